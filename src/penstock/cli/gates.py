"""Gates before a run: the option that leaves one out, and how findings are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.cli.terminal import Terminal
    from penstock.cluster.comm import Comm
    from penstock.cluster.gates.gate_model import Gate, GateFinding, PreflightRequest
    from penstock.cluster.gates.preflight import PreflightResult

CLOSED_GATES = 3

SkipGate = Annotated[
    list[str] | None,
    typer.Option(
        "--skip-gate",
        metavar="NAME",
        help="Leave this gate out, which run.json then says; repeatable. See `penstock cluster check`.",
    ),
]


def look_at_gates(
    doing: PreflightRequest,
    *,
    skips: Sequence[str] | None,
    is_strict: bool,
    comm: Comm,
    terminal: Terminal,
) -> PreflightResult:
    """Look at all gates, and say what does not pass. Where `is_strict`, the caller stops if that says so."""
    from penstock.cluster.gates.preflight import run_preflight

    inspection = run_preflight(doing, comm, skips=gates_named(skips or ()), is_strict=is_strict)
    preflight = inspection.preflight
    if not preflight.is_stopped:
        doubtful = [each for each in preflight.findings if each.is_closed or each.verdict == "warning"]
        for each in doubtful:
            terminal.note(f"gate {each.gate}: {each.verdict}: {each.found}")
        return inspection
    for each in preflight.closed:
        terminal.note(f"gate {each.gate}: {each.verdict}: {each.found}. {each.fix}")
    terminal.note(
        "Nothing was begun: results for a submission pass all gates. Mend these, or leave one out with "
        "--skip-gate NAME, which the record of the run then says."
    )
    return inspection


def gates_named(names: Iterable[str]) -> tuple[Gate, ...]:
    """The gates of these names."""
    from penstock.cluster.gates.gate_model import parse_gate

    return tuple(parse_gate(name) for name in names)


def findings_document(findings: Sequence[GateFinding]) -> list[dict[str, Any]]:
    """Findings as plain data."""
    from dataclasses import asdict

    return [asdict(each) for each in findings]
