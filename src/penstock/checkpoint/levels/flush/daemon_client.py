"""The flusher that hands steps to the daemon of its node, and learns from the journal what happens to them.

Orders are in the caches before `hand_over` returns; from then on no trainer is needed. Invariant: as long as
a trainer is alive and an order is open, it makes sure that a daemon runs (`DaemonWatchdog`); after the first
`hand_over`, orders of earlier jobs are on all nodes with a share of their step, or on none (`OrderRepair`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.checkpoint.commit.catalog import step_dirname
from penstock.checkpoint.commit.protocol import MANIFEST_NAME
from penstock.checkpoint.levels.flush import flush_folder
from penstock.checkpoint.levels.flush.daemon import free_cores, start_daemon
from penstock.checkpoint.levels.flush.flush_task import retry_delay
from penstock.checkpoint.levels.flush.flusher import FlushPhase, FlushState
from penstock.checkpoint.manager.step_store import DurableStore
from penstock.cluster.comm import Comm, all_gather_results, run_on_all_ranks
from penstock.errors import (
    DataDamaged,
    ObjectNotFound,
    PenstockError,
    RankFailed,
    StorageError,
    Unavailable,
    WaitTimeout,
)
from penstock.storage.protocol import read_object
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache import CachedSave, CacheLevel
    from penstock.checkpoint.levels.options import Flush
    from penstock.checkpoint.state.process_group import RankGroup


Result = TypeVar("Result")

Save = tuple[int, str]
"""A step and its save ID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrders:
    """The orders of one cache: those that are open, as which node, and the saves that are over."""

    open: Mapping[Save, int]
    over: frozenset[Save]


def find_orphans(nodes: Sequence[NodeOrders], num_nodes: Mapping[Save, int]) -> dict[Save, set[int]]:
    """By save that is not over: the nodes whose order is missing."""
    orphans = {}
    for save, number in num_nodes.items():
        if not any(save in node.over for node in nodes):
            missing = set(range(number)) - {node.open[save] for node in nodes if save in node.open}
            if missing:
                orphans[save] = missing
    return orphans


