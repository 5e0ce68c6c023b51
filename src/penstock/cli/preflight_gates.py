"""The preflight gates before a run: the option that skips one, and how findings are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cli.options import repeated
from penstock.cli.parsers import choice
from penstock.cli.terminal import Terminal

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.cluster.gates.gate_model import Gate, PreflightRequest
    from penstock.cluster.gates.preflight import PreflightResult

CLOSED_GATES: Final = 3
"""The exit code of a run that a gate stopped."""
GATE: Final = choice("cluster", "versions", "clock", "limits", "ipc", "apart", "space", "storage")


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Which preflight gates a run skips."""

    skipped: tuple[str, ...] = repeated(
        "--skip-gate",
        GATE,
        "Skip a preflight gate, which run.json records (see `penstock cluster check`).",
    )


def inspect_gates(
    request: PreflightRequest, options: GateOptions, *, is_strict: bool, comm: Comm, terminal: Terminal
) -> PreflightResult:
    """Inspect all gates and print those that do not pass; `is_strict` makes a closed one stop the run."""
    from penstock.cluster.gates.preflight import run_preflight

    inspection = run_preflight(request, comm, skips=parse_gates(options.skipped), is_strict=is_strict)
    preflight = inspection.preflight
    if not preflight.is_stopped:
        for finding in preflight.findings:
            if finding.is_closed or finding.verdict == "warning":
                terminal.note(f"gate {finding.gate}: {finding.verdict}: {finding.found}")
        return inspection
    for finding in preflight.closed:
        terminal.note(f"gate {finding.gate}: {finding.verdict}: {finding.found}. {finding.fix}")
    terminal.note(
        "Nothing was started: a run for a submission must pass all gates. Fix the problems above, or skip a "
        "gate with --skip-gate NAME, which the record of the run shows."
    )
    return inspection


def parse_gates(names: Iterable[str]) -> Sequence[Gate]:
    """The gates of these names."""
    from penstock.cluster.gates.gate_model import parse_gate

    return tuple(parse_gate(name) for name in names)
