"""Compares the runs of a study: how they differ, then tables, then findings.

T0 to T5 and T10 to T14 are tables of whole runs; T6 to T9 follow single files through all runs. "max" tables
take the process with the largest sum, as studies of file-per-process checkpoints do. The measures table shows
what such sums hide: threads that run side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.progress import Progress
from penstock.trace.compare.findings import find_all, say_left_out
from penstock.trace.compare.trace_study import (
    PROCESS,
    Study,
    TraceFinding,
    format_values,
    longest_process_sql,
    of_processes,
    pivot,
)
from penstock.trace.dimensions import IS_IO, IS_READ, IS_WRITE, sql_literal
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.figures import bandwidth, measure_axis, size_bins
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.breakdowns import measure_groups, ranks, timeline

GIB = 1 << 30
APP_TIER: Final = "(application event)"
"""The name that stands for the application's own event among the tiers of the measures."""
_TOP_FILES = 5


def load_report(study: Study) -> Answer:
    """Return T0: the lines and events of each run's files, and what was lost."""
    rows: list[Sequence[Value]] = []
    for run in study.runs:
        accounts = study.accounts.get(run, ())
        sums = [
            sum(getattr(account, name) for account in accounts)
            for name in ("lines", "events", "salvaged", "dropped")
        ]
        num_faulty = sum(bool(account.faults) for account in accounts)
        ranks = set().union(*(account.ranks for account in accounts))
        hosts = set().union(*(account.hosts for account in accounts))
        rows.append((run, len(accounts), *sums, num_faulty, len(ranks), len(hosts)))
    columns = make_columns(
        "run", "num_files", "num_lines", "num_events", "num_salvaged", "num_dropped", "num_faulty_files",
        "num_ranks", "num_hosts",
    )  # fmt: skip
    return Answer(name="t0", title="T0 What was read", columns=columns, rows=rows)


def times(study: Study) -> Answer:
    """Return T1: the time in the application event and each tier, for the process with the most of it."""
    rows = [["application event", *_by_run(study, longest_process_sql(("run",), where=study.is_app))]]
    for tier in study.tiers:
        where = f"{IS_IO} AND tier = {sql_literal(tier)}"
        rows.append([f"{tier} I/O", *_by_run(study, longest_process_sql(("run",), where=where))])
    columns = make_columns("time", *study.run_columns(Unit.MICROSECONDS))
    note = (
        "Sums of durations, from the process where they are largest; a bare 0: the run never used the tier."
    )
    title = "T1 Times, in seconds"
    return Answer(name="t1", title=title, columns=columns, rows=rows, notes=[note], missing="0")


def time_changes(study: Study, table: Answer) -> Answer:
    """Return how T1's unions of time changed, relative to the baseline's.

    Comparing sums would compare a flush by a hundred threads with a write by one.
    """
    busy: dict[Any, Any] = {(row["run"], row["tier"]): row["max_union_us"] for row in table.records()}
    names = {APP_TIER: "application event", **{tier: f"{tier} I/O" for tier in study.tiers}}
    rows = []
    for tier, name in names.items():
        base_us = busy.get((study.baseline, tier))
        in_runs = [busy.get((run, tier)) for run in study.runs]
        rows.append([name, *(us / base_us - 1 if us is not None and base_us else None for us in in_runs)])
    columns = make_columns("time", *study.run_columns(Unit.SHARE))
    note = "Compares unions: the time in which any call was under way, in the process where it is longest."
    title = f"T1 Change against {study.baseline}"
    return Answer(name="t1_change", title=title, columns=columns, rows=rows, notes=[note])


