"""The tables of a study: T0 to T5 and T10 to T14 of whole runs, T6 to T9 of single files through all runs.

"max" tables take the process with the largest sum, as studies of file-per-process checkpoints do; what such
sums hide (threads side by side) is in the measures table.
"""

from collections.abc import Sequence
from typing import Any, Final

from penstock.trace.compare.trace_study import PROCESS, Study, longest_process_sql, of_processes, pivot
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, measure_groups

GIB = 1 << 30
APP_TIER: Final = "(application event)"
"""Stands for the application's own event among the tiers of the measures."""
_TOP_FILES = 5


def load_report(study: Study) -> Answer:
    """T0: the lines and events of each run's files, and losses."""
    rows: list[Sequence[Value]] = []
    for run in study.runs:
        accounts = study.accounts.get(run, ())
        ranks = {rank for account in accounts for rank in account.ranks}
        hosts = {host for account in accounts for host in account.hosts}
        rows.append(
            (
                run,
                len(accounts),
                sum(account.lines for account in accounts),
                sum(account.events for account in accounts),
                sum(account.salvaged for account in accounts),
                sum(account.dropped for account in accounts),
                sum(bool(account.faults) for account in accounts),
                len(ranks),
                len(hosts),
            )
        )
    names = ("num_files", "num_lines", "num_events", "num_salvaged", "num_dropped", "num_faulty_files",
             "num_ranks", "num_hosts")  # fmt: skip
    columns = make_columns("run", *(Column(name, Unit.COUNT) for name in names))
    return Answer(name="t0", title="T0 What was read", columns=columns, rows=rows)


def times(study: Study) -> Answer:
    """T1: the application's event and each tier, of the process with the largest sum."""
    rows = [["application event", *_by_run(study, longest_process_sql(("run",), where=study.is_app))]]
    for tier in study.tiers:
        where = f"{IS_IO} AND tier = {sql_literal(tier)}"
        rows.append([f"{tier} I/O", *_by_run(study, longest_process_sql(("run",), where=where))])
    columns = make_columns("time", *study.run_columns(Unit.MICROSECONDS))
    note = (
        "Sums of durations, of the process where they are largest; a bare 0: the run never touched the tier."
    )
    title = "T1 Times, in seconds"
    return Answer(name="t1", title=title, columns=columns, rows=rows, notes=[note], missing="0")


def time_changes(study: Study, table: Answer) -> Answer:
    """How the unions of T1's measures differ from the baseline's, as shares of them.

    A change of sums would compare a flush by a hundred threads with a write by one.
    """
    busy = {(row["run"], row["tier"]): row["max_union_us"] for row in table.records()}
    names = {APP_TIER: "application event", **{tier: f"{tier} I/O" for tier in study.tiers}}
    rows = [
        [
            name,
            *(
                _relative_change(busy.get((run, tier)), busy.get((study.baseline, tier)))
                for run in study.runs
            ),
        ]
        for tier, name in names.items()
    ]
    columns = make_columns("time", *study.run_columns(Unit.SHARE))
    note = "Of unions: the time in which any call was under way, of the process where it is longest."
    title = f"T1 Change against {study.baseline}"
    return Answer(name="t1_change", title=title, columns=columns, rows=rows, notes=[note])


def measures(study: Study) -> Answer:
    """T1 by every measure of time, and what the tiers really gave."""
    columns = make_columns(
        "run", "tier", "max_sum_us", "max_union_us", "max_thread_us", "concurrency", "run_union_us",
        "total_bytes", "busy_rate",
    )  # fmt: skip
    note = (
        "Sum and union are of the process where they are largest, thread is the largest sum of one thread; "
        "the rate is all bytes by the time in which any process of the run was busy with the tier."
    )
    rows = [
        *_measure_rows(study, IS_IO, ("run", "tier")),
        *((run, APP_TIER, *rest) for run, *rest in _measure_rows(study, study.is_app, ("run",))),
    ]
    order = {run: number for number, run in enumerate(study.runs)}
    rows.sort(key=lambda row: (order[str(row[0])], str(row[1])))
    return Answer(name="t1_measures", title="T1 Measures of time", columns=columns, rows=rows, notes=[note])


