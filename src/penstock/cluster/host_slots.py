"""Which machines run how many ranks: `a:4,b:4`, host files, and Slurm's `node[01-03]`. Pure.

Invariant: a placement either holds all ranks or is refused before anything starts, and a host list that
cannot be parsed is refused, because a host that is left out would go unnoticed.
"""

import ipaddress
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
    entries = [_host_and_count(entry.strip(), text) for entry in text.split(",")]
    return _completed(entries, ranks, where=f"--hosts {text}")


def parse_hostfile(lines: str, *, ranks: int | None, where: str) -> tuple[HostSlots, ...]:
    """One host per line: `a`, `a:4` (MPICH) or `a slots=4` (Open MPI); `#` begins a comment."""
    return _completed(_hostfile_entries(lines, where), ranks, where=where)


def parse_host_names(text: str) -> tuple[str, ...]:
    """The machines of `a,b:4`, without their numbers of ranks."""
    return _each_once([_host_and_count(entry.strip(), text) for entry in text.split(",")], f"--hosts {text}")


def parse_hostfile_names(lines: str, *, where: str) -> tuple[str, ...]:
    """The machines of a host file."""
    return _each_once(_hostfile_entries(lines, where), where)


def count_ranks(hosts: Sequence[HostSlots], ranks: int | None, *, where: str) -> int:
    """How many ranks to start: `ranks`, or one for each slot; refused where the slots are too few."""
    slots = sum(host.slots for host in hosts)
    if ranks is None:
        return slots
    if ranks > slots:
        raise UsageError(
            f"{ranks} ranks do not fit into {slots} slots",
            where=where,
            fix="Lower --ranks, or raise the counts after the hosts.",
        )
    return ranks


def is_loopback(host: str) -> bool:
    """Whether `host` means the local machine, whichever that is."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostfile_entries(lines: str, where: str) -> list[tuple[str, int | None]]:
    entries = []
    for line in lines.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = next((word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")), None)
        entries.append(
            (words[0], _count(slots, line)) if slots is not None else _host_and_count(words[0], line)
        )
    if not entries:
        raise UsageError("The host file is empty", where=where, fix="Write one host per line: node1:4")
    return entries


def _host_and_count(entry: str, where: str) -> tuple[str, int | None]:
    if entry.startswith("["):
        host, bracket, after = entry[1:].partition("]")
        if bracket and host:
            return host, _count(after.removeprefix(":"), where) if after else None
    host, colon, count = entry.partition(":")
    if not host or "[" in entry:
        raise UsageError(
            f"{entry!r} is not a host", where=where, fix="Write hosts like node1:4,node2:4, without spaces."
        )
    return host, _count(count, where) if colon else None


def _count(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise UsageError(
            f"{text!r} is not a number of ranks",
            where=where.strip(),
            fix="Write a whole number of at least 1 after the host, as in node1:4.",
        )
    return int(text)


def _completed(
    entries: list[tuple[str, int | None]], ranks: int | None, *, where: str
) -> tuple[HostSlots, ...]:
    _each_once(entries, where)
    counted = [count for _, count in entries if count is not None]
    if counted and len(counted) < len(entries):
        raise UsageError(
            "Only some hosts have a count",
            where=where,
            fix="Give a count to every host, or to none for an even spread.",
        )
    even = -(-(ranks or len(entries)) // len(entries))
    return tuple(HostSlots(host, count if count is not None else even) for host, count in entries)


def _each_once(entries: list[tuple[str, int | None]], where: str) -> tuple[str, ...]:
    names = [host for host, _ in entries]
    duplicate = next((host for host in names if names.count(host) > 1), None)
    if duplicate is not None:
        raise UsageError(
            f"Host {duplicate!r} is named twice",
            where=where,
            fix=f"Name it once, with the sum: {duplicate}:2",
        )
    return tuple(names)


LONGEST = 100_000
"""In hosts: more than any cluster has, and few enough for memory."""

_ITEM = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """The hosts of a list of Slurm's, in its order; numbers keep their leading zeros."""
    hosts: list[str] = []
    position = 0
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None:
            raise _not_understood(text, text[position:])
        hosts.extend(_expanded(item[1], text, room=LONGEST - len(hosts)))
        position = item.end()
    if not hosts or text.endswith(","):
        raise _not_understood(text, text)
    return tuple(hosts)


def _expanded(item: str, text: str, *, room: int) -> list[str]:
    """The product of an item's brackets, from left to right."""
    names = [""]
    for plain, bracket in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
        endings = [plain] if plain else list(_numbers(bracket, text, room=room))
        if len(names) * len(endings) > room:
            raise UsageError(
                f"The list has more than {LONGEST:,} hosts", where=text[:80], fix="Check its ranges."
            )
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(bracket: str, text: str, *, room: int) -> Iterator[str]:
    for part in bracket.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _not_understood(text, f"[{bracket}]")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) <= int(first) + room:
            raise _not_understood(text, f"[{bracket}]")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _not_understood(text: str, part: str) -> UsageError:
    return UsageError(
        f"{part!r} is not a host list in Slurm's notation",
        where=text[:200],
        fix="Name the hosts one by one: --hosts node1,node2.",
    )
