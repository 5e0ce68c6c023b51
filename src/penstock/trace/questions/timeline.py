"""What happened when: I/O in buckets of time by tier, and the events of one file in order.

An event that spans several buckets is divided by the time it spent in each; it counts as an operation where
it began. A bucket's concurrency is the mean over the whole bucket.
"""

from penstock.errors import UsageError
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_cells import add_up
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.bucket_sums import round_up, sum_buckets
from penstock.trace.questions.events_view import IS_IO, EventsView

_BUCKETS_WANTED = 100
_MOST_BUCKETS = 100_000


def timeline(events: EventsView, *, bucket_us: int | None = None) -> Answer:
    """A row for each bucket of each run and tier in which there was I/O."""
    cells = add_up(events, ("run", "tier", "phase"))
    starts = cells.ask(f"""
        SELECT run, min(first_us), max(last_us) FILTER (WHERE {IS_IO}) - min(first_us)
        FROM {{events}} GROUP BY run""")
    origins: dict[str, int] = {run: first_us for run, first_us, _ in starts}
    span_us = max((span for _, _, span in starts if span is not None), default=1)
    width = bucket_us or round_up(span_us // _BUCKETS_WANTED)
    if span_us // width > _MOST_BUCKETS:
        raise UsageError(
            f"The trace has {span_us // width:,} buckets of this size", fix="Use larger buckets."
        )
    buckets = sum_buckets(
        events, ("run", "tier"), IS_IO, width_us=width, origin_of=lambda key: origins[key[0]]
    )
    rows = [
        (run, tier, bucket * width, width, sums.num_started, sums.read_bytes, sums.written_bytes,
         sums.read_bytes * 1e6 / width, sums.written_bytes * 1e6 / width, sums.inside_us / width,
         sums.busy_us / width)
        for (run, tier, bucket), sums in buckets.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (row[0], row[1] or "", row[2]))
    columns = make_columns(
        "run", "tier", "since_start_us", "bucket_us", "num_started", "read_bytes", "written_bytes",
        "read_rate", "write_rate", "concurrency", "busy_share",
    )  # fmt: skip
    note = f"Each bucket is {width / 1e6:g} s; times are since the run's first event."
    return Answer(name="timeline", title="Timeline", columns=columns, rows=rows, notes=[note])


def file_events(events: EventsView, path: str) -> Answer:
    """The events of `path`, which is a whole path or the end of one that is unique."""
    path = _find_path(events, path)
    rows = events.ask(f"""
        SELECT run, rank, tid, ts_us - (SELECT min(ts_us) FROM {{events}}), dur_us, name, op, size_bytes,
               "offset", ret
        FROM {{events}} WHERE path = {sql_literal(path)} ORDER BY ts_us, end_us, tid, name""")
    columns = make_columns(
        "run", "rank", "tid", "since_start_us", "dur_us", "name", "op", "size_bytes",
        Column("offset", Unit.BYTES), "ret",
    )  # fmt: skip
    return Answer(name="file", title=path, columns=columns, rows=rows)


def _find_path(events: EventsView, path: str) -> str:
    matches = events.ask(f"""
        SELECT DISTINCT path FROM {{events}}
        WHERE path = {sql_literal(path)} OR ends_with(path, {sql_literal("/" + path.lstrip("/"))})
        ORDER BY path <> {sql_literal(path)}, path LIMIT 6""")
    paths = [row[0] for row in matches]
    if path in paths or len(paths) == 1:
        return str(paths[0])
    if paths:
        raise UsageError(f"Several files end in {path!r}: {', '.join(paths)}", fix="Give the whole path.")
    nearest = events.ask(f"""
        SELECT path FROM (SELECT DISTINCT path FROM {{events}} WHERE path IS NOT NULL)
        ORDER BY levenshtein(path, {sql_literal(path)}), path LIMIT 1""")
    advice = f"The nearest name is {nearest[0][0]}." if nearest else "This trace names no files."
    raise UsageError(f"No event has the file {path!r}", fix=advice)