def _measure_rows(study: Study, where: str, by: Sequence[str]) -> list[Sequence[Value]]:
    """Rows of `by` and all measures; sums of all ranks are no process unless there is nothing else."""
    events, width = study.events, len(by)
    processes: dict[tuple[Value, ...], list[Sequence[Any]]] = {}
    for row in measure_groups(events, (*by, "host", "pid"), where=where):
        processes.setdefault(row[:width], []).append(row[width + 1 :])
    keys = ", ".join(by)
    threads = {
        row[:width]: row[width]
        for row in events.ask(f"""
            SELECT {keys}, {of_processes("max(total)")}::BIGINT FROM (
                SELECT {keys}, pid, sum(dur_us) AS total FROM {{events}} WHERE {where}
                GROUP BY {keys}, {PROCESS}, tid) GROUP BY {keys}""")
    }
    rows: list[Sequence[Value]] = []
    for *key, _, _, union_us, _, moved in measure_groups(
        events, by, where=where, extra=["sum(size_bytes)::BIGINT"]
    ):
        # Each is pid, calls, sum, union, concurrency.
        found = processes[tuple(key)]
        found = [one for one in found if one[0] != ALL_RANKS] or found
        longest = max(found, key=lambda one: int(one[2]))
        rate = moved * 1e6 / union_us if moved is not None and union_us else None
        most_union_us = max(one[3] for one in found)
        rows.append((*key, longest[2], most_union_us, threads[tuple(key)], longest[4], union_us, moved, rate))
    return rows


def volumes(study: Study) -> Answer:
    """T2: bytes on each tier, whole and normalised, because runs may differ in ranks and files."""
    rows = study.events.ask(f"""
        SELECT run, tier, sum(size_bytes)::BIGINT, sum(size_bytes) / {GIB}::DOUBLE,
               coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT,
               coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT,
               count(DISTINCT ({PROCESS})), count(DISTINCT path),
               sum(size_bytes) / {GIB}::DOUBLE / count(DISTINCT ({PROCESS})),
               sum(size_bytes) / {GIB}::DOUBLE / count(DISTINCT path)
        FROM {{events}} WHERE {IS_IO} AND tier IS NOT NULL GROUP BY run, tier
        ORDER BY {study.in_order()}, tier""")
    columns = make_columns(
        "run", "tier", Column("total_bytes", Unit.COUNT), "total_GiB", "written_bytes", "read_bytes",
        "num_processes", "num_files", "per_process_gib", "per_file_gib",
    )  # fmt: skip
    return Answer(name="t2", title="T2 Bytes on each tier", columns=columns, rows=rows)


def classes(study: Study) -> Answer:
    """T3: bytes and time of each class of files, of the process where each is largest."""
    rows = study.events.ask(f"""
        SELECT run, file_class, max(moved) / {GIB}::DOUBLE, max(took)::BIGINT FROM (
            SELECT run, file_class, coalesce(sum(size_bytes), 0) AS moved, sum(dur_us) AS took
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY run, file_class, {PROCESS})
        GROUP BY run, file_class ORDER BY {study.in_order()}, file_class""")
    columns = make_columns("run", "file_class", "max_size_gib", "max_sum_us")
    return Answer(name="t3", title="T3 Classes of files", columns=columns, rows=rows)


def class_calls(study: Study) -> Answer:
    """T4: how often each call was made on each class of files."""
    sql = f"""SELECT file_class, name, run, count(*) FROM {{events}}
              WHERE {IS_IO} AND path IS NOT NULL GROUP BY ALL"""
    keys = ("file_class", "name")
    return pivot(study, "t4", "T4 Calls by class of files", keys=keys, sql=sql, unit=Unit.COUNT)


