"""All findings of a comparison, and the rules about ranks, threads, tiers and loops.

Rules here need more than one query each: missing ranks (F1), sums over threads (F3), slower tiers (F5),
ranks that are busy longer than others (F8, F13) and loops that changed (F10). `query_findings` has the other
rules. To add a finding, write a function here or there, and add it to `FINDING_RULES`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, Final

from penstock.trace.compare import query_findings
from penstock.trace.compare.slow_calls import slow_calls
from penstock.trace.compare.trace_study import (
    PROCESS,
    Study,
    TraceFinding,
    Weight,
    format_values,
    longest_process_sql,
)
from penstock.trace.dimensions import (
    IS_CALL,
    IS_IO,
    IS_READ,
    IS_RUNTIME,
    IS_WRITE,
    RANK_NAME,
    EventsView,
    sql_literal,
)
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.breakdowns import STRAGGLER_RATIO, measure_groups, ranks, union_times
from penstock.units import format_bytes, format_count, format_rate, format_seconds

_CONCURRENCY: Final = 1.5
_ONE_TIER_SHARE: Final = 0.95
_LIKE_FOR_LIKE: Final = 0.05
_LATE_COLUMNS: Final = (
    "run", "rank", "pid", "host", "num_events", "moved_bytes", "sum_us", "union_us", "to_median",
    "work_to_median",
)  # fmt: skip
_LOOP_PARTS: Final = {
    "stall": "checkpointing",
    "barrier": "waiting for other ranks",
    "wait": "waiting for data",
    "compute": "computing",
    "step": "the rest of each step",
}
"""The parts of a loop by their spans. Time in which several parts overlap belongs to the first of them: a
checkpoint in the body of a step, or in a function that computes, is not computation.
"""
_READING: Final = "reading, at the same time"
_READ_BYTES: Final = "bytes read"
_WAIT_IN_IO: Final = "waiting with I/O under way"
_WORTH_SAYING: Final = 0.02
_WORTH_FIXING: Final = 0.05
_CHANGED: Final = 1.25
_READS_DATA: Final = 0.1
_FIXES: Final = {
    "wait": "Read further ahead, with more workers or threads, or bring the data closer.",
    "barrier": "Look at the rank that arrives last: its I/O, its share of the data, its host.",
    "stall": "Write checkpoints in the background, or to a nearer tier first.",
}
"""Fixes for the parts of a loop that do no work."""


def missing_ranks(study: Study) -> list[TraceFinding]:
    """Return F1 if traces of some ranks are missing, so that totals are too small."""
    ranks_of: dict[str, set[int]] = {run: set() for run in study.runs}
    for run, rank in study.events.ask("SELECT DISTINCT run, rank FROM {events} WHERE rank IS NOT NULL"):
        ranks_of[run].add(rank)
    fullest = max(study.runs, key=lambda run: (len(ranks_of[run]), run == study.baseline))
    findings = []
    for run, here in ranks_of.items():
        missing = ranks_of[fullest] - here
        if not (missing and here):
            continue
        says = [
            (
                f"{run} has traces of {len(here)} ranks ({format_values(here)}), {fullest} of "
                f"{len(ranks_of[fullest])}: ranks {format_values(missing)} are missing "
                f"({', '.join(map(str, sorted(missing)))})."
            ),
            "The totals of this run are smaller for that reason alone; compare it by rank and by file.",
        ]
        is_here, is_there = (f"run = {sql_literal(name)}" for name in (run, fullest))
        rows = study.events.ask(f"""
            SELECT file_class, count(*) FILTER (WHERE {is_here}) AS here,
                   count(*) FILTER (WHERE {is_there}) AS there,
                   count(DISTINCT rank) FILTER (WHERE {is_here}) AS ranks_here,
                   count(DISTINCT rank) FILTER (WHERE {is_there}) AS ranks_there,
                   here / ranks_here, there / ranks_there
            FROM {{events}} WHERE {IS_IO} AND {IS_WRITE} AND ({is_here} OR {is_there}) AND path IS NOT NULL
            GROUP BY file_class HAVING count(DISTINCT run) = 2 ORDER BY there DESC, file_class""")
        equal = next((row for row in rows if row[5] == row[6]), None)
        if equal:
            says.append(
                f"It has {equal[1]} writes of {equal[0]}, not {equal[2]}, but as many per rank: {equal[5]:g}."
            )
        columns = make_columns(
            "file_class", "num_writes", f"num_writes_{fullest}", "num_ranks", f"num_ranks_{fullest}",
            Column("per_rank", Unit.NUMBER), Column(f"per_rank_{fullest}", Unit.NUMBER),
        )  # fmt: skip
        title = f"Writes of {run} and {fullest}, by the ranks that wrote"
        evidence = Answer(name=f"f1_{run}", title=title, columns=columns, rows=rows)
        title = f"{run}: traces of ranks {format_values(missing)} are missing"
        findings.append(TraceFinding("F1", Weight.ALARM, title, [run], says, evidence))
    return findings


def summed_threads(study: Study) -> list[TraceFinding]:
    """Return F3 if threads ran side by side: their sums look like elapsed time, but are not."""
    busiest: dict[tuple[str, str], tuple[Any, ...]] = {}
    rows = measure_groups(
        study.work,
        ("run", "tier", "host", "pid"),
        where=f"{IS_IO} AND tier IS NOT NULL",
        extra=["count(DISTINCT tid)"],
    )
    for run, tier, *row in sorted(rows, key=lambda row: (study.runs.index(row[0]), row[1], -row[5], row[3])):
        if (row[5] or 0) >= _CONCURRENCY:
            busiest.setdefault((run, tier), tuple(row))
    columns = make_columns(
        "run", "tier", "pid", "num_threads", "sum_us", "union_us", "concurrency", "max_thread_us",
    )  # fmt: skip
    findings = []
    longest = {
        tuple(key): longest_us
        for *key, longest_us in study.work.ask(f"""
            SELECT run, tier, host, pid, max(total)::BIGINT FROM (
                SELECT run, tier, host, pid, sum(dur_us) AS total FROM {{events}}
                WHERE {IS_IO} AND tier IS NOT NULL GROUP BY run, tier, host, pid, tid)
            GROUP BY run, tier, host, pid""")
    }
    for (run, tier), (host, pid, _, sum_us, union_us, concurrency, num_threads) in busiest.items():
        longest_us = longest[run, tier, host, pid]
        says = [
            (
                f"The calls of process {pid} on {tier} add up to {_seconds(sum_us)}, but it was busy with "
                f"them for {_seconds(union_us)}: {concurrency:.1f} at a time, over {num_threads} threads."
            ),
            (
                f"The longest single thread has {_seconds(longest_us)}, which leaves out the other threads. "
                "Compare unions."
            ),
        ]
        row = [run, tier, pid, num_threads, sum_us, union_us, concurrency, longest_us]
        evidence = Answer(name=f"f3_{run}_{tier}", title="The busiest process", columns=columns, rows=[row])
        title = f"{run}: time on {tier} is a sum over parallel threads"
        findings.append(TraceFinding("F3", Weight.NOTE, title, [run], says, evidence))
    return findings


def slower_tier(study: Study) -> list[TraceFinding]:
    """Return F5 if a run takes longer to write the same bytes to a tier other than the baseline's."""
    app_us: Counter[str] = Counter(dict(study.events.ask(longest_process_sql(("run",), where=study.is_app))))
    written = measure_groups(
        study.events, ("run", "tier"), where=f"{IS_IO} AND {IS_WRITE}", extra=["sum(size_bytes)::BIGINT"]
    )
    totals: Counter[str] = Counter()
    for run, *_, moved in written:
        totals[run] += moved or 0
    alone = {
        run: (run, tier, app_us[run], moved, union_us, moved * 1e6 / union_us if union_us else None)
        for run, tier, _, _, union_us, _, moved in sorted(written, key=lambda row: study.runs.index(row[0]))
        if moved is not None and moved >= _ONE_TIER_SHARE * totals[run]
    }
    base = alone.get(study.baseline)
    columns = make_columns("run", "tier", "app_us", "written_bytes", "write_union_us", "busy_rate")
    findings = []
    for run, row in alone.items():
        if (
            base is None
            or row[1] == base[1]
            or abs(row[3] / base[3] - 1) > _LIKE_FOR_LIKE
            or row[2] <= base[2]
        ):
            continue
        says = [
            (
                f"The application's event took {_seconds(row[2])} on {row[1]} ({run}), and "
                f"{_seconds(base[2])} on {base[1]} ({study.baseline})."
            ),
            (
                f"While busy, {row[1]} took {format_rate(row[5] or 0)}, {base[1]} "
                f"{format_rate(base[5] or 0)}: a nearer tier is not automatically faster."
            ),
        ]
        evidence = Answer(name=f"f5_{run}", title="One tier each", columns=columns, rows=[base, row])
        title = f"{run}: checkpoints are slower on {row[1]} than on {base[1]}"
        findings.append(TraceFinding("F5", Weight.NOTE, title, [run], says, evidence, row[2] - base[2]))
    return findings


