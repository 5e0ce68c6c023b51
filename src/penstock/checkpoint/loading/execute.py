"""One rank's part of a load plan: threads read while another thread exchanges data with the other ranks.

A further thread sends a heartbeat to all ranks every second, because the exchange stalls when a rank leaves.
Invariants: all ranks learn of the first failure in the same heartbeat, and none returns before its own work
has ended; a rank whose reads fail still sends and receives everything, so that no other rank waits for it
forever; every item that is whole in the memory of the rank responsible for it is verified.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from penstock.checkpoint.formats.manifest import start_checksum
from penstock.checkpoint.loading.placement import Destinations, Target, incoming_messages, outgoing_messages
from penstock.checkpoint.loading.reader import (
    BlockReader,
    OpenFiles,
    ReadBuffers,
    Span,
    SummedItem,
    damaged,
    plan_blocks,
)
from penstock.checkpoint.loading.transport import Outbox, Transport, run_rounds
from penstock.checkpoint.plan.load_plan import LoadPlan, payload_starts
from penstock.checkpoint.plan.region_arithmetic import find_overlaps
from penstock.checkpoint.saving.buffers import pin_memory
from penstock.checkpoint.state.regions import Ints, Regions, element_sizes
from penstock.cluster.comm import format_cause
from penstock.errors import RankFailed, WaitTimeout
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES
from penstock.storage.capabilities import find_local_paths
from penstock.storage.protocol import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
    from penstock.checkpoint.loading.requests import ByteItemIndex
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress


Result = TypeVar("Result")

HEARTBEAT_S = 1.0
"""So late may a rank hear of another's failure: one small message of all ranks in that time costs nothing."""

INTERRUPTED = "it was interrupted (Ctrl-C) while loading"


class CancelToken:
    """Tells work that it is to end; safe from any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._is_stopped = False
        self.is_interrupted = False

    def on_cancel(self, call: Callable[[], None]) -> None:
        """Have `call` made when it is to end; now, where that is already so."""
        with self._lock:
            self._calls.append(call)
            is_late = self._is_stopped
        if is_late:
            call()

    def stop(self) -> None:
        """It is to end. Safe twice."""
        with self._lock:
            self._is_stopped = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def interrupt(self) -> None:
        """It is to end, because the caller was interrupted; other ranks will hear so."""
        self.is_interrupted = True
        self.stop()


@dataclass(frozen=True, slots=True)
class _RankStatus:
    """How one rank stands at one beat."""

    state: Literal["busy", "done", "failed"]
    host: str = ""
    cause: str = ""


def run_with_heartbeat(
    comm: Comm, work: Callable[[CancelToken], Result], *, awaiting: str, limit_s: float | None = None
) -> Result:
    """What `work` gives on this rank once it is done on all; where it raises on any, all raise. Collective.

    `work` runs in a thread and ends soon after its `CancelToken` is cancelled. No other thread may use `comm`
    meanwhile.
    A rank that is done waits for the others at most `limit_s`, by default the limit of `comm`. Alone, the
    error is its own.
    """
    cancel_token = CancelToken()
    if comm.size == 1:
        with ExitStack() as undo:
            undo.callback(cancel_token.stop)
            return work(cancel_token)
    with (
        ThreadPoolExecutor(1, thread_name_prefix="penstock-work") as workers,
        ThreadPoolExecutor(1, thread_name_prefix="penstock-vigil") as keepers,
        ExitStack() as undo,
    ):
        # On the way out of an interrupt, too: the vigil then tells the others, and ends.
        undo.callback(cancel_token.interrupt)
        limit_s = comm.timeout_s if limit_s is None else limit_s
        vigil = _Heartbeat(comm, cancel_token, awaiting, limit_s)
        # The vigil begins the work, so that an interrupt finds both or neither.
        keeping = keepers.submit(vigil.keep, lambda: workers.submit(work, cancel_token))
        wait([keeping])
        undo.pop_all()
        cancel_token.stop()
        working, stands = keeping.result()
        wait([working])
    for rank, stand in enumerate(stands):
        if stand.state == "failed":
            own = working.exception() if rank == comm.rank else None
            raise RankFailed(rank, stand.host, stand.cause) from own
    return working.result()


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """Beat by beat, until all ranks are done or one has failed."""

    comm: Comm
    cancel_token: CancelToken
    awaiting: str
    limit_s: float

    def keep(self, begin: Callable[[], Future[Result]]) -> tuple[Future[Result], Sequence[_RankStatus]]:
        """The work of this rank, and how each rank stood last."""
        with ExitStack() as undo:
            undo.callback(self.cancel_token.stop)
            working, done_s = begin(), None
            while True:
                wait([working], timeout=HEARTBEAT_S)
                if done_s is None and working.done():
                    done_s = time.monotonic()
                stands = self.comm.gather(self._stand(working, done_s), awaiting=self.awaiting)
                if any(each.state == "failed" for each in stands):
                    return working, stands
                if all(each.state == "done" for each in stands):
                    undo.pop_all()
                    return working, stands

    def _stand(self, working: Future[Result], done_s: float | None) -> _RankStatus:
        cause = ""
        if self.cancel_token.is_interrupted:
            cause = INTERRUPTED
        elif done_s is None:
            return _RankStatus("busy")
        elif (error := working.exception()) is not None:
            cause = format_cause(error)
        elif time.monotonic() - done_s > self.limit_s:
            cause = format_cause(WaitTimeout(self.awaiting, self.limit_s))
        return _RankStatus("failed", self.comm.host, cause) if cause else _RankStatus("done")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTotals:
    """What moving cost."""

    read_bytes: int
    received_bytes: int
    num_summed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadContext:
    """What moving needs besides the plan."""

    checkpoint: CheckpointSource
    storage: Storage
    """The opened one, or a faster way to the same files."""
    transport: Transport | None
    buffers: ReadBuffers
    progress: Progress
    timeout_s: float

    @property
    def takes_any_address(self) -> bool:
        """Whether the storage reads into any memory as fast as into aligned huge pages."""
        paths = find_local_paths(self.storage)
        return paths is None or paths.uses_page_cache

    def open_file(self, number: int) -> Source:
        """One of the checkpoint's files."""
        return self.storage.open(self.checkpoint.key(self.checkpoint.index.files[number]))

    def summed(self, item_index: ByteItemIndex, row: int) -> SummedItem | None:
        """The sum of the item of a row of `item_index`, where it is known."""
        summed = self.checkpoint.summed
        if summed is None:
            return None
        source = int(item_index.source_row[row])
        expected = summed.object_sums[-1 - source] if source < 0 else summed.sums[source].tobytes()
        begin = int(item_index.stored.item_offset[row])
        return SummedItem(
            name=item_index.tensors[int(item_index.stored.regions.tensor[row])].name,
            file=f"{self.checkpoint.uri}/{self.checkpoint.index.files[int(item_index.stored.file[row])]}",
            begin=begin,
            end=begin + int(item_index.stored.item_bytes[row]),
            expected=expected,
        )


