"""The page of a checkpoint run: how fast it wrote and read checkpoints, and whether it read correct bytes.

run.json, checkpoints.json, throughput.parquet -> rounds on one time axis -> report
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.reports.report import (
    Banner,
    Chart,
    Kind,
    Look,
    Report,
    Section,
    Series,
    Table,
    Tone,
    Trouble,
    bar_chart,
    table_section,
)
from penstock.results.checkpoint_files import Throughput, judge, read_checkpoints, read_throughput
from penstock.results.counter_files import ReconciliationVerdict
from penstock.results.run_record import RunOutcome, RunRecord
from penstock.results.step_series import MOST_BUCKETS, Numbers, best_split, growth, heat_rows
from penstock.units import format_bytes, format_rate, format_seconds

GIB: Final = 2**30
_LATE: Final = 1.3
"""A rank is reported as slow if its rounds take this many times as long as the median rank's."""
_SLOWER: Final = 0.7
"""A drop in throughput is reported if the throughput falls below this share of its earlier value."""
_ONE_BUCKET_S: Final = 0.05
_RESUME: Final = "Run the same command again with --resume: complete checkpoints are kept."
_DOING: Final = {"write": "writing", "read": "reading"}
_WORDS: Final = {"write": "written", "read": "read back"}
_TONES: Final[Mapping[str, Tone]] = {"write": "dark", "read": "full"}
Round = Mapping[str, Any]
"""A round of `checkpoints.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRun:
    """The data that the page shows. `figures` is the content of `checkpoints.json`.

    `rounds` has the rounds of each direction, if any. `rates` has the bytes per second of each rank in each
    interval between `edges`.
    """

    record: RunRecord
    figures: Mapping[str, Any]
    throughput: Throughput
    rounds: Mapping[str, Sequence[Round]]
    edges: Numbers
    rates: Mapping[str, Numbers]


def make_checkpoint_page(folder: Path, record: RunRecord) -> tuple[Report, dict[str, str]]:
    """Build the page for the run in `folder`; return it with facts for its table of settings.

    If no round has finished, the page shows how the run ended.
    """
    figures = read_checkpoints(folder)
    if figures is None:
        banner = Banner(
            verdict="no figure",
            look=Look.DOUBT,
            figure="no figures were recorded",
            limited_by="not known",
            since="-",
            to_do=_RESUME,
        )
        return Report(title=f"Checkpoint run {record.id}", subtitle="", banner=banner), {}
    throughput, all_rounds = read_throughput(folder), figures["checkpoints"]
    origin_s = min(one["began_at_s"] for one in all_rounds)
    end_s = max(one["ended_at_s"] for one in all_rounds) - origin_s
    edges = np.linspace(0.0, max(end_s, 1e-3), MOST_BUCKETS + 1)
    num_ranks = max(map(len, throughput.values()), default=0)
    rates = {direction: np.zeros((num_ranks, MOST_BUCKETS)) for direction in _DOING}
    began = {(one["direction"], one["step"]): one["began_at_s"] - origin_s for one in all_rounds}
    for (direction, step), ranks in throughput.items():
        start_s = began.get((direction, step))
        if start_s is None:
            continue
        for rank, intervals in enumerate(ranks):
            begins_s, widths_s, sizes_bytes = np.array(intervals, np.float64).reshape(-1, 3).T
            begins_s += start_s
            moved = growth(begins_s, begins_s + widths_s, sizes_bytes, edges)
            rates[direction][rank] += moved / np.diff(edges)
    rounds = {name: [one for one in all_rounds if one["direction"] == name] for name in _DOING}
    run = CheckpointRun(
        record=record, figures=figures, throughput=throughput, rounds=rounds, edges=edges, rates=rates
    )
    page = Report(
        title=f"Checkpoint run {record.id}",
        subtitle="",
        banner=_banner(run),
        highlights=list(_highlights(run)),
        sections=list(_sections(run)),
    )
    return page, {"target": figures["target"]}


# Answers and troubles


def _banner(run: CheckpointRun) -> Banner:
    troubles = list(_find_troubles(run))
    verdict = judge(
        is_right=run.figures["is_right"],
        is_from_memory=any(one["from_memory"] for one in run.rounds["read"]),
        deliveries=run.record.deliveries,
    )
    # The time of one checkpoint, and the time it would take at its full size.
    size_bytes, parts, limits, rates = run.figures["checkpoint_bytes"], [], [], []
    for name in _DOING:
        totals = run.figures[name]
        if totals is None:
            continue
        limits.append(
            f"{_DOING[name].capitalize()}: {totals['bottleneck']} (p99 of a chunk {totals['p99_ms']:.0f} ms)."
        )
        rate = totals["gib_per_s"]
        if rate is None:
            parts.append(f"{_WORDS[name]} from memory alone")
            continue
        state = "durable" if name == "write" else "verified"
        took = format_seconds(size_bytes / GIB / rate)
        parts.append(f"{_WORDS[name]} with {rate:.2f} GiB/s, {state} after {took}")
        rates += [rate] if rate else []
    figure = f"{format_bytes(size_bytes)} of {run.figures['model']}: {'; '.join(parts)}"
    full_bytes = round(size_bytes / Fraction(str(run.record.plan.get("scale", "1"))))
    if full_bytes != size_bytes and rates:
        full = " and ".join(format_seconds(full_bytes / GIB / rate) for rate in rates)
        figure += f". All {format_bytes(full_bytes)} of it at this rate: {full}"
    of_rounds = {name: [one["gib_per_s"] for one in rounds] for name, rounds in run.rounds.items() if rounds}
    spans = (
        f"{_DOING[name]} at {min(each):.2f} to {max(each):.2f} GiB/s" for name, each in of_rounds.items()
    )
    target = str(run.figures["target"])
    more = (
        f"Compare with the storage's limits: `penstock storage probe {shlex.quote(target)}`; more --streams"
        " ask it for more at once."
    )
    if run.record.outcome is RunOutcome.INTERRUPTED:
        more = _RESUME
    return Banner(
        verdict=verdict,
        look={"passed": Look.GOOD, "failed": Look.BAD}.get(verdict, Look.DOUBT),
        figure=figure,
        limited_by=" ".join(limits),
        since=next(
            filter(None, (trouble.since for trouble in troubles)), f"no lasting change: {', '.join(spans)}"
        ),
        to_do=troubles[0].to_do if troubles else more,
        troubles=[trouble.says for trouble in troubles],
    )


def _find_troubles(run: CheckpointRun) -> Iterator[Trouble]:
    """Yield the troubles that stand out, most serious first."""
    all_rounds = run.figures["checkpoints"]
    wrong = sum(one["wrong_bytes"] for one in all_rounds)
    if wrong:
        first = next(one["wrong"][0] for one in all_rounds if one["wrong"])
        yield Trouble(
            f"{wrong} chunks do not hold what was written, the first at byte {first['offset']:,} of "
            f"{first['key']}.",
            "Do not trust this storage with checkpoints before the cause is found.",
        )
    warm = [one["cold"]["resident_share"] for one in run.rounds["read"] if one["from_memory"]]
    to_do = "Read past the page cache (direct://...), or after a restart of the hosts."
    if warm:
        reads = f"{len(warm)} of {len(run.rounds['read'])} reads"
        says = f"{reads} came from the page cache: up to {max(warm):.0%} of their bytes."
        yield Trouble(says, to_do)
    for delivery in run.record.deliveries:
        if delivery.verdict is ReconciliationVerdict.FAIL and not warm:
            yield Trouble(f"Not all bytes came from storage: {delivery.why}.", to_do)
    for name in _DOING:
        # While all ranks wait for one, the total throughput is low as well, so only the rank is named.
        yield from list(_late_rank(run, name)) or _slower_from_then_on(run, name)


def _slower_from_then_on(run: CheckpointRun, direction: str) -> Iterator[Trouble]:
    rates = run.rates[direction].sum(axis=0)
    moves = np.concatenate([[False], rates > 0, [False]])
    # In the first and the last interval of a round, bytes were transferred for only a part of the time.
    moving = np.flatnonzero(moves[:-2] & moves[1:-1] & moves[2:])
    split = best_split(rates[moving]) if moving.size else None
    if split is None:
        return
    before, after = float(np.median(rates[moving][:split])), float(np.median(rates[moving][split:]))
    if after < _SLOWER * before:
        at, doing = format_seconds(float(run.edges[moving[split]])), _DOING[direction]
        yield Trouble(
            f"From {at} on {doing} fell from {format_rate(before)} to {format_rate(after)}.",
            "Look for a write cache that was full then, for throttling, or for other users of the storage.",
            since=f"{at} after the first byte ({doing})",
        )


def _late_rank(run: CheckpointRun, direction: str) -> Iterator[Trouble]:
    """Yield a trouble if all other ranks wait for one rank in most rounds."""
    ends = [
        [max((begin_s + width_s for begin_s, width_s, _ in intervals), default=0.0) for intervals in ranks]
        for (way, _), ranks in run.throughput.items()
        if way == direction and len(ranks) > 1
    ]
    if not ends:
        return
    mean = np.mean(ends, axis=0)
    last = int(mean.argmax())
    others = float(np.median(np.delete(mean, last)))
    if mean[last] >= _LATE * others and mean[last] - others > _ONE_BUCKET_S:
        yield Trouble(
            f"Rank {last} is {_DOING[direction]} for {format_seconds(float(mean[last]))} a checkpoint, the "
            f"others for {format_seconds(others)}: all of them wait for it.",
            f"Look at rank {last}'s path to storage, and whether it has more to move.",
        )


# Charts and tables


def _highlights(run: CheckpointRun) -> Iterator[Chart]:
    bars: dict[str, float] = {}
    limits: dict[str, float] = {}
    for direction, rounds in run.rounds.items():
        bars |= {f"{direction[0]}{one['number']}": one["gib_per_s"] * GIB for one in rounds}
        if len(rounds) > 1:
            mean = float(np.mean([one["gib_per_s"] * GIB for one in rounds]))
            limits[f"mean of {direction}s {format_rate(mean)}"] = mean
    title, name = "Each checkpoint: w written, r read back", run.record.id
    yield bar_chart(title, name, bars, "B/s", limits=limits)
    # Writing and reading share one time axis, because all writes come before all reads.
    moved = {direction: rates.sum(axis=0) for direction, rates in run.rates.items() if rates.any()}
    yield Chart(
        kind=Kind.AREA,
        title="Throughput of all ranks",
        run=name,
        unit="B/s",
        series=[
            Series(name=_WORDS[direction], x=run.edges, y=rates, tone=_TONES[direction])
            for direction, rates in moved.items()
        ],
        note=f"means of {format_seconds(float(run.edges[1]))}, pauses included",
    )
    keys = {"set-up": "setup_s", "moving bytes": "pipeline_s", "making durable": "drain_s"}
    spent = {part: sum(one[key] for one in run.rounds["write"]) for part, key in keys.items()}
    whole = sum(spent.values()) or 1.0
    note = ", ".join(
        f"{part} {format_seconds(part_s)} ({part_s / whole:.0%})" for part, part_s in spent.items()
    )
    yield bar_chart("Until a written checkpoint is durable", name, spent, "s", note=note)


def _sections(run: CheckpointRun) -> Iterator[Section]:
    charts = []
    for direction, rates in run.rates.items():
        if rates.any():
            series = heat_rows(
                [f"rank {rank}" for rank in range(len(rates))], rates, run.edges, tone=_TONES[direction]
            )
            full = f"full tone: {format_rate(float(rates.max()))}"
            title = f"{direction.capitalize()}, by rank"
            charts.append(Chart(kind=Kind.HEAT, title=title, run=run.record.id, series=series, note=full))
    yield Section(
        name="ranks",
        title="Throughput by rank and time",
        text=["The fuller the tone, the faster a rank moved its bytes; a round is as long as its last rank."],
        charts=charts,
        why_empty="This run did not record its throughput over time.",
    )
    gap = run.figures["gap_s"]
    text = [f"While {_DOING[delivery.direction]}, {delivery.why}." for delivery in run.record.deliveries]
    if gap is not None:
        text.insert(0, f"The first read began {format_seconds(gap)} after the last write.")
    all_rounds = run.figures["checkpoints"]
    rows = [
        {
            "checkpoint": f"{one['direction']} {one['number']}",
            "cold by": one["cold"]["path"] if one["cold"] else "-",
            "in memory": f"{one['cold']['resident_share']:.1%}" if one["cold"] else "-",
            "verified": format_bytes(one["verified_bytes"]) if one["direction"] == "read" else "-",
            "wrong chunks": str(one["wrong_bytes"]),
        }
        for one in all_rounds
    ]
    yield Section(name="proof", title="Cold reads and verified bytes", text=text, tables=[Table(rows)])
    rows = [
        {
            "checkpoint": f"{one['direction']} {one['number']}",
            "bytes": format_bytes(one["moved_bytes"]),
            "took": format_seconds(one["duration_s"]),
            "GiB/s": f"{one['gib_per_s']:.2f}",
            "slowest rank": f"{one['min_gib_per_s']:.2f} GiB/s ({one['slowest_rank']})",
            "p50": f"{one['p50_ms']:.1f} ms",
            "p99": f"{one['p99_ms']:.1f} ms",
            "held up by": one["bottleneck"],
        }
        for one in all_rounds
    ]
    yield table_section("rounds", "All checkpoints", rows, bars="GiB/s")
