"""Findings about one run alone, R1 to R4, each with what it costs and what to do about it.

Small reads (R1), reads at random offsets (R2), unaligned reads and writes (R3), the share of metadata (R4).
A comparison says how runs differ; these say what is dear in each of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.trace.compare.trace_study import (
    FindingRule,
    Study,
    TraceFinding,
    Weight,
    spread_over_ranks,
)
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE
from penstock.units import format_bytes, format_seconds

_SMALL_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = 4096
"""Offsets between pages make a file system read, and for a write read and change, the pages at both ends."""
_LARGE_BYTES: Final = 1 << 20
"""A transfer of this size takes the same time wherever it begins."""
_ENOUGH_CALLS: Final = 100
_SMALL_SHARE: Final = 0.5
_RANDOM_SHARE: Final = 0.5
_UNALIGNED_SHARE: Final = 0.5
_METADATA_SHARE: Final = 0.25
_MOVES: Final = f"({IS_READ} OR {IS_WRITE} OR op IN ('sendfile', 'copy_file_range', 'splice'))"
_SYNCS: Final = "op IN ('fsync', 'fdatasync', 'sync', 'syncfs', 'msync', 'sync_file_range')"


def small_reads(study: Study) -> list[TraceFinding]:
    """R1: most reads are so small that their number costs more than their bytes."""
    small = f"size_bytes < {_SMALL_BYTES}"
    rows = study.events.ask(f"""
        SELECT run, file_class, count(*) AS num_reads, count(*) FILTER (WHERE {small}) AS num_small,
               quantile_cont(size_bytes, 0.5),
               coalesce(sum(size_bytes) FILTER (WHERE {small}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE {small}), 0)::BIGINT AS took
        FROM {{events}} WHERE {IS_IO} AND {IS_READ} AND size_bytes > 0 AND path IS NOT NULL
        GROUP BY run, file_class
        HAVING num_small >= {_ENOUGH_CALLS} AND num_small >= {_SMALL_SHARE} * num_reads
        ORDER BY {study.in_order()}, took DESC, file_class""")
    columns = make_columns(
        "run", "file_class", "num_reads", "num_small", "median_bytes", "small_bytes", "small_us",
    )  # fmt: skip
    return _one_per_run(
        study,
        rows,
        Answer(name="r1", title=f"Reads below {format_bytes(_SMALL_BYTES)}", columns=columns, rows=rows),
        code="R1",
        title="small reads",
        where=f"{IS_READ} AND {small}",
        says=lambda row: (
            f"{row[3]:,} of {row[2]:,} reads of {row[1]} move less than {format_bytes(_SMALL_BYTES)}, half "
            f"of them {format_bytes(round(row[4]))} or less; together {format_bytes(row[5])}."
        ),
        fix="Read through a larger buffer, or put many samples into one file and read blocks of it: "
        "1 MiB a read keeps most storage busy.",
    )


def random_reads(study: Study) -> list[TraceFinding]:
    """R2: reads below a MiB that do not begin where the one before in their file ended."""
    rows = study.events.ask(f"""
        WITH ordered AS (
            SELECT run, file_class, dur_us, "offset" AS begins, size_bytes,
                   lag("offset" + size_bytes) OVER one_file AS ended
            FROM {{events}} WHERE {IS_IO} AND {IS_READ} AND size_bytes > 0 AND "offset" IS NOT NULL
              AND path IS NOT NULL
            WINDOW one_file AS (PARTITION BY run, host, pid, path ORDER BY ts_us, "offset"))
        SELECT run, file_class, count(*) AS num_reads, count(*) FILTER (WHERE begins <> ended) AS num_random,
               count(*) FILTER (WHERE begins < ended), quantile_cont(size_bytes, 0.5),
               coalesce(sum(dur_us) FILTER (WHERE begins <> ended), 0)::BIGINT AS took
        FROM ordered WHERE ended IS NOT NULL AND size_bytes < {_LARGE_BYTES} GROUP BY run, file_class
        HAVING num_random >= {_ENOUGH_CALLS} AND num_random >= {_RANDOM_SHARE} * num_reads
        ORDER BY {study.in_order()}, took DESC, file_class""")
    columns = make_columns(
        "run", "file_class", "num_reads", Column("num_random", Unit.COUNT),
        Column("num_backwards", Unit.COUNT), "median_bytes", "random_us",
    )  # fmt: skip
    return _one_per_run(
        study,
        rows,
        Answer(
            name="r2", title="Reads below 1 MiB that follow another of their file", columns=columns, rows=rows
        ),
        code="R2",
        title="reads at random offsets",
        where=f'{IS_READ} AND size_bytes < {_LARGE_BYTES} AND "offset" IS NOT NULL',
        says=lambda row: (
            f"{row[3]:,} of {row[2]:,} reads below 1 MiB of {row[1]} begin elsewhere than the read before "
            f"them in the same file ended, {row[4]:,} of them before it; read-ahead fetches bytes that "
            "nobody asks for."
        ),
        fix="Shuffle the order of files or of large blocks instead of samples, or turn read-ahead off "
        "(posix_fadvise with POSIX_FADV_RANDOM, or O_DIRECT).",
    )


def unaligned_transfers(study: Study) -> list[TraceFinding]:
    """R3: reads and writes below a MiB that begin between two pages."""
    unaligned = f'"offset" % {_PAGE_BYTES} <> 0'
    rows = study.events.ask(f"""
        SELECT run, file_class, CASE WHEN {IS_WRITE} THEN 'write' ELSE 'read' END AS direction,
               count(*) AS num_calls, count(*) FILTER (WHERE {unaligned}) AS num_unaligned,
               coalesce(sum(size_bytes) FILTER (WHERE {unaligned}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE {unaligned}), 0)::BIGINT AS took
        FROM {{events}} WHERE {IS_IO} AND ({IS_READ} OR {IS_WRITE}) AND "offset" IS NOT NULL
          AND size_bytes > 0 AND size_bytes < {_LARGE_BYTES} AND path IS NOT NULL
        GROUP BY run, file_class, direction
        HAVING num_unaligned >= {_ENOUGH_CALLS} AND num_unaligned >= {_UNALIGNED_SHARE} * num_calls
        ORDER BY {study.in_order()}, took DESC, file_class, direction""")
    columns = make_columns(
        "run", "file_class", "direction", "num_calls", "num_unaligned", "unaligned_bytes", "unaligned_us",
    )  # fmt: skip
    return _one_per_run(
        study,
        rows,
        Answer(name="r3", title="Transfers below 1 MiB", columns=columns, rows=rows),
        code="R3",
        title="unaligned offsets",
        where=f"({IS_READ} OR {IS_WRITE}) AND size_bytes < {_LARGE_BYTES} AND {unaligned}",
        says=lambda row: (
            f"{row[4]:,} of {row[3]:,} {row[2]}s below 1 MiB of {row[1]} begin between two pages of "
            f"{format_bytes(_PAGE_BYTES)}: the pages at their ends are moved more than once."
        ),
        fix=f"Begin records at multiples of {format_bytes(_PAGE_BYTES)}, or of the stripe of a parallel file "
        "system, and pad them.",
    )


def metadata_share(study: Study) -> list[TraceFinding]:
    """R4: much of the time with I/O goes to calls that move no bytes."""
    rows = study.events.ask(f"""
        WITH kinds AS (
            SELECT run, op, count(*) AS num_calls, sum(dur_us)::BIGINT AS took,
                   sum(took) OVER (PARTITION BY run) AS whole, {_MOVES} OR {_SYNCS} AS is_transfer
            FROM {{events}} WHERE {IS_IO} GROUP BY run, op),
        shares AS (
            SELECT *, sum(took) FILTER (WHERE NOT is_transfer) OVER (PARTITION BY run) AS metadata FROM kinds)
        SELECT run, op, num_calls, took / whole, metadata / whole, metadata::BIGINT, took
        FROM shares WHERE NOT is_transfer AND whole > 0 AND metadata >= {_METADATA_SHARE} * whole
        ORDER BY {study.in_order()}, took DESC, op""")
    few = {run for run in study.runs if sum(row[2] for row in rows if row[0] == run) < _ENOUGH_CALLS}
    rows = [row for row in rows if row[0] not in few]
    columns = make_columns(
        "run", "op", "num_calls", Column("share", Unit.SHARE), "metadata_share", "metadata_us", "sum_us",
    )  # fmt: skip
    return _one_per_run(
        study,
        rows,
        Answer(name="r4", title="Calls that move no bytes", columns=columns, rows=rows),
        code="R4",
        title="much time for metadata",
        where=f"NOT ({_MOVES} OR {_SYNCS})",
        says=lambda row: (
            f"{100 * row[4]:.0f} % of the time in I/O calls ({format_seconds(row[5] / 1e6)}, summed over all "
            f"ranks) goes to calls that move no bytes, most of it to {row[2]:,} calls of {row[1]}."
        ),
        fix="Put many samples into one file, keep files open between reads, and remember sizes instead of "
        "asking for them.",
    )


RUN_RULES: Final[Mapping[str, FindingRule]] = {
    "R1": small_reads,
    "R2": random_reads,
    "R3": unaligned_transfers,
    "R4": metadata_share,
}


def _one_per_run(
    study: Study,
    rows: Sequence[tuple[Any, ...]],
    evidence: Answer,
    *,
    code: str,
    title: str,
    where: str,
    says: Any,
    fix: str,
) -> list[TraceFinding]:
    """A finding for each run that has rows; their last column is the time that is at stake."""
    findings = []
    for run in dict.fromkeys(row[0] for row in rows):
        of_run = [row for row in rows if row[0] == run]
        sum_us = sum(row[-1] for row in of_run)
        findings.append(
            TraceFinding(
                code=code,
                weight=Weight.COST,
                title=f"{run}: {title}" if run else title,
                runs=[run],
                says=[says(of_run[0])],
                evidence=Answer(
                    name=f"{evidence.name}_{run}",
                    title=evidence.title,
                    columns=evidence.columns,
                    rows=of_run,
                ),
                lost_us=spread_over_ranks(study, run, where=where, sum_us=sum_us),
                fix=fix,
            )
        )
    return findings
