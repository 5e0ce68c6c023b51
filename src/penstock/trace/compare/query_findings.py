"""Findings from a few queries each: calls whose number, size, place or tier costs time or misleads.

    query -> rows of a run -> a title and sentences about them -> TraceFinding, with the rows as its evidence

F rules apply to comparisons and reports. R rules apply to reports; in comparisons, only `HABIT_RULES` do.
Times are sums over threads, which `spread_over_ranks` converts into seconds of one rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from penstock.trace.compare.trace_study import PROCESS, Study, TraceFinding, Weight
from penstock.trace.dimensions import IS_CALL, IS_IO, IS_READ, IS_WRITE, NUM_CALLS, argument_sql, sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.breakdowns import measure_groups, union_times
from penstock.units import format_bytes, format_seconds

Rows = Sequence[tuple[Any, ...]]

_SMALL_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = 4096
"""If a transfer begins or ends inside a page, a file system reads the whole page and, for a write,
modifies it.
"""
_LARGE_BYTES: Final = 1 << 20
"""From this size on, a transfer takes the same time wherever it begins."""
_ENOUGH_CALLS: Final = 100
_ENOUGH_FILES: Final = 10
"""A pattern in fewer files, or in fewer calls than `_ENOUGH_CALLS`, is not a habit of a program."""
_READ_BACK_SHARE: Final = 0.5
MEMORY_RATE: Final = 8e9
"""A rate of single calls, in bytes per second, that no device of one host reaches; for tiers without a stated
rate.
"""
_UNSERVED_SHARE: Final = 0.02
_EXTRA_A_FILE: Final = 0.5
_STATS_A_FILE: Final = 3
_OPENS_A_FILE: Final = 2
_OTHER_SIZE: Final = 2.0
"""A size that differs by a smaller factor is explained by headers and alignment."""
_LONG_AFTER_US: Final = 1_000_000
_METADATA_SHARE: Final = 0.25
_LOOKUPS: Final = "op IN ('stat', 'lstat', 'fstat', 'access')"
_LOOKS: Final = f"({_LOOKUPS} OR op IN ('chmod', 'chown', 'utime', 'truncate', 'ftruncate', 'readlink'))"
"""Calls that transfer no bytes, and that a closed file no longer needs. Renaming and removing do not count.
"""
_MOVES: Final = f"({IS_READ} OR {IS_WRITE} OR op IN ('sendfile', 'copy_file_range', 'splice'))"
_SYNCS: Final = "op IN ('fsync', 'fdatasync', 'sync', 'syncfs', 'msync', 'sync_file_range')"
_FIXES: Final = {
    "small": "Read through a larger buffer, or put many samples into one file and read blocks of it: "
    "1 MiB per read keeps most storage busy.",
    "scattered": "Shuffle the order of files or of large blocks instead of samples, or turn read-ahead off "
    "(posix_fadvise with POSIX_FADV_RANDOM, or O_DIRECT).",
    "unaligned": f"Begin records at multiples of {format_bytes(_PAGE_BYTES)}, or of the stripe of a parallel "
    "file system, and pad them.",
}
_TRAITS: Final = {
    "small": "move less than 100 kB",
    "scattered": "begin before the preceding one in the same file",
    "unaligned": "begin or end inside a block of the file system",
}
"""What Darshan counts about calls that it does not record one by one."""
_IS_OPEN: Final = "op IN ('open', 'fopen')"
_IS_SMALL: Final = f"size_bytes < {_SMALL_BYTES}"
_IS_UNALIGNED: Final = f'"offset" % {_PAGE_BYTES} <> 0'


def _find(  # noqa: PLR0917 - what every rule has
    study: Study,
    code: str,
    evidence: str,
    columns: Sequence[str | Column],
    says: Callable[[Rows], Sequence[str]],
    sql: str,
    *,
    weight: Weight = Weight.COST,
    where: str | Callable[[Rows], str] = "",
    habit: str = "",
    fix: str = "",
) -> list[TraceFinding]:
    """Return a finding for each run among the query's rows, which begin with the run and end with their time.

    For an alarm, there is a finding for each value in the second column. `says` returns the title and the
    sentences. `where` is the SQL condition of the calls in which the run lost time. `habit` says how often a
    run has this habit: it names `calls`, or a column to sum up. `{run}` in the title of the evidence stands
    for the run; the run's column is left out unless `columns` has it.
    """
    findings: list[TraceFinding] = []
    for key, rows in _group(study, sql, 2 if weight is Weight.ALARM else 1).items():
        title, *sentences = says(rows)
        run = rows[0][0]
        lost_us = None
        of_calls = where if isinstance(where, str) else where(rows)
        if of_calls:
            lost_us = spread_over_ranks(study, run, where=of_calls, sum_us=sum(row[-1] for row in rows))
        answer = Answer(
            name="_".join([code.lower(), *map(str, key)]),
            title=evidence.replace("{run}", run),
            columns=make_columns(*columns),
            rows=rows if columns[0] == "run" else [row[1:] for row in rows],
        )
        amount, usual = 0.0, 0.0
        if habit == "calls":
            amount, usual = study.work.ask_one(f"""
                SELECT count(*) FILTER (WHERE run = {sql_literal(run)}),
                       count(*) FILTER (WHERE run = {sql_literal(study.baseline)})
                FROM {{events}} WHERE {IS_IO} AND ({of_calls})""")
        elif habit:
            amount = sum(float(row[habit] or 0) for row in answer.records())
            usual = sum(one.amount for one in findings if one.runs == [study.baseline])
        findings.append(
            TraceFinding(code, weight, title, [run], sentences, answer, lost_us, fix, amount, usual)
        )
    return findings


def _group(study: Study, sql: str, by: int) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Group the rows of a query by their first `by` columns, in the order of the runs, which come first."""
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in sorted(study.work.ask(sql), key=lambda row: study.runs.index(row[0])):
        groups.setdefault(row[:by], []).append(row)
    return groups


