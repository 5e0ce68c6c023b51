"""Which hosts are asked, and how they are reached: from the words of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cluster.facts.agent_processes import QueryHosts
    from penstock.cluster.facts.host_facts import Via
    from penstock.environment import Environment

WAYS = ("local", "ssh", "slurm", "mpi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The hosts, and the way to them."""

    via: Via
    hosts: tuple[str, ...]


def asked_hosts(
    via: str | None, *, hosts: str | None, hostfile: Path | None, environment: Environment
) -> Asked:
    """Several hosts need a launcher; this machine alone does not. An allocation of Slurm names its own."""
    from penstock.errors import UsageError

    names = _named(hosts, hostfile)
    way = via or ("mpi" if names else "local")
    if way == "slurm" and not names:
        names = _allocated(environment)
    if way == "local" and len(names) > 1:
        raise UsageError(
            f"{len(names)} hosts cannot be asked from here alone",
            where="--via local",
            fix="Leave --via out: a launcher then brings one process to each host.",
        )
    if way in WAYS[1:] and not names:
        raise UsageError(
            "Nothing says which hosts to ask",
            where=f"--via {way}",
            fix="Give --hosts a,b,c or --hostfile FILE.",
        )
    return Asked(via=_known(way), hosts=names or ("localhost",))


def way_to(
    asked: Asked,
    *,
    launcher: str,
    arguments: Sequence[str],
    python: str,
    timeout_s: float,
    environment: Environment,
) -> QueryHosts:
    """Asks each host by a process of its own."""
    from penstock.cluster.facts.agent_processes import (
        AgentProcesses,
        launcher_agent_command,
        local_command,
        ssh_command,
        ssh_environment,
    )
    from penstock.cluster.launcher_command import LaunchRequest, parse_launcher_name
    from penstock.errors import UsageError

    if launcher != "auto" and asked.via != "mpi":
        raise UsageError(
            f"--via {asked.via} uses no launcher of one's choice",
            where=f"--launcher {launcher}",
            fix="Leave one of them out.",
        )
    if asked.via == "local":
        return AgentProcesses(local_command(python), environment)
    if asked.via == "ssh":
        return AgentProcesses(
            ssh_command(python, arguments, timeout_s=timeout_s), ssh_environment(environment)
        )
    # Without --overlap a step waits until the job's other steps leave its processors.
    request = (
        LaunchRequest(launcher="srun", launcher_args=("--overlap", *arguments))
        if asked.via == "slurm"
        else LaunchRequest(launcher=parse_launcher_name(launcher), launcher_args=tuple(arguments))
    )
    return AgentProcesses(launcher_agent_command(request, environment, python), environment)


def _known(way: str) -> Via:
    from penstock.cluster.facts.host_facts import Via
    from penstock.errors import UsageError

    for known in get_args(Via):
        if known == way and way in WAYS:
            return known  # type: ignore[no-any-return]  # one of the words themselves
    raise UsageError(f"{way!r} is no way to hosts", where="--via", fix=f"Choose one of {', '.join(WAYS)}.")


def _named(hosts: str | None, hostfile: Path | None) -> tuple[str, ...]:
    from penstock.cluster.host_slots import parse_host_names, parse_hostfile_names
    from penstock.errors import UsageError

    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile both say which hosts to ask", fix="Give one of them.")
    if hosts is not None:
        return parse_host_names(hosts)
    if hostfile is None:
        return ()
    try:
        text = hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The host file cannot be read: {error}", fix="Name a text file with one host a line."
        ) from error
    return parse_hostfile_names(text, where=str(hostfile))


def _allocated(environment: Environment) -> tuple[str, ...]:
    from penstock.cluster.host_slots import expand_nodelist

    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    return expand_nodelist(nodes) if nodes else ()
