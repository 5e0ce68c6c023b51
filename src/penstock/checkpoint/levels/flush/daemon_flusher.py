"""A flusher that hands steps over to the daemon of its node, and reads in the journal what became of them.

Orders lie in the caches before `hand_over` returns; from then on no trainer is needed. Invariant: as long as
a trainer lives and an order is open, it sees to it that a daemon runs.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.checkpoint.commit.catalog import step_dirname
from penstock.checkpoint.commit.protocol import MANIFEST_NAME
from penstock.checkpoint.levels.flush.daemon import free_cores, start_daemon
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder, Order, OrderedFile, read_order
from penstock.checkpoint.levels.flush.flush_task import pause_after
from penstock.checkpoint.levels.flush.flusher import FlushState
from penstock.checkpoint.levels.flush.journal import JournalReader, Standing
from penstock.cluster.collectives import all_gather_results
from penstock.errors import ObjectNotFound, PenstockError, StorageError, Unavailable, WaitTimeout
from penstock.storage.object_io import read_object
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.checkpoint.levels.cache import Cached, CacheLevel
    from penstock.checkpoint.levels.options import Flush
    from penstock.checkpoint.manager.step_store import DurableKeeper
    from penstock.checkpoint.state.process_group import Members
    from penstock.cluster.comm import Comm


Result = TypeVar("Result")

Save = tuple[int, str]
"""A step and the id of its save."""


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


POLL_S: Final = 0.05
SETTLING_S: Final = 10.0
"""So long a daemon that was started may take until it holds its lock."""
NUM_STARTS: Final = 4
"""So many times in a row a daemon is started in vain before the trainer is told."""

logger = logging.getLogger(__name__)


class DaemonFlusher:
    """A `Flusher` of this rank; the first rank of each node writes the orders and minds the daemon."""

    def __init__(
        self,
        cache: CacheLevel,
        durable: DurableKeeper,
        durable_uri: str,
        members: Members,
        settings: Flush,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nodes = cache.nodes
        self._leads = cache.leads
        self._durable = durable
        self._durable_uri = durable_uri
        self._members = members
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._folder = FlushFolder(Path(parse_uri(cache.storage.uri).root))
        self._minder = Minder(self._folder, clock=clock)
        self._journal = JournalReader(self._folder.journal)
        self._mending: Mending | None = Mending(cache, self._folder, self._journal, members.comm)
        self._given: set[int] = set()
        self._told: set[tuple[int, str, str]] = set()
        self._failed: dict[int, BaseException] = {}
        rank = members.comm.rank
        self._node = next(number for number, ranks in enumerate(self._nodes) if rank in ranks)
        self._cores = self._free_cores()
        self._undo = ExitStack()
        self._undo.callback(members.close)
        self._undo.enter_context(self._folder.trainers.left())

    def saving(self) -> AbstractContextManager[None]:
        """A note in the cache, where the daemon is to pause for it."""
        return self._folder.saving.left() if self._settings.pause_while_saving else nullcontext()

    def hand_over(self, step: int, cached: Cached) -> None:
        """Write the order on every node."""
        self._given.add(step)
        try:
            if self._mending is not None:
                mending, self._mending = self._mending, None
                mending.mend()
            all_gather_results(
                self._members.comm,
                lambda: self._order(step, cached) if self._leads else None,
                awaiting=f"all nodes to hand over step {step}",
            )
        except PenstockError as error:
            # The step is cached and stays so; what failed is told with other failures of the background.
            self._failed[step] = error
        if self._leads:
            self._minder.mind()

    def states(self) -> Mapping[int, FlushState]:
        """As orders and journal say; of this node's share."""
        return states_of(self._folder, self._journal)

    def untold_failures(self) -> Mapping[int, BaseException]:
        """Failures that last; they are tried again all the same.

        Those of steps that an earlier job gave are only logged: they shall not keep this one from restoring.
        """
        found: dict[int, BaseException] = dict(self._failed)
        self._failed.clear()
        try:
            found.update(self._new_failures())
            open_steps = self._folder.orders.steps()
            if open_steps and self._leads:
                self._minder.mind()
        except (OSError, Unavailable) as error:
            # All ranks come together after this call: what fails on one must reach the others there.
            found.setdefault(max(self._given, default=0), error)
        return found

    def _new_failures(self) -> dict[int, BaseException]:
        found: dict[int, BaseException] = {}
        open_steps = self._folder.orders.steps()
        for (step, save_id), standing in self._journal.standings().items():
            failure = standing.failure
            if failure is None or not failure.is_lasting or step not in open_steps:
                continue
            if (step, save_id, failure.reason) not in self._told:
                self._told.add((step, save_id, failure.reason))
                if step in self._given:
                    found[step] = StorageError(failure.reason)
                else:
                    logger.warning("Step %d of an earlier job is not durable: %s", step, failure.reason)
        return found

    def wait(self, timeout_s: float) -> None:
        """Until no order is open here but those whose failure is to be told."""
        moved, moved_at_s = self._movement(), self._clock()
        while waiting := self._awaited():
            if self._leads:
                self._minder.mind()
            now_s = self._clock()
            if (movement := self._movement()) != moved:
                moved, moved_at_s = movement, now_s
            elif now_s - moved_at_s > timeout_s:
                raise WaitTimeout(
                    f"{step_dirname(waiting[0])} to become durable", timeout_s, where=str(self._folder.log)
                )
            self._sleep(POLL_S)

    def close(self) -> None:
        """Wait for the daemon; what does not end in time is told, and goes on without this process."""
        with self._undo:
            try:
                self.wait(self._durable.timeout_s)
            except (WaitTimeout, Unavailable) as error:
                self._failed[max(self._folder.orders.steps(), default=0)] = error

    def _awaited(self) -> list[int]:
        """The open steps that do not wait for somebody to mend something.

        What trainers before this one gave, and other nodes may not have, goes on without being waited for.
        """
        return [
            step
            for step, state in self.states().items()
            if not state.is_over
            and step not in self._failed
            and not self._is_lasting(step)
            and (step in self._given or state.phase != "waiting")
        ]

    def _is_lasting(self, step: int) -> bool:
        failures = [
            standing.failure
            for (each, _), standing in self._journal.standings().items()
            if each == step and standing.failure is not None
        ]
        return any(failure.is_lasting for failure in failures)

    def _movement(self) -> object:
        speed = self._folder.speed()
        return self._folder.orders.steps(), speed.moved_bytes if speed else 0

    def _order(self, step: int, cached: Cached) -> None:
        shares = {share.rank: share.files for share in cached.shares}
        settings = self._settings
        self._folder.orders.put(
            Order(
                step=step,
                save_id=cached.save_id,
                durable=self._durable_uri,
                node=self._node,
                nodes=[
                    [
                        OrderedFile(name=file.name, size_bytes=file.size_bytes)
                        for rank in ranks
                        for file in shares[rank]
                    ]
                    for ranks in self._nodes
                ],
                keep=self._durable.keep,
                bytes_per_s=settings.bytes_per_s,
                threads=settings.threads,
                pause_while_saving=settings.pause_while_saving,
                cores=self._cores,
                given_s=time.time(),
            )
        )

    def _free_cores(self) -> list[int]:
        told = self._members.comm.gather(
            sorted(os.sched_getaffinity(0)), awaiting="all ranks to tell their cores"
        )
        return free_cores([told[rank] for rank in self._nodes[self._node]], os.cpu_count() or 1)


