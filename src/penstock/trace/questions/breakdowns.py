"""Tables of a trace: summary, breakdowns by operation, file, class, size and rank, overlap, timeline.

Each row has calls, bytes and measures of time. Three measures always stand side by side, because each alone
misleads: the sum of durations counts parallel threads several times, the longest thread ignores the others,
and the union does not show how many threads ran at once. Unions are exact, in whole microseconds, and never
larger than sums. In `overlap`, `union_us`, `sum_us` and `concurrency` describe the I/O; its overlap with
computation is computed from intervals, not as a difference of totals. An event that spans several buckets of
a timeline is divided by the time that it spent in each; it counts as an operation in the bucket where it
began.

DuckDB reads ten million events in a second, but its window functions would take ten seconds for them.
Therefore, numpy measures unions in the order of time, a batch at a time: an event adds the part that lies
beyond the furthest end so far.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.errors import UsageError
from penstock.trace.dimensions import (
    IS_IO,
    IS_READ,
    IS_WRITE,
    LEADER,
    NO_IO,
    RANK_NAME,
    EventsView,
    case_sql,
    check_keys,
    sql_literal,
)
from penstock.trace.event_schema import ALL_RANKS, RECORDING, SUM
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.units import format_bytes

_BATCH_ROWS: Final = 1 << 19
_NEVER: Final = np.iinfo(np.int64).min // 2

Numbers = npt.NDArray[np.int64]
Key = tuple[Any, ...]
Totals = defaultdict[Any, list[int]]


def measure_groups(
    events: EventsView, by: Sequence[str], *, where: str, extra: Sequence[str] = ()
) -> list[Key]:
    """Return rows of `by`, num_events, sum_us, union_us, concurrency, and the SQL aggregates `extra`."""
    return _measure(events, by, events.ask(_group_sql(by, where, extra)), where)


def _group_sql(by: Sequence[str], where: str, extra: Sequence[str]) -> str:
    # A hash stands for the values of a group, because a join with a table of groups would lose the order.
    number, grouping = (f"hash({', '.join(by)})", f"GROUP BY {', '.join(by)}") if by else ("0", "")
    selected = ", ".join([number, *by, "count(*)", "coalesce(sum(dur_us), 0)::BIGINT", *extra])
    return f"SELECT {selected} FROM {{events}} WHERE {where} {grouping}"


def _measure(events: EventsView, by: Sequence[str], found: Sequence[Key], where: str) -> list[Key]:
    unions = union_times(events, by, where, groups=found)
    rows = []
    for _, *row in found:
        key, (num_events, sum_us, *more) = row[: len(by)], row[len(by) :]
        (union_us,) = unions.get(tuple(key), (0,))
        rows.append((*key, num_events, sum_us, union_us, sum_us / union_us if union_us else None, *more))
    return rows


def union_times(
    events: EventsView, by: Sequence[str], *sets: str, groups: Sequence[Key] = ()
) -> dict[Key, tuple[int, ...]]:
    """Return the time in which an event of each set was in progress, by the values of `by`.

    Sets are SQL conditions. Groups whose events take no time are left out. If there are `groups`, rows of
    `_group_sql`, only those are measured.
    """

    def add(  # noqa: PLR0917 - the arrays of a batch
        totals: Totals, keys: list[Key], place: int, groups: Numbers, begins: Numbers, ends: Numbers
    ) -> None:
        firsts = np.flatnonzero(np.concatenate((np.ones(1, bool), groups[1:] != groups[:-1])))
        sums = np.add.reduceat(ends - begins, firsts).tolist()
        for group, total_us in zip(groups[firsts].tolist(), sums, strict=True):
            totals[keys[group]][place] += total_us

    times = {key: tuple(total) for key, total in _add_up(events, by, sets, add, groups).items()}
    # Without keys, all events form one group, even if there are none.
    return times if by else {(): (0,) * len(sets), **times}


def union_in_buckets(
    events: EventsView, by: Sequence[str], *sets: str, width_us: int, origin_of: Callable[[Key], int]
) -> dict[tuple[Key, int], list[int]]:
    """Measure unions like `union_times`, in each bucket of time.

    The result is by key and number of the bucket, counted from the key's origin.
    """

    def add(  # noqa: PLR0917 - the arrays of a batch
        totals: Totals, keys: list[Key], place: int, groups: Numbers, begins: Numbers, ends: Numbers
    ) -> None:
        origins = np.array([origin_of(key) for key in keys], dtype=np.int64)[groups]
        begins, ends = begins - origins, ends - origins
        while len(groups):
            buckets = begins // width_us
            edges = np.minimum(ends, (buckets + 1) * width_us)
            changes = np.flatnonzero((np.diff(groups) != 0) | (np.diff(buckets) != 0)) + 1
            firsts = np.concatenate((np.zeros(1, np.int64), changes))
            sums = np.add.reduceat(edges - begins, firsts)
            found = zip(groups[firsts].tolist(), buckets[firsts].tolist(), sums.tolist(), strict=True)
            for group, bucket, total_us in found:
                totals[keys[group], bucket][place] += total_us
            # Pieces that reach into the next bucket continue there.
            is_longer = ends > edges
            groups, begins, ends = groups[is_longer], edges[is_longer], ends[is_longer]

    return _add_up(events, by, sets, add)


def _add_up(
    events: EventsView,
    by: Sequence[str],
    sets: Sequence[str],
    add: Callable[..., None],
    wanted: Sequence[Key] = (),
) -> Totals:
    """Return the totals that `add` makes from the pieces of time whose lengths add up to unions.

    The pieces of a group and set do not overlap. `add` receives the keys, the position of the set, and for
    each piece its group (a position among the keys), start and end. The pieces of a group are adjacent and in
    order.
    """
    is_member = " OR ".join(f"({one})" for one in sets)
    members = " + ".join(f"(coalesce({one}, false)::UTINYINT << {place})" for place, one in enumerate(sets))
    where = f"dur_us > 0 AND ({is_member})"
    numbered, keys, number_of = "0", [()], {0: 0}
    if by:
        numbered = f"hash({', '.join(by)})"
        found = wanted or events.ask(_group_sql(by, where, ()))
        keys = [row[1 : len(by) + 1] for row in found]
        number_of = {row[0]: number for number, row in enumerate(found)}
        assert len(number_of) == len(keys), "two groups have the same hash of 64 bits"
    query = (
        f"SELECT {numbered} AS numbered, {members} AS members, ts_us, end_us FROM {{events}} WHERE {where}"
    )
    # A table has its events in the order of time. Several tables may not, and conditions that DuckDB turns
    # into a join lose the order. Events are then sorted, which takes longer than everything else.
    for order in ("", " ORDER BY ts_us"):
        totals: Totals = defaultdict(lambda: [0] * len(sets))
        reach = np.full((len(sets), len(keys)), _NEVER)
        last_us = _NEVER
        for batch in events.read(query + order, _BATCH_ROWS):
            members_of, starts, ends = (batch.column(place).to_numpy() for place in (1, 2, 3))
            if len(starts) and (starts[0] < last_us or np.any(starts[1:] < starts[:-1])):
                break
            last_us = starts[-1] if len(starts) else last_us
            codes = np.zeros(len(starts), dtype=np.int64)
            if by:
                encoded = batch.column(0).dictionary_encode()
                # Groups that are not wanted have the number -1.
                numbers = [number_of.get(value, -1) for value in encoded.dictionary.to_pylist()]
                codes = np.array(numbers, dtype=np.int64)[encoded.indices.to_numpy()]
                members_of = np.where(codes < 0, 0, members_of)
                # numpy sorts 16-bit numbers by radix, several times faster than wider numbers.
                sortable = codes.astype(np.int16 if len(keys) < 1 << 15 else np.int32)
                by_group = np.argsort(sortable, kind="stable")
                codes, members_of, starts, ends = (one[by_group] for one in (codes, members_of, starts, ends))
            for place in range(len(sets)):
                chosen = (members_of & (1 << place)) != 0
                if chosen.any():
                    groups, begins, until = codes[chosen], starts[chosen], ends[chosen]
                    begins = _cut_covered(groups, begins, until, reach[place])
                    is_left = until > begins
                    if is_left.any():
                        add(totals, keys, place, groups[is_left], begins[is_left], until[is_left])
        else:
            return totals
    raise AssertionError("sorted events are out of order")


def _cut_covered(groups: Numbers, starts: Numbers, ends: Numbers, reach: Numbers) -> Numbers:
    """Find where each event begins to add to its group's union; move `reach` to the groups' furthest ends.

    For example, of 0-10, 5-12 and 6-8, the first adds from 0 onward, the second from 10 onward, and the third
    nothing.
    """
    is_first = np.concatenate((np.ones(1, bool), groups[1:] != groups[:-1]))
    firsts = np.flatnonzero(is_first)
    of_firsts = groups[firsts]
    furthest = ends.copy()
    furthest[firsts] = np.maximum(ends[firsts], reach[of_firsts])
    lowest, span = int(furthest.min()), int(furthest.max()) - int(furthest.min()) + 1
    if span * len(firsts) < 1 << 62:
        # Each group is shifted above all groups before it, so their ends do not reach it, and one pass serves
        # all.
        lift = (np.cumsum(is_first) - 1) * span - lowest
        furthest = np.maximum.accumulate(furthest + lift) - lift
    else:
        for begin, end in pairwise([*firsts.tolist(), len(groups)]):
            furthest[begin:end] = np.maximum.accumulate(furthest[begin:end])
    before = np.concatenate((furthest[:1], furthest[:-1]))
    before[firsts] = reach[of_firsts]
    reach[of_firsts] = furthest[np.append(firsts[1:], len(groups)) - 1]
    return np.maximum(starts, before)


def summary(events: EventsView) -> tuple[Answer, Answer]:
    """Return a table of facts about a trace, with notes on the runs that it names, and a row per function."""
    # The bytes of MPI-IO are traced again in the calls that it makes.
    counts = events.ask_one(f"""
        SELECT count(DISTINCT host), greatest(count(DISTINCT rank), max(num_ranks)),
               count(DISTINCT (host, pid)) FILTER (is_one),
               count(DISTINCT (host, pid, tid)) FILTER (is_one),
               (SELECT count(DISTINCT path) FROM {{events}}), coalesce(sum(num_events), 0)::BIGINT,
               coalesce(max(last_us) - min(first_us), 0), coalesce(sum(moved), 0)::BIGINT,
               coalesce(sum(io_us), 0)::BIGINT
        FROM (SELECT host, rank, pid, tid, pid <> {ALL_RANKS} AS is_one, count(*) AS num_events,
                     max(CASE WHEN starts_with(args, '{SUM}') THEN (args->>'num_ranks')::INTEGER END)
                         AS num_ranks,
                     min(ts_us) AS first_us, max(end_us) AS last_us,
                     sum(size_bytes) FILTER (WHERE cat <> 'MPIIO') AS moved,
                     sum(dur_us) FILTER (WHERE {IS_IO}) AS io_us
              FROM {{events}} GROUP BY host, rank, pid, tid)""")
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
        ("io_sum_us", Unit.MICROSECONDS, counts[8]),
        ("io_concurrency", Unit.RATIO, counts[8] / io_us if io_us else None),
        ("app_io_union_us", Unit.MICROSECONDS, app_us),
        ("compute_union_us", Unit.MICROSECONDS, compute_us),
        ("overlap_us", Unit.MICROSECONDS, io_us + compute_us - either_us),
        ("io_alone_us", Unit.MICROSECONDS, either_us - compute_us),
        ("compute_alone_us", Unit.MICROSECONDS, either_us - io_us),
    ]
    runs = events.ask("""
        SELECT json_extract_string(args, '$.run') AS traced, json_extract_string(args, '$.results') AS results
        FROM {events} WHERE cat = 'run' AND name = 'run' AND traced IS NOT NULL AND results IS NOT NULL
        GROUP BY ALL ORDER BY min(ts_us), traced""")
    answer = Answer(
        name="facts",
        title="Summary",
        columns=[Column(name, unit, _OVER_ALL.get(name, "")) for name, unit, _ in facts],
        rows=[[value for _, _, value in facts]],
        notes=[
            *(f"Trace of the run {run}; its results: {results}" for run, results in runs),
            *find_untraced(events),
            "Overlaps cover the intervals of all processes; `penstock trace overlap` shows them by process.",
        ],
    )
    return answer, _functions(events)


_UNTRACED_SHARE: Final = 0.1
_UNTRACED_BYTES: Final = 1 << 20
"""The bytes that a recording may miss without a note, for loading programs and for the tracer's own I/O."""