def execute_plan(
    plan: LoadPlan,
    item_index: ByteItemIndex,
    targets: Sequence[Target],
    context: LoadContext,
    cancel_token: CancelToken,
) -> LoadTotals:
    """Read, sum, exchange and put in place; `targets` are this rank's wanted boxes, in their order.

    Once `cancel_token` says so, nothing more is read, and what others wait for is sent as it is.
    """
    begin, end = _ranges(plan, item_index)
    items = _whole_items(plan, item_index, begin, end, context)
    spans = _spans(plan, item_index, begin, end, items)
    settings = context.buffers.settings
    blocks = plan_blocks(spans, block_bytes=settings.block_bytes, alignment_bytes=PAGE_BYTES)
    messages, places = outgoing_messages(plan.sends, item_index.tensors)
    outbox = Outbox(messages, context.timeout_s)
    destinations = Destinations(
        plan,
        begin.tolist(),
        targets,
        tensors=item_index.tensors,
        outbox=outbox,
        messages=places,
        takes_any_address=context.takes_any_address,
    )
    files = OpenFiles(blocks, context.open_file)
    reading = BlockReader(
        blocks,
        spans,
        files=files,
        landing=destinations,
        items=items,
        progress=context.progress,
        wait_for_room=outbox.wait_for_room,
    )
    incoming = incoming_messages(plan.receives, item_index.tensors, targets)
    context.progress.begin("loading", sum(block.end - block.begin for block in blocks))
    with ThreadPoolExecutor(settings.streams + 1, thread_name_prefix="penstock-load") as threads:
        is_for_cuda = any(each.memory.device.type == "cuda" for each in targets)
        under_way = list(reading.start(context.buffers, threads, pin_memory if is_for_cuda else None))
        if context.transport is not None and (messages or incoming):
            exchange = threads.submit(run_rounds, context.transport, outbox, incoming, context.timeout_s)
            under_way.append(exchange)

        def stop() -> None:
            reading.stop()
            outbox.give_up()

        cancel_token.on_cancel(stop)
        for future in under_way:
            future.add_done_callback(lambda done: stop() if done.exception() is not None else None)
        with ExitStack() as undo:
            undo.callback(stop)
            wait(under_way)
    files.close()
    for future in under_way:
        future.result()
    return LoadTotals(
        read_bytes=sum(block.end - block.begin for block in blocks),
        received_bytes=sum(message.size_bytes for message in incoming),
        num_summed=len(items),
    )


