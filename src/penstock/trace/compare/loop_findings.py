"""F10: how the loops of two runs differ, from the spans that a program records of its own steps.

A step is waiting for data, computing, and waiting for other ranks; between steps stand checkpoints. These
parts follow one another on each rank, so their seconds add up. Reading runs beside them: it costs nothing
but the waiting that it causes, and is told as the reason of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.trace.compare.trace_study import PROCESS, Study, TraceFinding, Weight
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, measure_groups
from penstock.units import format_bytes, format_rate, format_seconds

WAITING: Final = "waiting for data"
COMPUTING: Final = "computing"
_PARTS: Final = {
    "wait": WAITING,
    "compute": COMPUTING,
    "barrier": "waiting for other ranks",
    "stall": "checkpointing",
}
"""The parts of a loop by the phases of their spans."""
_READING: Final = "reading, beside them"
_IS_CHECKPOINT: Final = "(phase = 'app_io' AND contains(cat, 'checkpoint'))"
_WORTH_SAYING: Final = 0.02
_CHANGED: Final = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """The loop of one run; times are those of an average rank."""

    num_ranks: int
    num_steps: float
    parts_us: Mapping[str, float]
    read_us: float = 0.0
    read_bytes: float = 0.0

    @property
    def read_rate(self) -> float:
        """Bytes a second while anything was read."""
        return self.read_bytes * 1e6 / self.read_us if self.read_us else 0.0

    def over_steps(self, num_steps: float) -> "_Loop":
        """The same loop, had it taken so many steps."""
        share = num_steps / self.num_steps if self.num_steps and num_steps else 1.0
        return _Loop(
            num_ranks=self.num_ranks,
            num_steps=self.num_steps * share,
            parts_us={part: took * share for part, took in self.parts_us.items()},
            read_us=self.read_us * share,
            read_bytes=self.read_bytes * share,
        )


def changed_loop(study: Study) -> list[TraceFinding]:
    """F10: a rank spends longer, or shorter, in some part of its loop than in the baseline."""
    loops = _measure_loops(study)
    base = loops.get(study.baseline)
    if base is None:
        return []
    findings = [
        _compare_loops(study, run, loops[run], base)
        for run in study.runs
        if run != study.baseline and run in loops
    ]
    return [finding for finding in findings if finding is not None]


def _measure_loops(study: Study) -> dict[str, _Loop]:
    """The loops of the runs that recorded waiting or computing."""
    phases = "'wait', 'compute', 'barrier', 'stall'"
    spans: dict[str, dict[str, tuple[int, int, int]]] = {}
    # A program that records no stalls may have waited for its checkpoints as they lasted.
    for run, part, took, num_spans, num_ranks, num_processes in study.events.ask(f"""
        SELECT run, CASE WHEN {_IS_CHECKPOINT} THEN 'saving' ELSE phase END AS part,
               sum(dur_us)::BIGINT, count(*), count(DISTINCT rank), count(DISTINCT ({PROCESS}))
        FROM {{events}} WHERE phase IN ({phases}) OR {_IS_CHECKPOINT} GROUP BY run, part"""):
        spans.setdefault(run, {})[part] = (took, num_spans, num_ranks or num_processes)
    reads: dict[str, tuple[int, int]] = {}
    moved = "coalesce(sum(size_bytes), 0)::BIGINT"
    for run, _, _, _, _, busy_us, _, read_bytes in measure_groups(
        study.events, ("run", "host", "pid"), where=f"{IS_IO} AND {IS_READ}", extra=[moved]
    ):
        of_run = reads.get(run, (0, 0))
        reads[run] = (of_run[0] + busy_us, of_run[1] + read_bytes)
    loops = {}
    for run, found in spans.items():
        if not {"wait", "compute"} & found.keys():
            continue
        if "saving" in found:
            found.setdefault("stall", found["saving"])
        num_ranks = max(ranks for _, _, ranks in found.values())
        num_steps = max(found[phase][1] for phase in ("wait", "compute") if phase in found)
        read_us, read_bytes = reads.get(run, (0, 0))
        loops[run] = _Loop(
            num_ranks=num_ranks,
            num_steps=num_steps / num_ranks,
            parts_us={name: found[phase][0] / num_ranks for phase, name in _PARTS.items() if phase in found},
            read_us=read_us / num_ranks,
            read_bytes=read_bytes / num_ranks,
        )
    return loops


def _compare_loops(study: Study, run: str, here: _Loop, base: _Loop) -> TraceFinding | None:
    """None unless some part differs by a share of the baseline's loop that is worth saying."""
    equal = base.over_steps(here.num_steps)
    names = [name for name in _PARTS.values() if name in here.parts_us or name in equal.parts_us]
    changes = {name: here.parts_us.get(name, 0.0) - equal.parts_us.get(name, 0.0) for name in names}
    least_us = _WORTH_SAYING * sum(equal.parts_us.values())
    told = {name: change for name, change in changes.items() if abs(change) > least_us}
    if not told:
        return None
    worst = max(told, key=lambda name: told[name])
    is_slower = told[worst] > 0
    worst = worst if is_slower else min(told, key=lambda name: told[name])
    change = format_seconds(abs(told[worst]) / 1e6)
    title = f"{run}: {worst} takes {change} {'more' if is_slower else 'less'} than in {study.baseline}"
    return TraceFinding(
        code="F10",
        weight=Weight.COST if is_slower else Weight.NOTE,
        title=title,
        runs=[run],
        says=[*_describe_changes(study, run, here, base, told), *_explain(study, here, equal, worst)],
        evidence=_tabulate(study, run, here, equal, changes),
        lost_us=round(told[worst]) if is_slower else None,
    )


