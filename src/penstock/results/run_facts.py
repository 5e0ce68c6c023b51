"""Facts on all pages of runs: when and where a run was made, how it ended, and with which settings."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.reports.report import Look
from penstock.results.run_record import RunOutcome, RunRecord
from penstock.units import format_bytes


def run_subtitle(record: RunRecord) -> str:
    """The workload, the ranks, the hosts and the date."""
    hosts = ", ".join(host.host for host in record.hosts[:3]) + (
        f" and {len(record.hosts) - 3} more" if len(record.hosts) > 3 else ""
    )
    workload = "_".join(filter(None, (record.name, record.accelerator)))
    return (
        f"{workload}, {record.ranks} rank{'s' * (record.ranks > 1)} on {hosts or 'unknown hosts'}, "
        f"{record.started_at[:16].replace('T', ' ')} UTC, penstock {record.penstock_version}"
    )


def outcome_verdict(record: RunRecord) -> tuple[str, Look] | None:
    """The verdict on a run that did not finish; None of one that did."""
    if record.outcome is RunOutcome.FINISHED:
        return None
    return record.outcome.value, Look.BAD if record.outcome is RunOutcome.FAILED else Look.DOUBT


def fact_rows(record: RunRecord, more: Mapping[str, str]) -> list[dict[str, str]]:
    """The facts that say what a run was, as rows."""
    facts = {
        "command": shlex.join(record.command),
        **more,
        "outcome": f"{record.outcome}: {record.why}" if record.why else str(record.outcome),
        "began": record.started_at,
        "ended": record.ended_at or "-",
        "hosts": "; ".join(
            f"{host.host}: {host.num_cores} cores, {format_bytes(host.memory_bytes)}, Linux {host.kernel}"
            for host in record.hosts
        ),
        "versions": f"penstock {record.penstock_version}, Python {record.python_version}",
    }
    facts |= {f"remark {number}": remark for number, remark in enumerate(record.remarks, start=1)}
    return [{"fact": name, "value": value} for name, value in facts.items()]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem of a run, and its remedy; `since` is when it began, if not at the start."""

    kind: str
    says: str
    to_do: str
    since: str = ""
