"""`penstock cluster check`: whether hosts of a collected cluster are alike, and whether gates stand open."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values
from penstock.cli.gates import findings_document, gates_named
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.cluster.gates.gate_model import GateFinding, PreflightRequest

_COLOURS = {"pass": "green", "warning": "yellow", "not checked": "yellow", "fail": "red"}
_ORDER = ("fail", "not checked", "warning")
_EXIT_CODES = {"pass": 0, "warning": 0, "not checked": 3, "fail": 1}

_File = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="What `penstock cluster collect` has written; without: gates."),
]
_Gates = Annotated[
    list[str] | None,
    typer.Option(
        "--gate",
        metavar="NAME",
        help="One of cluster, versions, clock, limits, ipc, apart, space, storage; repeatable; else all.",
    ),
]
_Data = Annotated[
    str | None, typer.Option("--data", metavar="URI", help="The storage that ranks will read or write.")
]
_Results = Annotated[
    Path | None, typer.Option("--results", metavar="DIR", help="Where results of a run will go.")
]
_Needs = Annotated[str, typer.Option("--needs", metavar="SIZE", help="What each rank will write to --data.")]
_StorageOption = Annotated[
    list[str] | None,
    typer.Option("-o", "--option", metavar="NAME=VALUE", help="An option of the storage; repeatable."),
]


@ranked
def check(
    comm: Comm,
    file: _File = None,
    *,
    gate: _Gates = None,
    data: _Data = None,
    results: _Results = None,
    needs: _Needs = "0",
    option: _StorageOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Compare the hosts of a collected cluster, or look at the gates that runs pass before they begin.

    With FILE: memory, cores, kernel, versions, mounts, settings and clocks of its hosts. Without: gates, on
    as many ranks as are asked for. Exits with 1 where one fails, with 3 where something was not checked.

    Examples:

      penstock cluster check cluster.json

      penstock cluster check --data /mnt/pfs/unet3d --results runs --hosts node1:4,node2:4

      penstock cluster check --gate clock --gate versions --ranks 8 --json
    """
    from penstock.errors import UsageError

    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    if file is None:
        doing = _undertaking(data, results, option, written_bytes=values.size("--needs", needs))
        return _check_gates(doing, gate, comm=comm, terminal=terminal)
    if gate or data or results:
        raise UsageError(
            "A file of facts is compared with itself; gates look at what is here now",
            where=str(file),
            fix="Leave the file out, or --gate, --data and --results.",
        )
    return _check_file(file, terminal)


def _check_file(file: Path, terminal: Terminal) -> int:
    from dataclasses import asdict

    from penstock.cluster.facts.homogeneity import check_homogeneity, overall_verdict
    from penstock.cluster.facts.host_facts import read_cluster_facts

    facts = read_cluster_facts(file)
    checks = check_homogeneity(facts)
    verdict = overall_verdict(checks)
    document = {
        "verdict": verdict,
        "is_partial": facts.is_partial,
        "hosts": [each.host for each in facts.present],
        "checks": [asdict(each) for each in checks],
    }
    lines = [(each.verdict, each.subject, each.found, each.fix) for each in checks]
    terminal.result(document, lambda console: _draw(console, lines))
    return _EXIT_CODES[verdict]


def _undertaking(
    data: str | None, results: Path | None, option: list[str] | None, *, written_bytes: int
) -> PreflightRequest:
    from penstock.cluster.gates.gate_model import PreflightRequest
    from penstock.environment import process_environment, untraced
    from penstock.storage import open_storage

    environment = untraced(process_environment())
    options = values.assignments("--option", option or ())
    return PreflightRequest(
        environment=environment,
        uri=data,
        reopen=None if data is None else partial(open_storage, data, environment, options=options),
        results=results,
        written_bytes=written_bytes,
    )


def _check_gates(doing: PreflightRequest, names: list[str] | None, *, comm: Comm, terminal: Terminal) -> int:
    from penstock.cluster.gates.gate_model import Gate
    from penstock.cluster.gates.preflight import run_preflight

    found = run_preflight(doing, comm, gates=gates_named(names) if names else tuple(Gate)).preflight.findings
    verdict = _gravest(found)
    document = {"verdict": verdict, "ranks": comm.size, "gates": findings_document(found)}
    lines = [(str(each.verdict), str(each.gate), each.found, each.fix) for each in found]
    terminal.result(document, lambda console: _draw(console, lines))
    return _EXIT_CODES[verdict]


def _gravest(found: Sequence[GateFinding]) -> str:
    verdicts = {str(each.verdict) for each in found}
    return next((verdict for verdict in _ORDER if verdict in verdicts), "pass")


def _draw(console: Console, lines: Sequence[tuple[str, str, str, str]]) -> None:
    """One line a check; what is not as it should be is followed by its fix."""
    from rich.markup import escape

    words, width = (max(len(line[column]) for line in lines) for column in (0, 1))
    for verdict, subject, found, fix in lines:
        colour = _COLOURS.get(verdict, "default")
        console.print(f"[{colour}]{verdict:<{words}}[/] {subject:<{width}}  {escape(found)}")
        if fix and verdict != "pass":
            console.print(f"{'':<{words}} {'':<{width}}  [italic]{escape(fix)}[/italic]")
