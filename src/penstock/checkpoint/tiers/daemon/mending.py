"""Orders that a kill left on some nodes only: completed where the others hold their shares, or taken back.

Done once by each job, before it hands over anything of its own. Invariant: afterwards a step is ordered on
all nodes that have a share of it, or on none, unless it is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.checkpoint.commit.base import MANIFEST_NAME
from penstock.checkpoint.tiers.daemon.orders import Order, read_order
from penstock.cluster.collectives import all_gather_results
from penstock.errors import ObjectNotFound
from penstock.storage.whole import read_object

if TYPE_CHECKING:
    from penstock.checkpoint.tiers.cache import CacheLevel
    from penstock.checkpoint.tiers.daemon.folder import FlushFolder
    from penstock.checkpoint.tiers.daemon.journal import JournalReader
    from penstock.cluster.comm import Comm

Result = TypeVar("Result")

Save = tuple[int, str]
"""A step and the id of its save."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrders:
    """What one cache knows of orders: which are open, as which node, and which saves are over."""

    open: Mapping[Save, int]
    over: frozenset[Save]


def unfinished(told: Iterable[NodeOrders], num_nodes: Mapping[Save, int]) -> dict[Save, set[int]]:
    """By save: the nodes for which nobody has its order, where none is over."""
    nodes = list(told)
    found = {}
    for save, number in num_nodes.items():
        if not any(save in node.over for node in nodes):
            missing = set(range(number)) - {node.open[save] for node in nodes if save in node.open}
            if missing:
                found[save] = missing
    return found


class Mending:
    """One rank's part in it; the first rank of each node looks and writes."""

    def __init__(self, cache: CacheLevel, folder: FlushFolder, journal: JournalReader, comm: Comm) -> None:
        self._cache = cache
        self._folder = folder
        self._journal = journal
        self._comm = comm

    def mend(self) -> None:
        """Complete orders, or take them back. Collective."""
        mine: dict[Save, Order] = {}
        told = self._together(partial(self._known, mine), "all nodes to tell their orders")
        sizes = self._together(
            lambda: {save: len(order.nodes) for save, order in mine.items()}, "all nodes to count them"
        )
        num_nodes = {save: number for each in sizes for save, number in each.items()}
        for save, missing in unfinished(told, num_nodes).items():
            teller = next(rank for rank, node in enumerate(told) if save in node.open)
            own_text = mine[save].model_dump_json() if self._comm.rank == teller else ""
            text = self._comm.gather(own_text, awaiting="a node to tell its order")[teller]
            adopted = self._together(
                partial(self._adopt, text, missing), "all nodes to look for their shares"
            )
            if save in mine and (lost := missing - {node for node in adopted if node is not None}):
                logger.warning("Step %d is not flushed: nodes %s have lost it", save[0], sorted(lost))
                self._folder.orders.remove(mine[save])

    def _own_orders(self) -> dict[Save, Order]:
        found = self._folder.orders.all().values()
        return {(order.step, order.save_id): order for order in found if isinstance(order, Order)}

    def _known(self, mine: dict[Save, Order]) -> NodeOrders:
        """What this node knows; its orders are noted in `mine`, as only few of them are asked for."""
        if not self._cache.leads:
            return NodeOrders(open={}, over=frozenset())
        mine.update(self._own_orders())
        over = {save for save, standing in self._journal.standings().items() if standing.outcome}
        return NodeOrders(
            open={save: order.node for save, order in mine.items() if save not in over}, over=frozenset(over)
        )

    def _adopt(self, text: str, missing: set[int]) -> int | None:
        """Take on an order as the node whose files this cache holds; which one that is."""
        if not self._cache.leads:
            return None
        order = read_order(text.encode(), "another node")
        try:
            held = self._cache.holds(order.name)
            manifest = bytes(read_object(held.storage, held.key(MANIFEST_NAME)))
            start = f"{held.committed.folder}/"
            sizes = {
                info.key.removeprefix(start): info.size_bytes
                for info in held.storage.list(held.committed.folder)
            }
        except ObjectNotFound:
            return None
        if f'"save_id":"{order.save_id}"'.encode() not in manifest:
            return None
        for node in sorted(missing):
            if all(sizes.get(file.name) == file.size_bytes for file in order.nodes[node]):
                self._folder.orders.put(order.model_copy(update={"node": node}))
                return node
        return None

    def _together(self, work: Callable[[], Result], awaiting: str) -> list[Result]:
        return all_gather_results(self._comm, work, awaiting=awaiting)
