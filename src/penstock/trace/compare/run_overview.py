"""What a report says first: how long each run took, what it moved, how busy it was, and what was slow.

Invariant: no number is said that a finding of the same report calls misleading; it is left out, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.trace.compare.trace_study import TraceFinding, Weight
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView, measure_groups
from penstock.units import format_bytes, format_rate, format_seconds

PARTIAL: Final = "F1"
"""The finding that traces of ranks are missing: totals are too small."""
FROM_CACHE: Final = "F9"
"""The finding that the page cache served reads: their rate is not the storage's."""

_MENTIONED: Final = 0.001


@dataclass(frozen=True, slots=True)
class Doubts:
    """The runs of which a finding says that a number misleads, by the code of the finding."""

    runs: Mapping[str, Collection[str]]

    @classmethod
    def from_findings(cls, findings: Sequence[TraceFinding]) -> Doubts:
        """The alarms among the findings."""
        alarms: dict[str, set[str]] = {}
        for finding in findings:
            if finding.weight is Weight.ALARM:
                alarms.setdefault(finding.code, set()).update(finding.runs)
        return cls(alarms)

    def about(self, code: str, run: object) -> bool:
        """Whether the finding `code` concerns the run."""
        return run in self.runs.get(code, ())


def overview(events: EventsView, runs: Sequence[str], findings: Sequence[TraceFinding]) -> Answer:
    """A row for each run: its span, calls, bytes, busy time, and the operation that was under way longest."""
    doubts = Doubts.from_findings(findings)
    extra = (
        f"coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT",
        f"coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT",
        "count(DISTINCT path)",
    )
    busy = {row[0]: row[1:] for row in measure_groups(events, ("run",), where=IS_IO, extra=extra)}
    slow = _slowest_operations(events)
    who = events.ask(f"""
        SELECT run, max(last_us) - min(first_us), count(DISTINCT host), count(DISTINCT rank),
               count(*) FILTER (pid <> {ALL_RANKS})
        FROM (SELECT run, host, pid, min(rank) AS rank, min(ts_us) AS first_us, max(end_us) AS last_us
              FROM {{events}} GROUP BY run, host, pid) GROUP BY run""")
    seen = {row[0]: row[1:] for row in who}
    rows = []
    for run in runs:
        span_us, num_hosts, num_ranks, num_processes = seen.get(run, (0, 0, 0, 0))
        num_calls, _, union_us, concurrency, read, written, num_files = busy.get(
            run, (0, 0, 0, None, 0, 0, 0)
        )
        is_partial = doubts.about(PARTIAL, run)
        rate = (read + written) * 1e6 / union_us if union_us else None
        has_rate = not (is_partial or doubts.about(FROM_CACHE, run))
        rows.append(
            (run, span_us, union_us, union_us / span_us if span_us else None, concurrency,
             None if is_partial else read, None if is_partial else written,
             (read + written) // num_processes if num_processes else None, rate if has_rate else None,
             num_calls, num_files, num_processes, num_ranks, num_hosts, *slow.get(run, (None,) * 4))
        )  # fmt: skip
    columns = make_columns(
        "run", "span_us", Column("union_us", Unit.MICROSECONDS, "busy s"),
        Column("busy_share", Unit.SHARE, "busy"), Column("concurrency", Unit.RATIO, "calls at a time"),
        "read_bytes", "written_bytes",
        Column("per_process_bytes", Unit.BYTES, "moved by a process"),
        Column("busy_rate", Unit.RATE, "rate while busy"), "num_calls", "num_files", "num_processes",
        "num_ranks", "num_hosts", Column("slowest_op", Unit.TEXT, "longest under way"),
        Column("slowest_op_us", Unit.MICROSECONDS, "its busy s"),
        Column("longest_call_us", Unit.MICROSECONDS, "its longest call s"),
        Column("longest_call_path", Unit.TEXT, "on"),
    )  # fmt: skip
    return Answer(
        name="overview", title="Runs", columns=columns, rows=rows, notes=list(_explain(runs, doubts))
    )


def _slowest_operations(events: EventsView) -> dict[str, tuple[Any, ...]]:
    """The operation that was under way longest in each run: its busy time, its longest call, and on what."""
    slowest: dict[str, tuple[Any, ...]] = {}
    extra = ("max(dur_us)", "arg_min(path, row(-dur_us, path))")
    for run, op, _, _, union_us, _, longest_us, path in measure_groups(
        events, ("run", "op"), where=IS_IO, extra=extra
    ):
        if union_us > slowest.get(run, (None, 0))[1]:
            slowest[run] = (op, union_us, longest_us, path)
    return slowest