class Minder:
    """Sees to it that a cache has a daemon, without starting one after the other where none can run."""

    def __init__(self, folder: FlushFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._num_starts = 0
        self._not_before_s = 0.0

    def mind(self) -> None:
        """Start a daemon where there is none; `Unavailable` where that was in vain several times."""
        now_s = self._clock()
        if self._folder.daemon_lives():
            self._num_starts, self._not_before_s = 0, now_s + 1.0
            return
        if now_s < self._not_before_s:
            return
        if self._num_starts >= NUM_STARTS:
            self._num_starts = 0
            self._not_before_s = now_s + SETTLING_S
            raise Unavailable(
                f"The flush daemon was started {NUM_STARTS} times and ended each time. It said last: "
                f"{self._folder.log_tail()[-500:]}",
                where=str(self._folder.log),
                fix='Mend what it names, or let the trainer flush: pc.Flush(by="trainer").',
            )
        self._num_starts += 1
        self._not_before_s = now_s + SETTLING_S + pause_after(self._num_starts)
        start_daemon(self._folder)


def states_of(folder: FlushFolder, journal: JournalReader) -> dict[int, FlushState]:
    """How far each step of a cache is, as its orders and its journal say."""
    orders = folder.orders.all()
    standings = journal.standings()
    speed = folder.speed()
    states = {}
    for (step, save_id), standing in standings.items():
        order = orders.get(step)
        is_asked_anew = order is not None and (not isinstance(order, Order) or order.save_id != save_id)
        if standing.outcome is not None and not is_asked_anew:
            orders.pop(step, None)
            states[step] = FlushState(
                phase="durable" if standing.outcome.what == "durable" else "superseded",
                size_bytes=standing.copied_bytes,
                copied_bytes=standing.copied_bytes,
                reason=standing.outcome.reason,
            )
    for step, order in orders.items():
        if not isinstance(order, Order):
            states[step] = FlushState(phase="failing", reason=str(order))
            continue
        now_bytes = speed.copied_bytes if speed is not None and speed.step == step else 0
        standing = standings.get((step, order.save_id), Standing(step=step))
        states[step] = _open_state(order, standing, now_bytes)
    return dict(sorted(states.items()))


def _open_state(order: Order, standing: Standing, now_bytes: int) -> FlushState:
    copied_bytes = min(max(standing.copied_bytes, now_bytes), order.size_bytes)
    if standing.failure is not None:
        return FlushState(
            phase="failing",
            size_bytes=order.size_bytes,
            copied_bytes=copied_bytes,
            reason=standing.failure.reason,
        )
    if standing.is_marked:
        reason = "the other nodes' files" if len(order.nodes) > 1 else ""
        return FlushState(
            phase="waiting", size_bytes=order.size_bytes, copied_bytes=order.size_bytes, reason=reason
        )
    phase = "copying" if copied_bytes else "given"
    return FlushState(
        phase="copying" if phase == "copying" else "given",
        size_bytes=order.size_bytes,
        copied_bytes=copied_bytes,
    )
