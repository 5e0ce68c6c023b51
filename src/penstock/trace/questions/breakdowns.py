"""Tables of a trace: summary, breakdowns by operation, file, class, size and rank, overlap with compute.

Each row has calls, bytes and measures of time. In `overlap`, `union_us`, `sum_us` and `concurrency` are those
of the I/O; its overlap with computation is one of intervals, not a difference of totals.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

from penstock.errors import UsageError
from penstock.trace.dimensions import NO_IO, sql_literal
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import (
    IS_IO,
    IS_READ,
    IS_WRITE,
    EventsView,
    check_keys,
    measure_groups,
    union_times,
)


def summary(events: EventsView) -> tuple[Answer, Answer]:
    """The facts, and a row for each function."""
    return _facts(events), _functions(events)


def _facts(events: EventsView) -> Answer:
    # The bytes of MPI-IO are traced again in the calls below it.
    counts = events.ask_one(f"""
        SELECT count(DISTINCT host), count(DISTINCT rank), count(DISTINCT (host, pid)) FILTER (is_one),
               count(DISTINCT (host, pid, tid)) FILTER (is_one),
               (SELECT count(DISTINCT path) FROM {{events}}), coalesce(sum(num_events), 0)::BIGINT,
               coalesce(max(last_us) - min(first_us), 0), coalesce(sum(moved), 0)::BIGINT,
               coalesce(sum(io_us), 0)::BIGINT
        FROM (SELECT host, rank, pid, tid, pid <> {ALL_RANKS} AS is_one, count(*) AS num_events,
                     min(ts_us) AS first_us, max(end_us) AS last_us,
                     sum(size_bytes) FILTER (WHERE cat <> 'MPIIO') AS moved,
                     sum(dur_us) FILTER (WHERE {IS_IO}) AS io_us
              FROM {{events}} GROUP BY host, rank, pid, tid)""")
    sum_us = counts[8]
    is_compute = "phase = 'compute'"
    sets = (IS_IO, is_compute, f"{IS_IO} OR {is_compute}", "phase = 'app_io'")
    io_us, compute_us, either_us, app_us = union_times(events, (), *sets)[()]
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
        columns=[Column(name, unit, _OVER_ALL.get(name, "")) for name, unit, _ in facts],
        rows=[[value for _, _, value in facts]],
        notes=[
            "Overlaps are of intervals over all processes; `penstock trace overlap` shows them by process."
        ],
    )


_OVER_ALL = {
    "overlap_us": "overlap over all processes s",
    "io_alone_us": "io alone over all processes s",
    "compute_alone_us": "compute alone over all processes s",
}


_NUM_EVENTS = "sum(num)::BIGINT"
_SUM_US = "sum(busy_us)::BIGINT"
_TOTAL = "sum(bytes)::BIGINT"
_MEAN = "any_value(mean)"
_DEVIATION = "sqrt(sum(num * (size - mean) ** 2) / nullif(any_value(total) - 1, 0))"
_SMALLEST, _LARGEST = "min(size)", "max(size)"


def _quantile_sql(share: float) -> str:
    """A quantile, interpolated as in pandas."""
    place = f"((any_value(total) - 1) * {share}::DOUBLE)"
    below, above = (
        f"min(size) FILTER (WHERE until > {rounded}((total - 1) * {share}::DOUBLE))"
        for rounded in ("floor", "ceil")
    )
    return f"({below} + ({above} - {below}) * ({place} - floor({place})))"


def _count_sizes(by: Sequence[str], where: str) -> str:
    """A query for how often each size occurs; events without a size have one row for all of them."""
    keys = ", ".join(by)
    return f"""
        SELECT {keys}, size_bytes AS size, count(*) AS num, sum(dur_us) AS busy_us
        FROM {{events}} WHERE {where} GROUP BY {keys}, size_bytes"""


def _measure_sizes(
    events: EventsView, by: Sequence[str], measures: Sequence[str], *, where: str, order: str
) -> list[tuple[Any, ...]]:
    """Rows of `by` and of `measures`: the SQL above, exact, because calls have few different sizes."""
    keys = ", ".join(by)
    return events.ask(f"""
        WITH placed AS (
            SELECT *, size::HUGEINT * num AS bytes,
                   sum(num) OVER (PARTITION BY {keys} ORDER BY size NULLS LAST) AS until,
                   sum(num) FILTER (WHERE size IS NOT NULL) OVER (PARTITION BY {keys}) AS total,
                   sum(size::HUGEINT * num) OVER (PARTITION BY {keys})::DOUBLE / total AS mean
            FROM ({_count_sizes(by, where)}))
        SELECT {", ".join([*by, *measures])} FROM placed GROUP BY {keys} ORDER BY {order}""")


def _functions(events: EventsView) -> Answer:
    measures = (
        _NUM_EVENTS, _SUM_US, _TOTAL, _SMALLEST, _quantile_sql(0.25),
        _MEAN, _quantile_sql(0.5), _quantile_sql(0.75), _LARGEST,
    )  # fmt: skip
    rows = _measure_sizes(events, ("cat", "op"), measures, where="true", order="4 DESC, 1, 2")
    columns = make_columns(
        "cat", "op", "num_events", "sum_us", "total_bytes", "min_bytes", "p25_bytes", "mean_bytes",
        "median_bytes", "p75_bytes", "max_bytes",
    )  # fmt: skip
    return Answer(name="functions", title="Functions", columns=columns, rows=rows)


_EXTRA = (
    f"coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT",
    f"coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT",
    "max(dur_us)",
)


def ops(events: EventsView, *, by: Sequence[str] = ("tier", "op")) -> Answer:
    """I/O operations, the most time-consuming first."""
    return _break_down(events, by, where=IS_IO, name="ops", title="Operations")


def files(events: EventsView, *, by: Sequence[str] = ("path",), top: int | None = None) -> Answer:
    """Files, the most time-consuming first."""
    return _break_down(events, by, where="path IS NOT NULL", name="files", title="Files", top=top)


def classes(events: EventsView, *, by: Sequence[str] = ("file_class", "op")) -> Answer:
    """Classes of files, the most time-consuming first."""
    return _break_down(events, by, where="path IS NOT NULL", name="classes", title="Classes of files")


def _break_down(
    events: EventsView, by: Sequence[str], *, where: str, name: str, title: str, top: int | None = None
) -> Answer:
    by = check_keys(by)
    extra = _EXTRA if "path" in by else ("count(DISTINCT path)", *_EXTRA)
    rows = measure_groups(events, by, where=where, extra=extra)
    width = len(by)
    rows.sort(key=lambda row: (-row[width + 1], *map(str, row[:width])))
    columns = make_columns(
        *map(Column, by), "num_events", "sum_us", "union_us", "concurrency",
        *([] if "path" in by else [Column("num_files", Unit.COUNT)]), "read_bytes", "written_bytes",
        "max_us",
    )  # fmt: skip
    return Answer(name=name, title=f"{title} by {', '.join(by)}", columns=columns, rows=rows[:top])


_MOVES = "size_bytes IS NOT NULL AND phase = 'io'"


def sizes(events: EventsView, *, by: Sequence[str] = ("op",), top: int = 20) -> tuple[Answer, Answer]:
    """How large transfers are: a description for each group, and its `top` most frequent sizes."""
    by = check_keys(by)
    return describe(events, by), value_counts(events, by, top=top)


def describe(events: EventsView, by: Sequence[str]) -> Answer:
    """Count, mean, sample deviation and exact quantiles, interpolated as in pandas."""
    keys = ", ".join(by)
    quantiles = map(_quantile_sql, (0.25, 0.5, 0.75, 0.99))
    measures = (
        _NUM_EVENTS, _TOTAL, _MEAN, _DEVIATION, _SMALLEST, *quantiles,
        _LARGEST,
    )  # fmt: skip
    rows = _measure_sizes(events, by, measures, where=_MOVES, order=keys)
    names = ("total", "mean", "std", "min", "p25", "median", "p75", "p99", "max")
    columns = make_columns(
        *map(Column, by), "num_events", *(Column(f"{name}_bytes", Unit.BYTES) for name in names),
    )  # fmt: skip
    return Answer(name="sizes", title=f"Sizes of transfers by {keys}", columns=columns, rows=rows)


def value_counts(events: EventsView, by: Sequence[str], *, top: int) -> Answer:
    """How often each size occurs."""
    keys = ", ".join(by)
    rows = events.ask(f"""
        SELECT {keys}, size, num FROM ({_count_sizes(by, _MOVES)})
        QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY num DESC, size) <= {top}
        ORDER BY {keys}, num DESC, size""")
    columns = make_columns(*map(Column, by), "size_bytes", "num_events")
    return Answer(name="size_counts", title=f"Most frequent sizes by {keys}", columns=columns, rows=rows)


_MOVED_BYTES = "coalesce(sum(size_bytes), 0)::BIGINT"
STRAGGLER_RATIO = 1.25
"""A rank whose I/O takes this many times the median of its run is late; see `ranks`."""


def ranks(events: EventsView) -> Answer:
    """A row for each process, by run and rank: skew, and which ranks the others wait for.

    A rank that moves twice the bytes may take twice the time: a late one is a straggler only where it takes
    longer than its work explains. Work is bytes, or calls in a run where most ranks move none. What Darshan
    has only as a sum of all ranks (`ALL_RANKS`) has a row, but is not one of them.
    """
    busy = measure_groups(events, ("run", "rank", "pid", "host"), where=IS_IO, extra=[_MOVED_BYTES])
    spans = {
        row[:3]: row[3:]
        for row in events.ask("""
            SELECT run, pid, host, max(end_us) - min(min(ts_us)) OVER (PARTITION BY run),
                   coalesce(sum(dur_us) FILTER (WHERE phase = 'app_io'), 0)::BIGINT
            FROM {events} GROUP BY run, pid, host""")
    }
    rows = [
        (run, rank, pid, host, num_events, moved, sum_us, union_us, concurrency,
         *reversed(spans[run, pid, host]))
        for run, rank, pid, host, num_events, sum_us, union_us, concurrency, moved in busy
    ]  # fmt: skip
    rows.sort(key=lambda row: (row[0], -1 if row[1] is None else row[1], row[2], row[3] or ""))
    rated_rows = [row for _, of_run in groupby(rows, key=itemgetter(0)) for row in _rate_ranks(list(of_run))]
    columns = make_columns(
        "run", "rank", "pid", "host", "num_events", "moved_bytes", "sum_us", "union_us", "concurrency",
        "app_us", "last_event_us", "to_median", "work_to_median", "is_straggler",
    )  # fmt: skip
    note = (
        f"A straggler's union is more than {STRAGGLER_RATIO:g} times its run's median, and more than its "
        "bytes (its calls, where most ranks move none) explain."
    )
    notes = [note] + [
        f"The row of process {ALL_RANKS} is what the trace has as sums of all ranks: files that they share."
    ] * any(row[2] == ALL_RANKS for row in rows)
    return Answer(name="ranks", title="Ranks", columns=columns, rows=rated_rows, notes=notes)


def _rate_ranks(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The processes of one run, their time and work to its median, and whether they are stragglers."""
    rated = [row for row in rows if row[2] != ALL_RANKS]
    yield from ((*row, None, None, False) for row in rows if row not in rated)
    if not rated:
        return
    usual_us = median(row[7] for row in rated)
    work = 5 if median(row[5] for row in rated) else 4
    usual = median(row[work] for row in rated)
    for row in rated:
        late, more = (row[7] / usual_us if usual_us else None), row[work] / usual
        yield *row, late, more, late is not None and late > STRAGGLER_RATIO * max(more, 1.0)