def measures(study: Study) -> Answer:
    """Return T1 by every measure of time, and the rate that each tier really delivered."""
    columns = make_columns(
        "run", "tier", "max_sum_us", "max_union_us", "max_thread_us", "concurrency", "run_union_us",
        "total_bytes", "busy_rate",
    )  # fmt: skip
    note = (
        "Sum and union are from the process where they are largest, thread is the largest sum of one thread; "
        "the rate is all bytes divided by the time in which any process of the run was busy with the tier."
    )
    rows = [
        *_measure_rows(study, IS_IO, ("run", "tier")),
        *((run, APP_TIER, *rest) for run, *rest in _measure_rows(study, study.is_app, ("run",))),
    ]
    order = {run: number for number, run in enumerate(study.runs)}
    rows.sort(key=lambda row: (order[str(row[0])], str(row[1])))
    return Answer(name="t1_measures", title="T1 Measures of time", columns=columns, rows=rows, notes=[note])


def _measure_rows(study: Study, where: str, by: Sequence[str]) -> list[Sequence[Value]]:
    """Return rows of `by` and all measures; sums over all ranks count only if there is nothing else."""
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
        # Each entry is pid, calls, sum, union, concurrency.
        found = processes[tuple(key)]
        found = [one for one in found if one[0] != ALL_RANKS] or found
        longest = max(found, key=lambda one: int(one[2]))
        rate = moved * 1e6 / union_us if moved is not None and union_us else None
        most_union_us = max(one[3] for one in found)
        rows.append((*key, longest[2], most_union_us, threads[tuple(key)], longest[4], union_us, moved, rate))
    return rows


def query_tables(study: Study) -> list[Answer]:
    """Return the tables that take one query each: T2 to T5 and T10 to T14.

    Volumes are given both in total and normalized, because runs may differ in ranks and files.
    """

    def ask(name: str, title: str, columns: Sequence[str | Column], sql: str) -> Answer:
        rows = study.events.ask(f"{sql} ORDER BY {study.in_order()}, {_ORDER.get(name, '2')}")
        return Answer(name=name, title=title, columns=make_columns(*columns), rows=rows)

    is_written = f"{IS_IO} AND {IS_WRITE} AND path IS NOT NULL"
    on_tier, by_call = f"{IS_IO} AND tier IS NOT NULL", ("tier", "name")
    moved = f"FROM {{events}} WHERE {on_tier} AND size_bytes IS NOT NULL GROUP BY ALL"
    return [
        ask(
            "t2",
            "T2 Bytes on each tier",
            ("run", "tier", Column("total_bytes", Unit.COUNT), "total_GiB", "written_bytes", "read_bytes",
             "num_processes", "num_files", "per_process_gib", "per_file_gib"),
            f"""
            SELECT run, tier, sum(size_bytes)::BIGINT, sum(size_bytes) / {GIB}::DOUBLE,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT,
                   count(DISTINCT ({PROCESS})), count(DISTINCT path),
                   sum(size_bytes) / {GIB}::DOUBLE / count(DISTINCT ({PROCESS})),
                   sum(size_bytes) / {GIB}::DOUBLE / count(DISTINCT path)
            FROM {{events}} WHERE {on_tier} GROUP BY run, tier""",
        ),
        ask(
            "t3",
            "T3 Classes of files",
            ("run", "file_class", "max_size_gib", "max_sum_us"),
            f"""
            SELECT run, file_class, max(moved) / {GIB}::DOUBLE, max(took)::BIGINT FROM (
                SELECT run, file_class, coalesce(sum(size_bytes), 0) AS moved, sum(dur_us) AS took
                FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY run, file_class, {PROCESS})
            GROUP BY run, file_class""",
        ),
        pivot(
            study,
            "t4",
            "T4 Calls by class of files",
            keys=("file_class", "name"),
            sql=f"""SELECT file_class, name, run, count(*) FROM {{events}}
                    WHERE {IS_IO} AND path IS NOT NULL GROUP BY ALL""",
            unit=Unit.COUNT,
        ),
        ask(
            "t5_spread",
            "T5 Spread of files' write times",
            ("run", "file_class", "num_files", Column("min_writes", Unit.COUNT),
             Column("max_writes", Unit.COUNT), "min_us", "median_us", "max_us"),
            f"""
            SELECT run, file_class, count(*), min(num_writes), max(num_writes), min(took), median(took),
                   max(took)
            FROM (SELECT run, file_class, sum(dur_us)::BIGINT AS took, count(*) AS num_writes FROM {{events}}
                  WHERE {is_written} GROUP BY run, file_class, path)
            GROUP BY run, file_class""",
        ),
        ask(
            "t5",
            "T5 Writes of each file",
            ("run", "file_class", "path", "sum_us", "size_gib", "num_writes"),
            f"""
            SELECT run, file_class, path, sum(dur_us)::BIGINT, sum(size_bytes) / {GIB}::DOUBLE, count(*)
            FROM {{events}} WHERE {is_written} GROUP BY run, file_class, path""",
        ),
        pivot(
            study,
            "t10",
            "T10 Times of calls on each tier, in seconds",
            keys=by_call,
            sql=longest_process_sql(("tier", "name", "run"), where=on_tier),
            unit=Unit.MICROSECONDS,
        ),
        pivot(
            study,
            "t11",
            "T11 GiB moved by calls",
            keys=by_call,
            sql=f"SELECT tier, name, run, sum(size_bytes) / {GIB}::DOUBLE {moved}",
            unit=Unit.GIB,
        ),
        pivot(
            study,
            "t12",
            "T12 Median bytes of a call",
            keys=by_call,
            sql=f"SELECT tier, name, run, quantile_cont(size_bytes, 0.5) {moved}",
            unit=Unit.NUMBER,
        ),
        ask(
            "t13",
            "T13 Sizes of writes, in bytes",
            ("run", "tier", Column("count", Unit.COUNT),
             *(Column(name, Unit.NUMBER) for name in ("mean", "std", "min", "25%", "50%", "75%", "max"))),
            f"""
            SELECT run, tier, count(*), avg(size_bytes), stddev_samp(size_bytes), min(size_bytes),
                   quantile_cont(size_bytes, 0.25), quantile_cont(size_bytes, 0.5),
                   quantile_cont(size_bytes, 0.75), max(size_bytes)
            FROM {{events}} WHERE {on_tier} AND {IS_WRITE} GROUP BY run, tier""",
        ),
        ask(
            "t14",
            "T14 Files that took longest to write",
            ("run", "tier", "file", "write_us", "num_writes", f"in_{study.baseline}_us"),
            f"""
            WITH written AS (
                SELECT run, tier, parse_filename(path) AS file_name, sum(dur_us)::BIGINT AS took,
                       count(*) AS num_writes
                FROM {{events}} WHERE {is_written} GROUP BY run, tier, path)
            SELECT run, tier, file_name, took, num_writes,
                   (SELECT max(took) FROM written b
                    WHERE b.run = {sql_literal(study.baseline)} AND b.file_name = written.file_name)
            FROM written
            QUALIFY {_TOP_FILES} >= row_number() OVER (
                PARTITION BY run, tier ORDER BY took DESC, file_name)""",
        ),
    ]  # fmt: skip


