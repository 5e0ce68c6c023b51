"""Slurm's short way to write many hosts: `node[01-03,7],gpu1` is node01, node02, node03, node7, gpu1. Pure.

Place in the flow: an allocation says in this form which machines it has. Invariant: what is not understood is
refused, for a host that is left out would never be missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.errors import UsageError

LONGEST = 100_000
"""In hosts: more than any machine has, and few enough for memory."""

_ITEM = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """All hosts of a list, in its order; numbers keep their leading zeros."""
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
                f"These are more than {LONGEST:,} hosts", where=text[:80], fix="Look for a range too many."
            )
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(bracket: str, text: str, *, room: int) -> Iterator[str]:
    for part in bracket.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _not_understood(text, f"[{bracket}]")
        first, last = found[1], found[2] or found[1]
        if not int(first) <= int(last) <= int(first) + room:
            raise _not_understood(text, f"[{bracket}]")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _not_understood(text: str, part: str) -> UsageError:
    return UsageError(
        f"{part!r} is no list of hosts as Slurm writes it",
        where=text[:200],
        fix="Write them out: --hosts node1,node2.",
    )
