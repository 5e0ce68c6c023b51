"""How large and how long calls are, in true bins, and the files that take most bytes and time.

A bin begins where its row says and ends where the next one begins; a bin without calls has no row.
"""

from typing import Final

from penstock.trace.figures.time_axis import KIND
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView

MOST_FILES: Final = 12


def size_bins(events: EventsView) -> Answer:
    """Transfers and their bytes between powers of two, by run and direction; nothing moved is a bin, too."""
    rows = events.ask(f"""
        SELECT run, CASE WHEN {IS_WRITE} THEN 'write' ELSE 'read' END AS kind,
               CASE WHEN size_bytes > 0 THEN (2 ** floor(log2(size_bytes)))::BIGINT ELSE 0 END AS from_bytes,
               greatest(1, 2 * from_bytes), count(*), sum(size_bytes)::BIGINT
        FROM {{events}} WHERE {IS_IO} AND size_bytes IS NOT NULL AND ({IS_WRITE} OR {IS_READ})
        GROUP BY run, kind, from_bytes ORDER BY run, kind, from_bytes""")
    columns = make_columns(
        "run", "kind", "from_bytes", Column("to_bytes", Unit.BYTES), "num_calls", "total_bytes"
    )
    return Answer(name="size_bins", title="Sizes of transfers", columns=columns, rows=rows)


def latency_bins(events: EventsView) -> Answer:
    """Calls and their time by duration, in bins of 1, 2 and 5 times powers of ten, by run and kind."""
    rows = events.ask(f"""
        WITH alike AS (
            SELECT run, op, phase, dur_us, count(*) AS num_calls FROM {{events}} WHERE {IS_IO} GROUP BY ALL),
        timed AS (
            SELECT run, {KIND} AS kind, dur_us, num_calls,
                   (10 ** floor(log10(greatest(dur_us, 1))))::BIGINT AS power_us
            FROM alike)
        SELECT run, kind,
               CASE WHEN dur_us < 1 THEN 0 WHEN dur_us >= 5 * power_us THEN 5 * power_us
                    WHEN dur_us >= 2 * power_us THEN 2 * power_us ELSE power_us END AS from_us,
               any_value(CASE WHEN dur_us < 1 THEN 1 WHEN dur_us >= 5 * power_us THEN 10 * power_us
                              WHEN dur_us >= 2 * power_us THEN 5 * power_us ELSE 2 * power_us END),
               sum(num_calls)::BIGINT, sum(num_calls * dur_us)::BIGINT
        FROM timed GROUP BY run, kind, from_us ORDER BY run, kind, from_us""")
    columns = make_columns("run", "kind", "from_us", "to_us", "num_calls", "sum_us")
    return Answer(name="latency_bins", title="Durations of calls", columns=columns, rows=rows)


def busiest_files(events: EventsView) -> Answer:
    """The files of each run with the most bytes, and those with the most time: calls, bytes, busy time.

    `union_us` is the time in which at least one call on the file was under way.
    """
    rows = events.ask(f"""
        WITH totals AS (
            SELECT run, path, any_value(tier) AS tier, count(*) AS num_calls, sum(dur_us)::BIGINT AS sum_us,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT AS read_bytes,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT AS written_bytes
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY run, path
            QUALIFY row_number() OVER (
                        PARTITION BY run ORDER BY read_bytes + written_bytes DESC, path) <= {MOST_FILES}
                 OR row_number() OVER (PARTITION BY run ORDER BY sum_us DESC, path) <= {MOST_FILES}),
        busy AS (
            SELECT run, path,
                   greatest(0, end_us - greatest(ts_us, coalesce(max(end_us) OVER (
                       PARTITION BY run, path ORDER BY ts_us
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), ts_us))) AS added_us
            FROM {{events}} SEMI JOIN totals USING (run, path) WHERE {IS_IO})
        SELECT run, tier, path, num_calls, read_bytes, written_bytes, sum_us, sum(added_us)::BIGINT
        FROM totals JOIN busy USING (run, path) GROUP BY ALL ORDER BY run, 8 DESC, path""")
    columns = make_columns(
        "run", "tier", "path", "num_calls", "read_bytes", "written_bytes", "sum_us", "union_us"
    )
    return Answer(name="busiest_files", title="Files by bytes and time", columns=columns, rows=rows)


def operations(events: EventsView) -> Answer:
    """Calls by run and operation: how many, how long they took together and at most, and bytes."""
    rows = events.ask(f"""
        SELECT run, op, any_value({KIND}) AS kind, count(*), sum(dur_us)::BIGINT AS sum_us, avg(dur_us),
               max(dur_us), coalesce(sum(size_bytes), 0)::BIGINT, arg_max(path, dur_us)
        FROM {{events}} WHERE {IS_IO} GROUP BY run, op ORDER BY run, sum_us DESC, op""")
    columns = make_columns(
        "run", "op", "kind", "num_calls", "sum_us", "mean_us", "max_us", "moved_bytes",
        Column("slowest_path", Unit.TEXT),
    )  # fmt: skip
    return Answer(name="operations", title="Operations", columns=columns, rows=rows)
