"""F11 and F12: writes of another size than in the baseline, and calls that come long after a file's close."""

from collections.abc import Sequence
from typing import Any, Final

from penstock.trace.compare.trace_study import (
    Study,
    TraceFinding,
    Weight,
    count_ranks,
    match_rows,
    spread_over_ranks,
)
from penstock.trace.dimensions import sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_WRITE, union_times
from penstock.units import format_bytes, format_seconds

_OTHER_SIZE: Final = 2.0
"""A size that differs by less is a matter of headers and alignment."""
_ENOUGH_BYTES: Final = 1 << 20
_LONG_AFTER_US: Final = 1_000_000
_FILES_FOR_A_HABIT: Final = 10
_LOOKS: Final = (
    "'stat', 'lstat', 'fstat', 'access', 'chmod', 'chown', 'utime', 'truncate', 'ftruncate', 'readlink'"
)
"""Calls that move no bytes, and that a file needs no longer once it is closed; a later unlink or rename is
part of its life."""


def _typical_sql(keys: str) -> str:
    """SELECT `keys`, writes, bytes, and the size at which half of the bytes are written.

    Headers are most of the writes, but next to nothing of the bytes.
    """
    return f"""
        SELECT {keys}, sum(num_writes)::BIGINT AS num_writes, any_value(whole)::BIGINT AS written,
               min(size_bytes) FILTER (WHERE upto >= whole / 2) AS typical
        FROM (SELECT {keys}, size_bytes, num_writes,
                     sum(moved) OVER (PARTITION BY {keys} ORDER BY size_bytes) AS upto,
                     sum(moved) OVER (PARTITION BY {keys}) AS whole
              FROM (SELECT {keys}, size_bytes, count(*) AS num_writes, sum(size_bytes) AS moved
                    FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND size_bytes > 0 AND path IS NOT NULL
                    GROUP BY {keys}, size_bytes))
        GROUP BY {keys}"""


def changed_sizes(study: Study) -> list[TraceFinding]:
    """F11: the bytes of a class of files are written in pieces of another size than in the baseline."""
    rows = study.events.ask(f"""
        WITH typical AS ({_typical_sql("run, tier, file_class")}),
        usual AS ({_typical_sql("run, file_class")})
        SELECT t.run, t.tier, t.file_class, t.num_writes, t.written, t.typical, u.num_writes, u.written,
               u.typical, t.typical / u.typical
        FROM typical t JOIN usual u ON t.file_class = u.file_class AND u.run = {sql_literal(study.baseline)}
        WHERE t.run <> u.run AND t.written >= {_ENOUGH_BYTES}
          AND greatest(t.typical / u.typical, u.typical / t.typical) >= {_OTHER_SIZE}
        ORDER BY {study.in_order("t.run")}, t.tier, t.written DESC, t.file_class""")
    return [
        _changed_sizes_finding(study, run, [row[1:] for row in rows if row[0] == run])
        for run in dict.fromkeys(row[0] for row in rows)
    ]


def _changed_sizes_finding(study: Study, run: str, rows: Sequence[tuple[Any, ...]]) -> TraceFinding:
    columns = make_columns(
        "tier", "file_class", "num_writes", "written_bytes", "typical_bytes",
        Column(f"num_writes_{study.baseline}", Unit.COUNT), Column(f"written_{study.baseline}", Unit.BYTES),
        Column(f"typical_{study.baseline}", Unit.BYTES), Column("to_base", Unit.RATIO),
    )  # fmt: skip
    title = f"Sizes at which half of the bytes are written, {run} and {study.baseline}"
    evidence = Answer(name=f"f11_{run}", title=title, columns=columns, rows=rows)
    tier, kind, num, _, typical, num_base, _, typical_base, ratio = max(rows, key=lambda row: int(row[3]))
    sizes = (
        f"{kind} is written to {tier} in pieces of {format_bytes(typical)}, in {study.baseline} of "
        f"{format_bytes(typical_base)} (half of the bytes are in larger ones): {num:,} writes, not "
        f"{num_base:,}."
    )
    says = [sizes]
    lost_us = _longer_us(study, run, rows)
    if lost_us > 0:
        says.append(
            f"A rank is busy with the writes of these classes for {format_seconds(lost_us / 1e6)} longer "
            f"than in {study.baseline} for as many bytes; whether their size is the reason, only a "
            "measurement with that size shows."
        )
    word = "smaller" if ratio < 1 else "larger"
    return TraceFinding(
        code="F11",
        weight=Weight.COST if lost_us > 0 else Weight.NOTE,
        title=f"{run}: {word} writes than in {study.baseline}",
        runs=[run],
        says=says,
        evidence=evidence,
        lost_us=max(lost_us, 0) or None,
    )


