"""F8 and F13: ranks that are busy longer than the others, judged by the work that they do.

`ranks` tells which of them are stragglers; the others do more, and are a finding of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from penstock.trace.compare.trace_study import Study, TraceFinding, Weight, format_ranges
from penstock.trace.questions.answer import Answer, make_columns
from penstock.trace.questions.breakdowns import STRAGGLER_RATIO, ranks
from penstock.units import format_bytes, format_rate, format_seconds

_KEPT: Final = (
    "run", "rank", "pid", "host", "num_events", "moved_bytes", "sum_us", "union_us", "to_median",
    "work_to_median",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _LateRank:
    """A rank that is busy with I/O much longer than the median of its run."""

    facts: Mapping[str, Any]
    median_us: float
    median_bytes: float

    @property
    def busy_rate(self) -> float:
        """Bytes a second while it was busy."""
        return float(self.facts["moved_bytes"] * 1e6 / self.facts["union_us"])

    @property
    def row(self) -> tuple[Any, ...]:
        """Its row of the evidence."""
        return (*(self.facts[name] for name in _KEPT), self.busy_rate)


def stragglers(study: Study) -> list[TraceFinding]:
    """F8: ranks that take longer than their work explains; a checkpoint waits for the slowest."""
    late = [rank for rank in _find_late_ranks(study) if rank.facts["is_straggler"]]
    return _make_findings(study, late, code="F8", title="Stragglers", describe=_describe_straggler)


def uneven_work(study: Study) -> list[TraceFinding]:
    """F13: ranks that take longer because they do more; the others wait for them as well."""
    late = [rank for rank in _find_late_ranks(study) if not rank.facts["is_straggler"]]
    return _make_findings(study, late, code="F13", title="More work on some ranks", describe=_describe_work)


def _find_late_ranks(study: Study) -> list[_LateRank]:
    records = ranks(study.events).records()
    late = []
    for run in study.runs:
        of_run: list[Mapping[str, Any]] = [
            row for row in records if row["run"] == run and row["to_median"] is not None
        ]
        if not of_run:
            continue
        late += [
            _LateRank(
                facts=row,
                median_us=median(other["union_us"] for other in of_run),
                median_bytes=median(other["moved_bytes"] for other in of_run),
            )
            for row in of_run
            if row["to_median"] > STRAGGLER_RATIO
        ]
    return late


def _make_findings(
    study: Study, late: Sequence[_LateRank], *, code: str, title: str, describe: Any
) -> list[TraceFinding]:
    """One finding of all runs: the same ranks are late in most of them."""
    if not late:
        return []
    columns = make_columns(*_KEPT, "busy_rate")
    evidence = Answer(name=code.lower(), title=title, columns=columns, rows=[rank.row for rank in late])
    by_run = {run: [rank for rank in late if rank.facts["run"] == run] for run in study.runs}
    by_run = {run: found for run, found in by_run.items() if found}
    lost_us = max(rank.facts["union_us"] - rank.median_us for rank in late)
    return [
        TraceFinding(
            code=code,
            weight=Weight.COST,
            title=title,
            runs=list(by_run),
            says=[describe(run, found) for run, found in by_run.items()],
            evidence=evidence,
            lost_us=round(lost_us),
        )
    ]


def _describe_straggler(run: str, late: Sequence[_LateRank]) -> str:
    worst, names = _pick_worst(late)
    return (
        f"{run}: busy with I/O for more than {STRAGGLER_RATIO:g} times the median, and for longer than their "
        f"work explains: {names}; longest {_name(worst)}, {_seconds(worst)} "
        f"({worst.facts['to_median']:.2f} times) for {worst.facts['work_to_median']:.2f} times the work, at "
        f"{format_rate(worst.busy_rate)}."
    )


def _describe_work(run: str, late: Sequence[_LateRank]) -> str:
    worst, names = _pick_worst(late)
    work = (
        f"moves {format_bytes(worst.facts['moved_bytes'])}, not {format_bytes(round(worst.median_bytes))}"
        if worst.median_bytes
        else f"makes {worst.facts['work_to_median']:.2f} times the calls"
    )
    usual_rate = worst.median_bytes * 1e6 / worst.median_us
    return (
        f"{run}: more work than on the median rank: {names}. {_name(worst).capitalize()} {work}, and is busy "
        f"for {_seconds(worst)}, not {format_seconds(worst.median_us / 1e6)}, at "
        f"{format_rate(worst.busy_rate)}, not {format_rate(usual_rate)}: the others wait for it, but it is "
        "not slow."
    )


def _pick_worst(late: Sequence[_LateRank]) -> tuple[_LateRank, str]:
    """The rank that is busy longest, and the names of all."""
    numbers = [rank.facts["rank"] for rank in late if rank.facts["rank"] is not None]
    pids = [rank.facts["pid"] for rank in late]
    names = f"rank {format_ranges(numbers)}" if numbers else f"process {format_ranges(pids)}"
    return max(late, key=lambda rank: rank.facts["to_median"]), names


def _name(rank: _LateRank) -> str:
    number = rank.facts["rank"]
    return f"process {rank.facts['pid']}" if number is None else f"rank {number}"


def _seconds(rank: _LateRank) -> str:
    return format_seconds(rank.facts["union_us"] / 1e6)
