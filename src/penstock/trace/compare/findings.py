"""The findings of a comparison that are about ranks, tiers and calls, one function each.

Ranks and threads: missing ranks (F1), summed threads (F3). Tiers: a flush that reads a cache
(F4), a slower tier (F5), reads from memory (F9). Calls: more per file than the baseline (F2), small writes
(F6), repeated lookups (F7).
"""

from collections.abc import Sequence
from typing import Any

from penstock.trace.compare.trace_study import (
    PROCESS,
    Study,
    TraceFinding,
    Weight,
    format_ranges,
    longest_process_sql,
    match_rows,
    spread_over_ranks,
)
from penstock.trace.dimensions import sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, measure_groups
from penstock.units import format_bytes, format_rate, format_seconds


def missing_ranks(study: Study) -> list[TraceFinding]:
    """F1: traces of some ranks are missing, so totals are too small by as much."""
    ranks: dict[str, set[int]] = {run: set() for run in study.runs}
    for run, rank in study.events.ask("SELECT DISTINCT run, rank FROM {events} WHERE rank IS NOT NULL"):
        ranks[run].add(rank)
    fullest = max(study.runs, key=lambda run: (len(ranks[run]), run == study.baseline))
    findings = []
    for run in study.runs:
        missing = ranks[fullest] - ranks[run]
        if missing and ranks[run]:
            evidence = _writes(study, run, fullest)
            findings.append(_missing_ranks_finding(run, fullest, ranks, missing, evidence))
    return findings


def _missing_ranks_finding(
    run: str, fullest: str, ranks: dict[str, set[int]], missing: set[int], evidence: Answer
) -> TraceFinding:
    num_here, num_there = len(ranks[run]), len(ranks[fullest])
    counts = (
        f"{run} has traces of {num_here} ranks ({format_ranges(ranks[run])}), {fullest} of {num_there}: "
        f"ranks {format_ranges(missing)} are missing ({', '.join(map(str, sorted(missing)))})."
    )
    says = [
        counts,
        "The totals of this run are smaller for that reason alone; compare it by rank and by file.",
    ]
    equal = [row for row in evidence.records() if row["per_rank"] == row[f"per_rank_{fullest}"]]
    if equal:
        row = equal[0]
        says.append(
            f"It has {row['num_writes']} writes of {row['file_class']}, not {row[f'num_writes_{fullest}']}, "
            f"but as many per rank: {row['per_rank']:g}."
        )
    title = f"{run}: traces of ranks {format_ranges(missing)} are missing"
    return TraceFinding("F1", Weight.ALARM, title, [run], says, evidence)


def _writes(study: Study, run: str, fullest: str) -> Answer:
    writes = study.events.ask(f"""
        SELECT file_class,
               count(*) FILTER (WHERE run = {sql_literal(run)}), count(*) FILTER (WHERE run =
               {sql_literal(fullest)}), count(DISTINCT rank) FILTER (WHERE run = {sql_literal(run)}),
               count(DISTINCT rank) FILTER (WHERE run = {sql_literal(fullest)})
        FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND run IN ({sql_literal(run)}, {sql_literal(fullest)})
        AND path IS NOT NULL GROUP BY file_class HAVING count(DISTINCT run) = 2 ORDER BY 3 DESC, 1""")
    rows: list[Sequence[Value]] = [
        (name, here, there, ranks_here, ranks_there, here / ranks_here, there / ranks_there)
        for name, here, there, ranks_here, ranks_there in writes
    ]
    columns = make_columns(
        "file_class", "num_writes", f"num_writes_{fullest}", "num_ranks", f"num_ranks_{fullest}",
        Column("per_rank", Unit.NUMBER), Column(f"per_rank_{fullest}", Unit.NUMBER),
    )  # fmt: skip
    title = f"Writes of {run} and {fullest}, by the ranks that wrote"
    return Answer(name=f"f1_{run}", title=title, columns=columns, rows=rows)


