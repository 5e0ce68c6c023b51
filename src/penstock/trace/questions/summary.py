"""What a trace contains: hosts, ranks, files, time; compute, I/O and their overlap; sizes by function."""

from __future__ import annotations

from penstock.trace.interval_union import union_times
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, EventsView


def summary(events: EventsView) -> tuple[Answer, Answer]:
    """The facts, and a row for each function."""
    return _facts(events), _functions(events)


def _facts(events: EventsView) -> Answer:
    who = events.ask_one("""
        SELECT count(DISTINCT host), count(DISTINCT rank), count(DISTINCT (host, pid)),
               count(DISTINCT (host, pid, tid))
        FROM (SELECT DISTINCT host, rank, pid, tid FROM {events})""")
    what = events.ask_one("""
        SELECT count(DISTINCT path), count(*), coalesce(max(end_us) - min(ts_us), 0),
               coalesce(sum(size_bytes), 0)::BIGINT
        FROM {events}""")
    counts = (*who, *what)
    (sum_us,) = events.ask_one(f"SELECT coalesce(sum(dur_us), 0)::BIGINT FROM {{events}} WHERE {IS_IO}")
    busy = union_times(events, (), first=IS_IO, second="phase = 'compute'")[()]
    app_us = union_times(events, (), first="phase = 'app_io'")[()].first_us
    io_us, compute_us, either_us = busy.first_us, busy.second_us, busy.either_us
    facts: list[tuple[str, Unit, float | None]] = [
        *zip(
            ("num_hosts", "num_ranks", "num_processes", "num_threads", "num_files", "num_events"),
            [Unit.COUNT] * 6,
            counts[:6],
            strict=True,
        ),
        ("span_us", Unit.MICROSECONDS, counts[6]),
        ("moved_bytes", Unit.BYTES, counts[7]),
        ("io_union_us", Unit.MICROSECONDS, io_us),
        ("io_sum_us", Unit.MICROSECONDS, sum_us),
        ("io_concurrency", Unit.RATIO, sum_us / io_us if io_us else None),
        ("app_io_union_us", Unit.MICROSECONDS, app_us),
        ("compute_union_us", Unit.MICROSECONDS, compute_us),
        ("overlap_us", Unit.MICROSECONDS, io_us + compute_us - either_us),
        ("io_alone_us", Unit.MICROSECONDS, either_us - compute_us),
        ("compute_alone_us", Unit.MICROSECONDS, either_us - io_us),
    ]
    return Answer(
        name="facts",
        title="Summary",
        columns=[Column(name, unit) for name, unit, _ in facts],
        rows=[[value for _, _, value in facts]],
        notes=[
            "Overlaps are of intervals over all processes; `penstock trace overlap` shows them by process."
        ],
    )


def _functions(events: EventsView) -> Answer:
    rows = events.ask("""
        SELECT cat, op, count(*), sum(dur_us)::BIGINT, sum(size_bytes)::BIGINT, min(size_bytes),
               quantile_cont(size_bytes, 0.25), avg(size_bytes), quantile_cont(size_bytes, 0.5),
               quantile_cont(size_bytes, 0.75), max(size_bytes)
        FROM {events} GROUP BY cat, op ORDER BY 4 DESC, 1, 2""")
    columns = make_columns(
        "cat", "op", "num_events", "sum_us", "total_bytes", "min_bytes", "p25_bytes", "mean_bytes",
        "median_bytes", "p75_bytes", "max_bytes",
    )  # fmt: skip
    return Answer(name="functions", title="Functions", columns=columns, rows=rows)