def _describe_changes(
    study: Study, run: str, here: _Loop, base: _Loop, told: Mapping[str, float]
) -> list[str]:
    equal = base.over_steps(here.num_steps)
    each = [
        f"{name} {_seconds(here.parts_us.get(name, 0.0))}, not {_seconds(equal.parts_us.get(name, 0.0))} "
        f"({change / 1e6:+.3f} s)"
        for name, change in sorted(told.items(), key=lambda pair: -pair[1])
    ]
    says = [f"Over {here.num_steps:,.0f} steps, a rank of {run} spent on {'; on '.join(each)}."]
    if round(here.num_steps) != round(base.num_steps):
        says.append(
            f"{study.baseline} took {base.num_steps:,.0f} steps; its seconds are those of as many steps."
        )
    return says


def _explain(study: Study, here: _Loop, base: _Loop, worst: str) -> list[str]:
    """Why a loop waits for data: reading is slower, there is more to read, or less to hide it behind."""
    if worst != WAITING or not here.read_us or not base.read_us:
        return []
    read = (
        f"Reading kept it busy for {_seconds(here.read_us)} ({format_bytes(round(here.read_bytes))} at "
        f"{format_rate(here.read_rate)}); in {study.baseline} for {_seconds(base.read_us)} "
        f"({format_bytes(round(base.read_bytes))} at {format_rate(base.read_rate)})."
    )
    computes = here.parts_us.get(COMPUTING, 0.0), base.parts_us.get(COMPUTING, 0.0)
    if here.read_rate * _CHANGED < base.read_rate:
        why = "Reads are slower."
    elif here.read_bytes > base.read_bytes * _CHANGED:
        why = "There is more to read."
    elif computes[0] * _CHANGED < computes[1]:
        why = "Reads are as fast as before: there is less computation to hide them behind."
    else:
        return [read]
    return [f"{read} {why}"]


def _tabulate(study: Study, run: str, here: _Loop, base: _Loop, changes: Mapping[str, float]) -> Answer:
    columns = make_columns(
        "part", "here_us", Column(f"{study.baseline}_us", Unit.MICROSECONDS), "lost_us", "per_step_us",
    )  # fmt: skip
    parts = sorted(changes, key=lambda name: -changes[name])
    rows: list[Sequence[Value]] = [
        _row(name, here.parts_us.get(name, 0.0), base.parts_us.get(name, 0.0), here.num_steps)
        for name in parts
    ]
    if here.read_us or base.read_us:
        rows.append(_row(_READING, here.read_us, base.read_us, here.num_steps))
    title = f"The loops of {run} and {study.baseline}, of an average rank"
    return Answer(name=f"f10_{run}", title=title, columns=columns, rows=rows)


def _row(name: str, here_us: float, base_us: float, num_steps: float) -> tuple[Any, ...]:
    per_step = round(here_us / num_steps) if num_steps else None
    return (name, round(here_us), round(base_us), round(here_us - base_us), per_step)


def _seconds(us: float) -> str:
    return format_seconds(us / 1e6)
