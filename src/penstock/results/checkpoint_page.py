"""The page of a checkpoint run: how fast they were durable, how fast they were back, and if they were right.

run.json, checkpoints.json, throughput.parquet -> rounds on one axis of time -> banner and charts
"""

import json
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
    bar_chart,
    table_section,
)
from penstock.results.checkpoint_figures import CheckpointFigures, DirectionFigures, read_checkpoint_figures
from penstock.results.io_reconciliation import ReconciliationVerdict
from penstock.results.run_facts import Trouble, fact_rows, outcome_verdict, run_subtitle
from penstock.results.run_folder import CHECKPOINTS_FILE
from penstock.results.run_record import RunRecord
from penstock.results.step_series import MOST_BUCKETS, Numbers, best_split, fold_rows
from penstock.results.throughput_file import RoundThroughput, read_throughput
from penstock.units import format_bytes, format_rate, format_seconds

GIB: Final = 2**30
_LATE: Final = 1.3
"""A rank that ends this many times as late as the median rank is named."""
_SLOWER: Final = 0.7
"""Throughput that falls below this share of what it was is named."""
_DOING: Final = {"write": "writing", "read": "reading"}
_WORDS: Final = {"write": "written", "read": "read back"}
_TONES: Final[Mapping[str, Tone]] = {"write": "dark", "read": "full"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRun:
    """What the page is made of; `rounds` are those of `checkpoints.json`."""

    record: RunRecord
    figures: CheckpointFigures | None
    rounds: Sequence[Mapping[str, Any]]
    throughput: Sequence[RoundThroughput]

    def of(self, direction: str) -> list[Mapping[str, Any]]:
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


def make_checkpoint_page(folder: Path, record: RunRecord) -> Report:
    """The page of the run in `folder`; of one that did not finish, how it ended."""
    figures = read_checkpoint_figures(folder)
    rounds: list[Mapping[str, Any]] = []
    if figures is not None:
        rounds = json.loads((folder / CHECKPOINTS_FILE).read_bytes())["checkpoints"]
    run = CheckpointRun(record=record, figures=figures, rounds=rounds, throughput=read_throughput(folder))
    return Report(
        title=f"Checkpoint run {record.id}",
        subtitle=run_subtitle(record),
        banner=_banner(run),
        highlights=list(_first(run)) if figures else [],
        sections=[*(_exhibits(run) if figures else ()), *_tables(run)],
    )


def _banner(run: CheckpointRun) -> Banner:
    figures = run.figures
    if figures is None:
        word, look = outcome_verdict(run.record) or ("no figure", Look.DOUBT)
        return Banner(
            verdict=word,
            look=look,
            figure="no figures were recorded",
            limited_by="not known",
            since="-",
            to_do="Run the same command again with --resume: complete checkpoints are kept.",
            troubles=[run.record.why] if run.record.why else [],
        )
    troubles = list(find_troubles(run, figures))
    verdict, look = _verdict(run, figures, troubles)
    return Banner(
        verdict=verdict,
        look=look,
        figure=_say_figure(run, figures),
        limited_by=" ".join(_say_limits(run, figures)),
        since=next(
            (trouble.since for trouble in troubles if trouble.since), "no change: all rounds were alike"
        ),
        to_do=_say_to_do(figures, troubles),
        troubles=[trouble.says for trouble in troubles],
    )


def _verdict(run: CheckpointRun, figures: CheckpointFigures, troubles: Sequence[Trouble]) -> tuple[str, Look]:
    unfinished = outcome_verdict(run.record)
    if unfinished is not None:
        return unfinished
    if not figures.is_right:
        return "failed", Look.BAD
    if any(trouble.kind == "page cache" for trouble in troubles):
        return "doubtful", Look.DOUBT
    return "passed", Look.GOOD


def _say_figure(run: CheckpointRun, figures: CheckpointFigures) -> str:
    """What one checkpoint took, and what it would take at its full size."""
    said = []
    for name, direction in (("write", figures.write), ("read", figures.read)):
        if direction is None:
            continue
        if direction.gib_per_s is None:
            said.append(f"{_WORDS[name]} from memory alone")
            continue
        took = format_seconds(figures.checkpoint_bytes / GIB / direction.gib_per_s)
        durable = "durable" if name == "write" else "verified"
        said.append(f"{_WORDS[name]} with {direction.gib_per_s:.2f} GiB/s, {durable} after {took}")
    full_bytes = _full_bytes(run, figures)
    whole = f"{format_bytes(figures.checkpoint_bytes)} of {figures.model}: {'; '.join(said)}"
    if full_bytes == figures.checkpoint_bytes:
        return whole
    rates = [one.gib_per_s for one in (figures.write, figures.read) if one and one.gib_per_s]
    full = " and ".join(format_seconds(full_bytes / GIB / rate) for rate in rates)
    return f"{whole}. All {format_bytes(full_bytes)} of it at this rate: {full}" if full else whole


def _full_bytes(run: CheckpointRun, figures: CheckpointFigures) -> int:
    """The size of a checkpoint without `--scale`."""
    return round(figures.checkpoint_bytes / Fraction(str(run.record.plan.get("scale", "1"))))


def _say_limits(run: CheckpointRun, figures: CheckpointFigures) -> Iterator[str]:
    for name, direction in (("write", figures.write), ("read", figures.read)):
        if direction is not None:
            rounds = run.of(name)
            p99 = max(one["p99_ms"] for one in rounds)
            yield f"{_DOING[name].capitalize()}: {direction.bottleneck} (p99 of a chunk {p99:.0f} ms)."


def _say_to_do(figures: CheckpointFigures, troubles: Sequence[Trouble]) -> str:
    if troubles:
        return troubles[0].to_do
    return (
        f"Compare with the storage's limits: `penstock storage probe {figures.target}`; more --streams ask "
        "it for more at once."
    )


def find_troubles(run: CheckpointRun, figures: CheckpointFigures) -> Iterator[Trouble]:
    """What stands out, the gravest first."""
    wrong = sum(one["wrong_bytes"] for one in run.rounds)
    if wrong:
        first = next(one["wrong"][0] for one in run.rounds if one["wrong"])
        yield Trouble(
            "wrong bytes",
            f"{wrong} chunks do not hold what was written, the first at byte {first['offset']:,} of "
            f"{first['key']}.",
            "Do not trust this storage with checkpoints before the cause is found.",
        )
    yield from _from_memory(run)
    for name, direction in (("write", figures.write), ("read", figures.read)):
        if direction is not None:
            # While all wait for one rank, the throughput of all is low as well.
            yield from list(_late_rank(run, name, direction)) or _slower_from_then_on(run, name)


def _from_memory(run: CheckpointRun) -> Iterator[Trouble]:
    warm = [one for one in run.of("read") if one["from_memory"]]
    to_do = "Read past the page cache (direct://...), or after a restart of the hosts."
    if warm:
        share = max(one["cold"]["resident_share"] for one in warm)
        reads = f"{len(warm)} of {len(run.of('read'))} reads"
        says = f"{reads} came from the page cache: up to {share:.0%} of their bytes."
        yield Trouble("page cache", says, to_do)
    for delivery in run.record.deliveries:
        if delivery.verdict is ReconciliationVerdict.FAIL and not warm:
            yield Trouble("page cache", f"Not all bytes came from storage: {delivery.why}.", to_do)


def _slower_from_then_on(run: CheckpointRun, direction: str) -> Iterator[Trouble]:
    rates = run.rates(direction).sum(axis=0)
    moves = np.concatenate([[False], rates > 0, [False]])
    # In the first and the last bucket of a round, bytes moved for a part of the time.
    moving = np.flatnonzero(moves[:-2] & moves[1:-1] & moves[2:])
    if not moving.size:
        return
    split = best_split(rates[moving])
    if split is None:
        return
    before, after = float(np.median(rates[moving][:split])), float(np.median(rates[moving][split:]))
    if after >= _SLOWER * before:
        return
    at_s = float(run.edges[moving[split]])
    doing = _DOING[direction]
    yield Trouble(
        "slower",
        f"From {format_seconds(at_s)} on {doing} fell from {format_rate(before)} to {format_rate(after)}.",
        "Look for a write cache that was full then, for throttling, or for other users of the storage.",
        since=f"{format_seconds(at_s)} after the first byte ({doing})",
    )


def _late_rank(run: CheckpointRun, name: str, direction: DirectionFigures) -> Iterator[Trouble]:
    """The rank that all others wait for in most rounds."""
    ends = [
        [moved.width_s * len(moved.sizes_bytes) for moved in one.ranks]
        for one in run.throughput
        if one.direction == name and len(one.ranks) > 1
    ]
    if not ends or direction.checkpoints == 0:
        return
    mean = np.mean(ends, axis=0)
    last = int(mean.argmax())
    others = float(np.median(np.delete(mean, last)))
    if mean[last] >= _LATE * others and mean[last] - others > _ONE_BUCKET_S:
        yield Trouble(
            "slow rank",
            f"Rank {last} is {_DOING[name]} for {format_seconds(float(mean[last]))} a checkpoint, the others "
            f"for {format_seconds(others)}: all of them wait for it.",
            f"Look at rank {last}'s path to storage, and whether it has more to move.",
        )


_ONE_BUCKET_S: Final = 0.05


def _first(run: CheckpointRun) -> Iterator[Chart]:
    bars, limits = {}, {}
    for direction in ("write", "read"):
        for one in run.of(direction):
            bars[f"{direction[0]}{one['number']}"] = one["gib_per_s"] * GIB
        rates = [one["gib_per_s"] * GIB for one in run.of(direction)]
        if len(rates) > 1:
            limits[f"mean of {direction}s {format_rate(float(np.mean(rates)))}"] = float(np.mean(rates))
    yield bar_chart("Each checkpoint: w written, r read back", run.record.id, bars, "B/s", limits=limits)
    yield _over_time(run)
    yield _durable_point(run)


def _over_time(run: CheckpointRun) -> Chart:
    """Writing and reading on one axis of time; all writes come before all reads."""
    rates = {direction: run.rates(direction).sum(axis=0) for direction in ("write", "read")}
    return Chart(
        kind=Kind.AREA,
        title="Throughput of all ranks",
        run=run.record.id,
        unit="B/s",
        series=[
            Series(name=_WORDS[direction], x=run.edges, y=series, tone=_TONES[direction])
            for direction, series in rates.items()
            if series.any()
        ],
        note=", ".join(
            f"{direction} at most {format_rate(float(series.max()))}"
            for direction, series in rates.items()
            if series.any()
        ),
    )


def _durable_point(run: CheckpointRun) -> Chart:
    """How the time of writing divides until the last byte is durable."""
    parts = {name: sum(one[key] for one in run.of("write")) for name, key in _PARTS.items()}
    whole = sum(parts.values()) or 1.0
    tones: Mapping[str, Tone] = {"set-up": "light", "moving bytes": "dark", "making durable": "doubt"}
    return Chart(
        kind=Kind.STACK,
        title="Until a written checkpoint is durable",
        run=run.record.id,
        series=[Series(name=name, tone=tones[name], y=[spent_s]) for name, spent_s in parts.items()],
        note=", ".join(
            f"{name} {format_seconds(spent)} ({spent / whole:.0%})" for name, spent in parts.items()
        ),
    )


_PARTS: Final = {"set-up": "setup_s", "moving bytes": "pipeline_s", "making durable": "drain_s"}


def _exhibits(run: CheckpointRun) -> Iterator[Section]:
    yield Section(
        name="ranks",
        title="Throughput by rank and time",
        text=["The fuller the tone, the faster a rank moved its bytes; a round is as long as its last rank."],
        charts=[chart for direction in ("write", "read") for chart in _rank_heat(run, direction)],
        why_empty="This run did not record its throughput over time.",
    )
    yield folded_cold(run)


def _rank_heat(run: CheckpointRun, direction: str) -> Iterator[Chart]:
    rates = run.rates(direction)
    if not rates.any():
        return
    names, rows = fold_rows([f"rank {rank}" for rank in range(len(rates))], rates)
    yield Chart(
        kind=Kind.HEAT,
        title=f"{direction.capitalize()}, by rank",
        run=run.record.id,
        series=[
            Series(name=name, x=run.edges, y=row, tone=_TONES[direction])
            for name, row in zip(names, rows, strict=True)
        ],
        note=f"full tone: {format_rate(float(rows.max()))}",
    )


def folded_cold(run: CheckpointRun) -> Section:
    """How it is known that reads were cold, and that bytes are right."""
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
    gap = run.figures.gap_s if run.figures else None
    says = [f"While {_DOING[delivery.direction]}, {delivery.why}." for delivery in run.record.deliveries]
    if gap is not None:
        says.insert(0, f"The first read began {format_seconds(gap)} after the last write.")
    return Section(
        name="proof",
        title="Cold reads and verified bytes",
        text=says,
        tables=[Table(rows)] if rows else (),
    )


def _tables(run: CheckpointRun) -> Iterator[Section]:
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
    target = {"target": run.figures.target} if run.figures else {}
    yield table_section("facts", "Run and settings", fact_rows(run.record, target))
