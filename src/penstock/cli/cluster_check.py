"""`penstock cluster check`: compare the hosts of a collected cluster, or inspect preflight gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.option_groups import BackendOptions
from penstock.cli.options import group, option, optional_argument, repeated
from penstock.cli.parsers import FILE, FOLDER, SIZE, URI
from penstock.cli.preflight_gates import GATE, parse_gates
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal
from penstock.environment import process_environment, untraced
from penstock.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cluster.comm import Comm

_COLOURS = {"pass": "green", "warning": "yellow", "not checked": "yellow", "fail": "red"}
_WORST_FIRST = ("fail", "not checked", "warning")
_EXIT_CODES = {"pass": 0, "warning": 0, "not checked": 3, "fail": 1}


@dataclass(frozen=True, kw_only=True)
class _CheckOptions:
    file: Path | None = optional_argument(
        "[FILE]", FILE, "Facts that `penstock cluster collect` has written (default: inspect gates)."
    )
    gates: tuple[str, ...] = repeated("--gate", GATE, "Inspect only this gate (default: all).")
    data: str | None = option("--data", URI, "Storage that ranks will read or write.")
    storage: BackendOptions = group(BackendOptions)
    results: Path | None = option("--results", FOLDER, "Parent directory for results of the run.")
    written_bytes: int = option("--needs", SIZE, "Bytes that each rank will write to --data.", default="0")


@ranked(_CheckOptions)
def check(options: _CheckOptions, comm: Comm, terminal: Terminal) -> int:
    """Compare the hosts of a collected cluster, or inspect the preflight gates that runs pass.

    With FILE: compares memory, cores, kernel, versions, mounts, settings and clocks of its hosts. Without
    FILE: inspects gates on all ranks. Exits with 1 if a check fails, with 3 if something was not checked.

    Examples:

      penstock cluster check cluster.json

      penstock cluster check --data /mnt/pfs/unet3d --results runs --hosts node1:4,node2:4

      penstock cluster check --gate clock --gate versions --ranks 8 --json
    """
    if options.file is None:
        return _check_gates(options, comm, terminal)
    if options.gates or options.data or options.results:
        raise UsageError(
            "FILE cannot be combined with --gate, --data or --results",
            where=str(options.file),
            fix="Leave FILE out to inspect gates, or the options to compare hosts.",
        )
    return _check_file(options.file, terminal)


def _check_file(file: Path, terminal: Terminal) -> int:
    from penstock.cluster.facts.homogeneity import check_homogeneity, overall_verdict
    from penstock.cluster.facts.host_facts import read_cluster_facts

    facts = read_cluster_facts(file)
    checks = check_homogeneity(facts)
    verdict = overall_verdict(checks)
    document = {
        "verdict": verdict,
        "is_partial": facts.is_partial,
        "hosts": [host.host for host in facts.present],
        "checks": [asdict(finding) for finding in checks],
    }
    lines = [(finding.verdict, finding.subject, finding.found, finding.fix) for finding in checks]
    terminal.result(document, lambda console: _draw(console, lines))
    return _EXIT_CODES[verdict]


def _check_gates(options: _CheckOptions, comm: Comm, terminal: Terminal) -> int:
    from penstock.cluster.gates.gate_model import Gate, PreflightRequest
    from penstock.cluster.gates.preflight import run_preflight
    from penstock.storage import open_storage

    environment = untraced(process_environment())
    reopen = None
    if options.data is not None:
        reopen = partial(open_storage, options.data, environment, options=options.storage.values)
    undertaking = PreflightRequest(
        environment=environment,
        uri=options.data,
        reopen=reopen,
        results=options.results,
        written_bytes=options.written_bytes,
    )
    gates = parse_gates(options.gates) or tuple(Gate)
    findings = run_preflight(undertaking, comm, gates=gates).preflight.findings
    verdicts = {str(finding.verdict) for finding in findings}
    verdict = next((word for word in _WORST_FIRST if word in verdicts), "pass")
    document = {
        "verdict": verdict,
        "ranks": comm.size,
        "gates": [asdict(finding) for finding in findings],
    }
    lines = [(str(finding.verdict), str(finding.gate), finding.found, finding.fix) for finding in findings]
    terminal.result(document, lambda console: _draw(console, lines))
    return _EXIT_CODES[verdict]


def _draw(console: Console, lines: Sequence[tuple[str, str, str, str]]) -> None:
    """Draw one line for each check, and the fix below each one that does not pass."""
    from rich.markup import escape

    verdict_width, subject_width = (max(len(line[column]) for line in lines) for column in (0, 1))
    for verdict, subject, finding, fix in lines:
        colour = _COLOURS.get(verdict, "default")
        console.print(
            f"[{colour}]{verdict:<{verdict_width}}[/] {subject:<{subject_width}}  {escape(finding)}"
        )
        if fix and verdict != "pass":
            console.print(f"{'':<{verdict_width}} {'':<{subject_width}}  [italic]{escape(fix)}[/italic]")
