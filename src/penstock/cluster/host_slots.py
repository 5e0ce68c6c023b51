"""Which machines run how many ranks: `a:4,b:4`, host files, and Slurm's `node[01-03]`. Pure.

Invariant: a placement either holds all ranks or is refused before anything starts, and a host list that
cannot be parsed is refused, because a host that is left out would go unnoticed.
"""

import ipaddress
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A machine, by name or address, and its number of ranks."""

    host: str
    slots: int


def parse_hosts(text: str, *, ranks: int | None) -> tuple[HostSlots, ...]:
    """`a:4,b:4`, or `a,b` to spread `ranks` evenly; IPv6 addresses are in brackets: `[fe80::1]:4`."""
    return _spread(_entries(text), ranks, where=f"--hosts {text}")


def parse_hostfile(lines: str, *, ranks: int | None, where: str) -> tuple[HostSlots, ...]:
    """One host per line: `a`, `a:4` (MPICH) or `a slots=4` (Open MPI); `#` begins a comment."""
    return _spread(_hostfile_entries(lines, where), ranks, where=where)


def parse_host_names(text: str) -> tuple[str, ...]:
    """The machines of `a,b:4`, without their numbers of ranks."""
    return tuple(_entries(text))


def parse_hostfile_names(lines: str, *, where: str) -> tuple[str, ...]:
    """The machines of a host file."""
    return tuple(_hostfile_entries(lines, where))


def count_ranks(hosts: Sequence[HostSlots], ranks: int | None, *, where: str) -> int:
    """The number of ranks to start: `ranks`, or one for each slot; refused where the slots are too few."""
    slots = sum(host.slots for host in hosts)
    if ranks is not None and ranks > slots:
        raise UsageError(
            f"{ranks} ranks do not fit into {slots} slots",
            where=where,
            fix="Lower --ranks, or raise the counts after the hosts.",
        )
    return slots if ranks is None else ranks


def is_loopback(host: str) -> bool:
    """True if `host` is a name or an address of the local machine for sure."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _entries(text: str) -> dict[str, int | None]:
    counts: dict[str, int | None] = {}
    for entry in text.split(","):
        _add(counts, entry.strip(), text, where=f"--hosts {text}")
    return counts


def _hostfile_entries(lines: str, where: str) -> dict[str, int | None]:
    counts: dict[str, int | None] = {}
    for line in lines.splitlines():
        words = line.partition("#")[0].split()
        if words:
            slots = next((word.removeprefix("slots") for word in words[1:] if word.startswith("slots=")), "")
            _add(counts, words[0] + slots.replace("=", ":"), line, where=where)
    if not counts:
        raise UsageError("The host file is empty", where=where, fix="Write one host per line: node1:4")
    return counts


def _add(counts: dict[str, int | None], entry: str, text: str, *, where: str) -> None:
    """Add a host and its number of ranks, None if it has none; refuse a host that is named twice."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise UsageError(
            f"{entry!r} is not a host", where=text, fix="Write hosts like node1:4,node2:4, without spaces."
        )
    address, name, count = match.groups()
    if count is not None and (not count.isdecimal() or int(count) == 0):
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


def _spread(counts: dict[str, int | None], ranks: int | None, *, where: str) -> tuple[HostSlots, ...]:
    if len({count is None for count in counts.values()}) > 1:
        raise UsageError(
            "Only some hosts have a count",
            where=where,
            fix="Give a count to every host, or to none for an even spread.",
        )
    even = -(-(ranks or len(counts)) // len(counts))
    return tuple(HostSlots(host, even if count is None else count) for host, count in counts.items())


LONGEST = 100_000
"""In hosts: more than any cluster has, and few enough for memory."""

_ENTRY = re.compile(r"(?:\[([^\]]+)\]|([^\[:]+))(?::(.*))?")
"""An address in brackets or a name, and a count."""
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """The hosts of a list in Slurm's notation, in its order; numbers keep their leading zeros."""
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise _not_understood(text, text)
    hosts: list[str] = []
    for item in items:
        # Plain text and the content of brackets take turns: "r[1-2]c[8]" -> "r", "1-2", "c", "8", "".
        choices = [
            [part] if number % 2 == 0 else list(_numbers(part, text))
            for number, part in enumerate(re.split(r"\[([^\]]*)\]", item))
        ]
        if len(hosts) + math.prod(map(len, choices)) > LONGEST:
            raise UsageError(
                f"The list has more than {LONGEST:,} hosts", where=text[:80], fix="Check its ranges."
            )
        hosts += map("".join, itertools.product(*choices))
    return tuple(hosts)


def _numbers(bracket: str, text: str) -> Iterator[str]:
    for part in bracket.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not int(first) <= int(last) <= int(first) + LONGEST:
            raise _not_understood(text, f"[{bracket}]")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _not_understood(text: str, part: str) -> UsageError:
    return UsageError(
        f"{part!r} is not a host list in Slurm's notation",
        where=text[:200],
        fix="Name the hosts one by one: --hosts node1,node2.",
    )
