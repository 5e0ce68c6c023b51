"""All findings of a comparison, and those about ranks, threads, tiers and loops.

These need more than one query each: missing ranks (F1), sums over threads (F3), slower tiers (F5), ranks that
are busy longer than others (F8, F13) and loops that changed (F10). `query_findings` has the others. To add a
finding, write a function here or there, and add it to `FINDING_RULES`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final

from penstock.trace.compare import query_findings
from penstock.trace.compare.trace_study import (
    PROCESS,
    Study,
    TraceFinding,
    Weight,
    format_ranges,
    longest_process_sql,
)
from penstock.trace.dimensions import IS_IO, IS_READ, IS_WRITE, sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.breakdowns import STRAGGLER_RATIO, measure_groups, ranks
from penstock.units import format_bytes, format_rate, format_seconds

_CONCURRENCY: Final = 1.5
_ONE_TIER_SHARE: Final = 0.95
_LIKE_FOR_LIKE: Final = 0.05
_LATE_COLUMNS: Final = (
    "run", "rank", "pid", "host", "num_events", "moved_bytes", "sum_us", "union_us", "to_median",
    "work_to_median",
)  # fmt: skip
_LOOP_PARTS: Final = {
    "wait": "waiting for data",
    "compute": "computing",
    "barrier": "waiting for other ranks",
    "stall": "checkpointing",
}
"""The parts of a loop by the phases of their spans."""
_READING: Final = "reading, at the same time"
_READ_BYTES: Final = "bytes read"
_WORTH_SAYING: Final = 0.02
_CHANGED: Final = 1.25


def missing_ranks(study: Study) -> list[TraceFinding]:
    """F1: traces of some ranks are missing, which makes totals too small."""
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
                f"{run} has traces of {len(here)} ranks ({format_ranges(here)}), {fullest} of "
                f"{len(ranks_of[fullest])}: ranks {format_ranges(missing)} are missing "
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
        title = f"{run}: traces of ranks {format_ranges(missing)} are missing"
        findings.append(TraceFinding("F1", Weight.ALARM, title, [run], says, evidence))
    return findings


def summed_threads(study: Study) -> list[TraceFinding]:
    """F3: sums over threads that run side by side look like time, but are not."""
    busiest: dict[tuple[str, str], tuple[Any, ...]] = {}
    rows = measure_groups(
        study.events,
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
        for *key, longest_us in study.events.ask(f"""
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
                f"The longest single thread has {_seconds(longest_us)}, which is too little for the same "
                "reason. Compare unions."
            ),
        ]
        row = [run, tier, pid, num_threads, sum_us, union_us, concurrency, longest_us]
        evidence = Answer(name=f"f3_{run}_{tier}", title="The busiest process", columns=columns, rows=[row])
        title = f"{run}: time on {tier} is a sum over parallel threads"
        findings.append(TraceFinding("F3", Weight.ALARM, title, [run], says, evidence))
    return findings


