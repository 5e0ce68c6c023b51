"""F3: sums over threads that run side by side look like time, and are none."""

from __future__ import annotations

from penstock.trace.compare.study import PROCESS, Study
from penstock.trace.findings.base import Finding, Weight
from penstock.trace.intervals import measures_sql
from penstock.trace.questions.base import IS_IO, Answer, Column, Unit
from penstock.units import format_seconds

_CONCURRENCY = 1.5


def summed_threads(study: Study) -> list[Finding]:
    """A finding for each run and tier where a process's sum of durations is far above its busy time."""
    source = "{events}"
    rows = study.events.ask(f"""
        WITH process AS ({
        measures_sql(
            source, ("run", "tier", "host", "pid"), where=IS_IO, extra=", count(DISTINCT tid) AS num_threads"
        )
    }),
             thread AS (SELECT run, tier, {PROCESS}, sum(dur_us) AS total FROM {{events}}
                        WHERE {IS_IO} GROUP BY run, tier, {PROCESS}, tid)
        SELECT run, tier, pid, num_threads, sum_us, union_us, concurrency,
               (SELECT max(total)::BIGINT FROM thread t
                WHERE t.run = p.run AND t.tier IS NOT DISTINCT FROM p.tier AND t.pid = p.pid
                  AND t.host IS NOT DISTINCT FROM p.host)
        FROM process p WHERE tier IS NOT NULL AND concurrency >= {_CONCURRENCY}
        QUALIFY row_number() OVER (PARTITION BY run, tier ORDER BY sum_us DESC, pid) = 1
        ORDER BY {study.in_order()}, tier""")
    columns = [
        Column("run"), Column("tier"), Column("pid"), Column("num_threads", Unit.COUNT),
        Column("sum_us", Unit.MICROSECONDS), Column("union_us", Unit.MICROSECONDS),
        Column("concurrency", Unit.RATIO), Column("max_thread_us", Unit.MICROSECONDS),
    ]  # fmt: skip
    return [
        _finding(
            Answer(name=f"f3_{row[0]}_{row[1]}", title="The busiest process", columns=columns, rows=[row]),
        )
        for row in rows
    ]


def _finding(evidence: Answer) -> Finding:
    run, tier, pid, num_threads, total, union, concurrency, longest = evidence.rows[0]
    assert isinstance(total, int)
    assert isinstance(union, int)
    assert isinstance(longest, int)
    summed = (
        f"The calls of process {pid} on {tier} add up to {format_seconds(total / 1e6)}, but it was busy with "
        f"them for {format_seconds(union / 1e6)}: {concurrency:.1f} at a time, over {num_threads} threads."
    )
    single = (
        f"The longest single thread has {format_seconds(longest / 1e6)}, which says too little for the same "
        "reason. Compare unions."
    )
    says = [summed, single]
    title = f"{run}: time on {tier} is summed over threads side by side"
    return Finding(code="F3", weight=Weight.ALARM, title=title, runs=[str(run)], says=says, evidence=evidence)
