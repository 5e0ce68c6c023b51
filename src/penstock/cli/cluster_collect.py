"""`penstock cluster collect`: the facts of all hosts in one file, or an error that names the missing ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from penstock.cli.options import flag, option, repeated, verb
from penstock.cli.parsers import FILE, LAUNCHER, TEXT, TIME, choice
from penstock.cli.terminal import Terminal, table
from penstock.environment import Environment, process_environment
from penstock.errors import UsageError
from penstock.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cluster.facts.agent_processes import QueryHosts
    from penstock.cluster.facts.host_facts import ClusterFacts, PresentHost, Via


@dataclass(frozen=True, kw_only=True)
class _CollectOptions:
    hosts: str | None = option("--hosts", TEXT, "Hosts to query (default: this one).", metavar="A,B:4")
    hostfile: Path | None = option("--hostfile", FILE, "Read the hosts from a file, one a line.")
    via: str | None = option(
        "--via",
        choice("local", "ssh", "slurm", "mpi"),
        "Way to start a process on each host: ssh, slurm (default hosts: the allocation), mpi (any launcher) "
        "or local for this machine only (default: mpi with hosts, else local).",
    )
    output: Path = option("--output", FILE, "File to write.", default="cluster.json", short="-o")
    allow_partial: bool = flag("--allow-partial", "Accept missing hosts, and mark the facts as partial.")
    timeout_s: float = option("--timeout", TIME, "Longest wait for one host.", default="60s")
    launcher: str = option("--launcher", LAUNCHER, "Launcher for --via mpi.", default="auto")
    launcher_args: tuple[str, ...] = repeated(
        "--launcher-arg", TEXT, "Pass an argument to the launcher, or to ssh."
    )
    python: str | None = option(
        "--python", TEXT, "Python interpreter on the hosts (default: this one's path).", metavar="PATH"
    )


@verb(_CollectOptions)
def collect(options: _CollectOptions, terminal: Terminal) -> None:
    """Collect the facts of each host: cores, memory, networks, drives, mounts, kernel and settings.

    Runs one process on each host. A host that fails, hangs or answers with anything but facts is an error
    that names it. Only listed settings and variables are read; secrets are redacted.

    Examples:

      penstock cluster collect -o cluster.json

      penstock cluster collect --hosts node1,node2,node3 --via ssh --python /opt/penstock/bin/python

      penstock cluster collect --hostfile hosts.txt --launcher srun --timeout 2min
    """
    from penstock.cluster.facts.collect_facts import collect_from_hosts
    from penstock.results.published_files import write_text

    environment = process_environment()
    target = choose_hosts(options, environment)
    facts = collect_from_hosts(
        plan_queries(target, options, environment),
        target.hosts,
        via=target.via,
        timeout_s=options.timeout_s,
        collected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        allow_partial=options.allow_partial,
    )
    output = options.output
    write_text(output.absolute().parent, output.name, facts.model_dump_json(indent=2) + "\n")
    for host in facts.absent:
        terminal.note(f"{host.host} is missing: {host.reason}")
    terminal.result(facts.model_dump(mode="json"), lambda console: _draw(console, facts, output))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHosts:
    """The hosts to query, and the way to start a process on them."""

    via: Via
    hosts: tuple[str, ...]


def choose_hosts(options: _CollectOptions, environment: Environment) -> TargetHosts:
    """The hosts that the options name, or this machine. A Slurm allocation names its own."""
    hosts = _named_hosts(options)
    via = _parse_via(options.via or ("mpi" if hosts else "local"))
    if via == "slurm" and not hosts:
        hosts = _allocated_hosts(environment)
    if via == "local" and len(hosts) > 1:
        raise UsageError(
            f"--via local cannot query {len(hosts)} hosts",
            where="--via local",
            fix="Leave --via out to start one process on each host by a launcher.",
        )
    if via != "local" and not hosts:
        raise UsageError(
            "No hosts are named", where=f"--via {via}", fix="Give --hosts a,b,c or --hostfile FILE."
        )
    return TargetHosts(via=via, hosts=hosts or ("localhost",))


def plan_queries(target: TargetHosts, options: _CollectOptions, environment: Environment) -> QueryHosts:
    """How each host is queried by a process of its own."""
    from penstock.cluster.facts.agent_processes import (
        AgentProcesses,
        launcher_agent_command,
        local_command,
        ssh_command,
        ssh_environment,
    )
    from penstock.cluster.launcher_command import LaunchRequest, parse_launcher_name

    python, arguments = options.python or sys.executable, options.launcher_args
    if options.launcher != "auto" and target.via != "mpi":
        raise UsageError(
            f"--launcher cannot be combined with --via {target.via}",
            where=f"--launcher {options.launcher}",
            fix="Leave one of them out.",
        )
    if target.via == "local":
        return AgentProcesses(local_command(python), environment)
    if target.via == "ssh":
        command = ssh_command(python, arguments, timeout_s=options.timeout_s)
        return AgentProcesses(command, ssh_environment(environment))
    # Without --overlap a step waits until the job's other steps leave its processors.
    request = (
        LaunchRequest(launcher="srun", launcher_args=("--overlap", *arguments))
        if target.via == "slurm"
        else LaunchRequest(launcher=parse_launcher_name(options.launcher), launcher_args=arguments)
    )
    return AgentProcesses(launcher_agent_command(request, environment, python), environment)


def _parse_via(word: str) -> Via:
    from penstock.cluster.facts.host_facts import Via

    via: Via = next(known for known in get_args(Via) if known == word)
    return via


def _named_hosts(options: _CollectOptions) -> tuple[str, ...]:
    from penstock.cluster.host_slots import parse_host_names, parse_hostfile_names

    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("--hosts and --hostfile are mutually exclusive", fix="Leave one of them out.")
    if options.hosts is not None:
        return parse_host_names(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        text = options.hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The host file cannot be read: {error}", fix="Name a text file with one host a line."
        ) from error
    return parse_hostfile_names(text, where=str(options.hostfile))


def _allocated_hosts(environment: Environment) -> tuple[str, ...]:
    from penstock.cluster.host_slots import expand_nodelist

    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    return expand_nodelist(nodes) if nodes else ()


def _draw(console: Console, facts: ClusterFacts, output: Path) -> None:

    table("Hosts", [_row(host) for host in facts.present])(console)
    state = f"PARTIAL: {len(facts.absent)} missing" if facts.is_partial else "complete"
    memory = "unknown" if facts.memory_bytes is None else format_bytes(facts.memory_bytes)
    console.print(
        f"{len(facts.present)} of {len(facts.asked)} hosts, {state}, memory of all {memory}: {output}",
        markup=False,
    )


def _row(host: PresentHost) -> dict[str, str]:

    report = host.report
    return {
        "host": host.host,
        "cores": str(report.cpu.num_logical) if report.cpu else "-",
        "memory": format_bytes(report.memory_bytes) if report.memory_bytes else "-",
        "networks": _count(report.nics),
        "drives": _count(report.drives),
        "mounts": _count(report.mounts),
        "unread": ", ".join(report.unread) or "-",
    }


def _count(facts: tuple[object, ...] | None) -> str:
    return "-" if facts is None else str(len(facts))
