"""In what the runs are not alike, said before any number: ranks, hosts, files, steps, lost lines.

A run with half the traces looks like a run with half the writes; who compares totals must know first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.trace.questions.base import IS_IO, Answer, Column, Value

if TYPE_CHECKING:
    from penstock.trace.compare.study import Study


def mismatches(study: Study) -> Answer:
    """A row for each thing in which a run differs from the baseline, and for each run that lost lines."""
    rows: list[Sequence[Value]] = []
    for what, column, where in _THINGS:
        seen = _sets(study, column, where)
        base = seen.get(study.baseline, set())
        for run in study.runs:
            here = seen.get(run, set())
            if what == "hosts" and len(here) == len(base):
                continue  # other machines of the same number are no obstacle
            if here != base:
                rows.append((what, run, len(here), len(base), spans(base - here), spans(here - base)))
    rows += _lost(study)
    columns = [
        Column("what"), Column("run"), Column("here"), Column(study.baseline), Column("missing"),
        Column("added"),
    ]  # fmt: skip
    notes = [] if rows else [f"All runs have the ranks, hosts, steps and files of {study.baseline}."]
    return Answer(
        name="mismatches",
        title=f"What differs from {study.baseline}",
        columns=columns,
        rows=rows,
        notes=notes,
    )


def spans(values: Iterable[Any]) -> str:
    """Numbers as spans (`8-15`), names as a short list."""
    values = sorted(values)
    if not values:
        return ""
    if not all(isinstance(value, int) for value in values):
        shown = ", ".join(map(str, values[:2]))
        return shown + (f" and {len(values) - 2:,} more" if len(values) > 2 else "")
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


_THINGS = (
    ("ranks", "rank", "rank IS NOT NULL"),
    ("hosts", "host", "host IS NOT NULL"),
    ("steps", "step", "step IS NOT NULL"),
    ("written files", "parse_filename(path)", f"{IS_IO} AND op IN ('write', 'pwrite') AND path IS NOT NULL"),
)


def _sets(study: Study, column: str, where: str) -> dict[str, set[Any]]:
    found: dict[str, set[Any]] = {}
    for run, value in study.events.ask(f"SELECT DISTINCT run, {column} FROM {{events}} WHERE {where}"):
        found.setdefault(run, set()).add(value)
    return found


def _lost(study: Study) -> list[Sequence[Value]]:
    rows: list[Sequence[Value]] = []
    for run in study.runs:
        accounts = study.accounts.get(run, ())
        harmed = [account for account in accounts if not account.is_whole]
        if harmed:
            lost = sum(account.dropped for account in harmed)
            salvaged = sum(account.salvaged for account in harmed)
            faults = sum(len(account.faults) for account in harmed)
            said = f"{lost} lines dropped, {salvaged} salvaged, {faults} torn files"
            rows.append(
                ("damaged files", run, len(harmed), None, said, ", ".join(a.file for a in harmed[:2]))
            )
    return rows
