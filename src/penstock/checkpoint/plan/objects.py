"""Who writes leaves that are no tensors, and under which name, where ranks hold different ones.

A name in a checkpoint holds one object, but every rank has its own random state. Invariant: each different
object under one name is kept once, and each rank finds its own again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoint.plan.records import PlacedObject

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from penstock.checkpoint.plan.records import HeldObject

OWN_MARK = "@rank"
"""Stands in a stored name between the leaf's name and the rank whose object it is: `rng@rank3`."""


def own_name(name: str, rank: int) -> str:
    """What `rank`'s object is stored as where it differs from the common one."""
    return f"{name}{OWN_MARK}{rank}"


def place_objects(held: Sequence[Iterable[HeldObject]]) -> list[list[PlacedObject]]:
    """What each rank writes; `held` is in rank order.

    The object of the lowest rank has the plain name, which is what stock readers find. Objects that all
    holders share are written by the holder with the fewest bytes so far; those that differ by their owners.
    """
    holders: dict[str, list[tuple[int, HeldObject]]] = {}
    for rank, objects in enumerate(held):
        for each in objects:
            holders.setdefault(each.name, []).append((rank, each))
    load = [0] * len(held)
    placed: list[list[PlacedObject]] = [[] for _ in held]
    for name, owners in holders.items():
        common = owners[0][1]
        sharers = [rank for rank, each in owners if each.digest == common.digest]
        writes = [(min(sharers, key=lambda rank: load[rank]), name, common.size_bytes)]
        writes += [
            (rank, own_name(name, rank), each.size_bytes)
            for rank, each in owners
            if each.digest != common.digest
        ]
        for rank, stored_name, size_bytes in writes:
            placed[rank].append(PlacedObject(name=name, stored_name=stored_name, size_bytes=size_bytes))
            load[rank] += max(size_bytes, 1)
    return placed


def stored_name_for(name: str, rank: int, stored: Container[str]) -> str | None:
    """Under which of the `stored` names `rank` finds the object of its leaf `name`, if any."""
    own = own_name(name, rank)
    if own in stored:
        return own
    return name if name in stored else None