_ORDER: Final = {"t5": "2, 4 DESC, 3", "t14": "2, 4 DESC, 3"}
"""The positions of the columns by which a table is sorted within a run, if it is not the second column."""


def _by_run(study: Study, sql: str) -> list[Value]:
    by_run = dict(study.events.ask(sql))
    return [by_run.get(run) for run in study.runs]


def file_tables(study: Study) -> tuple[Answer, Answer, Answer, Answer]:
    """Return T6 (calls), T7 (times), T8 (sizes) and T9 (the events of the first file, in order).

    The description names the files by base name, or by a pattern for it, because runs keep the same files in
    different places. If it names none, the file whose calls differ most between runs is taken.
    """
    names: Sequence[str] = study.spec.files or [
        name
        for (name,) in study.events.ask(f"""
            SELECT file_name FROM (
                SELECT parse_filename(path) AS file_name, run, count(*) AS num_calls
                FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY ALL)
            GROUP BY file_name
            ORDER BY count(*) DESC, max(num_calls) - min(num_calls) DESC, file_name LIMIT 1""")
    ]
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
        study, "t8", "T8 Transfers of single files by size", unit=Unit.COUNT,
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


def find_mismatches(study: Study) -> Answer:
    """Return how each run differs from the baseline in ranks, hosts, steps and files, and the run's losses.

    This comes before all tables, because a run with half of its traces looks like a run with half of the
    writes.
    """
    rows: list[Sequence[Value]] = []
    for what, column, where in _COMPARED_SETS:
        sets: dict[str, set[Any]] = {}
        for run, value in study.events.ask(f"SELECT DISTINCT run, {column} FROM {{events}} WHERE {where}"):
            sets.setdefault(run, set()).add(value)
        base = sets.get(study.baseline, set())
        for run in study.runs:
            values = sets.get(run, set())
            if column in _TRACED and bool(values) != bool(base):
                # An empty set says nothing about the run: its tracer does not record these values.
                why = f"unknown: no event of {run if base else study.baseline} has one"
                rows.append((what, run, len(values) or None, len(base) or None, why, ""))
                continue
            # Jobs run on other machines each time, so only the number of hosts matters.
            if values != base and (what != "hosts" or len(values) != len(base)):
                lacks, has_more = format_values(base - values), format_values(values - base)
                rows.append((what, run, len(values), len(base), lacks, has_more))
    for run in study.runs:
        damaged = [account for account in study.accounts.get(run, ()) if not account.is_whole]
        if damaged:
            lost = sum(account.dropped for account in damaged)
            salvaged = sum(account.salvaged for account in damaged)
            faults = sum(len(account.faults) for account in damaged)
            loss = f"{lost} lines dropped, {salvaged} salvaged, {faults} torn files"
            names = ", ".join(account.file for account in damaged[:2])
            rows.append(("damaged files", run, len(damaged), None, loss, names))
    columns = make_columns("what", "run", "here", Column(study.baseline), "missing", "added")
    notes = [] if rows else [f"All runs have the ranks, hosts, steps and files of {study.baseline}."]
    notes += say_left_out(study)
    return Answer(
        name="mismatches",
        title=f"What differs from {study.baseline}",
        columns=columns,
        rows=rows,
        notes=notes,
    )


