"""Breakdowns by operation, file, class of files, size and rank: calls, bytes, measures of time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from penstock.trace.interval_union import measure_groups
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import GROUPINGS, IS_IO, IS_READ, IS_WRITE, EventsView, check_keys

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
    check_keys(by, GROUPINGS)
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
    check_keys(by, GROUPINGS)
    return describe(events, by), value_counts(events, by, top=top)


def describe(events: EventsView, by: Sequence[str]) -> Answer:
    """Count, mean, sample deviation and exact quantiles, interpolated as in pandas."""
    keys = ", ".join(by)
    rows = events.ask(f"""
        SELECT {keys}, count(*), sum(size_bytes)::BIGINT, avg(size_bytes), stddev_samp(size_bytes),
               min(size_bytes), quantile_cont(size_bytes, 0.25), quantile_cont(size_bytes, 0.5),
               quantile_cont(size_bytes, 0.75), quantile_cont(size_bytes, 0.99), max(size_bytes)
        FROM {{events}} WHERE {_MOVES} GROUP BY {keys} ORDER BY {keys}""")
    names = ("total", "mean", "std", "min", "p25", "median", "p75", "p99", "max")
    columns = make_columns(
        *map(Column, by), "num_events", *(Column(f"{name}_bytes", Unit.BYTES) for name in names),
    )  # fmt: skip
    return Answer(name="sizes", title=f"Sizes of transfers by {keys}", columns=columns, rows=rows)


def value_counts(events: EventsView, by: Sequence[str], *, top: int) -> Answer:
    """How often each size occurs."""
    keys = ", ".join(by)
    rows = events.ask(f"""
        SELECT {keys}, size_bytes, count(*) AS num_events FROM {{events}} WHERE {_MOVES}
        GROUP BY {keys}, size_bytes
        QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY count(*) DESC, size_bytes) <= {top}
        ORDER BY {keys}, num_events DESC, size_bytes""")
    columns = make_columns(*map(Column, by), "size_bytes", "num_events")
    return Answer(name="size_counts", title=f"Most frequent sizes by {keys}", columns=columns, rows=rows)


_MOVED_BYTES = "coalesce(sum(size_bytes), 0)::BIGINT"
STRAGGLER_RATIO = 1.25
"""A rank whose I/O takes this many times the median of its run is a straggler."""


def ranks(events: EventsView) -> Answer:
    """A row for each process, by run and rank: skew, and which ranks the others wait for."""
    busy = measure_groups(events, ("run", "rank", "pid", "host"), where=IS_IO, extra=[_MOVED_BYTES])
    spans = {
        row[:3]: row[3:]
        for row in events.ask("""
            SELECT run, pid, host, max(end_us) - min(min(ts_us)) OVER (PARTITION BY run),
                   coalesce(sum(dur_us) FILTER (WHERE phase = 'app_io'), 0)::BIGINT
            FROM {events} GROUP BY run, pid, host""")
    }
    rows = [
        (
            run,
            rank,
            pid,
            host,
            num_events,
            moved,
            sum_us,
            union_us,
            concurrency,
            *reversed(spans[run, pid, host]),
        )
        for run, rank, pid, host, num_events, sum_us, union_us, concurrency, moved in busy
    ]
    rows.sort(key=lambda row: (row[0], -1 if row[1] is None else row[1], row[2], row[3] or ""))
    medians = {run: median(row[7] for row in rows if row[0] == run) for run in {row[0] for row in rows}}
    judged_rows = [
        (*row, ratio, ratio is not None and ratio > STRAGGLER_RATIO)
        for row in rows
        for ratio in (row[7] / medians[row[0]] if medians[row[0]] else None,)
    ]
    columns = make_columns(
        "run", "rank", "pid", "host", "num_events", "moved_bytes", "sum_us", "union_us", "concurrency",
        "app_us", "last_event_us", "to_median", "is_straggler",
    )  # fmt: skip
    note = f"A straggler's union is more than {STRAGGLER_RATIO:g} times its run's median."
    return Answer(name="ranks", title="Ranks", columns=columns, rows=judged_rows, notes=[note])
