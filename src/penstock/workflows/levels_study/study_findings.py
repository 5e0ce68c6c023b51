"""Findings of a levels study beyond a comparison of runs: whether caches paid off, what flushes cost.

Rules over the same events as those of `trace.findings`, in the same form. Invariant: the numbers of each
sentence are in its evidence.
"""

from collections.abc import Sequence
from typing import Final

from penstock.trace.compare.trace_study import FindingRule, Study, TraceFinding, Weight
from penstock.trace.dimensions import sql_literal
from penstock.trace.interval_union import union_sql
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_WRITE
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.workflows.levels_study.study_plan import SAVE_EVENT, STEP_EVENT

_CACHED: Final = ("cached_flushed", "cached", "single", "single_flushed", "interval_flushed")
_FLUSHED_AND_NOT: Final = (("cached_flushed", "cached"), ("single_flushed", "single"))
_WORTH_SAYING: Final = 0.02


def cache_pays_off(study: Study) -> list[TraceFinding]:
    """S1: how long training waited for saves to caches, compared with the slow level."""
    waited = _query_waits(study)
    base = next((name for name in ("direct_slow", "bypass") if name in waited), None)
    rows = [name for name in _CACHED if name in waited]
    if base is None or not rows:
        return []
    table: list[Sequence[Value]] = [
        (name, *waited[name], waited[name][1] / waited[base][1]) for name in (base, *rows)
    ]
    says = [
        f"{name}: training waited {format_seconds(waited[name][1] / 1e6)} for {waited[name][0]} checkpoints, "
        f"{waited[name][1] / waited[base][1]:.0%} of what {base} cost "
        f"({format_seconds(waited[base][1] / 1e6)}): the cache "
        f"{'paid off' if waited[name][1] < waited[base][1] else 'did not pay off'}."
        for name in rows
    ]
    columns = make_columns("run", "num_saves", "waited_us", Column(f"of_{base}", Unit.SHARE))
    losing = [name for name in rows if waited[name][1] >= waited[base][1]]
    title = (
        f"{', '.join(losing)}: caching cost more than it saved"
        if losing
        else "Every cached configuration paid off"
    )
    evidence = Answer(
        name="s1", title="What training waited for saves, on the slowest rank", columns=columns, rows=table
    )
    weight = Weight.COST if losing else Weight.NOTE
    runs = [base, *rows]
    return [TraceFinding(code="S1", weight=weight, title=title, runs=runs, says=says, evidence=evidence)]


def flush_costs_training(study: Study) -> list[TraceFinding]:
    """S2: how much longer steps and saves took during a flush."""
    steps, waited = _query_steps(study), _query_waits(study)
    pairs = [(a, b) for a, b in _FLUSHED_AND_NOT if a in steps and b in steps]
    columns = make_columns(
        "run", "without_flush", "num_steps", "mean_step_us", "without_us", "longest_step_us", "stall_us",
        "longer_saves_us",
    )  # fmt: skip
    findings = []
    for run, without in pairs:
        (num_steps, mean, longest), (_, quiet, _) = steps[run], steps[without]
        stall, longer = (mean - quiet) * num_steps, waited[run][1] - waited[without][1]
        row = (run, without, num_steps, round(mean), round(quiet), longest, round(stall), longer)
        says = [
            (
                f"A training step took {format_seconds(mean / 1e6)} beside the flush of {run}, and "
                f"{format_seconds(quiet / 1e6)} without one ({without}): {mean / quiet - 1:+.1%}, or "
                f"{stall / 1e6:+.2f} s over {num_steps} steps of the slowest rank."
            ),
            f"Saves waited {longer / 1e6:+.2f} s in all.",
        ]
        is_cost = mean / quiet - 1 > _WORTH_SAYING or longer > _WORTH_SAYING * waited[without][1]
        findings.append(
            TraceFinding(
                code="S2",
                weight=Weight.COST if is_cost else Weight.NOTE,
                title=f"{run}: what the flush costs training",
                runs=[run, without],
                says=says,
                evidence=Answer(name=f"s2_{run}", title="Beside a flush", columns=columns, rows=[row]),
            )
        )
    return findings


