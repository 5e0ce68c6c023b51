"""The page of a checkpoint run: how fast checkpoints were durable, how fast they were back, and if correctly.

run.json, checkpoints.json, throughput.parquet -> rounds on one axis of time -> report
"""

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
from penstock.results.checkpoint_files import RoundThroughput, read_checkpoints, read_throughput
from penstock.results.counter_files import ReconciliationVerdict
from penstock.results.run_record import RunRecord
from penstock.results.step_series import MOST_BUCKETS, Numbers, best_split, heat_rows
from penstock.units import format_bytes, format_rate, format_seconds

GIB: Final = 2**30
_LATE: Final = 1.3
"""A rank that ends this many times as late as the median rank is named."""
_SLOWER: Final = 0.7
"""Throughput that falls below this share of what it was is named."""
_ONE_BUCKET_S: Final = 0.05
_DOING: Final = {"write": "writing", "read": "reading"}
_WORDS: Final = {"write": "written", "read": "read back"}
_TONES: Final[Mapping[str, Tone]] = {"write": "dark", "read": "full"}
Round = Mapping[str, Any]
"""A round of `checkpoints.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRun:
    """Everything that the page is made of; `figures` is `checkpoints.json`."""

    record: RunRecord
    figures: Mapping[str, Any]
    throughput: Sequence[RoundThroughput]

    @property
    def rounds(self) -> Sequence[Round]:
        """All rounds, in their order."""
        rounds: Sequence[Round] = self.figures.get("checkpoints", ())
        return rounds

    @property
    def directions(self) -> dict[str, Mapping[str, Any]]:
        """The totals of writing and of reading, for those that were done."""
        return {name: self.figures[name] for name in ("write", "read") if self.figures[name] is not None}

    def of(self, direction: str) -> list[Round]:
        """The rounds of one direction."""
        return [one for one in self.rounds if one["direction"] == direction]

    @property
    def edges(self) -> Numbers:
        """The edges of buckets of time, from the first round's start to the last one's end."""
        end_s = max((one["ended_at_s"] for one in self.rounds), default=1.0) - self._origin_s
        return np.linspace(0.0, max(end_s, 1e-3), MOST_BUCKETS + 1)

    @property
    def _origin_s(self) -> float:
        return min((one["began_at_s"] for one in self.rounds), default=0.0)

    def rates(self, direction: str) -> Numbers:
        """For each rank, what it moved in one direction in each bucket, in bytes a second."""
        edges, num_ranks = self.edges, max((len(one.ranks) for one in self.throughput), default=0)
        rates = np.zeros((num_ranks, len(edges) - 1))
        began = {(one["direction"], one["step"]): one["began_at_s"] - self._origin_s for one in self.rounds}
        for one in self.throughput:
            start_s = began.get((one.direction, one.step))
            if one.direction != direction or start_s is None:
                continue
            for rank, moved in enumerate(one.ranks):
                moments = start_s + moved.width_s * np.arange(len(moved.sizes_bytes) + 1)
                totals = np.concatenate([[0.0], np.cumsum(moved.sizes_bytes)])
                rates[rank] += np.diff(np.interp(edges, moments, totals))
        return rates / np.diff(edges)


def make_checkpoint_page(folder: Path, record: RunRecord) -> tuple[Report, dict[str, str]]:
    """The page of the run in `folder`, and more facts; of one that did not finish, how it ended."""
    figures = read_checkpoints(folder)
    if figures is None:
        banner = Banner(
            verdict="no figure",
            look=Look.DOUBT,
            figure="no figures were recorded",
            limited_by="not known",
            since="-",
            to_do="Run the same command again with --resume: complete checkpoints are kept.",
        )
        return Report(title=f"Checkpoint run {record.id}", subtitle="", banner=banner), {}
    run = CheckpointRun(record=record, figures=figures, throughput=read_throughput(folder))
    page = Report(
        title=f"Checkpoint run {record.id}",
        subtitle="",
        banner=_banner(run),
        highlights=[_each_checkpoint(run), _over_time(run), _until_durable(run)],
        sections=list(_sections(run)),
    )
    return page, {"target": figures["target"]}


# Answers and troubles


def _banner(run: CheckpointRun) -> Banner:
    troubles = list(_find_troubles(run))
    verdict, look = "passed", Look.GOOD
    if any(trouble.kind == "page cache" for trouble in troubles):
        verdict, look = "doubtful", Look.DOUBT
    if not run.figures["is_right"]:
        verdict, look = "failed", Look.BAD
    # The time that one checkpoint took, and the time it would take at its full size.
    size_bytes, parts, limits, rates = run.figures["checkpoint_bytes"], [], [], []
    for name, totals in run.directions.items():
        slowest = max(one["p99_ms"] for one in run.of(name))
        limits.append(
            f"{_DOING[name].capitalize()}: {totals['bottleneck']} (p99 of a chunk {slowest:.0f} ms)."
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
    more = (
        f"Compare with the storage's limits: `penstock storage probe {run.figures['target']}`; more "
        "--streams ask it for more at once."
    )
    return Banner(
        verdict=verdict,
        look=look,
        figure=figure,
        limited_by=" ".join(limits),
        since=next(
            (trouble.since for trouble in troubles if trouble.since), "no change: all rounds were alike"
        ),
        to_do=troubles[0].to_do if troubles else more,
        troubles=[trouble.says for trouble in troubles],
    )


def _find_troubles(run: CheckpointRun) -> Iterator[Trouble]:
    """The troubles that stand out, the gravest first."""
    wrong = sum(one["wrong_bytes"] for one in run.rounds)
    if wrong:
        first = next(one["wrong"][0] for one in run.rounds if one["wrong"])
        yield Trouble(
            "wrong bytes",
            f"{wrong} chunks do not hold what was written, the first at byte {first['offset']:,} of "
            f"{first['key']}.",
            "Do not trust this storage with checkpoints before the cause is found.",
        )
    warm = [one["cold"]["resident_share"] for one in run.of("read") if one["from_memory"]]
    to_do = "Read past the page cache (direct://...), or after a restart of the hosts."
    if warm:
        reads = f"{len(warm)} of {len(run.of('read'))} reads"
        says = f"{reads} came from the page cache: up to {max(warm):.0%} of their bytes."
        yield Trouble("page cache", says, to_do)
    for delivery in run.record.deliveries:
        if delivery.verdict is ReconciliationVerdict.FAIL and not warm:
            yield Trouble("page cache", f"Not all bytes came from storage: {delivery.why}.", to_do)
    for name in run.directions:
        # While all wait for one rank, the throughput of all is low as well.
        yield from list(_late_rank(run, name)) or _slower_from_then_on(run, name)


def _slower_from_then_on(run: CheckpointRun, direction: str) -> Iterator[Trouble]:
    rates = run.rates(direction).sum(axis=0)
    moves = np.concatenate([[False], rates > 0, [False]])
    # In the first and the last bucket of a round, bytes moved for a part of the time.
    moving = np.flatnonzero(moves[:-2] & moves[1:-1] & moves[2:])
    split = best_split(rates[moving]) if moving.size else None
    if split is None:
        return
    before, after = float(np.median(rates[moving][:split])), float(np.median(rates[moving][split:]))
    if after < _SLOWER * before:
        at, doing = format_seconds(float(run.edges[moving[split]])), _DOING[direction]
        yield Trouble(
            "slower",
            f"From {at} on {doing} fell from {format_rate(before)} to {format_rate(after)}.",
            "Look for a write cache that was full then, for throttling, or for other users of the storage.",
            since=f"{at} after the first byte ({doing})",
        )


def _late_rank(run: CheckpointRun, direction: str) -> Iterator[Trouble]:
    """The rank that all others wait for in most rounds."""
    ends = [
        [moved.width_s * len(moved.sizes_bytes) for moved in one.ranks]
        for one in run.throughput
        if one.direction == direction and len(one.ranks) > 1
    ]
    if not ends:
        return
    mean = np.mean(ends, axis=0)
    last = int(mean.argmax())
    others = float(np.median(np.delete(mean, last)))
    if mean[last] >= _LATE * others and mean[last] - others > _ONE_BUCKET_S:
        yield Trouble(
            "slow rank",
            f"Rank {last} is {_DOING[direction]} for {format_seconds(float(mean[last]))} a checkpoint, the "
            f"others for {format_seconds(others)}: all of them wait for it.",
            f"Look at rank {last}'s path to storage, and whether it has more to move.",
        )


# Charts and tables


def _each_checkpoint(run: CheckpointRun) -> Chart:
    bars: dict[str, float] = {}
    limits: dict[str, float] = {}
    for direction in ("write", "read"):
        rates = [one["gib_per_s"] * GIB for one in run.of(direction)]
        numbers = [one["number"] for one in run.of(direction)]
        bars |= {f"{direction[0]}{number}": rate for number, rate in zip(numbers, rates, strict=True)}
        if len(rates) > 1:
            mean = float(np.mean(rates))
            limits[f"mean of {direction}s {format_rate(mean)}"] = mean
    return bar_chart("Each checkpoint: w written, r read back", run.record.id, bars, "B/s", limits=limits)


def _over_time(run: CheckpointRun) -> Chart:
    """Writing and reading on one axis of time; all writes come before all reads."""
    rates = {direction: run.rates(direction).sum(axis=0) for direction in ("write", "read")}
    moved = {direction: series for direction, series in rates.items() if series.any()}
    return Chart(
        kind=Kind.AREA,
        title="Throughput of all ranks",
        run=run.record.id,
        unit="B/s",
        series=[
            Series(name=_WORDS[direction], x=run.edges, y=series, tone=_TONES[direction])
            for direction, series in moved.items()
        ],
        note=", ".join(f"{name} at most {format_rate(float(each.max()))}" for name, each in moved.items()),
    )


def _until_durable(run: CheckpointRun) -> Chart:
    """The parts of the time until the last written byte is durable."""
    keys: list[tuple[str, str, Tone]] = [
        ("set-up", "setup_s", "light"),
        ("moving bytes", "pipeline_s", "dark"),
        ("making durable", "drain_s", "doubt"),
    ]
    parts = [(name, tone, sum(one[key] for one in run.of("write"))) for name, key, tone in keys]
    whole = sum(spent_s for _, _, spent_s in parts) or 1.0
    return Chart(
        kind=Kind.STACK,
        title="Until a written checkpoint is durable",
        run=run.record.id,
        series=[Series(name=name, tone=tone, y=[spent_s]) for name, tone, spent_s in parts],
        note=", ".join(f"{name} {format_seconds(spent)} ({spent / whole:.0%})" for name, _, spent in parts),
    )


def _sections(run: CheckpointRun) -> Iterator[Section]:
    charts = []
    for direction in ("write", "read"):
        rates = run.rates(direction)
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
    rows = [
        {
            "checkpoint": f"{one['direction']} {one['number']}",
            "cold by": one["cold"]["path"] if one["cold"] else "-",
            "in memory": f"{one['cold']['resident_share']:.1%}" if one["cold"] else "-",
            "verified": format_bytes(one["verified_bytes"]) if one["direction"] == "read" else "-",
            "wrong chunks": str(one["wrong_bytes"]),
        }
        for one in run.rounds
    ]
    tables = [Table(rows)] if rows else ()
    yield Section(name="proof", title="Cold reads and verified bytes", text=text, tables=tables)
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
        for one in run.rounds
    ]
    if rows:
        yield table_section("rounds", "All checkpoints", rows, bars="GiB/s")
