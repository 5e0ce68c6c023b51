"""Findings about ranks and their threads: missing ranks (F1), summed threads (F3), stragglers (F8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.trace.compare.trace_study import PROCESS, Study, TraceFinding, Weight, format_ranges
from penstock.trace.dimensions import sql_literal
from penstock.trace.interval_union import union_sql
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.breakdowns import STRAGGLER_RATIO, ranks
from penstock.trace.questions.events_view import IS_IO, IS_WRITE
from penstock.units import format_seconds


def missing_ranks(study: Study) -> list[TraceFinding]:
    """F1: traces of some ranks are missing, so totals are too small by as much."""
    ranks: dict[str, set[int]] = {run: set() for run in study.runs}
    for run, rank in study.events.ask("SELECT DISTINCT run, rank FROM {events} WHERE rank IS NOT NULL"):
        ranks[run].add(rank)
    fullest = max(study.runs, key=lambda run: (len(ranks[run]), run == study.baseline))
    findings = []
    for run in study.runs:
        missing = ranks[fullest] - ranks[run]
        if missing and ranks[run]:
            evidence = _writes(study, run, fullest)
            findings.append(_missing_ranks_finding(run, fullest, ranks, missing, evidence))
    return findings


def _missing_ranks_finding(
    run: str, fullest: str, ranks: dict[str, set[int]], missing: set[int], evidence: Answer
) -> TraceFinding:
    num_here, num_there = len(ranks[run]), len(ranks[fullest])
    counts = (
        f"{run} has traces of {num_here} ranks ({format_ranges(ranks[run])}), {fullest} of {num_there}: "
        f"ranks {format_ranges(missing)} are missing ({', '.join(map(str, sorted(missing)))})."
    )
    says = [
        counts,
        "The totals of this run are smaller for that reason alone; compare it by rank and by file.",
    ]
    equal = [row for row in evidence.records() if row["per_rank"] == row[f"per_rank_{fullest}"]]
    if equal:
        row = equal[0]
        says.append(
            f"It has {row['num_writes']} writes of {row['file_class']}, not {row[f'num_writes_{fullest}']}, "
            f"but as many per rank: {row['per_rank']:g}."
        )
    title = f"{run}: traces of ranks {format_ranges(missing)} are missing"
    return TraceFinding(code="F1", weight=Weight.ALARM, title=title, runs=[run], says=says, evidence=evidence)


def _writes(study: Study, run: str, fullest: str) -> Answer:
    writes = study.events.ask(f"""
        SELECT file_class,
               count(*) FILTER (WHERE run = {sql_literal(run)}), count(*) FILTER (WHERE run =
               {sql_literal(fullest)}), count(DISTINCT rank) FILTER (WHERE run = {sql_literal(run)}),
               count(DISTINCT rank) FILTER (WHERE run = {sql_literal(fullest)})
        FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND run IN ({sql_literal(run)}, {sql_literal(fullest)})
        AND path IS NOT NULL GROUP BY file_class HAVING count(DISTINCT run) = 2 ORDER BY 3 DESC, 1""")
    rows: list[Sequence[Value]] = [
        (name, here, there, ranks_here, ranks_there, here / ranks_here, there / ranks_there)
        for name, here, there, ranks_here, ranks_there in writes
    ]
    columns = make_columns(
        "file_class", "num_writes", f"num_writes_{fullest}", "num_ranks", f"num_ranks_{fullest}",
        Column("per_rank", Unit.NUMBER), Column(f"per_rank_{fullest}", Unit.NUMBER),
    )  # fmt: skip
    title = f"Writes of {run} and {fullest}, by the ranks that wrote"
    return Answer(name=f"f1_{run}", title=title, columns=columns, rows=rows)


_CONCURRENCY = 1.5


def summed_threads(study: Study) -> list[TraceFinding]:
    """F3: sums over threads that run side by side look like time, but are not."""
    source = "{events}"
    rows = study.events.ask(f"""
        WITH process AS ({
        union_sql(
            source, ("run", "tier", "host", "pid"), where=IS_IO, extra=", count(DISTINCT tid) AS num_threads"
        )
    }),
             thread AS (SELECT run, tier, {PROCESS}, sum(dur_us) AS total FROM {{events}}
                        WHERE {IS_IO} GROUP BY run, tier, {PROCESS}, tid)
        SELECT run, tier, pid, num_threads, sum_us, union_us, concurrency,
               (SELECT max(total)::BIGINT FROM thread t
                WHERE t.run = p.run AND t.tier IS NOT DISTINCT FROM p.tier AND t.pid = p.pid
                  AND t.host IS NOT DISTINCT FROM p.host)
        FROM process p WHERE tier IS NOT NULL AND concurrency >= {_CONCURRENCY}
        QUALIFY row_number() OVER (PARTITION BY run, tier ORDER BY sum_us DESC, pid) = 1
        ORDER BY {study.in_order()}, tier""")
    columns = make_columns(
        "run", "tier", "pid", "num_threads", "sum_us", "union_us", "concurrency", "max_thread_us",
    )  # fmt: skip
    return [
        _summed_threads_finding(
            Answer(name=f"f3_{row[0]}_{row[1]}", title="The busiest process", columns=columns, rows=[row]),
        )
        for row in rows
    ]


def _summed_threads_finding(evidence: Answer) -> TraceFinding:
    run, tier, pid, num_threads, total, union, concurrency, longest = evidence.rows[0]
    assert isinstance(total, int)
    assert isinstance(union, int)
    assert isinstance(longest, int)
    summed = (
        f"The calls of process {pid} on {tier} add up to {format_seconds(total / 1e6)}, but it was busy with "
        f"them for {format_seconds(union / 1e6)}: {concurrency:.1f} at a time, over {num_threads} threads."
    )
    single = (
        f"The longest single thread has {format_seconds(longest / 1e6)}, which is too little for the same "
        "reason. Compare unions."
    )
    says = [summed, single]
    title = f"{run}: time on {tier} is a sum over parallel threads"
    return TraceFinding(
        code="F3", weight=Weight.ALARM, title=title, runs=[str(run)], says=says, evidence=evidence
    )


def stragglers(study: Study) -> list[TraceFinding]:
    """F8: ranks that are busy with I/O much longer than the others; a checkpoint waits for the slowest."""
    answer = ranks(study.events)
    late = [row for row, record in zip(answer.rows, answer.records(), strict=True) if record["is_straggler"]]
    if not late:
        return []
    evidence = Answer(name="f8", title="Stragglers", columns=answer.columns, rows=late)
    says = []
    for run in study.runs:
        records = [row for row in evidence.records() if row["run"] == run]
        if records:
            says.append(_describe_stragglers(run, records))
    runs = [run for run in study.runs if any(row["run"] == run for row in evidence.records())]
    return [
        TraceFinding(
            code="F8", weight=Weight.COST, title="Stragglers", runs=runs, says=says, evidence=evidence
        )
    ]


def _describe_stragglers(run: str, records: Sequence[Mapping[str, Any]]) -> str:
    worst = max(records, key=lambda row: row["to_median"])
    late = format_ranges(row["rank"] for row in records if row["rank"] is not None)
    return (
        f"{run}: busy with I/O for more than {STRAGGLER_RATIO:g} times the median: rank {late}; longest "
        f"rank {worst['rank']}, {format_seconds(worst['union_us'] / 1e6)} ({worst['to_median']:.2f} times)."
    )
