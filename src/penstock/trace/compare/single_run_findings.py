"""Findings about one run alone, R1 to R4, each with what it costs and what to do about it.

Small reads (R1), reads at random offsets (R2), unaligned reads and writes (R3), the share of metadata (R4).
A comparison says how runs differ; these say what is dear in each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.trace.compare.trace_study import Study, TraceFinding, Weight, spread_over_ranks
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE
from penstock.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRule:
    """A habit of a run that costs time, as a query that finds it; a rule of findings, as it is called."""

    code: str
    title: str
    sql: str
    """Rows of a run, of which the last column is the time that is at stake."""
    columns: Sequence[str | Column]
    """The columns of these rows behind the run."""
    evidence: str
    """What the rows are, in words."""
    where: str
    """SQL condition of the calls that the habit is a part of."""
    says: Callable[[tuple[Any, ...]], str]
    """A sentence about the row with the most time."""
    fix: str

    def __call__(self, study: Study) -> list[TraceFinding]:
        """A finding for each run that has rows."""
        by_run: dict[str, list[tuple[Any, ...]]] = {run: [] for run in study.runs}
        for row in study.events.ask(self.sql):
            by_run[row[0]].append(row)
        return [self._find(study, run, rows) for run, rows in by_run.items() if rows]

    def _find(self, study: Study, run: str, rows: Sequence[tuple[Any, ...]]) -> TraceFinding:
        rows = sorted(rows, key=lambda row: (-row[-1], *map(str, row[1:])))
        return TraceFinding(
            code=self.code,
            weight=Weight.COST,
            title=f"{run}: {self.title}" if run else self.title,
            runs=[run],
            says=[self.says(rows[0])],
            evidence=Answer(
                name=f"{self.code.lower()}_{run}",
                title=self.evidence,
                columns=make_columns("run", *self.columns),
                rows=rows,
            ),
            lost_us=spread_over_ranks(study, run, where=self.where, sum_us=sum(row[-1] for row in rows)),
            fix=self.fix,
        )


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
_IS_SMALL: Final = f"size_bytes < {_SMALL_BYTES}"
_IS_UNALIGNED: Final = f'"offset" % {_PAGE_BYTES} <> 0'

# Most reads are so small that their number costs more than their bytes.
_SMALL_READS: Final = RunRule(
    code="R1",
    title="small reads",
    sql=f"""
        SELECT run, file_class, count(*) AS num_reads, count(*) FILTER (WHERE {_IS_SMALL}) AS num_small,
               quantile_cont(size_bytes, 0.5),
               coalesce(sum(size_bytes) FILTER (WHERE {_IS_SMALL}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE {_IS_SMALL}), 0)::BIGINT
        FROM {{events}} WHERE {IS_IO} AND {IS_READ} AND size_bytes > 0 AND path IS NOT NULL
        GROUP BY run, file_class
        HAVING num_small >= {_ENOUGH_CALLS} AND num_small >= {_SMALL_SHARE} * num_reads""",
    columns=("file_class", "num_reads", "num_small", "median_bytes", "small_bytes", "small_us"),
    evidence=f"Reads below {format_bytes(_SMALL_BYTES)}",
    where=f"{IS_READ} AND {_IS_SMALL}",
    says=lambda row: (
        f"{row[3]:,} of {row[2]:,} reads of {row[1]} move less than {format_bytes(_SMALL_BYTES)}, half "
        f"of them {format_bytes(round(row[4]))} or less; together {format_bytes(row[5])}."
    ),
    fix="Read through a larger buffer, or put many samples into one file and read blocks of it: "
    "1 MiB a read keeps most storage busy.",
)
# Reads below a MiB that do not begin where the one before in their file ended.
_RANDOM_READS: Final = RunRule(
    code="R2",
    title="reads at random offsets",
    sql=f"""
        WITH ordered AS (
            SELECT run, file_class, dur_us, "offset" AS begins, size_bytes,
                   lag("offset" + size_bytes) OVER one_file AS ended
            FROM {{events}} WHERE {IS_IO} AND {IS_READ} AND size_bytes > 0 AND "offset" IS NOT NULL
              AND path IS NOT NULL
            WINDOW one_file AS (PARTITION BY run, host, pid, path ORDER BY ts_us, "offset"))
        SELECT run, file_class, count(*) AS num_reads, count(*) FILTER (WHERE begins <> ended) AS num_random,
               count(*) FILTER (WHERE begins < ended), quantile_cont(size_bytes, 0.5),
               coalesce(sum(dur_us) FILTER (WHERE begins <> ended), 0)::BIGINT
        FROM ordered WHERE ended IS NOT NULL AND size_bytes < {_LARGE_BYTES} GROUP BY run, file_class
        HAVING num_random >= {_ENOUGH_CALLS} AND num_random >= {_RANDOM_SHARE} * num_reads""",
    columns=(
        "file_class", "num_reads", Column("num_random", Unit.COUNT), Column("num_backwards", Unit.COUNT),
        "median_bytes", "random_us",
    ),
    evidence="Reads below 1 MiB that follow another of their file",
    where=f'{IS_READ} AND size_bytes < {_LARGE_BYTES} AND "offset" IS NOT NULL',
    says=lambda row: (
        f"{row[3]:,} of {row[2]:,} reads below 1 MiB of {row[1]} begin elsewhere than the read before "
        f"them in the same file ended, {row[4]:,} of them before it; read-ahead fetches bytes that "
        "nobody asks for."
    ),
    fix="Shuffle the order of files or of large blocks instead of samples, or turn read-ahead off "
    "(posix_fadvise with POSIX_FADV_RANDOM, or O_DIRECT).",
)  # fmt: skip
# Reads and writes below a MiB that begin between two pages.
_UNALIGNED_TRANSFERS: Final = RunRule(
    code="R3",
    title="unaligned offsets",
    sql=f"""
        SELECT run, file_class, CASE WHEN {IS_WRITE} THEN 'write' ELSE 'read' END AS direction,
               count(*) AS num_calls, count(*) FILTER (WHERE {_IS_UNALIGNED}) AS num_unaligned,
               coalesce(sum(size_bytes) FILTER (WHERE {_IS_UNALIGNED}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE {_IS_UNALIGNED}), 0)::BIGINT
        FROM {{events}} WHERE {IS_IO} AND ({IS_READ} OR {IS_WRITE}) AND "offset" IS NOT NULL
          AND size_bytes > 0 AND size_bytes < {_LARGE_BYTES} AND path IS NOT NULL
        GROUP BY run, file_class, direction
        HAVING num_unaligned >= {_ENOUGH_CALLS} AND num_unaligned >= {_UNALIGNED_SHARE} * num_calls""",
    columns=("file_class", "direction", "num_calls", "num_unaligned", "unaligned_bytes", "unaligned_us"),
    evidence="Transfers below 1 MiB",
    where=f"({IS_READ} OR {IS_WRITE}) AND size_bytes < {_LARGE_BYTES} AND {_IS_UNALIGNED}",
    says=lambda row: (
        f"{row[4]:,} of {row[3]:,} {row[2]}s below 1 MiB of {row[1]} begin between two pages of "
        f"{format_bytes(_PAGE_BYTES)}: the pages at their ends are moved more than once."
    ),
    fix=f"Begin records at multiples of {format_bytes(_PAGE_BYTES)}, or of the stripe of a parallel file "
    "system, and pad them.",
)
# Much of the time with I/O goes to calls that move no bytes.
_METADATA: Final = RunRule(
    code="R4",
    title="much time for metadata",
    sql=f"""
        WITH kinds AS (
            SELECT run, op, count(*) AS num_calls, sum(dur_us)::BIGINT AS took,
                   sum(took) OVER (PARTITION BY run) AS whole, {_MOVES} OR {_SYNCS} AS is_transfer
            FROM {{events}} WHERE {IS_IO} GROUP BY run, op),
        others AS (
            SELECT *, sum(took) OVER of_run AS metadata, sum(num_calls) OVER of_run AS num_others
            FROM kinds WHERE NOT is_transfer WINDOW of_run AS (PARTITION BY run))
        SELECT run, op, num_calls, took / whole, metadata / whole, metadata::BIGINT, took FROM others
        WHERE whole > 0 AND metadata >= {_METADATA_SHARE} * whole AND num_others >= {_ENOUGH_CALLS}""",
    columns=("op", "num_calls", Column("share", Unit.SHARE), "metadata_share", "metadata_us", "sum_us"),
    evidence="Calls that move no bytes",
    where=f"NOT ({_MOVES} OR {_SYNCS})",
    says=lambda row: (
        f"{100 * row[4]:.0f} % of the time in I/O calls ({format_seconds(row[5] / 1e6)}, summed over all "
        f"ranks) goes to calls that move no bytes, most of it to {row[2]:,} calls of {row[1]}."
    ),
    fix="Put many samples into one file, keep files open between reads, and remember sizes instead of "
    "asking for them.",
)

RUN_RULES: Final[Mapping[str, RunRule]] = {
    rule.code: rule for rule in (_SMALL_READS, _RANDOM_READS, _UNALIGNED_TRANSFERS, _METADATA)
}