_TRACED: Final = ("rank", "host", "step")
"""Columns that some tracers leave empty."""
_COMPARED_SETS: Final = (
    ("ranks", "rank", "rank IS NOT NULL"),
    ("hosts", "host", "host IS NOT NULL"),
    ("steps", "step", "step IS NOT NULL"),
    ("written files", "parse_filename(path)", f"{IS_IO} AND op IN ('write', 'pwrite') AND path IS NOT NULL"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """The parts of a comparison, in the order of the report."""

    runs: Sequence[str]
    baseline: str
    mismatches: Answer
    findings: Sequence[TraceFinding]
    tables: Sequence[Answer]
    charts: Sequence[Answer]

    def table(self, name: str) -> Answer:
        """Return the table called `name`, such as `t1` or `t5_spread`."""
        return next(table for table in (*self.tables, *self.charts) if table.name == name)


def compare_runs(study: Study, *, progress: Progress | None = None) -> ComparisonResult:
    """Compare all runs of a study: mismatches, tables, charts, findings."""
    progress = progress or Progress()
    progress.begin("comparing", 5)
    mismatches = find_mismatches(study)
    progress.advance(1)
    measured = measures(study)
    first = [
        load_report(study),
        times(study),
        time_changes(study, measured),
        measured,
    ]
    asked = query_tables(study)
    progress.advance(1)
    # Tables of whole files come before T10 to T14, the tables of single calls.
    before = [table for table in asked if not table.name.startswith("t1")]
    behind = [table for table in asked if table not in before]
    tables = [*first, *before, *file_tables(study), *behind]
    progress.advance(1)
    charts = [
        timeline(study.events),
        bandwidth(measure_axis(study.events, study.runs)),
        ranks(study.events),
        size_bins(study.events),
    ]
    progress.advance(1)
    findings = find_all(study)
    progress.advance(1)
    return ComparisonResult(
        runs=study.runs,
        baseline=study.baseline,
        mismatches=mismatches,
        findings=findings,
        tables=tables,
        charts=charts,
    )