def late_ranks(study: Study, *, are_stragglers: bool) -> list[TraceFinding]:
    """Return F8 for ranks slower than their work explains, or F13 for ranks slower because they do more.

    A checkpoint waits for the slowest rank, whatever makes it slow.
    """
    code, title = ("F8", "stragglers") if are_stragglers else ("F13", "more work on some ranks")
    findings: list[TraceFinding] = []
    records: list[dict[str, Any]] = [
        row for row in ranks(study.work).records() if row["to_median"] is not None
    ]
    for run in study.runs:
        of_run = [row for row in records if row["run"] == run]
        late = [
            {**row, "busy_rate": row["moved_bytes"] * 1e6 / row["union_us"]}
            for row in of_run
            if row["to_median"] > STRAGGLER_RATIO and row["is_straggler"] == are_stragglers
        ]
        if not late:
            continue
        usual_us, usual_bytes = (median(row[name] for row in of_run) for name in ("union_us", "moved_bytes"))
        worst = max(late, key=lambda row: row["to_median"])
        numbers = [row["rank"] for row in late if row["rank"] is not None]
        # Numbers of processes are in no meaningful order.
        pids = [str(row["pid"]) for row in late]
        names = f"rank {format_values(numbers)}" if numbers else f"process {format_values(pids)}"
        name = f"process {worst['pid']}" if worst["rank"] is None else f"rank {worst['rank']}"
        rate = format_rate(worst["busy_rate"])
        if are_stragglers:
            says = (
                f"Busy with I/O for more than {STRAGGLER_RATIO:g} times the median, and for longer "
                f"than their work explains: {names}; longest {name}, {_seconds(worst['union_us'])} "
                f"({worst['to_median']:.2f} times) for {worst['work_to_median']:.2f} times the work, at "
                f"{rate}."
            )
        else:
            work = f"makes {worst['work_to_median']:.2f} times the calls"
            if usual_bytes:
                moved, usual = format_bytes(worst["moved_bytes"]), format_bytes(round(usual_bytes))
                work = f"moves {moved}, not {usual}"
            says = (
                f"More work than on the median rank: {names}. {name.capitalize()} {work}, and is busy "
                f"for {_seconds(worst['union_us'])}, not {_seconds(usual_us)}, at {rate}, not "
                f"{format_rate(usual_bytes * 1e6 / usual_us)}: the others wait for it, but it is not slow."
            )
        rows = [[row[column] for column in (*_LATE_COLUMNS, "busy_rate")] for row in late]
        columns = make_columns(*_LATE_COLUMNS, "busy_rate")
        evidence = Answer(name=f"{code.lower()}_{run}", title="Late ranks", columns=columns, rows=rows)
        lost_us = round(max(row["union_us"] - usual_us for row in late))
        full = f"{run}: {title}, {names}"
        of_base_us = sum(one.amount for one in findings if one.runs == [study.baseline])
        findings.append(
            TraceFinding(code, Weight.COST, full, [run], [says], evidence, lost_us, "", lost_us, of_base_us)
        )
    return findings