_CONCURRENCY = 1.5


def summed_threads(study: Study) -> list[TraceFinding]:
    """F3: sums over threads that run side by side look like time, but are not."""
    columns = make_columns(
        "run", "tier", "pid", "num_threads", "sum_us", "union_us", "concurrency", "max_thread_us",
    )  # fmt: skip
    busiest: dict[tuple[str, str], tuple[Any, ...]] = {}
    for row in measure_groups(
        study.events,
        ("run", "tier", "host", "pid"),
        where=f"{IS_IO} AND tier IS NOT NULL",
        extra=["count(DISTINCT tid)"],
    ):
        run, tier, host, pid, _, sum_us, union_us, concurrency, num_threads = row
        found = (pid, num_threads, sum_us, union_us, concurrency, host)
        best = busiest.get((run, tier))
        is_busier = best is None or (-sum_us, pid) < (-best[2], best[0])
        if (concurrency or 0) >= _CONCURRENCY and is_busier:
            busiest[run, tier] = found
    findings = []
    for run, tier in sorted(busiest, key=lambda key: (study.runs.index(key[0]), key[1])):
        pid, num_threads, total, union, concurrency, host = busiest[run, tier]
        is_host = "host IS NULL" if host is None else f"host = {sql_literal(host)}"
        (longest,) = study.events.ask_one(f"""
            SELECT max(total)::BIGINT FROM (
                SELECT sum(dur_us) AS total FROM {{events}}
                WHERE {IS_IO} AND run = {sql_literal(run)} AND tier = {sql_literal(tier)} AND pid = {pid}
                  AND {is_host} GROUP BY tid)""")
        summed = (
            f"The calls of process {pid} on {tier} add up to {format_seconds(total / 1e6)}, but it was busy "
            f"with them for {format_seconds(union / 1e6)}: {concurrency:.1f} at a time, over {num_threads} "
            "threads."
        )
        single = (
            f"The longest single thread has {format_seconds(longest / 1e6)}, which is too little for the "
            "same reason. Compare unions."
        )
        says = [summed, single]
        row = (run, tier, pid, num_threads, total, union, concurrency, longest)
        evidence = Answer(name=f"f3_{run}_{tier}", title="The busiest process", columns=columns, rows=[row])
        title = f"{run}: time on {tier} is a sum over parallel threads"
        findings.append(TraceFinding("F3", Weight.ALARM, title, [run], says, evidence))
    return findings


_READ_BACK_SHARE = 0.5
_ONE_TIER_SHARE = 0.95
_LIKE_FOR_LIKE = 0.05
_MEMORY_RATE = 8e9
"""Bytes per second of a single call beyond any device of one host, for tiers without a stated rate."""

_LARGE_BYTES = 1 << 20


def cache_read_by_flush(study: Study) -> list[TraceFinding]:
    """F4: threads read back from one tier what others wrote to it, while they write to another tier."""
    rows = study.events.ask(f"""
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
        ORDER BY {study.in_order()}, tier""")
    columns = make_columns(
        "run", "tier", "written_bytes", "read_back_bytes", "read_back_us", "sum_us", "read_share",
        "flushed_to",
    )  # fmt: skip
    findings = []
    for row in rows:
        run, tier, _, read_back, read_us, total, share, other = row
        sentence = (
            f"Threads that do not write to {tier} read {format_bytes(read_back)} back from it while "
            f"{other} is written: {format_seconds(read_us / 1e6)} of the {format_seconds(total / 1e6)} "
            f"on {tier}, summed over all ranks ({100 * share:.0f} %)."
        )
        says = [sentence, f"Time on {tier} is therefore not the time of checkpoints on {tier}."]
        evidence = Answer(name=f"f4_{run}_{tier}", title="Read back", columns=columns, rows=[row])
        title = f"{run}: the flush to {other} reads {tier}"
        findings.append(TraceFinding("F4", Weight.ALARM, title, [run], says, evidence))
    return findings