def _longer_us(study: Study, run: str, rows: Sequence[tuple[Any, ...]]) -> int:
    """How much longer an average rank writes than one of the baseline would for the same bytes of a class."""
    kinds = ", ".join(sql_literal(kind) for kind in dict.fromkeys(row[1] for row in rows))
    here_us = _busy_us(study, run, f"({match_rows(('tier', 'file_class'), rows)})")
    base_us = _busy_us(study, study.baseline, f"file_class IN ({kinds})")
    written: int = sum(row[3] for row in rows)
    usual: int = sum({row[1]: row[6] for row in rows}.values())
    num_here, num_base = count_ranks(study, run), count_ranks(study, study.baseline)
    return round(here_us / num_here - base_us / num_base * (written / num_here) / (usual / num_base))


def _busy_us(study: Study, run: str, where: str) -> int:
    """The time in which processes wrote, added over them."""
    chosen = f"run = {sql_literal(run)} AND {IS_IO} AND {IS_WRITE} AND {where}"
    return sum(busy_us for (busy_us,) in union_times(study.events, ("host", "pid"), chosen).values())


def calls_after_close(study: Study) -> list[TraceFinding]:
    """F12: written files that are looked at, or changed, long after they were closed."""
    rows = study.events.ask(f"""
        WITH written AS (
            SELECT DISTINCT run, path FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND path IS NOT NULL),
        looks AS (
            SELECT run, tier, file_class, path, op, ts_us, dur_us FROM {{events}}
            SEMI JOIN written USING (run, path) WHERE {IS_IO} AND op IN ({_LOOKS})),
        closes AS (SELECT run, path, end_us AS closed_us FROM {{events}} WHERE {IS_IO} AND op = 'close'),
        opens AS (
            SELECT run, path, ts_us AS opened_us FROM {{events}} WHERE {IS_IO} AND op IN ('open', 'fopen')),
        late AS (
            SELECT looks.*, closed_us FROM looks ASOF JOIN closes
            ON looks.run = closes.run AND looks.path = closes.path AND looks.ts_us >= closes.closed_us
            WHERE ts_us - closed_us >= {_LONG_AFTER_US})
        SELECT late.run, tier, file_class, op, count(DISTINCT late.path) AS num_files, count(*),
               median(ts_us - closed_us)::BIGINT, sum(dur_us)::BIGINT
        FROM late ASOF LEFT JOIN opens
        ON late.run = opens.run AND late.path = opens.path AND late.ts_us >= opens.opened_us
        WHERE coalesce(opened_us < closed_us, true)
        GROUP BY late.run, tier, file_class, op HAVING num_files >= {_FILES_FOR_A_HABIT}
        ORDER BY {study.in_order("late.run")}, tier, file_class, op""")
    return [
        _after_close_finding(study, run, [row[1:] for row in rows if row[0] == run])
        for run in dict.fromkeys(row[0] for row in rows)
    ]


def _after_close_finding(study: Study, run: str, rows: Sequence[tuple[Any, ...]]) -> TraceFinding:
    columns = make_columns(
        "tier", "file_class", "op", "num_files", "num_calls", "median_after_us", "sum_us",
    )  # fmt: skip
    evidence = Answer(name=f"f12_{run}", title="Calls after the close", columns=columns, rows=rows)
    tier, kind, op, num_files, num_calls, after_us, _ = max(rows, key=lambda row: int(row[4]))
    sum_us = sum(row[6] for row in rows)
    after = format_seconds(after_us / 1e6)
    latest = format_seconds(max(row[5] for row in rows) / 1e6)
    when = (
        f"On {tier}, {num_calls:,} calls of {op} on {num_files:,} files of {kind} come {after} after the "
        "file was closed (median)."
    )
    cost = (
        f"All calls of this kind take {format_seconds(sum_us / 1e6)}, summed over all ranks: a later step "
        "of the program goes over all files once more."
    )
    return TraceFinding(
        code="F12",
        weight=Weight.COST,
        title=f"{run}: files are looked at up to {latest} after their close",
        runs=[run],
        says=[when, cost],
        evidence=evidence,
        lost_us=spread_over_ranks(
            study, run, where=match_rows(("tier", "file_class", "op"), rows), sum_us=sum_us
        ),
    )