def overlap(events: EventsView, *, by: Sequence[str] = ("host", "pid"), of: str = "io") -> Answer:
    """A row for each value of `by`; `of` is the phase that counts as I/O, or `all` but compute and waiting.

    Without events of the phase `io`, the application's own spans of I/O count, and nothing else does.
    """
    by = check_keys(by)
    notes = []
    counted = f"NOT {NO_IO}" if of == "all" else f"phase = {sql_literal(of)}"
    if of == "io" and not events.ask_one(f"SELECT count(*) FROM {{events}} WHERE {counted}")[0]:
        counted = "phase = 'app_io'"
        notes.append("No event has the phase io: the application's own spans of I/O (app_io) count, if any.")
    keys, is_compute = ", ".join(by), "phase = 'compute'"
    counts = events.ask(f"""
        SELECT {keys}, count(*) FILTER (WHERE {counted}),
               coalesce(sum(dur_us) FILTER (WHERE {counted}), 0)::BIGINT
        FROM {{events}} WHERE {counted} OR {is_compute} GROUP BY {keys} ORDER BY {keys}""")
    if of not in ("io", "all") and not any(row[-2] for row in counts):
        known = ", ".join(row[0] for row in events.ask("SELECT DISTINCT phase FROM {events} ORDER BY phase"))
        raise UsageError(f"No event has the phase {of!r}", fix=f"Phases of these traces: {known}.")
    busy = union_times(events, by, counted, is_compute, f"({counted}) OR {is_compute}")
    if "rank" in by and "pid" not in by:
        (num_rankless,) = events.ask_one(
            "SELECT count(*) FROM (SELECT DISTINCT host, pid FROM {events} WHERE rank IS NULL)"
        )
        if num_rankless > 1:
            notes.append(
                f"{num_rankless:,} processes have no rank and are counted as one: --by pid shows them apart."
            )
    rows = []
    for *key, num_events, sum_us in counts:
        io_us, compute_us, either_us = busy.get(tuple(key), (0, 0, 0))
        concurrency = sum_us / io_us if io_us else None
        alone = either_us - compute_us, either_us - io_us
        both_us = io_us + compute_us - either_us
        rows.append((*key, num_events, io_us, sum_us, concurrency, compute_us, both_us, *alone))
    columns = make_columns(
        *map(Column, by), "num_events", "union_us", "sum_us", "concurrency", "compute_us", "overlap_us",
        "io_alone_us", "compute_alone_us",
    )  # fmt: skip
    return Answer(name="overlap", title=f"I/O and compute by {keys}", columns=columns, rows=rows, notes=notes)


def describe_runs(events: EventsView) -> list[str]:
    """A sentence for each run that these events name, in the order of their starts."""
    rows = events.ask("""
        SELECT json_extract_string(args, '$.run') AS traced, json_extract_string(args, '$.results') AS results
        FROM {events} WHERE cat = 'run' AND name = 'run' AND traced IS NOT NULL AND results IS NOT NULL
        GROUP BY ALL ORDER BY min(ts_us), traced""")
    return [f"Trace of the run {run}; its results: {results}" for run, results in rows]