def find_untraced(events: EventsView) -> list[str]:
    """Return sentences about runs in which `trace record` missed many of the bytes the system counted."""
    counted = events.ask(f"""
        SELECT run, string_agg(DISTINCT args->>'tracer', ' and '), sum((args->>'read_bytes')::BIGINT)::BIGINT,
               sum((args->>'written_bytes')::BIGINT)::BIGINT
        FROM {{events}} WHERE cat = '{RECORDING}' AND name = 'recorded' GROUP BY run ORDER BY run""")
    sentences = []
    for run, tracer, *moved in counted:
        traced = events.ask_one(f"""
            SELECT coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT
            FROM {{events}} WHERE run = {sql_literal(run)}""")
        for verb, all_bytes, seen_bytes in zip(("read", "written"), moved, traced, strict=True):
            if all_bytes - seen_bytes > max(_UNTRACED_SHARE * all_bytes, _UNTRACED_BYTES):
                of_run = f" of {run}" if run else ""
                advice = "" if tracer == "strace" else ": record with --tracer strace to see the rest"
                sentences.append(
                    f"{tracer} saw {format_bytes(seen_bytes)} of the {format_bytes(all_bytes)} that the"
                    f" processes{of_run} have {verb} through files, pipes and terminals{advice}"
                )
    return sentences


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
    """Return SQL for a quantile, interpolated as in pandas."""
    place = f"((any_value(total) - 1) * {share}::DOUBLE)"
    below, above = (
        f"min(size) FILTER (WHERE until > {rounded}((total - 1) * {share}::DOUBLE))"
        for rounded in ("floor", "ceil")
    )
    return f"({below} + ({above} - {below}) * ({place} - floor({place})))"