def slower_tier(study: Study) -> list[TraceFinding]:
    """F5: a run that writes the same bytes to another tier than the baseline takes longer."""
    app = dict(study.events.ask(longest_process_sql(("run",), where=study.is_app)))
    written = measure_groups(
        study.events, ("run", "tier"), where=f"{IS_IO} AND {IS_WRITE}", extra=["sum(size_bytes)::BIGINT"]
    )
    total: dict[str, int] = {}
    for row in written:
        total[row[0]] = total.get(row[0], 0) + (row[-1] or 0)
    alone = {
        run: (run, tier, moved, union_us, moved * 1e6 / union_us if union_us else None)
        for run, tier, _, _, union_us, _, moved in sorted(written, key=lambda row: study.runs.index(row[0]))
        if moved is not None and moved >= _ONE_TIER_SHARE * total[run]
    }
    base = alone.get(study.baseline)
    columns = make_columns("run", "tier", "app_us", "written_bytes", "write_union_us", "busy_rate")
    findings = []
    for run, row in alone.items():
        if base is None or row[1] == base[1] or abs(row[2] / base[2] - 1) > _LIKE_FOR_LIKE:
            continue
        if app.get(run, 0) <= app.get(study.baseline, 0):
            continue
        pair = [(run_row[0], run_row[1], app[run_row[0]], *run_row[2:]) for run_row in (base, row)]
        times = (
            f"The application's event took {format_seconds(app[run] / 1e6)} on {row[1]} ({run}), and "
            f"{format_seconds(app[study.baseline] / 1e6)} on {base[1]} ({study.baseline})."
        )
        rates = (
            f"While busy, {row[1]} took {format_rate(row[4] or 0)}, {base[1]} {format_rate(base[4] or 0)}: "
            "a nearer tier is not automatically faster."
        )
        says = [times, rates]
        evidence = Answer(name=f"f5_{run}", title="One tier each", columns=columns, rows=pair)
        title = f"{run}: checkpoints are slower on {row[1]} than on {base[1]}"
        lost_us = app[run] - app[study.baseline]
        findings.append(TraceFinding("F5", Weight.NOTE, title, [run], says, evidence, lost_us))
    return findings


def unserved_reads(study: Study) -> list[TraceFinding]:
    """F9: large reads faster than any device: the page cache served them."""
    rates = study.spec.device_rates_bytes_per_s()
    cases = "".join(f" WHEN tier = {sql_literal(tier)} THEN {rate}" for tier, rate in rates.items())
    limit = f"CASE{cases} ELSE {_MEMORY_RATE} END" if cases else str(_MEMORY_RATE)
    fast = f"size_bytes > {limit} * dur_us / 1e6"
    rows = study.events.ask(f"""
        SELECT run, tier, count(*), count(*) FILTER (WHERE {fast}) AS num_fast,
               sum(size_bytes)::BIGINT AS total,
               coalesce(sum(size_bytes) FILTER (WHERE {fast}), 0)::BIGINT AS unserved,
               max(size_bytes * 1e6 / dur_us)
        FROM {{events}}
        WHERE {IS_IO} AND {IS_READ} AND tier IS NOT NULL AND size_bytes >= {_LARGE_BYTES}
        GROUP BY run, tier HAVING unserved > 0 ORDER BY {study.in_order()}, tier""")
    columns = make_columns(
        "run", "tier", "num_reads", "num_unserved", "read_bytes", "unserved_bytes",
        Column("fastest", Unit.RATE),
    )  # fmt: skip
    findings = []
    for row in rows:
        sentence = (
            f"{format_bytes(row[5])} of {format_bytes(row[4])} read from {row[1]} in {row[0]} came faster "
            "than its device can deliver: they came from the page cache."
        )
        evidence = Answer(
            name=f"f9_{row[0]}_{row[1]}", title="Reads of 1 MiB and more", columns=columns, rows=[row]
        )
        title = f"{row[0]}: reads of {row[1]} that no device served"
        findings.append(TraceFinding("F9", Weight.ALARM, title, [row[0]], [sentence], evidence))
    return findings