def spread_over_ranks(study: Study, run: str, *, where: str, sum_us: float) -> int:
    """Convert a sum over the threads of all ranks into wall-clock time of an average rank.

    `where` selects the calls to which the sum belongs: calls that ran at the same time share their time.
    """
    chosen = f"run = {sql_literal(run)} AND {IS_IO} AND ({where})"
    busy = measure_groups(study.work, ("rank_name",), where=chosen)
    total_us, busy_us = (sum(row[place] for row in busy) for place in (2, 3))
    return round(sum_us * busy_us / total_us / count_ranks(study, run)) if total_us else 0


def count_ranks(study: Study, run: str) -> int:
    """Return the number of ranks of a run, or of its processes if no rank is known; at least 1."""
    (num_ranks, num_processes) = study.work.ask_one(f"""
        SELECT count(DISTINCT rank), count(DISTINCT rank_name) FROM {{events}}
        WHERE run = {sql_literal(run)}""")
    return int(num_ranks or num_processes or 1)


def match_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return an SQL condition for events whose `columns` equal what follows the run in one of `rows`."""
    each = (
        " AND ".join(
            f"{column} = {sql_literal(value)}" for column, value in zip(columns, row[1:], strict=False)
        )
        for row in rows
    )
    return " OR ".join(f"({condition})" for condition in each)


def extra_calls(study: Study) -> list[TraceFinding]:
    """Return F2 for operations that a class of files causes on some tier, but not in the baseline."""
    base = study.baseline

    def says(rows: Rows) -> Sequence[str]:
        sentences = [f"{rows[0][0]}: more operations for each file than {base}"]
        for tier in dict.fromkeys(row[1] for row in rows):
            here = [row for row in rows if row[1] == tier]
            kinds = list(dict.fromkeys(row[2] for row in here))
            extra = [f"+{row[4] - row[5]:g} {row[3]}" for row in here if row[2] == kinds[0]]
            cost = format_seconds(sum(row[7] for row in here) / 1e6)
            sentences.append(
                f"On {tier}, each file of {kinds[0]} takes more calls than in {base} ({', '.join(extra)}); "
                f"for the classes {', '.join(kinds)}, over all ranks, these cost {cost}."
            )
        return sentences

    return _find(
        study,
        "F2",
        f"Calls by file, {{run}} and {base}",
        ("tier", "file_class", "op", Column("per_file", Unit.NUMBER), Column(f"per_file_{base}", Unit.NUMBER),
         "num_files", "extra_us"),
        says,
        f"""
        WITH files AS (
            SELECT run, tier, file_class, count(DISTINCT path) AS num_files
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY ALL),
        each AS (
            SELECT run, tier, file_class, op, count(*) AS num_calls, sum(dur_us)::BIGINT AS took,
                   num_files, num_calls / num_files AS a_file
            FROM {{events}} JOIN files USING (run, tier, file_class) WHERE {IS_IO} AND path IS NOT NULL
            GROUP BY run, tier, file_class, op, num_files),
        usual AS (
            SELECT file_class, op, sum(num_calls) / sum(num_files) AS a_file
            FROM each WHERE run = {sql_literal(base)} GROUP BY file_class, op)
        SELECT e.run, e.tier, e.file_class, e.op, e.a_file, coalesce(u.a_file, 0), e.num_files,
               (e.took * (1 - coalesce(u.a_file, 0) / e.a_file))::BIGINT
        FROM each e LEFT JOIN usual u USING (file_class, op)
        WHERE e.run <> {sql_literal(base)} AND e.file_class IN (SELECT file_class FROM usual)
          AND e.op NOT IN ('read', 'write', 'pread', 'pwrite')
          AND e.a_file - coalesce(u.a_file, 0) >= {_EXTRA_A_FILE}
        ORDER BY e.tier, e.file_class, e.op""",
        where=partial(match_rows, ("tier", "file_class", "op")),
    )  # fmt: skip


def cache_read_by_flush(study: Study) -> list[TraceFinding]:
    """Return F4 if a flush to another tier reads back, in other threads, what was written to a tier."""

    def says(rows: Rows) -> Sequence[str]:
        ((run, tier, _, read_back, read_us, total, share, other),) = rows
        return (
            f"{run}: the flush to {other} reads {tier}",
            (
                f"Threads that do not write to {tier} read {format_bytes(read_back)} back from it while "
                f"{other} is written: {format_seconds(read_us / 1e6)} of the {format_seconds(total / 1e6)} "
                f"on {tier}, summed over all ranks ({100 * share:.0f} %)."
            ),
            f"Time on {tier} is therefore not the time of checkpoints on {tier}.",
        )

    return _find(
        study,
        "F4",
        "Read back",
        ("run", "tier", "written_bytes", "read_back_bytes", "read_back_us", "sum_us", "read_share",
         "flushed_to"),
        says,
        f"""
        WITH writers AS (
            SELECT run, tier, {PROCESS}, tid, true AS is_writer FROM {{events}}
            WHERE {IS_IO} AND {IS_WRITE} GROUP BY ALL),
        moved AS (
            SELECT run, tier, coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT AS written,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_READ} AND is_writer IS NULL), 0)::BIGINT
                       AS read_back,
                   coalesce(sum(dur_us) FILTER (WHERE {IS_READ} AND is_writer IS NULL), 0)::BIGINT AS read_us,
                   sum(dur_us)::BIGINT AS sum_us
            FROM (SELECT e.*, w.is_writer FROM {{events}} e LEFT JOIN writers w
                  ON e.run = w.run AND e.tier = w.tier AND e.host IS NOT DISTINCT FROM w.host
                     AND e.pid = w.pid AND e.tid = w.tid)
            WHERE {IS_IO} AND tier IS NOT NULL GROUP BY run, tier)
        SELECT run, tier, written, read_back, read_us, sum_us, read_us / sum_us,
               (SELECT string_agg(o.tier, ', ' ORDER BY o.tier) FROM moved o
                WHERE o.run = m.run AND o.tier <> m.tier
                  AND o.written >= {_READ_BACK_SHARE} * m.written) AS other
        FROM moved m
        WHERE written > 0 AND read_back >= {_READ_BACK_SHARE} * written AND other IS NOT NULL
        ORDER BY tier""",
        weight=Weight.ALARM,
    )  # fmt: skip


def _small_sql(is_wanted: str, share: float, order: str) -> str:
    """Return SQL for file classes in which many calls, and at least `share` of all, transfer few bytes."""
    return f"""
        SELECT run, file_class, count(*) AS num_calls, count(*) FILTER (WHERE {_IS_SMALL}) AS num_small,
               quantile_cont(size_bytes, 0.5),
               coalesce(sum(size_bytes) FILTER (WHERE {_IS_SMALL}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE {_IS_SMALL}), 0)::BIGINT AS small_us
        FROM {{events}} WHERE {IS_IO} AND {IS_CALL} AND {is_wanted} AND size_bytes > 0 AND path IS NOT NULL
        GROUP BY run, file_class
        HAVING num_small >= {_ENOUGH_CALLS} AND num_small >= {share} * num_calls
        ORDER BY {order} DESC, file_class"""


def small_writes(study: Study) -> list[TraceFinding]:
    """Return F6 for many writes so small that their number costs more than their bytes."""

    def says(rows: Rows) -> Sequence[str]:
        run, kind, num, small = max(rows, key=lambda row: int(row[6]))[:4]
        return (
            f"{run}: small writes",
            f"{small:,} of {num:,} writes of {kind} move less than {format_bytes(_SMALL_BYTES)}.",
            "A writer that collects headers and small records in one buffer needs a fraction of the calls.",
        )

    return _find(
        study,
        "F6",
        "Writes below 64 KiB",
        ("run", "file_class", "num_writes", "num_small", "median_bytes", "small_bytes", "small_us"),
        says,
        _small_sql(IS_WRITE, 0.25, "num_small"),
        where=f"{IS_WRITE} AND {_IS_SMALL}",
        habit="calls",
    )


def redundant_lookups(study: Study) -> list[TraceFinding]:
    """Return F7 for files that one process looks up, or opens, again and again."""

    def says(rows: Rows) -> Sequence[str]:
        # By seconds, then by number, because a habit on a fast tier costs less than a rarer one on a slow
        # tier.
        run, kind, files, stats, opens = max(rows, key=lambda row: (int(row[6]), int(row[5])))[:5]
        does, most = ("looks up", stats) if stats >= _STATS_A_FILE else ("opens", opens)
        return (
            f"{run}: redundant opens and stats",
            f"One process {does} each of {files:,} files of {kind} up to {most} times.",
            "The first answer is known already; on a parallel file system each further one is a round trip.",
        )

    return _find(
        study,
        "F7",
        "Files looked up repeatedly",
        ("run", "file_class", "num_files", Column("max_lookups", Unit.COUNT), Column("max_opens", Unit.COUNT),
         "num_lookups", "lookup_us"),
        says,
        f"""
        WITH looked_up AS (
            SELECT run, file_class, path, {PROCESS}, count(*) FILTER (WHERE {_LOOKUPS}) AS stats,
                   count(*) FILTER (WHERE {_IS_OPEN}) AS opens,
                   coalesce(sum(dur_us) FILTER (WHERE {_LOOKUPS}), 0)
                       + CASE WHEN opens > {_OPENS_A_FILE}
                              THEN sum(dur_us) FILTER (WHERE {_IS_OPEN}) ELSE 0 END AS took
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY run, file_class, path, {PROCESS})
        SELECT run, file_class, count(*), max(stats), max(opens), sum(stats)::BIGINT, sum(took)::BIGINT
        FROM looked_up WHERE stats >= {_STATS_A_FILE} OR opens > {_OPENS_A_FILE}
        GROUP BY run, file_class HAVING count(*) >= {_ENOUGH_FILES} ORDER BY 7 DESC, file_class""",
        where=f"({_LOOKUPS} OR {_IS_OPEN})",
        habit="calls",
    )  # fmt: skip


def unserved_reads(study: Study) -> list[TraceFinding]:
    """Return F9 for reads faster than any device, because the page cache served them.

    A large read is judged alone. Most of the small reads may be fast because an earlier one fetched their
    bytes too, so they are judged together, by file class, thread and second.
    """
    rates = study.spec.device_rates
    cases = "".join(f" WHEN {sql_literal(tier)} THEN {rate}" for tier, rate in rates.items())
    limit = f"CASE tier{cases} ELSE {MEMORY_RATE} END" if cases else str(MEMORY_RATE)

    def says(rows: Rows) -> Sequence[str]:
        ((run, tier, _, _, total, unserved, _),) = rows
        return (
            f"{run}: reads of {tier} that no device served",
            (
                f"{format_bytes(unserved)} of {format_bytes(total)} read from {tier} in {run} came faster "
                "than its device can deliver: they came from the page cache."
            ),
        )

    return _find(
        study,
        "F9",
        f"Reads of {format_bytes(_PAGE_BYTES)} and more",
        ("run", "tier", "num_reads", "num_unserved", "read_bytes", "unserved_bytes",
         Column("fastest", Unit.RATE)),
        says,
        f"""
        WITH together AS (
            SELECT run, tier, count(*) AS num, sum(size_bytes) AS moved, sum(dur_us) AS took
            FROM {{events}}
            WHERE {IS_IO} AND {IS_READ} AND {IS_CALL} AND tier IS NOT NULL AND size_bytes >= {_PAGE_BYTES}
            GROUP BY run, tier, file_class, {PROCESS}, tid, ts_us // 1000000,
                     CASE WHEN size_bytes >= {_LARGE_BYTES} THEN ts_us END),
        judged AS (
            SELECT *, moved >= {_SMALL_BYTES} AND moved > {limit} * took / 1e6 AS is_fast FROM together)
        SELECT run, tier, sum(num)::BIGINT, coalesce(sum(num) FILTER (WHERE is_fast), 0)::BIGINT,
               sum(moved)::BIGINT AS total,
               coalesce(sum(moved) FILTER (WHERE is_fast), 0)::BIGINT AS unserved,
               max(moved * 1e6 / took) FILTER (WHERE moved >= {_SMALL_BYTES})
        FROM judged GROUP BY run, tier HAVING unserved > {_UNSERVED_SHARE} * total ORDER BY tier""",
        weight=Weight.ALARM,
    )  # fmt: skip


_DIRECTION: Final = f"CASE WHEN {IS_WRITE} THEN 'write' ELSE 'read' END"


def _typical_sql(keys: str) -> str:
    """Return a SELECT of `keys`, calls, bytes, and the median size of a call, weighted by bytes.

    Without weights, headers would count most: they are most of the calls, but hardly any of the bytes.
    """
    return f"""
        SELECT {keys}, sum(num_calls)::BIGINT AS num_calls, any_value(whole)::BIGINT AS moved_bytes,
               min(size_bytes) FILTER (WHERE upto >= whole / 2) AS typical
        FROM (SELECT {keys}, size_bytes, count(*) AS num_calls, sum(size_bytes) AS moved,
                     sum(moved) OVER (PARTITION BY {keys} ORDER BY size_bytes) AS upto,
                     sum(moved) OVER (PARTITION BY {keys}) AS whole
              FROM (SELECT *, {_DIRECTION} AS direction FROM {{events}}
                    WHERE {IS_IO} AND {IS_CALL} AND ({IS_WRITE} OR {IS_READ}) AND size_bytes > 0
                      AND path IS NOT NULL)
              GROUP BY {keys}, size_bytes)
        GROUP BY {keys}"""


def changed_sizes(study: Study) -> list[TraceFinding]:
    """Return F11 if a class of files is transferred in calls of a different size than in the baseline."""
    base = study.baseline
    groups = _group(
        study,
        f"""
        WITH typical AS ({_typical_sql("run, direction, tier, file_class")}),
        usual AS ({_typical_sql("run, direction, file_class")})
        SELECT t.run, t.direction, t.tier, t.file_class, t.num_calls, t.moved_bytes, t.typical, u.num_calls,
               u.moved_bytes, u.typical, t.typical / u.typical
        FROM typical t JOIN usual u USING (direction, file_class)
        WHERE u.run = {sql_literal(base)} AND t.run <> u.run AND t.moved_bytes >= {_LARGE_BYTES}
          AND greatest(t.typical / u.typical, u.typical / t.typical) >= {_OTHER_SIZE}
        ORDER BY t.direction, t.tier, t.moved_bytes DESC, t.file_class""",
        by=2,
    )

    def busy_us(run: str, where: str) -> float:
        """Return the time that an average rank spent in these calls."""
        chosen = f"run = {sql_literal(run)} AND {IS_IO} AND ({where})"
        return sum(us for (us,) in union_times(study.work, ("rank_name",), chosen).values()) / num_ranks[run]

    num_ranks = {run: count_ranks(study, run) for run in (base, *(run for run, _ in groups))}
    findings = []
    for (run, direction), rows in groups.items():
        _, _, tier, kind, num, _, typical, num_base, _, typical_base, ratio = max(
            rows, key=lambda row: int(row[5])
        )
        does = f"written to {tier}" if direction == "write" else f"read from {tier}"
        says = [
            (
                f"{kind} is {does} in pieces of {format_bytes(typical)}, in {base} in pieces of "
                f"{format_bytes(typical_base)} (half of the bytes are in larger ones): {num:,} {direction}s, "
                f"not {num_base:,}."
            )
        ]
        # The time that the baseline's ranks would take for as many bytes.
        moved = sum(row[5] for row in rows) / num_ranks[run]
        usual = sum({row[3]: row[8] for row in rows}.values()) / num_ranks[base]
        is_direction = IS_WRITE if direction == "write" else IS_READ
        same_kinds = match_rows(("file_class",), (row[2:] for row in rows))
        usual_us = busy_us(base, f"{is_direction} AND ({same_kinds})") * moved / usual
        here = match_rows(("tier", "file_class"), (row[1:] for row in rows))
        lost_us = round(busy_us(run, f"{is_direction} AND ({here})") - usual_us)
        if lost_us > 0:
            says.append(
                f"A rank is busy with the {direction}s of these classes for {format_seconds(lost_us / 1e6)} "
                f"longer than in {base} for as many bytes; only a measurement with that size shows "
                "whether size is the reason."
            )
        columns = make_columns(
            "tier", "file_class", f"num_{direction}s", "moved_bytes", "typical_bytes",
            f"num_{direction}s_{base}", Column(f"moved_{base}", Unit.BYTES),
            Column(f"typical_{base}", Unit.BYTES), Column("to_base", Unit.RATIO),
        )  # fmt: skip
        evidence = Answer(
            name=f"f11_{run}_{direction}",
            title=f"Sizes at which half of the bytes are moved, {run} and {base}",
            columns=columns,
            rows=[row[2:] for row in rows],
        )
        weight = Weight.COST if lost_us > 0 else Weight.NOTE
        title = f"{run}: {'smaller' if ratio < 1 else 'larger'} {direction}s than in {base}"
        findings.append(TraceFinding("F11", weight, title, [run], says, evidence, max(lost_us, 0) or None))
    return findings


def calls_after_close(study: Study) -> list[TraceFinding]:
    """Return F12 for written files that are examined, or changed, long after they were closed."""

    def says(rows: Rows) -> Sequence[str]:
        run, tier, kind, op, num_files, num_calls, after_us, _ = max(rows, key=lambda row: int(row[5]))
        latest, after = (format_seconds(us / 1e6) for us in (max(row[6] for row in rows), after_us))
        sum_us = sum(row[7] for row in rows)
        return (
            f"{run}: files are looked at up to {latest} after they were closed",
            (
                f"On {tier}, {num_calls:,} calls of {op} on {num_files:,} files of {kind} come {after} after "
                "the file was closed (median)."
            ),
            (
                f"All calls of this kind take {format_seconds(sum_us / 1e6)}, summed over all ranks: a later "
                "step of the program goes over all files once more."
            ),
        )

    return _find(
        study,
        "F12",
        "Calls after the close",
        ("tier", "file_class", "op", "num_files", "num_calls", "median_after_us", "sum_us"),
        says,
        f"""
        WITH written AS (
            SELECT DISTINCT run, path FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND path IS NOT NULL),
        looks AS (
            SELECT run, tier, file_class, path, op, ts_us, dur_us FROM {{events}}
            SEMI JOIN written USING (run, path) WHERE {IS_IO} AND {_LOOKS}),
        closes AS (SELECT run, path, end_us AS closed_us FROM {{events}} WHERE {IS_IO} AND op = 'close'),
        opens AS (
            SELECT run, path, ts_us AS opened_us FROM {{events}} WHERE {IS_IO} AND {_IS_OPEN}),
        late AS (
            SELECT looks.*, closed_us FROM looks ASOF JOIN closes
            ON looks.run = closes.run AND looks.path = closes.path AND looks.ts_us >= closes.closed_us
            WHERE ts_us - closed_us >= {_LONG_AFTER_US})
        SELECT late.run, tier, file_class, op, count(DISTINCT late.path) AS num_files, count(*),
               median(ts_us - closed_us)::BIGINT, sum(dur_us)::BIGINT
        FROM late ASOF LEFT JOIN opens
        ON late.run = opens.run AND late.path = opens.path AND late.ts_us >= opens.opened_us
        WHERE coalesce(opened_us < closed_us, true)
        GROUP BY late.run, tier, file_class, op HAVING num_files >= {_ENOUGH_FILES}
        ORDER BY tier, file_class, op""",
        where=partial(match_rows, ("tier", "file_class", "op")),
        habit="num_calls",
    )


def compare_reads(study: Study, run: str) -> tuple[float, float] | None:
    """Return the microseconds of a read in `run`, and in the baseline at equal sizes; None without reads."""
    is_read = f"{IS_IO} AND {IS_READ} AND {IS_CALL} AND size_bytes > 0"
    here, base = study.work.ask_one(f"""
        WITH sized AS (
            SELECT run, floor(log2(size_bytes)) AS magnitude, count(*) AS num, avg(dur_us) AS mean_us
            FROM {{events}} WHERE {is_read} GROUP BY ALL)
        SELECT sum(h.num * h.mean_us) / sum(h.num), sum(h.num * b.mean_us) / sum(h.num)
        FROM sized h JOIN sized b USING (magnitude)
        WHERE h.run = {sql_literal(run)} AND b.run = {sql_literal(study.baseline)}""")
    return (here, base) if here and base else None


def small_reads(study: Study) -> list[TraceFinding]:
    """Return R1 if most reads are so small that their number costs more than their bytes."""
    return _find(
        study,
        "R1",
        f"Reads below {format_bytes(_SMALL_BYTES)}",
        ("run", "file_class", "num_reads", "num_small", "median_bytes", "small_bytes", "small_us"),
        lambda rows: (
            f"{rows[0][0]}: small reads",
            (
                f"{rows[0][3]:,} of {rows[0][2]:,} reads of {rows[0][1]} move less than "
                f"{format_bytes(_SMALL_BYTES)}, half of them {format_bytes(round(rows[0][4]))} or less; "
                f"together {format_bytes(rows[0][5])}."
            ),
        ),
        _small_sql(IS_READ, 0.5, "small_us"),
        where=f"{IS_READ} AND {_IS_SMALL}",
        habit="calls",
        fix=_FIXES["small"],
    )


def random_reads(study: Study) -> list[TraceFinding]:
    """Return R2 for reads below a MiB that do not begin where the preceding read of their file ended.

    Opening a file again, or reading it again from its beginning, starts another pass over it.
    """
    return _find(
        study,
        "R2",
        "Reads below 1 MiB that follow another of their file",
        ("run", "file_class", "num_reads", "num_random", "num_backwards", "median_bytes", "random_us"),
        lambda rows: (
            f"{rows[0][0]}: reads at random offsets",
            (
                f"{rows[0][3]:,} of {rows[0][2]:,} reads below 1 MiB of {rows[0][1]} do not begin where "
                f"the preceding read of the same file ended, {rows[0][4]:,} of them before that point; "
                "read-ahead fetches bytes that are never requested."
            ),
        ),
        f"""
        WITH ordered AS (
            SELECT run, file_class, op, dur_us, "offset" AS begins, size_bytes,
                   lag(CASE WHEN {_IS_OPEN} THEN NULL ELSE "offset" + size_bytes END) OVER one_file AS ended
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL
              AND (({IS_READ} AND size_bytes > 0 AND "offset" IS NOT NULL) OR {_IS_OPEN})
            WINDOW one_file AS (PARTITION BY run, {PROCESS}, path ORDER BY ts_us, "offset" NULLS FIRST))
        SELECT run, file_class, count(*) AS num_reads, count(*) FILTER (WHERE begins <> ended) AS num_random,
               count(*) FILTER (WHERE begins < ended), quantile_cont(size_bytes, 0.5),
               coalesce(sum(dur_us) FILTER (WHERE begins <> ended), 0)::BIGINT AS random_us
        FROM ordered WHERE {IS_READ} AND ended IS NOT NULL AND begins > 0 AND size_bytes < {_LARGE_BYTES}
        GROUP BY run, file_class
        HAVING num_random >= {_ENOUGH_CALLS} AND num_random >= 0.5 * num_reads
        ORDER BY random_us DESC, file_class""",
        where=f'{IS_READ} AND size_bytes < {_LARGE_BYTES} AND "offset" IS NOT NULL',
        habit="num_random",
        fix=_FIXES["scattered"],
    )


def unaligned_transfers(study: Study) -> list[TraceFinding]:
    """Return R3 for reads and writes below a MiB that begin inside a page."""
    return _find(
        study,
        "R3",
        "Transfers below 1 MiB",
        ("run", "file_class", "direction", "num_calls", "num_unaligned", "unaligned_bytes", "unaligned_us"),
        lambda rows: (
            f"{rows[0][0]}: unaligned offsets",
            (
                f"{rows[0][4]:,} of {rows[0][3]:,} {rows[0][2]}s below 1 MiB of {rows[0][1]} begin inside "
                f"a page of {format_bytes(_PAGE_BYTES)}: the pages at their ends are moved more than once."
            ),
        ),
        f"""
        SELECT run, file_class, CASE WHEN {IS_WRITE} THEN 'write' ELSE 'read' END AS direction,
               count(*) AS num_calls, count(*) FILTER (WHERE {_IS_UNALIGNED}) AS num_unaligned,
               coalesce(sum(size_bytes) FILTER (WHERE {_IS_UNALIGNED}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE {_IS_UNALIGNED}), 0)::BIGINT AS unaligned_us
        FROM {{events}} WHERE {IS_IO} AND ({IS_READ} OR {IS_WRITE}) AND "offset" IS NOT NULL
          AND size_bytes > 0 AND size_bytes < {_LARGE_BYTES} AND path IS NOT NULL
        GROUP BY run, file_class, direction
        HAVING num_unaligned >= {_ENOUGH_CALLS} AND num_unaligned >= 0.5 * num_calls
        ORDER BY unaligned_us DESC, file_class, direction""",
        where=f"({IS_READ} OR {IS_WRITE}) AND size_bytes < {_LARGE_BYTES} AND {_IS_UNALIGNED}",
        habit="calls",
        fix=_FIXES["unaligned"],
    )


def metadata_time(study: Study) -> list[TraceFinding]:
    """Return R4 if calls that transfer no bytes take much of the I/O time."""
    return _find(
        study,
        "R4",
        "Calls that move no bytes",
        ("run", "op", "num_calls", Column("share", Unit.SHARE), "metadata_share", "metadata_us", "sum_us"),
        lambda rows: (
            f"{rows[0][0]}: much time for metadata",
            (
                f"{100 * rows[0][4]:.0f} % of the time in I/O calls ({format_seconds(rows[0][5] / 1e6)}, "
                f"summed over all ranks) goes to calls that move no bytes, most of it to {rows[0][2]:,} "
                f"calls of {rows[0][1]}."
            ),
        ),
        f"""
        WITH kinds AS (
            SELECT run, op, sum({NUM_CALLS})::BIGINT AS num_calls, sum(dur_us)::BIGINT AS took,
                   sum(took) OVER (PARTITION BY run) AS whole, {_MOVES} OR {_SYNCS} AS is_transfer
            FROM {{events}} WHERE {IS_IO} GROUP BY run, op),
        others AS (
            SELECT *, sum(took) OVER of_run AS metadata, sum(num_calls) OVER of_run AS num_others
            FROM kinds WHERE NOT is_transfer WINDOW of_run AS (PARTITION BY run))
        SELECT run, op, num_calls, took / whole, metadata / whole, metadata::BIGINT, took FROM others
        WHERE whole > 0 AND metadata >= {_METADATA_SHARE} * whole AND num_others >= {_ENOUGH_CALLS}
        ORDER BY took DESC, op""",
        where=f"NOT ({_MOVES} OR {_SYNCS})",
        habit="calls",
        fix="Put many samples into one file, keep files open between reads, and remember sizes instead of "
        "asking for them.",
    )


def counted_calls(study: Study) -> list[TraceFinding]:
    """Return R7 for small, out-of-order or unaligned calls that a trace has only as counters."""
    number = {
        name: argument_sql(name) for name in ("calls", "time_us", "num_ranks", "sequential", "unaligned")
    }
    small = " + ".join(f"coalesce({argument_sql(f'sizes[{place}]')}, 0)" for place in range(4))
    has_sizes = f"{argument_sql('sizes[0]')} IS NOT NULL"
    sums = f"FROM {{events}} WHERE {IS_IO} AND NOT {IS_CALL} AND cat = 'POSIX' AND path IS NOT NULL"
    is_transfer = f"({IS_READ} OR {IS_WRITE})"
    had = {
        "small": (_DIRECTION, small, f"{is_transfer} AND {has_sizes}"),
        "scattered": (
            _DIRECTION, f"{number['calls']} - coalesce({number['sequential']}, 0)",
            f"{IS_READ} AND {has_sizes}",
        ),
        "unaligned": ("'transfer'", number["unaligned"], "true"),
    }  # fmt: skip
    kinds = " UNION ALL ".join(
        f"""SELECT '{trait}' AS trait, {direction} AS direction, run, file_class,
                   sum({number["calls"]}) FILTER ({is_transfer})::BIGINT AS calls,
                   sum({count})::BIGINT AS counted,
                   sum({number["time_us"]}) FILTER ({is_transfer})::BIGINT AS took,
                   max({number["num_ranks"]}) AS num_ranks
            {sums} AND {where} GROUP BY trait, direction, run, file_class"""
        for trait, (direction, count, where) in had.items()
    )
    findings: list[TraceFinding] = []
    for (run, trait, direction), rows in _group(
        study,
        f"""
        SELECT run, trait, direction, file_class, calls, counted, took, num_ranks FROM ({kinds})
        WHERE counted >= {_ENOUGH_CALLS} AND 2 * counted >= calls AND calls > 0
        ORDER BY took DESC, file_class""",
        3,
    ).items():
        calls, counted = (sum(row[place] for row in rows) for place in (4, 5))
        took_us = sum(row[6] * min(1.0, row[5] / row[4]) for row in rows)
        says = [
            f"{counted:,} of {calls:,} {direction}s {_TRAITS[trait]}, most of them of {rows[0][3]}.",
            f"They take about {format_seconds(took_us / 1e6)}, summed over all ranks.",
        ]
        columns = make_columns("direction", "file_class", "num_calls", "num_counted", "time_us", "num_ranks")
        evidence = Answer(
            name=f"r7_{run}_{trait}_{direction}", title="Counters", columns=columns,
            rows=[row[2:] for row in rows],
        )  # fmt: skip
        title = f"{trait} {direction}s, by counters"
        usual = sum(one.amount for one in findings if one.title == f"{study.baseline}: {title}")
        lost_us = round(took_us / max(1, *(row[7] or 1 for row in rows)))
        findings.append(
            TraceFinding(
                "R7",
                Weight.COST,
                f"{run}: {title}",
                [run],
                says,
                evidence,
                lost_us,
                _FIXES[trait],
                counted,
                usual,
            )
        )
    return findings


HABIT_RULES: Final[Mapping[str, Callable[[Study], list[TraceFinding]]]] = {
    "R1": small_reads,
    "R2": random_reads,
    "R3": unaligned_transfers,
    "R4": metadata_time,
    "R7": counted_calls,
}
"""Rules about costly habits of access. In a report, habits count in full; in a comparison, only as far as
they exceed the baseline's.
"""