def _count_sizes(by: Sequence[str], where: str) -> str:
    """Return a query for the frequency of each size; events without a size have one row for all of them."""
    keys = ", ".join(by)
    return f"""
        SELECT {keys}, size_bytes AS size, count(*) AS num, sum(dur_us) AS busy_us
        FROM {{events}} WHERE {where} GROUP BY {keys}, size_bytes"""


def _measure_sizes(
    events: EventsView, by: Sequence[str], measures: Sequence[str], *, where: str, order: str
) -> tuple[list[tuple[Any, ...]], int]:
    """Return rows of `by` and the SQL `measures`, which are exact, because calls have few different sizes."""
    keys = ", ".join(by)
    return events.ask_first(f"""
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
    rows, num_left_out = _measure_sizes(events, ("cat", "op"), measures, where="true", order="4 DESC, 1, 2")
    columns = make_columns(
        "cat", "op", "num_events", "sum_us", "total_bytes", "min_bytes", "p25_bytes", "mean_bytes",
        "median_bytes", "p75_bytes", "max_bytes",
    )  # fmt: skip
    return Answer(name="functions", title="Functions", columns=columns, rows=rows, num_left_out=num_left_out)


_EXTRA = (
    f"coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT",
    f"coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT",
    "max(dur_us)",
)


BREAKDOWNS: Final = {
    "ops": ("Operations", IS_IO),
    # MPI-IO's calls make POSIX calls, which transfer the same bytes.
    "files": ("Files", "path IS NOT NULL AND cat <> 'MPIIO'"),
    "classes": ("Classes of files", "path IS NOT NULL AND cat <> 'MPIIO'"),
}
"""The title of each breakdown, and the events that it counts."""


def break_down(events: EventsView, name: str, *, by: Sequence[str], top: int | None = None) -> Answer:
    """Return a table of operations, files or classes of files, the most time-consuming first."""
    title, where = BREAKDOWNS[name]
    by = check_keys(by)
    extra = _EXTRA if "path" in by else ("count(DISTINCT path)", *_EXTRA)
    # In SQL, because a trace may name a million files, of which a person sees the first.
    found, num_left_out = events.ask_first(
        f"{_group_sql(by, where, extra)} ORDER BY coalesce(sum(dur_us), 0) DESC,"
        f" {', '.join(f'{key}::VARCHAR' for key in by)} LIMIT {top or 'NULL'}"
    )
    columns = make_columns(
        *map(Column, by), "num_events", "sum_us", "union_us", "concurrency",
        *([] if "path" in by else [Column("num_files", Unit.COUNT)]), "read_bytes", "written_bytes",
        "max_us",
    )  # fmt: skip
    return Answer(
        name=name,
        title=f"{title} by {', '.join(by)}",
        columns=columns,
        rows=_measure(events, by, found, where),
        num_left_out=num_left_out,
    )


_MOVES = "size_bytes IS NOT NULL AND phase = 'io'"


def sizes(events: EventsView, *, by: Sequence[str] = ("op",), top: int = 20) -> tuple[Answer, Answer]:
    """Return sizes of transfers: statistics for each group, and its `top` most frequent sizes."""
    by = check_keys(by)
    keys = ", ".join(by)
    # Deviations are those of samples; quantiles are interpolated as in pandas.
    measures = (
        _NUM_EVENTS, _TOTAL, _MEAN, _DEVIATION, _SMALLEST, *map(_quantile_sql, (0.25, 0.5, 0.75, 0.99)),
        _LARGEST,
    )  # fmt: skip
    rows, num_left_out = _measure_sizes(events, by, measures, where=_MOVES, order=keys)
    names = ("total", "mean", "std", "min", "p25", "median", "p75", "p99", "max")
    columns = make_columns(
        *map(Column, by), "num_events", *(Column(f"{name}_bytes", Unit.BYTES) for name in names),
    )  # fmt: skip
    description = Answer(
        name="sizes",
        title=f"Sizes of transfers by {keys}",
        columns=columns,
        rows=rows,
        num_left_out=num_left_out,
    )
    rows, num_left_out = events.ask_first(f"""
        SELECT {keys}, size, num FROM ({_count_sizes(by, _MOVES)})
        QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY num DESC, size) <= {top}
        ORDER BY {keys}, num DESC, size""")
    columns = make_columns(*map(Column, by), "size_bytes", "num_events")
    title = f"Most frequent sizes by {keys}"
    return description, Answer(
        name="size_counts", title=title, columns=columns, rows=rows, num_left_out=num_left_out
    )


_MOVED_BYTES = "coalesce(sum(size_bytes), 0)::BIGINT"
STRAGGLER_RATIO = 1.25
"""A rank whose I/O takes more than this many times the median of its run is late; see `ranks`."""


def ranks(events: EventsView) -> Answer:
    """Return a row for each rank of a run, which shows skew and the stragglers that other ranks wait for.

    A rank is its process with workers and forked writers; if no rank is known, each process counts as one. A
    rank that transfers twice the bytes may take twice the time, so a late rank is a straggler only if it
    takes longer than its work explains. Work is measured in bytes, or in calls if most ranks of the run
    transfer no bytes. Darshan's sums over all ranks (`ALL_RANKS`), and processes without a rank among ranks,
    have a row, but do not count as ranks.
    """
    by = ("run", RANK_NAME)
    who = ("min(rank)", f"arg_min({LEADER}, ts_us)", "arg_min(host, ts_us)", "count(DISTINCT (host, pid))")
    busy = measure_groups(events, by, where=IS_IO, extra=[*who, _MOVED_BYTES])
    spans = {
        row[:2]: row[2:]
        for row in events.ask(f"""
            SELECT run, {RANK_NAME}, coalesce(sum(dur_us) FILTER (WHERE phase = 'app_io'), 0)::BIGINT,
                   max(end_us) - min(min(ts_us)) OVER (PARTITION BY run)
            FROM {{events}} GROUP BY run, {RANK_NAME}""")
    }
    rows = [
        (run, rank, pid, host, num_processes, num_events, moved, sum_us, union_us, concurrency,
         *spans[run, name])
        for run, name, num_events, sum_us, union_us, concurrency, rank, pid, host, num_processes, moved
        in busy
    ]  # fmt: skip
    rows.sort(key=lambda row: (row[0], -1 if row[1] is None else row[1], row[2], row[3] or ""))
    rated_rows = [row for _, of_run in groupby(rows, key=itemgetter(0)) for row in _rate_ranks(list(of_run))]
    columns = make_columns(
        "run", "rank", "pid", "host", "num_processes", "num_events", "moved_bytes", "sum_us", "union_us",
        "concurrency", "app_us", "last_event_us", "to_median", "work_to_median", "is_straggler",
    )  # fmt: skip
    note = (
        f"A straggler's union is more than {STRAGGLER_RATIO:g} times its run's median, and more than its "
        "bytes (its calls, where most ranks move none) explain."
    )
    notes = [note] + [
        f"The row of process {ALL_RANKS} has the files that ranks share, traced only as sums over all ranks."
    ] * any(row[2] == ALL_RANKS for row in rows)
    return Answer(name="ranks", title="Ranks", columns=columns, rows=rated_rows, notes=notes)


def _rate_ranks(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the ranks of a run: time and work relative to the median, and whether each is a straggler."""
    ranked = [row for row in rows if row[1] is not None]
    rated = ranked or [row for row in rows if row[2] != ALL_RANKS]
    yield from ((*row, None, None, False) for row in rows if row not in rated)
    if not rated:
        return
    usual_us = median(row[8] for row in rated)
    work = 6 if median(row[6] for row in rated) else 5
    usual = median(row[work] for row in rated)
    for row in rated:
        late, more = (row[8] / usual_us if usual_us else None), row[work] / usual
        yield *row, late, more, late is not None and late > STRAGGLER_RATIO * max(more, 1.0)