class OrderRepair:
    """Completes, divides anew or removes orders that a kill left on some nodes only, or whose nodes are gone.

    The lead rank of each node acts.
    """

    def __init__(
        self,
        cache: CacheLevel,
        folder: flush_folder.FlushFolder,
        journal: flush_folder.JournalReader,
        comm: Comm,
    ) -> None:
        self._cache = cache
        self._folder = folder
        self._journal = journal
        self._comm = comm

    def repair(self) -> None:
        """Complete orders where the missing nodes have their shares, else remove them. Collective."""
        own_orders: dict[Save, flush_folder.FlushOrder] = {}

        def describe() -> tuple[NodeOrders, dict[Save, int]]:
            # Read in here: a folder that one node cannot read must fail all nodes, not leave them waiting.
            own_orders.update(self._list_orders())
            return self._summarize(own_orders), {save: len(order.nodes) for save, order in own_orders.items()}

        answers = all_gather_results(self._comm, describe, awaiting="all nodes to list their orders")
        nodes = [node for node, _ in answers]
        num_nodes = {save: number for _, numbers in answers for save, number in numbers.items()}
        for save, missing in find_orphans(nodes, num_nodes).items():
            source = next(rank for rank, node in enumerate(nodes) if save in node.open)
            # Orders are long and rarely incomplete: their content is sent only now.
            own_text = own_orders[save].model_dump_json() if self._comm.rank == source else ""
            text = self._comm.gather(own_text, awaiting="a node to send its order")[source]
            adopted = all_gather_results(
                self._comm, partial(self._adopt, text, missing), awaiting="all nodes to look for their shares"
            )
            lost = missing - {node for node in adopted if node is not None}
            if lost and not self._divide_anew(save, text) and save in own_orders:
                logger.warning("Step %d cannot be flushed: nodes %s have lost it", save[0], sorted(lost))
                self._folder.orders.remove(own_orders[save])

    def _divide_anew(self, save: Save, text: str) -> bool:
        """Order a step from the nodes that exist, if they have all of it or can rebuild it. Collective.

        What was copied for other nodes is not copied again; a mark that says too much is taken back when the
        step is published, because then each file is looked for.
        """
        name = step_dirname(save[0])
        assessment = self._cache.assess_all(name)
        if assessment.is_rebuildable:
            try:
                self._cache.repair(name, assessment)
            except (StorageError, RankFailed) as error:
                logger.warning("%s could not be rebuilt: %s", name, error)
                return False
            assessment = self._cache.assess_all(name)
        if not assessment.is_complete or assessment.save_id != save[1]:
            return False
        shares = [
            [
                flush_folder.OrderedFile(name=file.name, size_bytes=file.size_bytes)
                for saved, holder in assessment.holders.items()
                if holder in ranks
                for file in assessment.files_of(saved)
            ]
            for ranks in self._cache.nodes
        ]
        own = next(number for number, ranks in enumerate(self._cache.nodes) if self._comm.rank in ranks)

        def put() -> None:
            order = flush_folder.read_order(text.encode(), "another node")
            if self._cache.is_lead and shares[own]:
                place = sum(bool(files) for files in shares[:own])
                nodes = [files for files in shares if files]
                self._folder.orders.put(order.model_copy(update={"node": place, "nodes": nodes}))
            elif self._cache.is_lead:
                self._folder.orders.remove(order)

        all_gather_results(self._comm, put, awaiting=f"all nodes to order {name} anew")
        return True

    def _list_orders(self) -> dict[Save, flush_folder.FlushOrder]:
        if not self._cache.is_lead:
            return {}
        orders = self._folder.orders.all().values()
        return {
            (order.step, order.save_id): order
            for order in orders
            if isinstance(order, flush_folder.FlushOrder)
        }

    def _summarize(self, orders: Mapping[Save, flush_folder.FlushOrder]) -> NodeOrders:
        states = self._journal.states() if self._cache.is_lead else {}
        over = frozenset(save for save, state in states.items() if state.outcome)
        return NodeOrders(
            open={save: order.node for save, order in orders.items() if save not in over}, over=over
        )

    def _adopt(self, text: str, missing: set[int]) -> int | None:
        """Adopt an order as the node whose files this cache has; returns its index."""
        if not self._cache.is_lead:
            return None
        order = flush_folder.read_order(text.encode(), "another node")
        if any(save == (order.step, order.save_id) for save in self._list_orders()):
            # A cache has one order for a step.
            return None
        try:
            share = self._cache.node.find(order.name)
            manifest = read_object(share.storage, share.key(MANIFEST_NAME))
            sizes = self._cache.node.sizes(share)
        except ObjectNotFound:
            return None
        if f'"save_id":"{order.save_id}"'.encode() not in manifest:
            return None
        for node in sorted(missing):
            if all(sizes.get(file.name) == file.size_bytes for file in order.nodes[node]):
                self._folder.orders.put(order.model_copy(update={"node": node}))
                return node
        return None


POLL_S: Final = 0.05
SETTLING_S: Final = 10.0
"""How long a daemon may take from its start until it holds its lock."""
NUM_STARTS: Final = 4
"""How many times in a row a daemon may fail to start before the trainer gets an error."""

logger = logging.getLogger(__name__)


