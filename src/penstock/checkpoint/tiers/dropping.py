"""Cached steps that nobody needs any more: what they hold, whether they are durable, and their removal.

Looks at the caches that can be reached from here; not collective. Invariant: a step goes from all of them,
with the orders to flush it, or the refusal names it and nothing has gone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.steps import Steps, name_of, step_of
from penstock.checkpoint.tiers.daemon.folder import FlushFolder
from penstock.checkpoint.tiers.daemon.orders import Order
from penstock.checkpoint.tiers.node_cache import NodeCache
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.registry import open_here


@dataclass(frozen=True, slots=True, kw_only=True)
class Droppable:
    """A step as it lies in some caches."""

    step: int
    size_bytes: int
    is_durable: bool | None
    """None where no durable level was named."""
    is_ordered: bool
    """Whether it still waits to be flushed."""


def droppable(caches: Sequence[Path], steps: Collection[int] | None, durable: str | None) -> list[Droppable]:
    """What these caches hold of `steps`, or of all, ascending; `ObjectNotFound` where a step is in none."""
    nodes = [_node(cache) for cache in caches]
    held = {step for node in nodes for name in node.names() if (step := step_of(name)) is not None}
    absent = sorted(set(steps or ()) - held)
    if absent:
        raise ObjectNotFound(
            f"Step {absent[0]} is in none of these caches",
            fix=f"They hold {', '.join(map(str, sorted(held))) or 'no step'}.",
        )
    known = None if durable is None else set(Steps(open_here(durable)).committed())
    ordered = {step for cache in caches for step in FlushFolder(cache).orders.steps()}
    return [
        Droppable(
            step=step,
            size_bytes=sum(sum(node.holding(name_of(step)).sizes.values()) for node in nodes),
            is_durable=None if known is None else step in known,
            is_ordered=step in ordered,
        )
        for step in sorted(held if steps is None else steps)
    ]


def require_durable(found: Sequence[Droppable]) -> None:
    """`UsageError` where a step might exist nowhere else."""
    for each in found:
        if not each.is_durable:
            why = "is not durable" if each.is_durable is False else "may not be durable"
            raise UsageError(
                f"Step {each.step} {why}; nothing was dropped",
                fix="Flush or scavenge it first and name the durable level by --durable, or give --force.",
            )


def drop(caches: Sequence[Path], steps: Collection[int]) -> None:
    """Take steps out of these caches: their orders first, so that no daemon looks for what is gone."""
    for cache in caches:
        book = FlushFolder(cache).orders
        orders = book.all()
        for step in steps:
            order = orders.get(step)
            if isinstance(order, Order):
                book.remove(order)
        node = _node(cache)
        for step in steps:
            node.remove(name_of(step))
            node.confirm(name_of(step))


def _node(cache: Path) -> NodeCache:
    return NodeCache(open_here(os.fspath(cache)), ranks=(0,))