def overlap(events: EventsView, *, by: Sequence[str] = ("host", "pid"), of: str = "io") -> Answer:
    """Return the overlap of I/O with computation, in a row for each value of `by`.

    `of` is the phase that counts as I/O, or `all` phases except compute and waiting. If there are no events
    of the phase `io`, only the application's own spans of I/O count.
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
    elif (
        "rank" not in by
        and events.ask_one("""
        SELECT count(*) FROM (SELECT rank FROM {events} WHERE rank IS NOT NULL AND phase IN ('io', 'compute')
                              GROUP BY run, rank HAVING count(DISTINCT (host, pid)) > 1)""")[0]
    ):
        notes.append("Ranks have several processes, such as workers: --by rank adds their I/O to the rank's.")
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


_BUCKETS_WANTED = 100
_MOST_BUCKETS = 100_000


def round_up(wanted_us: int) -> int:
    """Return the next round length of time: 1, 2 or 5 times a power of ten microseconds."""
    power = 1
    while wanted_us > 10 * power:
        power *= 10
    return next(step * power for step in (1, 2, 5, 10) if wanted_us <= step * power)


def cut_sql(source: str, bucket_us: int, kept: str) -> str:
    """Return a SELECT of `kept`, bucket, begin_us and finish_us: `source`, cut at the edges of buckets.

    `source` is a SELECT with `since_us` and `until_us`. Most events lie within one bucket, and skip the
    general case.
    """
    placed = f"""
        (SELECT *, since_us // {bucket_us} AS first_bucket,
                greatest(since_us, until_us - 1) // {bucket_us} AS last_bucket FROM ({source}))"""
    return f"""
        SELECT {kept}, first_bucket AS bucket, since_us AS begin_us, until_us AS finish_us
        FROM {placed} WHERE first_bucket = last_bucket
        UNION ALL
        SELECT {kept}, bucket, greatest(since_us, bucket * {bucket_us}),
               least(until_us, (bucket + 1) * {bucket_us})
        FROM (SELECT *, unnest(range(first_bucket, last_bucket + 1)) AS bucket FROM {placed}
              WHERE first_bucket < last_bucket)"""


MOVED_PART: Final = (
    "(size_bytes * (CASE WHEN whole_us > 0 THEN (finish_us - begin_us) / whole_us ELSE 1 END))"
)
"""SQL for the bytes of a piece from `cut_sql`, whose event took `whole_us`."""


def timeline(events: EventsView, *, bucket_us: int | None = None) -> Answer:
    """Return a row for each bucket of each run and tier that had I/O."""
    starts = events.ask(f"""
        SELECT run, min(ts_us), max(end_us) FILTER (WHERE {IS_IO}) - min(ts_us)
        FROM {{events}} GROUP BY run""")
    origins: dict[str, int] = {run: first_us for run, first_us, _ in starts}
    span_us = max((span for _, _, span in starts if span is not None), default=1)
    width = bucket_us or round_up(span_us // _BUCKETS_WANTED)
    if span_us // width > _MOST_BUCKETS:
        raise UsageError(
            f"The trace has {span_us // width:,} buckets of this size", fix="Use larger buckets."
        )
    source = f"""
        SELECT run, tier, coalesce(size_bytes, 0) AS size_bytes, {IS_READ} AS is_read, {IS_WRITE} AS is_write,
               dur_us AS whole_us, ts_us - {case_sql("run", origins)} AS since_us,
               since_us + dur_us AS until_us
        FROM {{events}} WHERE {IS_IO}"""
    sums = events.ask(f"""
        SELECT run, tier, bucket, count(*) FILTER (WHERE begin_us = since_us),
               coalesce(sum({MOVED_PART}) FILTER (WHERE is_read), 0)::DOUBLE,
               coalesce(sum({MOVED_PART}) FILTER (WHERE is_write), 0)::DOUBLE,
               sum(finish_us - begin_us)::BIGINT
        FROM ({cut_sql(source, width, "run, tier, size_bytes, is_read, is_write, whole_us, since_us")})
        GROUP BY run, tier, bucket ORDER BY run, coalesce(tier, ''), bucket""")
    busy = union_in_buckets(
        events, ("run", "tier"), IS_IO, width_us=width, origin_of=lambda key: origins[key[0]]
    )
    rows = []
    for run, tier, bucket, num_started, read_bytes, written_bytes, inside_us in sums:
        (busy_us,) = busy.get(((run, tier), bucket), (0,))
        rates = read_bytes * 1e6 / width, written_bytes * 1e6 / width
        rows.append(
            (run, tier, bucket * width, width, num_started, read_bytes, written_bytes, *rates,
             inside_us / width, busy_us / width)
        )  # fmt: skip
    columns = make_columns(
        "run", "tier", "since_start_us", "bucket_us", "num_started", "read_bytes", "written_bytes",
        "read_rate", "write_rate", "concurrency", "busy_share",
    )  # fmt: skip
    note = (
        f"Each bucket is {width / 1e6:g} s; times are since the run's first event. The last bucket counts as "
        "whole, although the run may end within it."
    )
    return Answer(name="timeline", title="Timeline", columns=columns, rows=rows, notes=[note])


def file_events(events: EventsView, path: str) -> Answer:
    """Return the events of `path`, which is a whole path, or the end of exactly one."""
    path = _find_path(events, path)
    rows, num_left_out = events.ask_first(f"""
        SELECT run, rank, tid, ts_us - (SELECT min(ts_us) FROM {{events}}), dur_us, name, op, size_bytes,
               "offset", ret
        FROM {{events}} WHERE path = {sql_literal(path)} ORDER BY ts_us, end_us, tid, name""")
    columns = make_columns(
        "run", "rank", "tid", "since_start_us", "dur_us", "name", "op", "size_bytes",
        Column("offset", Unit.BYTES), "ret",
    )  # fmt: skip
    return Answer(name="file", title=path, columns=columns, rows=rows, num_left_out=num_left_out)


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