def file_writes(study: Study) -> Answer:
    """T5: the writes of each file, those that took longest first."""
    rows = study.events.ask(f"""
        SELECT run, file_class, path, sum(dur_us)::BIGINT AS took, sum(size_bytes) / {GIB}::DOUBLE, count(*)
        FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND path IS NOT NULL GROUP BY run, file_class, path
        ORDER BY {study.in_order()}, file_class, took DESC, path""")
    columns = make_columns("run", "file_class", "path", "sum_us", "size_gib", "num_writes")
    return Answer(name="t5", title="T5 Writes of each file", columns=columns, rows=rows)


def class_writes(study: Study) -> Answer:
    """T5 in short: the spread of files' write times in each class."""
    rows = study.events.ask(f"""
        SELECT run, file_class, count(*), min(num_writes), max(num_writes), min(took), median(took), max(took)
        FROM (SELECT run, file_class, sum(dur_us)::BIGINT AS took, count(*) AS num_writes FROM {{events}}
              WHERE {IS_IO} AND {IS_WRITE} AND path IS NOT NULL GROUP BY run, file_class, path)
        GROUP BY run, file_class ORDER BY {study.in_order()}, file_class""")
    columns = make_columns(
        "run", "file_class", "num_files", Column("min_writes", Unit.COUNT),
        Column("max_writes", Unit.COUNT),
        *(Column(f"{name}_us", Unit.MICROSECONDS) for name in ("min", "median", "max")),
    )  # fmt: skip
    return Answer(name="t5_spread", title="T5 Spread of files' write times", columns=columns, rows=rows)


def call_times(study: Study) -> Answer:
    """T10: time of each call on each tier, of the process where its sum is largest."""
    where = f"{IS_IO} AND tier IS NOT NULL"
    sql = longest_process_sql(("tier", "name", "run"), where=where)
    keys = ("tier", "name")
    return pivot(
        study,
        "t10",
        "T10 Times of calls on each tier, in seconds",
        keys=keys,
        sql=sql,
        unit=Unit.MICROSECONDS,
    )


def call_bytes(study: Study) -> Answer:
    """T11: bytes that each call moved on each tier, over all processes."""
    sql = f"""SELECT tier, name, run, sum(size_bytes) / {GIB}::DOUBLE FROM {{events}}
              WHERE {IS_IO} AND tier IS NOT NULL AND size_bytes IS NOT NULL GROUP BY ALL"""
    return pivot(study, "t11", "T11 GiB moved by calls", keys=("tier", "name"), sql=sql, unit=Unit.GIB)


def median_sizes(study: Study) -> Answer:
    """T12: exact medians of sizes."""
    sql = f"""SELECT tier, name, run, quantile_cont(size_bytes, 0.5) FROM {{events}}
              WHERE {IS_IO} AND tier IS NOT NULL AND size_bytes IS NOT NULL GROUP BY ALL"""
    keys = ("tier", "name")
    return pivot(study, "t12", "T12 Median bytes of a call", keys=keys, sql=sql, unit=Unit.NUMBER)


def write_sizes(study: Study) -> Answer:
    """T13: writes described, with the sample deviation and interpolated quantiles of pandas."""
    rows = study.events.ask(f"""
        SELECT run, tier, count(*), avg(size_bytes), stddev_samp(size_bytes), min(size_bytes),
               quantile_cont(size_bytes, 0.25), quantile_cont(size_bytes, 0.5),
               quantile_cont(size_bytes, 0.75), max(size_bytes)
        FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND tier IS NOT NULL
        GROUP BY run, tier ORDER BY {study.in_order()}, tier""")
    names = ("mean", "std", "min", "25%", "50%", "75%", "max")
    columns = make_columns(
        "run", "tier", Column("count", Unit.COUNT), *(Column(name, Unit.NUMBER) for name in names),
    )  # fmt: skip
    return Answer(name="t13", title="T13 Sizes of writes, in bytes", columns=columns, rows=rows)