def redundancy_costs(study: Study) -> list[TraceFinding]:
    """S3: how much longer protected saves took."""
    waited = _query_waits(study)
    if not {"cached", "single"} <= waited.keys():
        return []
    protected, single = waited["cached"][1], waited["single"][1]
    columns = make_columns("run", "num_saves", "waited_us", Column("of_single", Unit.SHARE))
    rows = [(name, *waited[name], waited[name][1] / single) for name in ("single", "cached")]
    sentence = (
        f"Protected saves waited {format_seconds(protected / 1e6)}, single copies "
        f"{format_seconds(single / 1e6)}: {protected / single - 1:+.0%}."
    )
    return [
        TraceFinding(
            code="S3",
            weight=Weight.COST if protected > single else Weight.NOTE,
            title="What redundancy costs",
            runs=["cached", "single"],
            says=[sentence],
            evidence=Answer(name="s3", title="Protected or not", columns=columns, rows=rows),
        )
    ]


def flush_rates(study: Study) -> list[TraceFinding]:
    """S4: the rate of flushes, compared with the limit of the slow level."""
    limit = study.spec.device_rates_bytes_per_s().get("slow")
    flushed = [name for name in study.runs if name.endswith("_flushed")]
    source = union_sql(
        "{events}",
        ("run",),
        where=f"{IS_IO} AND {IS_WRITE} AND tier = 'slow'",
        extra=", sum(size_bytes)::BIGINT AS written",
    )
    flushes = {
        row[0]: row[1:]
        for row in study.events.ask(f"WITH busy AS ({source}) SELECT run, written, union_us FROM busy")
    }
    columns = make_columns("run", "written_bytes", "union_us", "busy_rate")
    findings = []
    for run in [name for name in flushed if name in flushes]:
        written, busy_us = flushes[run]
        rate = written * 1e6 / busy_us
        of_limit = f", {rate / limit:.0%} of its {format_rate(limit)}" if limit else ""
        sentence = (
            f"{run} wrote {format_bytes(written)} to the slow level in {format_seconds(busy_us / 1e6)} in "
            f"which it was at work: {format_rate(rate)}{of_limit}."
        )
        evidence = Answer(
            name=f"s4_{run}", title="Flushed", columns=columns, rows=[(run, written, busy_us, rate)]
        )
        findings.append(
            TraceFinding(
                code="S4",
                weight=Weight.NOTE,
                title=f"{run}: the flush",
                runs=[run],
                says=[sentence],
                evidence=evidence,
            )
        )
    return findings


RULES: Final[Sequence[FindingRule]] = (cache_pays_off, flush_costs_training, redundancy_costs, flush_rates)


def _query_waits(study: Study) -> dict[str, tuple[int, int]]:
    """By run: how many saves, and how long the slowest rank waited for them, in microseconds."""
    rows = study.events.ask(f"""
        SELECT run, max(number), max(total)::BIGINT FROM (
            SELECT run, rank, count(*) AS number, sum(dur_us) AS total FROM {{events}}
            WHERE name = {sql_literal(SAVE_EVENT)} GROUP BY run, rank) GROUP BY run""")
    return {run: (number, total) for run, number, total in rows}


def _query_steps(study: Study) -> dict[str, tuple[int, float, int]]:
    """By run: steps of the rank whose steps took longest, their mean, and the longest of all."""
    rows = study.events.ask(f"""
        SELECT run, arg_max(number, mean), max(mean), max(longest) FROM (
            SELECT run, rank, count(*) AS number, avg(dur_us) AS mean, max(dur_us) AS longest
            FROM {{events}} WHERE name = {sql_literal(STEP_EVENT)} GROUP BY run, rank) GROUP BY run""")
    return {run: (number, mean, longest) for run, number, mean, longest in rows}