class DaemonFlusher:
    """A `Flusher`; the lead rank of each node writes the orders and watches the daemon."""

    def __init__(
        self,
        cache: CacheLevel,
        durable: DurableStore,
        durable_uri: str,
        members: RankGroup,
        settings: Flush,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nodes = cache.nodes
        self._is_lead = cache.is_lead
        self._durable = durable
        self._durable_uri = durable_uri
        self._members = members
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._folder = flush_folder.FlushFolder(Path(parse_uri(cache.storage.uri).root))
        self._watchdog = DaemonWatchdog(self._folder, clock=clock)
        self._journal = flush_folder.JournalReader(self._folder.journal)
        self._order_repair: OrderRepair | None = OrderRepair(cache, self._folder, self._journal, members.comm)
        self._own_steps: set[int] = set()
        self._reported: set[tuple[int, str, str]] = set()
        self._failed: dict[int, BaseException] = {}
        rank = members.comm.rank
        self._node = next(number for number, ranks in enumerate(self._nodes) if rank in ranks)
        self._cores = self._free_cores()
        self._undo = ExitStack()
        self._undo.callback(members.close)
        self._undo.enter_context(self._folder.trainers.present())

    def saving(self) -> AbstractContextManager[None]:
        """Keep a presence file if the daemon is to pause for saves."""
        return self._folder.saving.present() if self._settings.pause_while_saving else nullcontext()

    def hand_over(self, step: int, cached: CachedSave) -> None:
        """Write the order on every node."""
        self._own_steps.add(step)
        try:
            if self._order_repair is not None:
                repair, self._order_repair = self._order_repair, None
                repair.repair()
            run_on_all_ranks(
                self._members.comm,
                lambda: self._order(step, cached) if self._is_lead else None,
                awaiting=f"all nodes to hand over step {step}",
            )
            if self._is_lead:
                self._watchdog.ensure_running()
        except (OSError, PenstockError) as error:
            # The step stays cached; the failure is reported with others of the background. Raised here, on
            # one rank alone, it would say that the step was not saved.
            self._failed[step] = error

    def take_over(self, step: int, cached: CachedSave) -> None:
        """Write the order on every node."""
        self.hand_over(step, cached)
        self._own_steps.discard(step)

    def states(self) -> Mapping[int, FlushState]:
        """The states of this node's share, from orders and journal."""
        return read_flush_states(self._folder, self._journal)

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """Failures that last; they are still retried.

        Those of steps of an earlier job are only logged: they must not keep this job from restoring.
        """
        failures, self._failed = self._failed, {}
        try:
            failures.update(self._new_failures())
            if self._folder.orders.steps() and self._is_lead:
                self._watchdog.ensure_running()
        except (OSError, Unavailable) as error:
            # A collective call follows on all ranks: an error raised here would leave the others waiting.
            failures.setdefault(max(self._own_steps, default=0), error)
        return failures

    def _new_failures(self) -> dict[int, BaseException]:
        new_failures: dict[int, BaseException] = {}
        open_steps = self._folder.orders.steps()
        for (step, save_id), save_state in self._journal.states().items():
            failure = save_state.failure
            if failure is None or not failure.is_lasting or step not in open_steps:
                continue
            if (step, save_id, failure.reason) not in self._reported:
                self._reported.add((step, save_id, failure.reason))
                if step in self._own_steps:
                    new_failures[step] = StorageError(failure.reason)
                else:
                    logger.warning("Step %d of an earlier job is not durable: %s", step, failure.reason)
        return new_failures

    def wait(self, timeout_s: float) -> None:
        """Wait until no order is open here, except those whose failure will be reported."""
        moved, moved_at_s = self._movement(), self._clock()
        while waiting := self._awaited():
            if self._is_lead:
                self._watchdog.ensure_running()
            now_s = self._clock()
            if (movement := self._movement()) != moved:
                moved, moved_at_s = movement, now_s
            elif now_s - moved_at_s > timeout_s:
                raise WaitTimeout(
                    f"{step_dirname(waiting[0])} to become durable", timeout_s, where=str(self._folder.log)
                )
            self._sleep(POLL_S)

    def close(self) -> None:
        """Wait for the daemon; what does not finish in time is reported, and continues without it."""
        with self._undo:
            try:
                self.wait(self._durable.timeout_s)
            except (WaitTimeout, Unavailable) as error:
                self._failed[max(self._folder.orders.steps(), default=0)] = error

    def _awaited(self) -> list[int]:
        """The open steps that are neither failing nor waiting for other nodes on behalf of an earlier job."""
        return [
            step
            for step, state in self.states().items()
            if not state.is_over
            and step not in self._failed
            and not self._is_lasting(step)
            and (step in self._own_steps or state.phase != "waiting")
        ]

    def _is_lasting(self, step: int) -> bool:
        states = (state for (number, _), state in self._journal.states().items() if number == step)
        return any(state.failure is not None and state.failure.is_lasting for state in states)

    def _movement(self) -> object:
        progress = self._folder.progress()
        return self._folder.orders.steps(), progress.moved_bytes if progress else 0

    def _order(self, step: int, cached: CachedSave) -> None:
        settings = self._settings
        self._folder.orders.put(
            flush_folder.FlushOrder(
                step=step,
                save_id=cached.save_id,
                durable=self._durable_uri,
                node=self._node,
                nodes=[
                    [
                        flush_folder.OrderedFile(name=name, size_bytes=size_bytes)
                        for rank in ranks
                        for name, size_bytes in cached.files[rank].items()
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
        # A trainer's threads need no longer flush it.
        self._folder.due.remove(step, cached.save_id)

    def _free_cores(self) -> list[int]:
        comm, ranks = self._members.comm, self._nodes[self._node]
        cores = comm.gather(sorted(os.sched_getaffinity(0)), awaiting="all ranks to list their cores")
        return free_cores([cores[rank] for rank in ranks], os.cpu_count() or 1)


class DaemonWatchdog:
    """Makes sure that a cache has a daemon, without endless attempts where none can run."""

    def __init__(
        self, folder: flush_folder.FlushFolder, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._num_starts = 0
        self._not_before_s = 0.0

    def ensure_running(self) -> None:
        """Start a daemon if there is none; `Unavailable` after several failed attempts."""
        now_s = self._clock()
        if self._folder.daemon_is_running():
            self._num_starts, self._not_before_s = 0, now_s + 1.0
            return
        if now_s < self._not_before_s:
            return
        if self._num_starts >= NUM_STARTS:
            self._num_starts = 0
            self._not_before_s = now_s + SETTLING_S
            raise Unavailable(
                f"The flush daemon was started {NUM_STARTS} times and ended each time. End of its log: "
                f"{self._folder.log_tail()[-500:]}",
                where=str(self._folder.log),
                fix='Fix the problem it reports, or let the trainer flush: pc.Flush(by="trainer").',
            )
        self._num_starts += 1
        self._not_before_s = now_s + SETTLING_S + retry_delay(self._num_starts)
        start_daemon(self._folder)


def read_flush_states(
    folder: flush_folder.FlushFolder, journal: flush_folder.JournalReader
) -> dict[int, FlushState]:
    """The flush state of each step of a cache, from its orders and its journal."""
    # Orders before the journal: an order is removed only after its outcome is in the journal.
    orders = folder.orders.all()
    save_states = journal.states()
    progress = folder.progress()
    states = {}
    for (step, save_id), save_state in save_states.items():
        order = orders.get(step)
        is_ordered_anew = order is not None and (isinstance(order, DataDamaged) or order.save_id != save_id)
        if save_state.outcome is not None and not is_ordered_anew:
            orders.pop(step, None)
            states[step] = FlushState(
                phase="durable" if save_state.outcome.what == "durable" else "superseded",
                size_bytes=save_state.copied_bytes,
                copied_bytes=save_state.copied_bytes,
                reason=save_state.outcome.reason,
            )
    for step, order in orders.items():
        if isinstance(order, DataDamaged):
            states[step] = FlushState(phase="failing", reason=str(order))
            continue
        now_bytes = progress.copied_bytes if progress is not None and progress.step == step else 0
        save_state = save_states.get((step, order.save_id), flush_folder.SaveState(step=step))
        states[step] = _describe_open_order(order, save_state, now_bytes)
    return dict(sorted(states.items()))


def _describe_open_order(
    order: flush_folder.FlushOrder, save_state: flush_folder.SaveState, now_bytes: int
) -> FlushState:
    copied_bytes = min(max(save_state.copied_bytes, now_bytes), order.size_bytes)
    phase: FlushPhase = "copying" if copied_bytes else "given"
    reason = ""
    if save_state.failure is not None:
        phase, reason = "failing", save_state.failure.reason
    elif save_state.is_marked:
        phase, copied_bytes = "waiting", order.size_bytes
        reason = "the other nodes' files" if len(order.nodes) > 1 else ""
    return FlushState(phase=phase, size_bytes=order.size_bytes, copied_bytes=copied_bytes, reason=reason)