def changed_loop(study: Study) -> list[TraceFinding]:
    """Return F10 if a rank spends longer, or shorter, in some part of its loop than in the baseline.

    A step consists of waiting for data, computing, and waiting for other ranks; checkpoints come between
    steps. These parts follow one another on each rank, so their seconds add up. Reading runs at the same
    time. It costs only the waiting that it causes, and is reported as the reason for that waiting.
    """
    loops = measure_loops(study)
    findings = []
    for run in study.runs:
        if run != study.baseline and {run, study.baseline} <= loops.keys():
            findings += _compare_loops(study, run, *loops[run], *loops[study.baseline])
    return findings


_LOOPS: Final = "penstock_loops"
"""The table of the spans of each rank's loop: run, rank_name, ts_us, dur_us, end_us and `part`."""


def measure_loops(study: Study) -> dict[str, tuple[float, dict[str, float]]]:
    """Return, by run, the steps of an average rank, its time in each part of the loop, and what it read.

    Runs that recorded neither waiting nor computing nor steps have no loop. Processes that record no step of
    a loop that others record are workers, whose computing is not part of the loop. In runs that record no
    stalls, a checkpoint is part of the loop if its thread is the loop's; a checkpoint in another thread or
    process is hidden.
    """
    is_saving = "(phase = 'app_io' AND contains(cat, 'checkpoint'))"
    events = EventsView(study.events.connection, _LOOPS)
    events.ask(f"""
        CREATE OR REPLACE TEMP TABLE {_LOOPS} AS
        SELECT run, rank_name, ts_us, dur_us, end_us,
               CASE part WHEN 'saving' THEN 'stall' ELSE part END AS part
        FROM (
            SELECT *, bool_or(part IN ('wait', 'step')) OVER (PARTITION BY run) AS has_steps,
                   bool_or(part IN ('wait', 'step')) OVER (PARTITION BY run, {PROCESS}) AS is_stepping,
                   bool_or(part = 'stall') OVER (PARTITION BY run) AS has_stalls,
                   bool_or(part <> 'saving') OVER (PARTITION BY run, {PROCESS}, tid) AS is_looping
            FROM (SELECT run, {RANK_NAME} AS rank_name, {PROCESS}, tid, ts_us, dur_us, end_us,
                         CASE WHEN {is_saving} THEN 'saving' WHEN phase = 'loop' THEN 'step' ELSE phase END
                             AS part
                  FROM {study.events.relation}
                  WHERE phase IN ('wait', 'compute', 'barrier', 'stall') OR {is_saving}
                     OR phase = 'loop' AND cat NOT IN ('epoch', 'run')))
        WHERE (is_stepping OR NOT has_steps) AND (part <> 'saving' OR is_looping AND NOT has_stalls)
        ORDER BY ts_us""")
    counted = {
        (run, part): num_spans
        for run, part, num_spans in events.ask("SELECT run, part, count(*) FROM {events} GROUP BY run, part")
    }
    num_ranks = dict(events.ask("SELECT run, count(DISTINCT rank_name) FROM {events} GROUP BY run"))
    # The time covered by each part and all earlier ones; a part's own time is what it adds.
    covers = [f"part IN {(*parts, '')}" for parts in accumulate((part,) for part in _LOOP_PARTS)]
    amounts: dict[str, Counter[str]] = {run: Counter() for run in num_ranks}
    for (run, _), covered in union_times(events, ("run", "rank_name"), *covers).items():
        own = (until - before for before, until in pairwise((0, *covered)))
        amounts[run].update(dict(zip(_LOOP_PARTS.values(), own, strict=True)))
    is_read, is_wait = f"{IS_IO} AND {IS_READ}", "phase = 'wait'"
    sets = (is_read, IS_IO, is_wait, f"({IS_IO} OR {is_wait})")
    for (run, _), times in union_times(study.work, ("run", "rank_name"), *sets).items():
        read_us, io_us, wait_us, either_us = times
        if run in amounts:
            amounts[run].update({_READING: read_us, _WAIT_IN_IO: io_us + wait_us - either_us})
    for run, moved in study.work.ask(
        f"SELECT run, sum(size_bytes)::BIGINT FROM {{events}} WHERE {is_read} GROUP BY run"
    ):
        if run in amounts:
            amounts[run][_READ_BYTES] = moved or 0
    loops = {}
    for run, of_run in amounts.items():
        # A step waits once, but may compute in several pieces.
        steps_of = [counted[run, part] for part in ("wait", "step", "compute") if (run, part) in counted]
        if steps_of:
            of_rank = {name: amount / num_ranks[run] for name, amount in of_run.items() if amount}
            loops[run] = (steps_of[0] / num_ranks[run], of_rank)
    return loops