def size_histogram(study: Study) -> Answer:
    """How many transfers, and bytes, fall between two powers of two."""
    rows = study.events.ask(f"""
        SELECT run, CASE WHEN {IS_WRITE} THEN 'write' ELSE 'read' END AS direction,
               (2 ** floor(log2(size_bytes)))::BIGINT AS from_bytes, count(*), sum(size_bytes)::BIGINT
        FROM {{events}} WHERE {IS_IO} AND size_bytes > 0 AND ({IS_WRITE} OR {IS_READ})
        GROUP BY run, direction, from_bytes ORDER BY {study.in_order()}, direction, from_bytes""")
    columns = make_columns("run", "direction", "from_bytes", "num_events", "total_bytes")
    return Answer(name="size_histogram", title="Sizes of transfers", columns=columns, rows=rows)


def longest_files(study: Study) -> Answer:
    """T14: the files that took longest to write, and the same files in the baseline."""
    rows = study.events.ask(f"""
        WITH written AS (
            SELECT run, tier, parse_filename(path) AS file_name, sum(dur_us)::BIGINT AS took,
                   count(*) AS num_writes
            FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND path IS NOT NULL GROUP BY run, tier, path)
        SELECT run, tier, file_name, took, num_writes,
               (SELECT max(took) FROM written b
                WHERE b.run = {sql_literal(study.baseline)} AND b.file_name = written.file_name)
        FROM written
        QUALIFY row_number() OVER (PARTITION BY run, tier ORDER BY took DESC, file_name) <= {_TOP_FILES}
        ORDER BY {study.in_order()}, tier, took DESC, file_name""")
    columns = make_columns("run", "tier", "file", "write_us", "num_writes", f"in_{study.baseline}_us")
    return Answer(name="t14", title="T14 Files that took longest to write", columns=columns, rows=rows)


def _by_run(study: Study, sql: str) -> list[Value]:
    by_run = dict(study.events.ask(sql))
    return [by_run.get(run) for run in study.runs]


def _relative_change(value: Value, base: Value) -> Value:
    comparable = isinstance(value, int | float) and isinstance(base, int | float) and base
    return value / base - 1 if comparable else None  # type: ignore[operator]


def followed_files(study: Study) -> Sequence[str]:
    """The files of the description; without any, the one whose calls differ most between runs."""
    if study.spec.files:
        return study.spec.files
    names = study.events.ask(f"""
        SELECT file_name FROM (
            SELECT parse_filename(path) AS file_name, run, count(*) AS num_calls
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY ALL)
        GROUP BY file_name ORDER BY count(*) DESC, max(num_calls) - min(num_calls) DESC, file_name LIMIT 1""")
    return [name for (name,) in names]


def file_tables(study: Study, names: Sequence[str]) -> tuple[Answer, Answer, Answer, Answer]:
    """T6 calls, T7 times, T8 sizes, T9 the events of the first file in order.

    Files are given by base name, or patterns of it: runs keep the same files in different places.
    """
    wanted = ", ".join(f"({sql_literal(name)})" for name in names) or "('')"
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
    return calls, times, sizes, _list_events(study, names[0] if names else "")


def _list_events(study: Study, name: str) -> Answer:
    rows = study.events.ask(f"""
        WITH origins AS (SELECT run, min(ts_us) AS origin_us FROM {{events}} GROUP BY run)
        SELECT run, tier, ts_us - origin_us, dur_us, name, size_bytes, rank, tid
        FROM {{events}} JOIN origins USING (run)
        WHERE {IS_IO} AND parse_filename(path) GLOB {sql_literal(name)}
        ORDER BY {study.in_order()}, ts_us, end_us, name""")
    columns = make_columns(
        "run", "tier", "since_start_us", "dur_us", "name", Column("size_bytes", Unit.COUNT), "rank", "tid",
    )  # fmt: skip
    return Answer(name="t9", title=f"T9 Events of {name} in order", columns=columns, rows=rows)
