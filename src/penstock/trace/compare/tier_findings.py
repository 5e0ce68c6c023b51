"""Findings about tiers: a flush that reads a cache (F4), a slower tier (F5), reads from memory (F9)."""

from __future__ import annotations

from penstock.trace.compare.trace_study import PROCESS, Study, TraceFinding, Weight, longest_process_sql
from penstock.trace.dimensions import sql_literal
from penstock.trace.interval_union import union_sql
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE
from penstock.units import format_bytes, format_rate, format_seconds

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
        findings.append(
            TraceFinding(
                code="F4", weight=Weight.ALARM, title=title, runs=[run], says=says, evidence=evidence
            )
        )
    return findings


def slower_tier(study: Study) -> list[TraceFinding]:
    """F5: a run that writes the same bytes to another tier than the baseline takes longer."""
    app = dict(study.events.ask(longest_process_sql(("run",), where=study.is_app)))
    rows = study.events.ask(f"""
        WITH busy AS ({
        union_sql(
            "{events}",
            ("run", "tier"),
            where=f"{IS_IO} AND {IS_WRITE}",
            extra=", sum(size_bytes)::BIGINT AS written",
        )
    })
        SELECT run, tier, written, union_us, written * 1e6 / nullif(union_us, 0) FROM busy
        WHERE written >= {_ONE_TIER_SHARE} * (SELECT sum(written) FROM busy b WHERE b.run = busy.run)
        ORDER BY {study.in_order()}""")
    alone = {row[0]: row for row in rows}
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
        findings.append(
            TraceFinding(code="F5", weight=Weight.NOTE, title=title, runs=[run], says=says, evidence=evidence)
        )
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
        findings.append(
            TraceFinding(
                code="F9", weight=Weight.ALARM, title=title, runs=[row[0]], says=[sentence], evidence=evidence
            )
        )
    return findings