_SMALL_BYTES = 64 << 10
_SMALL_SHARE = 0.25
_SMALL_COUNT = 100
_EXTRA_A_FILE = 0.5
_STATS_A_FILE = 3
_OPENS_A_FILE = 2
_FILES_FOR_A_HABIT = 10
_LOOKUPS = "'stat', 'lstat', 'fstat', 'access'"


def extra_calls(study: Study) -> list[TraceFinding]:
    """F2: operations that a class of files takes here, on some tier, and not in the baseline."""
    base = sql_literal(study.baseline)
    findings = []
    for run in study.runs:
        rows = study.events.ask(f"""
            WITH calls AS (
                SELECT run, tier, file_class, op, count(*) AS num_calls, sum(dur_us)::BIGINT AS took
                FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL AND run IN ({sql_literal(run)}, {base})
                GROUP BY run, tier, file_class, op),
            files AS (
                SELECT run, tier, file_class, count(DISTINCT path) AS num_files
                FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL AND run IN ({sql_literal(run)}, {base})
                GROUP BY run, tier, file_class),
            each AS (
                SELECT *, num_calls / num_files AS a_file
                FROM calls JOIN files USING (run, tier, file_class)),
            usual AS (
                SELECT file_class, op, sum(num_calls) / sum(num_files) AS a_file
                FROM each WHERE run = {base} GROUP BY file_class, op)
            SELECT e.tier, e.file_class, e.op, e.a_file, coalesce(u.a_file, 0), e.num_files,
                   (e.took * (1 - coalesce(u.a_file, 0) / e.a_file))::BIGINT
            FROM each e LEFT JOIN usual u USING (file_class, op)
            WHERE e.run = {sql_literal(run)} AND e.file_class IN (SELECT file_class FROM usual)
              AND e.op NOT IN ('read', 'write', 'pread', 'pwrite')
              AND e.a_file - coalesce(u.a_file, 0) >= {_EXTRA_A_FILE}
            ORDER BY e.tier, e.file_class, e.op""")
        if rows and run != study.baseline:
            findings.append(_extra(study, run, rows))
    return findings


def _extra(study: Study, run: str, rows: Sequence[tuple[Any, ...]]) -> TraceFinding:
    columns = make_columns(
        "tier", "file_class", "op", Column("per_file", Unit.NUMBER),
        Column(f"per_file_{study.baseline}", Unit.NUMBER), "num_files", "extra_us",
    )  # fmt: skip
    title = f"Calls by file, {run} and {study.baseline}"
    evidence = Answer(name=f"f2_{run}", title=title, columns=columns, rows=rows)
    says = []
    for tier in dict.fromkeys(row[0] for row in rows):
        here = [row for row in rows if row[0] == tier]
        kinds = list(dict.fromkeys(row[1] for row in here))
        extra = [f"+{row[3] - row[4]:g} {row[2]}" for row in here if row[1] == kinds[0]]
        cost = sum(row[6] for row in here)
        says.append(
            f"On {tier}, each file of {kinds[0]} takes {', '.join(extra)} calls more than in "
            f"{study.baseline}; with the classes {', '.join(kinds)}, over all ranks, that is "
            f"{format_seconds(cost / 1e6)}."
        )
    title = f"{run}: more operations for each file than {study.baseline}"
    calls = match_rows(("tier", "file_class", "op"), rows)
    lost_us = spread_over_ranks(study, run, where=calls, sum_us=sum(row[6] for row in rows))
    return TraceFinding("F2", Weight.COST, title, [run], says, evidence, lost_us)