def _compare_loops(  # noqa: PLR0917 - two loops
    study: Study,
    run: str,
    num_steps: float,
    here: Mapping[str, float],
    base_steps: float,
    base: Mapping[str, float],
) -> list[TraceFinding]:
    """Return a finding if some part differs by a share of the baseline's loop that is worth reporting."""
    share = num_steps / base_steps if num_steps and base_steps else 1.0
    base = {name: amount * share for name, amount in base.items()}
    parts = [name for name in _LOOP_PARTS.values() if name in here or name in base]
    changes = {name: here.get(name, 0.0) - base.get(name, 0.0) for name in parts}
    least_us = _WORTH_SAYING * sum(base.get(name, 0.0) for name in parts)
    notable = sorted(
        (name for name in parts if abs(changes[name]) > least_us), key=lambda name: -changes[name]
    )
    if not notable:
        return []
    is_slower = changes[notable[0]] > 0
    worst = notable[0] if is_slower else notable[-1]
    each = [
        f"{name} {_seconds(here.get(name, 0.0))}, not {_seconds(base.get(name, 0.0))} "
        f"({changes[name] / 1e6:+.3f} s)"
        for name in notable
    ]
    says = [f"Over {num_steps:,.0f} steps, a rank of {run} spent on {'; on '.join(each)}."]
    if round(num_steps) != round(base_steps):
        says.append(f"{study.baseline} took {base_steps:,.0f} steps; its seconds are scaled to as many.")
    if worst == _LOOP_PARTS["wait"] and here.get(_READING) and base.get(_READING):
        rate, base_rate = (loop.get(_READ_BYTES, 0.0) * 1e6 / loop[_READING] for loop in (here, base))
        says.append(
            f"Reading kept it busy for {_seconds(here[_READING])} "
            f"({format_bytes(round(here.get(_READ_BYTES, 0)))} at {format_rate(rate)}); in {study.baseline} "
            f"for {_seconds(base[_READING])} ({format_bytes(round(base.get(_READ_BYTES, 0)))} at "
            f"{format_rate(base_rate)}). {_explain_waiting(study, run, here, base)}".rstrip()
        )
    rows: list[Sequence[Value]] = []
    for name in [*sorted(parts, key=lambda part: -changes[part]), _READING]:
        here_us, base_us = here.get(name, 0.0), base.get(name, 0.0)
        if name != _READING or here_us or base_us:
            per_step_us = round(here_us / num_steps) if num_steps else None
            rows.append((name, round(here_us), round(base_us), round(here_us - base_us), per_step_us))
    columns = make_columns(
        "part", "here_us", Column(f"{study.baseline}_us", Unit.MICROSECONDS), "lost_us", "per_step_us",
    )  # fmt: skip
    title = f"The loops of {run} and {study.baseline}, of an average rank"
    evidence = Answer(name=f"f10_{run}", title=title, columns=columns, rows=rows)
    change = f"{_seconds(abs(changes[worst]))} {'more' if is_slower else 'less'}"
    title = f"{run}: {worst} takes {change} than in {study.baseline}"
    weight = Weight.COST if is_slower else Weight.NOTE
    lost_us = round(changes[worst]) if is_slower else None
    return [TraceFinding("F10", weight, title, [run], says, evidence, lost_us)]