def _ranges(plan: LoadPlan, item_index: ByteItemIndex) -> tuple[Ints, Ints]:
    """Where each read's payload begins and ends in its file."""
    item_bytes = element_sizes(item_index.tensors)
    outer = item_index.stored.regions.take(plan.row)
    begin = item_index.stored.payload_offset[plan.row]
    begin = begin + payload_starts(plan.regions, outer) * item_bytes[plan.regions.tensor]
    return begin, begin + plan.regions.num_bytes(item_bytes)


def _whole_items(
    plan: LoadPlan, item_index: ByteItemIndex, begin: Ints, end: Ints, context: LoadContext
) -> dict[int, SummedItem]:
    """Items that this rank reads from end to end, by row of `ByteItemIndex`: they are verified on the way."""
    found = {}
    item_bytes = element_sizes(item_index.tensors)
    sizes = item_index.stored.regions.num_bytes(item_bytes)
    is_first = np.ones(len(plan.row), dtype=np.bool_)
    is_first[1:] = plan.row[1:] != plan.row[:-1]
    bounds = [*np.flatnonzero(is_first).tolist(), len(plan.row)]
    rows, counts = np.unique(plan.row[is_first], return_counts=True)
    in_one_run = dict(zip(rows.tolist(), (counts == 1).tolist(), strict=True))
    for low, high in pairwise(bounds):
        row = int(plan.row[low])
        payload = int(item_index.stored.payload_offset[row])
        follows = (begin[low + 1 : high] == end[low : high - 1]).all()
        is_whole = begin[low] == payload and end[high - 1] == payload + sizes[row]
        if in_one_run[row] and follows and is_whole and (item := context.summed(item_index, row)) is not None:
            found[row] = item
    return found


def _spans(
    plan: LoadPlan, item_index: ByteItemIndex, begin: Ints, end: Ints, items: Mapping[int, SummedItem]
) -> list[Span]:
    """What each read asks of its file: its payload, and of a summed item also the envelope around."""
    spans = []
    last = len(plan.row) - 1
    for read, row in enumerate(plan.row.tolist()):
        low, high = int(begin[read]), int(end[read])
        item = items.get(row)
        if item is not None:
            low = item.begin if read == 0 or plan.row[read - 1] != row else low
            high = item.end if read == last or plan.row[read + 1] != row else high
        spans.append(Span(int(item_index.stored.file[row]), low, high, row if item is not None else None))
    return spans


NUM_THREADS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Landed:
    item: SummedItem
    file: int
    payload_offset: int
    payload: NDArray[np.uint8]


def verify_cut_items(
    plan: LoadPlan,
    item_index: ByteItemIndex,
    wanted: Regions,
    targets: Sequence[Target],
    context: LoadContext,
) -> int:
    """Verify what this rank answers for; how many items that were. `DataDamaged` names the first bad one.

    `wanted` is row by row what `targets` hold.
    """
    found = [
        landed
        for row in _opened_here(plan, item_index).tolist()
        if (landed := _landed(row, item_index, wanted, targets, context)) is not None
    ]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda landed: _verify(landed, context), found))
    return len(found)


def _opened_here(plan: LoadPlan, item_index: ByteItemIndex) -> Ints:
    """Rows whose payload this rank began to read, and others went on with."""
    item_bytes = element_sizes(item_index.tensors)
    outer = item_index.stored.regions.take(plan.row)
    starts = payload_starts(plan.regions, outer) == 0
    own = np.zeros(len(item_index.stored), dtype=np.int64)
    np.add.at(own, plan.row, plan.regions.num_bytes(item_bytes))
    is_cut = own[plan.row] < outer.num_bytes(item_bytes)
    return np.unique(plan.row[starts & is_cut])


def _landed(
    row: int, item_index: ByteItemIndex, wanted: Regions, targets: Sequence[Target], context: LoadContext
) -> _Landed | None:
    item = context.summed(item_index, row)
    if item is None:
        return None
    region = item_index.stored.regions.take(np.array([row]))
    met = find_overlaps(region, wanted)
    whole = np.flatnonzero(met.regions.num_elements == region.num_elements)
    for place in met.right[whole].tolist():
        facts = item_index.tensors[int(region.tensor[0])]
        payload = targets[place].straight(*region.region(0, len(facts.shape)))
        if payload is not None:
            offset = int(item_index.stored.payload_offset[row])
            return _Landed(item, int(item_index.stored.file[row]), offset, payload)
    return None


def _verify(landed: _Landed, context: LoadContext) -> None:
    item = landed.item
    prefix = bytearray(landed.payload_offset - item.begin)
    end = landed.payload_offset + landed.payload.nbytes
    suffix = bytearray(item.end - end)
    source = context.open_file(landed.file)
    try:
        source.read_into(item.begin, memoryview(prefix))
        source.read_into(end, memoryview(suffix))
    finally:
        source.close()
    total = start_checksum()
    for part in (prefix, landed.payload.data, suffix):
        total.update(part)
    if total.digest() != item.expected:
        raise damaged(item)
