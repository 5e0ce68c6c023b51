"""The tables of a study that follow single files through all runs: T6 to T9.

Files are named by their base names, or patterns of them: runs keep the same files in different places.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trace.compare.study import Study, pivot
from penstock.trace.lens import quoted
from penstock.trace.questions.base import IS_IO, Answer, Column, Unit


def followed_files(study: Study) -> Sequence[str]:
    """The files asked for; or else the one whose calls differ most between runs."""
    if study.asked.files:
        return study.asked.files
    found = study.events.ask(f"""
        SELECT file_name FROM (
            SELECT parse_filename(path) AS file_name, run, count(*) AS num_calls
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY ALL)
        GROUP BY file_name ORDER BY count(*) DESC, max(num_calls) - min(num_calls) DESC, file_name LIMIT 1""")
    return [name for (name,) in found]


def file_tables(study: Study, names: Sequence[str]) -> tuple[Answer, Answer, Answer, Answer]:
    """T6 calls, T7 times, T8 sizes, T9 the events of the first file in order."""
    wanted = ", ".join(f"({quoted(name)})" for name in names) or "('')"
    source = f"""(SELECT * FROM {{events}} JOIN (VALUES {wanted}) AS wanted(chosen)
                 ON parse_filename(path) GLOB chosen WHERE {IS_IO})"""
    keys = ("file", "tier", "name")
    calls = pivot(
        study, "t6", "T6 Calls on single files", keys=keys, unit=Unit.COUNT,
        sql=f"SELECT chosen, tier, name, run, count(*) FROM {source} GROUP BY ALL",
    )  # fmt: skip
    times = pivot(
        study, "t7", "T7 Times of calls on single files, in seconds", keys=keys, unit=Unit.MICROSECONDS,
        sql=f"SELECT chosen, tier, name, run, sum(dur_us)::BIGINT FROM {source} GROUP BY ALL",
    )  # fmt: skip
    sizes = pivot(
        study, "t8", "T8 How often single files were moved by each size", unit=Unit.COUNT,
        keys=("file", "tier", "name", "bytes"),
        sql=f"""SELECT chosen, tier, name, size_bytes, run, count(*) FROM {source}
                WHERE size_bytes IS NOT NULL GROUP BY ALL""",
    )  # fmt: skip
    return calls, times, sizes, _life(study, names[0] if names else "")


def _life(study: Study, name: str) -> Answer:
    rows = study.events.ask(f"""
        WITH origins AS (SELECT run, min(ts_us) AS origin_us FROM {{events}} GROUP BY run)
        SELECT run, tier, ts_us - origin_us, dur_us, name, size_bytes, rank, tid
        FROM {{events}} JOIN origins USING (run)
        WHERE {IS_IO} AND parse_filename(path) GLOB {quoted(name)}
        ORDER BY {study.in_order()}, ts_us, end_us, name""")
    columns = [
        Column("run"), Column("tier"), Column("since_start_us", Unit.MICROSECONDS),
        Column("dur_us", Unit.MICROSECONDS), Column("name"), Column("size_bytes", Unit.COUNT),
        Column("rank"), Column("tid"),
    ]  # fmt: skip
    return Answer(name="t9", title=f"T9 Events of {name} in order", columns=columns, rows=rows)
