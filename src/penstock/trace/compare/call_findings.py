"""Findings about calls: more per file than the baseline (F2), small writes (F6), repeated lookups (F7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.trace.compare.trace_study import Study, TraceFinding, Weight
from penstock.trace.dimensions import sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_WRITE
from penstock.units import format_bytes, format_seconds

_SMALL_BYTES = 64 << 10
_SMALL_SHARE = 0.25
_SMALL_COUNT = 100
_EXTRA_A_FILE = 0.5
_STATS_A_FILE = 3
_OPENS_A_FILE = 2
_FILES_FOR_A_HABIT = 10


def extra_calls(study: Study) -> list[TraceFinding]:
    """F2: operations that a class of files takes here, on some tier, and not in the baseline."""
    base = sql_literal(study.baseline)
    findings = []
    for run in study.runs:
        rows = study.events.ask(f"""
            WITH calls AS (
                SELECT run, tier, file_class, op, count(*) AS num_calls, sum(dur_us)::BIGINT AS took
                FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL AND run IN ({sql_literal(run)}, {base})
                GROUP BY run, tier, file_class, op),
            files AS (
                SELECT run, tier, file_class, count(DISTINCT path) AS num_files
                FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL AND run IN ({sql_literal(run)}, {base})
                GROUP BY run, tier, file_class),
            each AS (
                SELECT *, num_calls / num_files AS a_file
                FROM calls JOIN files USING (run, tier, file_class)),
            usual AS (
                SELECT file_class, op, sum(num_calls) / sum(num_files) AS a_file
                FROM each WHERE run = {base} GROUP BY file_class, op)
            SELECT e.tier, e.file_class, e.op, e.a_file, coalesce(u.a_file, 0), e.num_files,
                   (e.took * (1 - coalesce(u.a_file, 0) / e.a_file))::BIGINT
            FROM each e LEFT JOIN usual u USING (file_class, op)
            WHERE e.run = {sql_literal(run)} AND e.file_class IN (SELECT file_class FROM usual)
              AND e.op NOT IN ('read', 'write', 'pread', 'pwrite')
              AND e.a_file - coalesce(u.a_file, 0) >= {_EXTRA_A_FILE}
            ORDER BY e.tier, e.file_class, e.op""")
        if rows and run != study.baseline:
            findings.append(_extra(study, run, rows))
    return findings


def _extra(study: Study, run: str, rows: Sequence[tuple[Any, ...]]) -> TraceFinding:
    columns = make_columns(
        "tier", "file_class", "op", Column("per_file", Unit.NUMBER),
        Column(f"per_file_{study.baseline}", Unit.NUMBER), "num_files", "extra_us",
    )  # fmt: skip
    title = f"Calls by file, {run} and {study.baseline}"
    evidence = Answer(name=f"f2_{run}", title=title, columns=columns, rows=rows)
    says = []
    for tier in dict.fromkeys(row[0] for row in rows):
        here = [row for row in rows if row[0] == tier]
        kinds = list(dict.fromkeys(row[1] for row in here))
        extra = [f"+{row[3] - row[4]:g} {row[2]}" for row in here if row[1] == kinds[0]]
        cost = sum(row[6] for row in here)
        says.append(
            f"On {tier}, each file of {kinds[0]} takes {', '.join(extra)} calls more than in "
            f"{study.baseline}; with the classes {', '.join(kinds)}, over all ranks, that is "
            f"{format_seconds(cost / 1e6)}."
        )
    title = f"{run}: more operations for each file than {study.baseline}"
    return TraceFinding(code="F2", weight=Weight.COST, title=title, runs=[run], says=says, evidence=evidence)


def small_writes(study: Study) -> list[TraceFinding]:
    """F6: many writes so small that their number costs more than their bytes."""
    rows = study.events.ask(f"""
        SELECT run, file_class, count(*), count(*) FILTER (WHERE size_bytes < {_SMALL_BYTES}) AS small,
               quantile_cont(size_bytes, 0.5),
               coalesce(sum(size_bytes) FILTER (WHERE size_bytes < {_SMALL_BYTES}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE size_bytes < {_SMALL_BYTES}), 0)::BIGINT
        FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND path IS NOT NULL GROUP BY run, file_class
        HAVING small >= {_SMALL_COUNT} AND small / count(*) >= {_SMALL_SHARE}
        ORDER BY {study.in_order()}, small DESC, file_class""")
    if not rows:
        return []
    columns = make_columns(
        "run", "file_class", "num_writes", "num_small", "median_bytes", "small_bytes", "small_us",
    )  # fmt: skip
    run, kind, num, small = rows[0][:4]
    says = [
        f"In {run}, {small:,} of {num:,} writes of {kind} move less than {format_bytes(_SMALL_BYTES)}.",
        "A writer that collects headers and small records in one buffer needs a fraction of the calls.",
    ]
    evidence = Answer(name="f6", title="Writes below 64 KiB", columns=columns, rows=rows)
    names = list(dict.fromkeys(row[0] for row in rows))
    return [
        TraceFinding(
            code="F6", weight=Weight.COST, title="Small writes", runs=names, says=says, evidence=evidence
        )
    ]


def redundant_lookups(study: Study) -> list[TraceFinding]:
    """F7: files that one process looks up, or opens, again and again."""
    rows = study.events.ask(f"""
        WITH looked_up AS (
            SELECT run, file_class, path, pid,
                   count(*) FILTER (WHERE op IN ('stat', 'lstat', 'fstat', 'access')) AS stats,
                   count(*) FILTER (WHERE op IN ('open', 'fopen')) AS opens,
                   coalesce(sum(dur_us) FILTER (WHERE op IN ('stat', 'lstat', 'fstat', 'access')), 0) AS took
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY run, file_class, path, pid)
        SELECT run, file_class, count(*), max(stats), max(opens), sum(stats)::BIGINT, sum(took)::BIGINT
        FROM looked_up WHERE stats >= {_STATS_A_FILE} OR opens > {_OPENS_A_FILE}
        GROUP BY run, file_class HAVING count(*) >= {_FILES_FOR_A_HABIT}
        ORDER BY {study.in_order()}, 7 DESC, file_class""")
    if not rows:
        return []
    columns = make_columns(
        "run", "file_class", "num_files", Column("max_lookups", Unit.COUNT),
        Column("max_opens", Unit.COUNT), "num_lookups", "lookup_us",
    )  # fmt: skip
    run, kind, files, most = max(rows, key=lambda row: int(row[5]))[:4]
    says = [
        f"In {run}, one process looks up each of {files:,} files of {kind} up to {most} times.",
        "The first answer is known already; on a parallel file system each further one is a round trip.",
    ]
    evidence = Answer(name="f7", title="Files looked up repeatedly", columns=columns, rows=rows)
    names = list(dict.fromkeys(row[0] for row in rows))
    title = "Redundant opens and stats"
    return [
        TraceFinding(code="F7", weight=Weight.COST, title=title, runs=names, says=says, evidence=evidence)
    ]