def _explain_waiting(study: Study, run: str, here: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Say why a loop waits longer: slower or more reads, work after reads, less computation to hide reads."""
    slower = query_findings.compare_reads(study, run)
    waits = [loop.get(_LOOP_PARTS["wait"], 0.0) - loop.get(_WAIT_IN_IO, 0.0) for loop in (here, base)]
    more_us = here.get(_LOOP_PARTS["wait"], 0.0) - base.get(_LOOP_PARTS["wait"], 0.0)
    computed = [loop.get(_LOOP_PARTS["compute"], 0.0) for loop in (here, base)]
    if slower and slower[0] > _CHANGED * slower[1]:
        here_us, base_us = map(_seconds, slower)
        return f"Reads are slower: {here_us} per call of equal size, not {base_us}."
    if here.get(_READ_BYTES, 0.0) > base.get(_READ_BYTES, 0.0) * _CHANGED:
        return "There is more to read."
    if waits[0] - waits[1] > more_us / 2:
        return (
            f"No I/O was under way for {_seconds(waits[0])} of the waiting, in {study.baseline} for "
            f"{_seconds(waits[1])}: the time goes to what follows reading, such as decompression or decoding."
        )
    if computed[0] * _CHANGED < computed[1]:
        return "Reads are as fast as before: there is less computation to hide them behind."
    return ""


def _seconds(elapsed_us: float) -> str:
    return format_seconds(elapsed_us / 1e6)


def changed_readers(study: Study) -> list[TraceFinding]:
    """Return F15 if the number of threads or processes reading for a rank differs from the baseline's."""
    is_read = f"{IS_IO} AND {IS_READ} AND {IS_CALL}"
    readers = {
        run: (num_threads, num_processes)
        for run, num_threads, num_processes in study.work.ask(f"""
            SELECT run, sum(num_threads) / count(*), sum(num_processes) / count(*) FROM (
                SELECT run, rank_name, count(*) AS num_threads, count(DISTINCT ({PROCESS})) AS num_processes
                FROM (SELECT run, rank_name, {PROCESS}, tid, count(*) AS num_reads,
                             max(num_reads) OVER (PARTITION BY run, rank_name) AS most_reads
                      FROM {{events}} WHERE {is_read} GROUP BY run, rank_name, {PROCESS}, tid)
                -- One that reads a description does not count as a reader.
                WHERE num_reads >= {_READS_DATA} * most_reads GROUP BY run, rank_name)
            GROUP BY run""")
    }
    moved = "coalesce(sum(size_bytes), 0)::BIGINT"
    busy: dict[str, Counter[str]] = {}
    for run, _, _, _, union_us, _, read_bytes in measure_groups(
        study.work, ("run", "rank_name"), where=is_read, extra=[moved]
    ):
        busy.setdefault(run, Counter()).update({"us": union_us, "bytes": read_bytes, "ranks": 1})
    findings = []
    base = study.baseline
    for run in study.runs:
        if run == base or not {run, base} <= readers.keys():
            continue
        here, there = readers[run][0], readers[base][0]
        if max(here, there) < _CHANGED * min(here, there):
            continue
        # The time for which the baseline's ranks would be busy with as many bytes.
        usual_us = busy[base]["us"] * (
            busy[run]["bytes"] / busy[base]["bytes"] if busy[base]["bytes"] else 1.0
        )
        lost_us = round((busy[run]["us"] - usual_us) / busy[run]["ranks"]) if here < there else 0
        fewer = "fewer" if here < there else "more"
        rows = [
            (name, *readers[name], round(busy[name]["us"] / busy[name]["ranks"]), busy[name]["bytes"])
            for name in (run, base)
        ]
        says = (
            f"{here:.3g} threads in {readers[run][1]:.3g} processes read for each rank; in {base}, "
            f"{there:.3g} in {readers[base][1]:.3g}; reads were under way for {_seconds(rows[0][3])}, "
            f"not {_seconds(rows[1][3])}."
        )
        columns = make_columns(
            "run", Column("threads", Unit.NUMBER), Column("processes", Unit.NUMBER), "union_us", "read_bytes"
        )
        evidence = Answer(name=f"f15_{run}", title="Readers of a rank", columns=columns, rows=rows)
        weight = Weight.COST if lost_us > 0 else Weight.NOTE
        title = f"{run}: {fewer} readers than in {base}"
        findings.append(TraceFinding("F15", weight, title, [run], [says], evidence, max(lost_us, 0) or None))
    return findings


def loop_waits(study: Study) -> list[TraceFinding]:
    """Return R5 if the loop waits for data, other ranks or checkpoints for a noteworthy share of its time."""
    findings = []
    for run, (num_steps, spent) in measure_loops(study).items():
        whole_us = sum(spent.get(name, 0.0) for name in _LOOP_PARTS.values())
        rows = [(name, round(spent[name])) for name in _LOOP_PARTS.values() if spent.get(name)]
        for part, fix in _FIXES.items():
            name = _LOOP_PARTS[part]
            if spent.get(name, 0.0) < _WORTH_FIXING * whole_us:
                continue
            took, whole = _seconds(spent[name]), _seconds(whole_us)
            says = [f"Over {num_steps:,.0f} steps, a rank spent {took} of {whole} on {name}."]
            if part == "wait" and spent.get(_READING):
                says.append(f"I/O was under way for {_seconds(spent.get(_WAIT_IN_IO, 0.0))} of it.")
            columns = make_columns("part", "of_rank_us")
            evidence = Answer(
                name=f"r5_{run}_{part}", title="The loop of an average rank", columns=columns, rows=rows
            )
            title = f"{run}: {name} takes {spent[name] / whole_us:.0%} of the loop"
            lost_us = round(spent[name])
            findings.append(TraceFinding("R5", Weight.COST, title, [run], says, evidence, lost_us, fix))
    return findings


def unhidden_io(study: Study) -> list[TraceFinding]:
    """Return R6 for I/O that no computation of its rank hides, in a program that records no waiting."""
    is_compute = "phase = 'compute'"
    spent: dict[str, Counter[str]] = {}
    for (run, _), (io_us, compute_us, either_us) in union_times(
        study.work, ("run", "rank_name"), IS_IO, is_compute, f"({IS_IO} OR {is_compute})"
    ).items():
        if io_us and compute_us:
            amounts = {
                "io_us": io_us,
                "compute_us": compute_us,
                "alone_us": either_us - compute_us,
                "ranks": 1,
            }
            spent.setdefault(run, Counter()).update(amounts)
    waiting = {run for (run,) in study.events.ask("SELECT DISTINCT run FROM {events} WHERE phase = 'wait'")}
    findings = []
    for run, sums in spent.items():
        if run in waiting:
            continue
        io_us, compute_us, alone_us = (
            round(sums[name] / sums["ranks"]) for name in ("io_us", "compute_us", "alone_us")
        )
        hidden = _seconds(io_us - alone_us)
        says = [f"A rank had I/O under way for {_seconds(io_us)}, and computed for {hidden} of that."]
        columns = make_columns("run", "io_us", "compute_us", "io_alone_us")
        evidence = Answer(
            name=f"r6_{run}",
            title="An average rank",
            columns=columns,
            rows=[(run, io_us, compute_us, alone_us)],
        )
        title = f"{run}: {alone_us / io_us:.0%} of the I/O is not hidden by computation"
        findings.append(
            TraceFinding("R6", Weight.COST, title, [run], says, evidence, alone_us, _FIXES["wait"])
        )
    return findings


FINDING_RULES: Final[Mapping[str, Callable[[Study], list[TraceFinding]]]] = {
    "F1": missing_ranks,
    "F2": query_findings.extra_calls,
    "F3": summed_threads,
    "F4": query_findings.cache_read_by_flush,
    "F5": slower_tier,
    "F6": query_findings.small_writes,
    "F7": query_findings.redundant_lookups,
    "F8": partial(late_ranks, are_stragglers=True),
    "F9": query_findings.unserved_reads,
    "F10": changed_loop,
    "F11": query_findings.changed_sizes,
    "F12": query_findings.calls_after_close,
    "F13": partial(late_ranks, are_stragglers=False),
    "F14": slow_calls,
    "F15": changed_readers,
}
RUN_RULES: Final[Mapping[str, Callable[[Study], list[TraceFinding]]]] = {
    **query_findings.HABIT_RULES,
    "R5": loop_waits,
    "R6": unhidden_io,
}
"""The rules that find what costs time in a single run."""


def find_all(study: Study) -> list[TraceFinding]:
    """Return the findings of every rule, in the order of the report.

    When runs are compared, a habit (a costly pattern of access) counts only as far as it exceeds the
    baseline's. The baseline's own habits become notes without lost time.
    """
    rules: Iterable[Callable[[Study], list[TraceFinding]]] = FINDING_RULES.values()
    if len(study.runs) > 1:
        rules = [*rules, *query_findings.HABIT_RULES.values()]
    found = [finding for rule in rules for finding in rule(study)]
    return rank_findings(_keep_relevant(study, _compare_habits(study, _leave_out_explained(found))))


def find_in_runs(study: Study) -> list[TraceFinding]:
    """Return the findings of a report, in which each run's habits and the waits of its loop count in full."""
    rules = [*FINDING_RULES.values(), *RUN_RULES.values()]
    found = [finding for rule in rules for finding in rule(study)]
    return rank_findings(_keep_relevant(study, _leave_out_explained(found)))


def say_left_out(study: Study) -> list[str]:
    """Return a line for each run about the calls of its start-up and runtime, which findings leave out."""
    rows = study.events.ask(f"""
        SELECT run, count(*), sum(dur_us)::DOUBLE FROM {{events}} WHERE {IS_RUNTIME} GROUP BY run
        ORDER BY {study.in_order()}""")
    return [
        f"Findings leave out start-up and runtime of {run} (modules, sockets, pipes, shared memory): "
        f"{format_count(num_calls, 'call')}, which took {_seconds(took_us)}."
        for run, num_calls, took_us in rows
    ]


def _leave_out_explained(found: Sequence[TraceFinding]) -> list[TraceFinding]:
    """Leave out findings about stragglers whose lost time slow files explain."""
    of_files = [one for one in found if one.evidence.name.endswith("_files") and one.code == "F14"]
    return [
        one
        for one in found
        if one.code != "F8"
        or not any(
            cause.runs == one.runs and 2 * (cause.lost_us or 0) > (one.lost_us or 0) for cause in of_files
        )
    ]


def _compare_habits(study: Study, found: Sequence[TraceFinding]) -> list[TraceFinding]:
    """Count habits only as far as they exceed the baseline's; findings about the baseline become notes."""
    if len(study.runs) == 1:
        return list(found)
    loops = measure_loops(study)
    base_steps = loops.get(study.baseline, (0.0, {}))[0]
    compared = []
    for one in found:
        (run, *_) = one.runs
        if one.weight is Weight.COST and run == study.baseline:
            compared.append(replace(one, weight=Weight.NOTE, lost_us=None))
        elif one.usual_amount:
            share = loops[run][0] / base_steps if run in loops and base_steps else 1.0
            excess = max(0.0, 1 - one.usual_amount * share / one.amount)
            lost_us = round((one.lost_us or 0) * excess)
            compared.append(replace(one, lost_us=lost_us))
        else:
            compared.append(one)
    return compared


def _keep_relevant(study: Study, found: Sequence[TraceFinding]) -> list[TraceFinding]:
    """Leave out findings that cost less than 2 % of the time of their run."""
    spans = dict(study.work.ask("SELECT run, max(end_us) - min(ts_us) FROM {events} GROUP BY run"))
    return [
        one
        for one in found
        if one.lost_us is None or one.lost_us >= _WORTH_SAYING * max(spans.get(run, 0) for run in one.runs)
    ]


def rank_findings(findings: Sequence[TraceFinding]) -> list[TraceFinding]:
    """Sort findings: alarms first, because misleading numbers affect the others; then by time lost."""
    weights = list(Weight)
    return sorted(findings, key=lambda finding: (weights.index(finding.weight), -(finding.lost_us or 0)))