def slower_tier(study: Study) -> list[TraceFinding]:
    """F5: a run that writes the same bytes to another tier than the baseline takes longer."""
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
    """F8: ranks that take longer than their work explains. F13: those that take longer because they do more.

    A checkpoint waits for the slowest, whatever its reason.
    """
    code, title = ("F8", "Stragglers") if are_stragglers else ("F13", "More work on some ranks")
    says, rows, lost_us, runs = [], [], 0.0, []
    records: list[dict[str, Any]] = [
        row for row in ranks(study.events).records() if row["to_median"] is not None
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
        pids = [row["pid"] for row in late]
        names = f"rank {format_ranges(numbers)}" if numbers else f"process {format_ranges(pids)}"
        name = f"process {worst['pid']}" if worst["rank"] is None else f"rank {worst['rank']}"
        rate = format_rate(worst["busy_rate"])
        if are_stragglers:
            says.append(
                f"{run}: busy with I/O for more than {STRAGGLER_RATIO:g} times the median, and for longer "
                f"than their work explains: {names}; longest {name}, {_seconds(worst['union_us'])} "
                f"({worst['to_median']:.2f} times) for {worst['work_to_median']:.2f} times the work, at "
                f"{rate}."
            )
        else:
            work = f"makes {worst['work_to_median']:.2f} times the calls"
            if usual_bytes:
                moved, usual = format_bytes(worst["moved_bytes"]), format_bytes(round(usual_bytes))
                work = f"moves {moved}, not {usual}"
            says.append(
                f"{run}: more work than on the median rank: {names}. {name.capitalize()} {work}, and is busy "
                f"for {_seconds(worst['union_us'])}, not {_seconds(usual_us)}, at {rate}, not "
                f"{format_rate(usual_bytes * 1e6 / usual_us)}: the others wait for it, but it is not slow."
            )
        runs.append(run)
        rows += [[row[column] for column in (*_LATE_COLUMNS, "busy_rate")] for row in late]
        lost_us = max(lost_us, *(row["union_us"] - usual_us for row in late))
    if not runs:
        return []
    columns = make_columns(*_LATE_COLUMNS, "busy_rate")
    evidence = Answer(name=code.lower(), title=title, columns=columns, rows=rows)
    return [TraceFinding(code, Weight.COST, title, runs, says, evidence, round(lost_us))]


def changed_loop(study: Study) -> list[TraceFinding]:
    """F10: a rank spends longer, or shorter, in some part of its loop than in the baseline.

    A step is waiting for data, computing, and waiting for other ranks; between steps stand checkpoints. These
    parts follow one another on each rank, so their seconds add up. Reading runs at the same time: it costs
    only the waiting that it causes, and is reported as the reason of that.
    """
    loops = _measure_loops(study)
    findings = []
    for run in study.runs:
        if run != study.baseline and {run, study.baseline} <= loops.keys():
            findings += _compare_loops(study, run, *loops[run], *loops[study.baseline])
    return findings


def _measure_loops(study: Study) -> dict[str, tuple[float, dict[str, float]]]:
    """The steps of an average rank, its time in each part of the loop, and what it read, by run.

    Runs that recorded neither waiting nor computing have no loop.
    """
    is_checkpoint = "(phase = 'app_io' AND contains(cat, 'checkpoint'))"
    spans: dict[str, dict[str, tuple[int, int, int]]] = {}
    for run, part, took_us, num_spans, num_ranks in study.events.ask(f"""
        SELECT run, CASE WHEN {is_checkpoint} THEN 'saving' ELSE phase END AS part, sum(dur_us)::BIGINT,
               count(*), coalesce(nullif(count(DISTINCT rank), 0), count(DISTINCT ({PROCESS})))
        FROM {{events}} WHERE phase IN {tuple(_LOOP_PARTS)} OR {is_checkpoint} GROUP BY run, part"""):
        spans.setdefault(run, {})[part] = (took_us, num_spans, num_ranks)
    reads: dict[str, Counter[str]] = {}
    moved = "coalesce(sum(size_bytes), 0)::BIGINT"
    for run, *_, busy_us, _, read_bytes in measure_groups(
        study.events, ("run", "host", "pid"), where=f"{IS_IO} AND {IS_READ}", extra=[moved]
    ):
        reads.setdefault(run, Counter()).update({_READING: busy_us, _READ_BYTES: read_bytes})
    loops = {}
    for run, found in spans.items():
        if {"wait", "compute"} & found.keys():
            # A program that records no stalls may have waited for its checkpoints as they lasted.
            found.setdefault("stall", found.get("saving", (0, 0, 0)))
            num_ranks = max(part[2] for part in found.values())
            num_steps = max(found[phase][1] for phase in ("wait", "compute") if phase in found)
            amounts = {name: found[phase][0] for phase, name in _LOOP_PARTS.items() if phase in found}
            amounts |= {_READING: 0, _READ_BYTES: 0} | reads.get(run, {})
            of_rank = {name: amount / num_ranks for name, amount in amounts.items()}
            loops[run] = (num_steps / num_ranks, of_rank)
    return loops


def _compare_loops(  # noqa: PLR0917 - two loops
    study: Study,
    run: str,
    num_steps: float,
    here: Mapping[str, float],
    base_steps: float,
    base: Mapping[str, float],
) -> list[TraceFinding]:
    """A finding if some part differs by a share of the baseline's loop that is worth saying."""
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
        says.append(f"{study.baseline} took {base_steps:,.0f} steps; its seconds are those of as many steps.")
    if worst == _LOOP_PARTS["wait"] and here[_READING] and base[_READING]:
        # It waits for data because reading is slower, there is more to read, or less to hide it behind.
        rate, base_rate = (loop[_READ_BYTES] * 1e6 / loop[_READING] for loop in (here, base))
        computed = [loop.get(_LOOP_PARTS["compute"], 0.0) for loop in (here, base)]
        why = ""
        if rate * _CHANGED < base_rate:
            why = " Reads are slower."
        elif here[_READ_BYTES] > base[_READ_BYTES] * _CHANGED:
            why = " There is more to read."
        elif computed[0] * _CHANGED < computed[1]:
            why = " Reads are as fast as before: there is less computation to hide them behind."
        says.append(
            f"Reading kept it busy for {_seconds(here[_READING])} ({format_bytes(round(here[_READ_BYTES]))} "
            f"at {format_rate(rate)}); in {study.baseline} for {_seconds(base[_READING])} "
            f"({format_bytes(round(base[_READ_BYTES]))} at {format_rate(base_rate)}).{why}"
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


def _seconds(elapsed_us: float) -> str:
    return format_seconds(elapsed_us / 1e6)


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
}


def find_all(study: Study) -> list[TraceFinding]:
    """The findings of every rule, in the order of the report."""
    return rank_findings([finding for rule in FINDING_RULES.values() for finding in rule(study)])


def rank_findings(findings: Sequence[TraceFinding]) -> list[TraceFinding]:
    """Sort findings: first those that mislead, in whose light others are read; then by seconds lost."""
    weights = list(Weight)
    return sorted(findings, key=lambda finding: (weights.index(finding.weight), -(finding.lost_us or 0)))
