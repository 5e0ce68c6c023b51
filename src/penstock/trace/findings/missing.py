"""F1: traces of some ranks are missing, so that totals are too small by as much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.trace.compare.mismatches import spans
from penstock.trace.findings.base import Finding, Weight
from penstock.trace.lens import quoted
from penstock.trace.questions.base import IS_IO, IS_WRITE, Answer, Column, Unit, Value

if TYPE_CHECKING:
    from penstock.trace.compare.study import Study


def missing_ranks(study: Study) -> list[Finding]:
    """A finding for each run with fewer ranks than the run that has most."""
    ranks: dict[str, set[int]] = {run: set() for run in study.runs}
    for run, rank in study.events.ask("SELECT DISTINCT run, rank FROM {events} WHERE rank IS NOT NULL"):
        ranks[run].add(rank)
    fullest = max(study.runs, key=lambda run: (len(ranks[run]), run == study.baseline))
    findings = []
    for run in study.runs:
        missing = ranks[fullest] - ranks[run]
        if missing and ranks[run]:
            evidence = _writes(study, run, fullest)
            findings.append(_finding(run, fullest, ranks, missing, evidence))
    return findings


def _finding(
    run: str, fullest: str, ranks: dict[str, set[int]], missing: set[int], evidence: Answer
) -> Finding:
    num_here, num_there = len(ranks[run]), len(ranks[fullest])
    which = (
        f"{run} has traces of {num_here} ranks ({spans(ranks[run])}), {fullest} of {num_there}: "
        f"ranks {spans(missing)} are missing ({', '.join(map(str, sorted(missing)))})."
    )
    says = [
        which,
        "Totals of this run are smaller for that reason alone; compare it by rank and by file.",
    ]
    alike = [row for row in evidence.records() if row["per_rank"] == row[f"per_rank_{fullest}"]]
    if alike:
        row = alike[0]
        says.append(
            f"It has {row['num_writes']} writes of {row['file_class']}, not {row[f'num_writes_{fullest}']}, "
            f"but as many by rank: {row['per_rank']:g}."
        )
    title = f"{run}: traces of ranks {spans(missing)} are missing"
    return Finding(code="F1", weight=Weight.ALARM, title=title, runs=[run], says=says, evidence=evidence)


def _writes(study: Study, run: str, fullest: str) -> Answer:
    found = study.events.ask(f"""
        SELECT file_class,
               count(*) FILTER (WHERE run = {quoted(run)}), count(*) FILTER (WHERE run = {quoted(fullest)}),
               count(DISTINCT rank) FILTER (WHERE run = {quoted(run)}),
               count(DISTINCT rank) FILTER (WHERE run = {quoted(fullest)})
        FROM {{events}}
        WHERE {IS_IO} AND {IS_WRITE} AND run IN ({quoted(run)}, {quoted(fullest)}) AND path IS NOT NULL
        GROUP BY file_class HAVING count(DISTINCT run) = 2 ORDER BY 3 DESC, 1""")
    rows: list[Sequence[Value]] = [
        (name, here, there, ranks_here, ranks_there, here / ranks_here, there / ranks_there)
        for name, here, there, ranks_here, ranks_there in found
    ]
    columns = [
        Column("file_class"), Column("num_writes", Unit.COUNT), Column(f"num_writes_{fullest}", Unit.COUNT),
        Column("num_ranks", Unit.COUNT), Column(f"num_ranks_{fullest}", Unit.COUNT),
        Column("per_rank", Unit.NUMBER), Column(f"per_rank_{fullest}", Unit.NUMBER),
    ]  # fmt: skip
    title = f"Writes of {run} and {fullest}, by the ranks that wrote"
    return Answer(name=f"f1_{run}", title=title, columns=columns, rows=rows)
