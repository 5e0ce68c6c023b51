"""`penstock cluster collect`: the facts of all hosts in one file, or an error that names who is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values
from penstock.cli.cluster.hosts import asked_hosts, way_to
from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cluster.facts.host_facts import ClusterFacts, PresentHost

_Hosts = Annotated[
    str | None, typer.Option("--hosts", metavar="A,B:4", help="The hosts to ask; without: this one.")
]
_Hostfile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="The hosts to ask, one a line.")
]
_Via = Annotated[
    str | None,
    typer.Option(
        "--via",
        metavar="WAY",
        help="ssh, slurm (an allocation's own hosts, if none are named), mpi (any launcher), or local: this "
        "machine only.",
    ),
]
_Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where the facts go.")]
_AllowPartial = Annotated[
    bool, typer.Option("--allow-partial", help="Keep what there is where hosts are missing, marked.")
]
_Timeout = Annotated[str, typer.Option("--timeout", metavar="TIME", help="Longest wait for one host.")]
_Launcher = Annotated[
    str, typer.Option("--launcher", metavar="NAME", help="auto, mpiexec, mpirun, srun or pals.")
]
_LauncherArgs = Annotated[
    list[str] | None,
    typer.Option("--launcher-arg", metavar="ARG", help="Passed to the launcher, or to ssh; repeatable."),
]
_Python = Annotated[
    str,
    typer.Option(
        "--python",
        metavar="PATH",
        help="The interpreter on the hosts, or its name there; default: this one's.",
    ),
]


def collect(
    *,
    hosts: _Hosts = None,
    hostfile: _Hostfile = None,
    via: _Via = None,
    output: _Output = Path("cluster.json"),
    allow_partial: _AllowPartial = False,
    timeout: _Timeout = "60s",
    launcher: _Launcher = "auto",
    launcher_arg: _LauncherArgs = None,
    python: _Python = sys.executable,
    as_json: JsonFlag = False,
) -> None:
    """Collect what each host is: cores, memory, networks, drives, mounts, kernel, settings.

    One process runs on each host. A host that fails, hangs or answers with anything else than facts is an
    error that names it. Only listed settings and variables are read; secrets are withheld.

    Examples:

      penstock cluster collect -o cluster.json

      penstock cluster collect --hosts node1,node2,node3 --via ssh --python /opt/penstock/bin/python

      penstock cluster collect --hostfile hosts.txt --launcher srun --timeout 2min
    """
    from datetime import UTC, datetime

    from penstock.cluster.facts.collect_facts import collect_from_hosts
    from penstock.environment import process_environment
    from penstock.results.durable import write_text

    environment = process_environment()
    asked = asked_hosts(via, hosts=hosts, hostfile=hostfile, environment=environment)
    timeout_s = values.seconds("--timeout", timeout)
    ask = way_to(
        asked,
        launcher=launcher,
        arguments=launcher_arg or (),
        python=python,
        timeout_s=timeout_s,
        environment=environment,
    )
    facts = collect_from_hosts(
        ask,
        asked.hosts,
        via=asked.via,
        timeout_s=timeout_s,
        collected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        allow_partial=allow_partial,
    )
    write_text(output.absolute().parent, output.name, facts.model_dump_json(indent=2) + "\n")
    terminal = Terminal(as_json=as_json)
    for absent in facts.absent:
        terminal.note(f"{absent.host} is missing: {absent.reason}")
    terminal.result(facts.model_dump(mode="json"), lambda console: _draw(console, facts, output))


def _draw(console: Console, facts: ClusterFacts, output: Path) -> None:
    from penstock.units import format_bytes

    table("Hosts", [_row(each) for each in facts.present])(console)
    whole = f"PARTIAL: {len(facts.absent)} missing" if facts.is_partial else "whole"
    together = "unknown" if facts.memory_bytes is None else format_bytes(facts.memory_bytes)
    console.print(
        f"{len(facts.present)} of {len(facts.asked)} hosts, {whole}, memory of all {together}: {output}",
        markup=False,
    )


def _row(present: PresentHost) -> dict[str, str]:
    from penstock.units import format_bytes

    report = present.report
    return {
        "host": present.host,
        "cores": str(report.cpu.num_logical) if report.cpu else "-",
        "memory": format_bytes(report.memory_bytes) if report.memory_bytes else "-",
        "networks": _count(report.nics),
        "drives": _count(report.drives),
        "mounts": _count(report.mounts),
        "unread": ", ".join(report.unread) or "-",
    }


def _count(facts: tuple[object, ...] | None) -> str:
    return "-" if facts is None else str(len(facts))
