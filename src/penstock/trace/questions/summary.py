"""What a trace is of: hosts, ranks, files, time; compute, I/O and their overlap; sizes by function."""

from __future__ import annotations

from penstock.trace.intervals import measures_sql
from penstock.trace.questions.base import IS_IO, Answer, Column, Events, Unit

_BOTH = f"({IS_IO} OR phase = 'compute')"


def summary(events: Events) -> tuple[Answer, Answer]:
    """The facts, and a row for each function."""
    return _facts(events), _functions(events)


def _facts(events: Events) -> Answer:
    counts = events.ask_one("""
        SELECT count(DISTINCT host), count(DISTINCT rank), count(DISTINCT (host, pid)),
               count(DISTINCT (host, pid, tid)), count(DISTINCT path), count(*),
               coalesce(max(end_us) - min(ts_us), 0), coalesce(sum(size_bytes), 0)::BIGINT
        FROM {events}""")
    io = events.ask_one(measures_sql("{events}", (), where=IS_IO))
    compute = events.ask_one(measures_sql("{events}", (), where="phase = 'compute'"))
    app = events.ask_one(measures_sql("{events}", (), where="phase = 'app_io'"))
    either = events.ask_one(measures_sql("{events}", (), where=_BOTH))
    facts: list[tuple[str, Unit, float | None]] = [
        *zip(
            ("num_hosts", "num_ranks", "num_processes", "num_threads", "num_files", "num_events"),
            [Unit.COUNT] * 6,
            counts[:6],
            strict=True,
        ),
        ("span_us", Unit.MICROSECONDS, counts[6]),
        ("moved_bytes", Unit.BYTES, counts[7]),
        ("io_union_us", Unit.MICROSECONDS, io[2]),
        ("io_sum_us", Unit.MICROSECONDS, io[1]),
        ("io_concurrency", Unit.RATIO, io[3]),
        ("app_io_union_us", Unit.MICROSECONDS, app[2]),
        ("compute_union_us", Unit.MICROSECONDS, compute[2]),
        ("overlap_us", Unit.MICROSECONDS, io[2] + compute[2] - either[2]),
        ("io_alone_us", Unit.MICROSECONDS, either[2] - compute[2]),
        ("compute_alone_us", Unit.MICROSECONDS, either[2] - io[2]),
    ]
    return Answer(
        name="facts",
        title="Summary",
        columns=[Column(name, unit) for name, unit, _ in facts],
        rows=[[value for _, _, value in facts]],
        notes=["Overlaps are of intervals over all processes; `penstock trace overlap` has them by process."],
    )


def _functions(events: Events) -> Answer:
    rows = events.ask("""
        SELECT cat, op, count(*), sum(dur_us)::BIGINT, sum(size_bytes)::BIGINT, min(size_bytes),
               quantile_cont(size_bytes, 0.25), avg(size_bytes), quantile_cont(size_bytes, 0.5),
               quantile_cont(size_bytes, 0.75), max(size_bytes)
        FROM {events} GROUP BY cat, op ORDER BY 4 DESC, 1, 2""")
    columns = [
        Column("cat"),
        Column("op"),
        Column("num_events", Unit.COUNT),
        Column("sum_us", Unit.MICROSECONDS),
        Column("total_bytes", Unit.BYTES),
        Column("min_bytes", Unit.BYTES),
        Column("p25_bytes", Unit.BYTES),
        Column("mean_bytes", Unit.BYTES),
        Column("median_bytes", Unit.BYTES),
        Column("p75_bytes", Unit.BYTES),
        Column("max_bytes", Unit.BYTES),
    ]
    return Answer(name="functions", title="Functions", columns=columns, rows=rows)