def small_writes(study: Study) -> list[TraceFinding]:
    """F6: many writes so small that their number costs more than their bytes."""
    rows = study.events.ask(f"""
        SELECT run, file_class, count(*), count(*) FILTER (WHERE size_bytes < {_SMALL_BYTES}) AS small,
               quantile_cont(size_bytes, 0.5),
               coalesce(sum(size_bytes) FILTER (WHERE size_bytes < {_SMALL_BYTES}), 0)::BIGINT,
               coalesce(sum(dur_us) FILTER (WHERE size_bytes < {_SMALL_BYTES}), 0)::BIGINT
        FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND path IS NOT NULL GROUP BY run, file_class
        HAVING small >= {_SMALL_COUNT} AND small / count(*) >= {_SMALL_SHARE}
        ORDER BY {study.in_order()}, small DESC, file_class""")
    if not rows:
        return []
    columns = make_columns(
        "run", "file_class", "num_writes", "num_small", "median_bytes", "small_bytes", "small_us",
    )  # fmt: skip
    run, kind, num, small = max(rows, key=lambda row: int(row[6]))[:4]
    says = [
        f"In {run}, {small:,} of {num:,} writes of {kind} move less than {format_bytes(_SMALL_BYTES)}.",
        "A writer that collects headers and small records in one buffer needs a fraction of the calls.",
    ]
    evidence = Answer(name="f6", title="Writes below 64 KiB", columns=columns, rows=rows)
    names = list(dict.fromkeys(row[0] for row in rows))
    lost_us = max(
        spread_over_ranks(
            study,
            name,
            where=f"{IS_WRITE} AND size_bytes < {_SMALL_BYTES}",
            sum_us=sum(row[6] for row in rows if row[0] == name),
        )
        for name in names
    )
    return [TraceFinding("F6", Weight.COST, "Small writes", names, says, evidence, lost_us)]


def redundant_lookups(study: Study) -> list[TraceFinding]:
    """F7: files that one process looks up, or opens, again and again."""
    rows = study.events.ask(f"""
        WITH looked_up AS (
            SELECT run, file_class, path, {PROCESS},
                   count(*) FILTER (WHERE op IN ({_LOOKUPS})) AS stats,
                   count(*) FILTER (WHERE op IN ('open', 'fopen')) AS opens,
                   coalesce(sum(dur_us) FILTER (WHERE op IN ({_LOOKUPS})), 0) AS took
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY run, file_class, path, {PROCESS})
        SELECT run, file_class, count(*), max(stats), max(opens), sum(stats)::BIGINT, sum(took)::BIGINT
        FROM looked_up WHERE stats >= {_STATS_A_FILE} OR opens > {_OPENS_A_FILE}
        GROUP BY run, file_class HAVING count(*) >= {_FILES_FOR_A_HABIT}
        ORDER BY {study.in_order()}, 7 DESC, file_class""")
    if not rows:
        return []
    columns = make_columns(
        "run", "file_class", "num_files", Column("max_lookups", Unit.COUNT),
        Column("max_opens", Unit.COUNT), "num_lookups", "lookup_us",
    )  # fmt: skip
    # By seconds, then by number: a habit on a fast tier costs less than a rarer one on a slow tier.
    run, kind, files, stats, opens = max(rows, key=lambda row: (int(row[6]), int(row[5])))[:5]
    does, most = ("looks up", stats) if stats >= _STATS_A_FILE else ("opens", opens)
    says = [
        f"In {run}, one process {does} each of {files:,} files of {kind} up to {most} times.",
        "The first answer is known already; on a parallel file system each further one is a round trip.",
    ]
    evidence = Answer(name="f7", title="Files looked up repeatedly", columns=columns, rows=rows)
    names = list(dict.fromkeys(row[0] for row in rows))
    lost_us = max(
        spread_over_ranks(
            study, name, where=f"op IN ({_LOOKUPS})", sum_us=sum(row[6] for row in rows if row[0] == name)
        )
        for name in names
    )
    title = "Redundant opens and stats"
    return [TraceFinding("F7", Weight.COST, title, names, says, evidence, lost_us)]
