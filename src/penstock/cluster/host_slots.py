"""Find out which hosts run how many ranks, from `a:4,b:4`, host files, or the Slurm job.

Invariant: a placement either holds all ranks or is refused before anything starts, and a host list that
cannot be parsed is refused, because a missing host would go unnoticed.
"""

import ipaddress
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from penstock.environment import Environment
from penstock.errors import Unavailable, UsageError
from penstock.storage.files.local_files import read_document


def find_hosts(hosts: str | None, hostfile: str | Path | None) -> tuple[dict[str, int | None], str]:
    """Return the hosts of `--hosts` or `--hostfile` with their numbers of ranks, and the name of the option.

    The number is None for hosts without one. `hosts` is `a:4,b:4`, with IPv6 addresses in brackets:
    `[fe80::1]:4`. A host file has one host per line: `a`, `a:4` (MPICH) or `a slots=4` (Open MPI); `#` begins
    a comment.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError("--hosts and --hostfile are mutually exclusive", fix="Leave one of them out.")
    counts: dict[str, int | None] = {}
    if hosts is not None:
        where = f"--hosts {hosts}"
        for entry in hosts.split(","):
            _add(counts, entry.strip(), hosts, where=where)
        return counts, where
    if hostfile is None:
        return {}, ""
    where = f"--hostfile {hostfile}"
    try:
        lines = read_document(Path(hostfile)).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The host file cannot be read: {error}", fix="Name a text file with one host per line."
        ) from error
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            slots = next((word.removeprefix("slots") for word in words[1:] if word.startswith("slots=")), "")
            _add(counts, words[0] + slots.replace("=", ":"), line, where=where)
    if not counts:
        raise UsageError("The host file is empty", where=where, fix="Write one host per line: node1:4")
    return counts, where


def place_ranks(counts: Mapping[str, int | None], ranks: int | None, *, where: str) -> dict[str, int]:
    """Return the number of ranks that fit on each host. Hosts without numbers share `ranks` evenly."""
    if len({count is None for count in counts.values()}) > 1:
        raise UsageError(
            "Only some hosts have a count",
            where=where,
            fix="Give a count to every host, or to none for an even spread.",
        )
    even = -(-(ranks or len(counts)) // len(counts))
    slots = {host: even if count is None else count for host, count in counts.items()}
    if ranks is not None and ranks > sum(slots.values()):
        raise UsageError(
            f"{ranks} ranks do not fit into {sum(slots.values())} slots",
            where=where,
            fix="Lower --ranks, or raise the counts after the hosts.",
        )
    return slots


def is_loopback(host: str) -> bool:
    """Return True if `host` is certainly a name or an address of the local machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _add(counts: dict[str, int | None], entry: str, text: str, *, where: str) -> None:
    """Add a host and its number of ranks, None if it has none. A host that is named twice is refused."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise UsageError(
            f"{entry!r} is not a host",
            where=text,
            fix="Write hosts like node1:4,node2:4, without spaces; they must not begin with a sign.",
        )
    address, name, count = match.groups()
    if count is not None and not _COUNT.fullmatch(count):
        raise UsageError(
            f"{count!r} is not a number of ranks",
            where=text.strip(),
            fix="Write a whole number of at least 1 after the host, as in node1:4.",
        )
    host = address or name
    if host in counts:
        fix = f"Name it once, with the sum: {host}:2"
        raise UsageError(f"Host {host!r} is named twice", where=where, fix=fix)
    counts[host] = None if count is None else int(count)


_ENTRY = re.compile(r"(?:\[([\w:][^\],]*)\]|(\w[^\[:,]*))(?::(.*))?")
"""An address in brackets or a name, then a count. A name with a leading `-` would be an option to ssh."""
_COUNT = re.compile("0*[1-9][0-9]{0,8}")


def list_allocation(environment: Environment) -> tuple[str, ...]:
    """Return the hosts of this Slurm job; none outside of a job."""
    if "SLURM_JOB_NODELIST" not in environment:
        return ()
    command = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True, env=dict(environment)
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(
            f"The hosts of this Slurm job cannot be listed: {error}",
            fix="Name the hosts: --hosts node1,node2.",
        ) from error
    return tuple(answer.stdout.split())