def _explain(runs: Sequence[str], doubts: Doubts) -> Iterator[str]:
    for run in runs:
        if doubts.about(PARTIAL, run):
            yield f"{run}: traces of ranks are missing, so its totals and its rate are left out (F1)."
        elif doubts.about(FROM_CACHE, run):
            yield f"{run}: the page cache served reads, so its rate is left out (F9)."


def say_answer(answer: Answer, overlap: Answer) -> list[str]:
    """The first sentences of a report of these runs."""
    rows = answer.records()
    if len(rows) == 1:
        return [*_say_run(rows[0]), *_say_overlap(overlap.records())]
    return [*_say_runs(rows), *_say_overlap(overlap.records())]


def _say_run(row: Mapping[str, Any]) -> Iterator[str]:
    if not row["num_calls"]:
        yield f"{row['run']} has no I/O in its trace, which spans {_seconds(row['span_us'])}."
        return
    who = f"{_count(row['num_processes'], 'process', 'processes')} on {_count(row['num_hosts'] or 1, 'host')}"
    if row["num_ranks"]:
        who = f"{_count(row['num_ranks'], 'rank')}, {who}"
    moved = f"moved {format_bytes(row['per_process_bytes'])} a process"
    if row["read_bytes"] is not None:
        moved = f"read {format_bytes(row['read_bytes'])} and wrote {format_bytes(row['written_bytes'])}"
    yield (
        f"In {_seconds(row['span_us'])}, {row['run']} {moved}, "
        f"with {_count(row['num_calls'], 'call')} on {_count(row['num_files'], 'file')} ({who})."
    )
    rate = f", at {format_rate(row['busy_rate'])}" if row["busy_rate"] else ""
    yield (
        f"At least one call was under way for {_seconds(row['union_us'])}, "
        f"{_share(row['busy_share'] or 0)} of that{rate}; "
        f"while so, {row['concurrency'] or 0:.1f} ran at a time."
    )
    yield (
        f"Longest under way was {row['slowest_op']}: {_seconds(row['slowest_op_us'])}. Its longest call took "
        f"{_seconds(row['longest_call_us'])}{_on(row['longest_call_path'])}."
    )


def _say_runs(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    busiest = max(rows, key=lambda row: row["union_us"])
    idlest = min(rows, key=lambda row: row["union_us"])
    longest = max(rows, key=lambda row: row["span_us"])
    yield (
        f"{busiest['run']} was busy with I/O longest, {_seconds(busiest['union_us'])}, and "
        f"{idlest['run']} shortest, {_seconds(idlest['union_us'])}; "
        f"the longest trace is that of {longest['run']}, {_seconds(longest['span_us'])}."
    )
    whole = [row for row in rows if row["read_bytes"] is not None]
    if whole:
        most = max(whole, key=lambda row: row["read_bytes"] + row["written_bytes"])
        least = min(whole, key=lambda row: row["read_bytes"] + row["written_bytes"])
        yield (
            f"{most['run']} read {format_bytes(most['read_bytes'])} and wrote "
            f"{format_bytes(most['written_bytes'])}; "
            f"{least['run']} moved least, {format_bytes(least['read_bytes'] + least['written_bytes'])}."
        )
    slow = max(rows, key=lambda row: row["longest_call_us"] or 0)
    if slow["slowest_op"]:
        yield (
            f"In {busiest['run']}, {busiest['slowest_op']} was under way for "
            f"{_seconds(busiest['slowest_op_us'])}. The longest {slow['slowest_op']} of all took "
            f"{_seconds(slow['longest_call_us'])}, in {slow['run']}{_on(slow['longest_call_path'])}."
        )


def _say_overlap(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    spent: dict[str, list[int]] = {}
    for row in rows:
        sums = spent.setdefault(row["run"], [0, 0])
        sums[0] += row["io_us"]
        sums[1] += row["both_us"]
    shares = {run: both_us / io_us for run, (io_us, both_us) in spent.items() if io_us}
    if len(spent) == 1:
        yield from (
            f"{_share(share)} of the I/O was under way while its process computed."
            for share in shares.values()
        )
    elif shares:
        hidden = sorted((run for run in shares if shares[run] >= _MENTIONED), key=lambda run: -shares[run])
        told = [f"{_share(shares[run])} in {run}" for run in hidden]
        others = [f"less than {_share(_MENTIONED)} in the others"] if len(hidden) < len(shares) else []
        yield f"I/O that was under way while its process computed: {', '.join([*told, *others])}."


def _seconds(elapsed_us: int) -> str:
    return format_seconds(elapsed_us / 1e6)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _on(path: str | None) -> str:
    return f", on {path.rsplit('/', 1)[-1]}" if path else ""


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
