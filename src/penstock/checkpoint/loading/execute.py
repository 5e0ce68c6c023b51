"""One rank's part of a load plan: threads read while another thread exchanges data with the other ranks.

A further thread sends a heartbeat to all ranks every second, because the exchange stalls when a rank leaves.
Invariants: all ranks learn of the first failure in the same heartbeat, and none returns before its own work
has ended; a rank whose reads fail still sends and receives everything, so that no other rank waits for it
forever; every item that is whole in the memory of the rank responsible for it is verified.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
from penstock.checkpoint.formats.manifest import checksum_of
from penstock.checkpoint.loading import placement
from penstock.checkpoint.loading.host_links import HostLinks
from penstock.checkpoint.loading.host_sharing import HostSharing, settings_for_sharing
from penstock.checkpoint.loading.load_requests import ByteItemIndex
from penstock.checkpoint.plan.load_plan import LoadPlan, payload_starts
from penstock.checkpoint.plan.region_arithmetic import distinct, find_overlaps
from penstock.checkpoint.state.process_group import RankGroup
from penstock.checkpoint.state.regions import ByteArray, Ints, Regions, element_sizes
from penstock.cluster.comm import Comm, format_cause
from penstock.errors import PenstockError, RankError, RankFailed, WaitTimeout
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES
from penstock.storage.capabilities import find_local_paths, no_thread, submit_or_run
from penstock.storage.protocol import Source
from penstock.transfer import reader
from penstock.transfer.buffers import pin_memory
from penstock.transfer.exchange import Incoming, Outbox, run_rounds

Result = TypeVar("Result")
Beaten = TypeVar("Beaten")

HEARTBEAT_S = 1.0
"""How late a rank may hear of another's failure. A small message of all ranks at this rate costs nothing."""

INTERRUPTED = "it was interrupted (Ctrl-C) while loading"
AWAITED = "all ranks to load their parts"
NUM_VERIFYING_THREADS = 2


class CancelToken:
    """Tells work to end early. All methods may be called from any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._is_cancelled = False
        self.is_interrupted = False

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` on cancellation; at once if that has happened."""
        with self._lock:
            self._callbacks.append(callback)
            is_late = self._is_cancelled
        if is_late:
            callback()

    def cancel(self) -> None:
        """End the work. May be called twice."""
        with self._lock:
            self._is_cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def interrupt(self) -> None:
        """End the work because the caller was interrupted, which is what other ranks will report."""
        self.is_interrupted = True
        self.cancel()


RankState = Literal["busy", "done", "failed"]


@dataclass(frozen=True, slots=True)
class _RankStatus:
    """The status of one rank at one heartbeat."""

    state: RankState
    host: str = ""
    cause: str = ""


def run_with_heartbeat(
    comm: Comm, work: Callable[[CancelToken], Result], *, awaiting: str, limit_s: float | None = None
) -> Result:
    """Run `work` on all ranks and return its result here, or raise on all ranks if it fails on any.

    Collective.

    `work` runs in a thread and must end soon after its `CancelToken` is cancelled. No other thread may use
    `comm` meanwhile. A rank that is done waits at most `limit_s` for the others, by default the limit of
    `comm`. On a single rank, the error is raised as it is.
    """
    cancel_token = CancelToken()
    if comm.size == 1:
        with ExitStack() as undo:
            undo.callback(cancel_token.cancel)
            return work(cancel_token)
    with (
        ThreadPoolExecutor(1, thread_name_prefix="penstock-work") as workers,
        ThreadPoolExecutor(1, thread_name_prefix="penstock-heartbeat") as heartbeats,
        ExitStack() as undo,
    ):
        # An interrupt leaves this block, too: the heartbeat then tells the other ranks, and ends.
        undo.callback(cancel_token.interrupt)
        limit_s = comm.timeout_s if limit_s is None else limit_s
        heartbeat = _Heartbeat(comm, cancel_token, awaiting, limit_s)
        # The heartbeat's thread starts the work, so that an interrupt finds both running or neither.
        beating = submit_or_run(heartbeats, heartbeat.beat, partial(_start, workers, work, cancel_token))
        # With time limits, because Ctrl-C does not end a wait that it precedes by an instant.
        while wait([beating], timeout=HEARTBEAT_S).not_done:
            pass
        undo.pop_all()
        cancel_token.cancel()
        working, statuses = heartbeat.result(beating)
        wait([working])
    for rank, status in enumerate(statuses):
        if status.state == "failed":
            own = working.exception() if rank == comm.rank else None
            raise RankFailed(rank, status.host, status.cause) from own
    return working.result()


def _start(
    threads: Executor, work: Callable[[CancelToken], Result], cancel_token: CancelToken
) -> Future[Result]:
    """Start the work. If no thread may be started, it is cancelled, which ends what others wait for."""
    try:
        return threads.submit(work, cancel_token)
    except RuntimeError as error:
        cancel_token.cancel()
        failed: Future[Result] = Future()
        with suppress(PenstockError):
            work(cancel_token)
        failed.set_exception(no_thread(error))
        return failed


@dataclass(slots=True)
class _Heartbeat:
    """Exchanges the status of all ranks until all are done or one has failed."""

    comm: Comm
    cancel_token: CancelToken
    awaiting: str
    limit_s: float
    working: Future[Any] | None = None

    def beat(self, start: Callable[[], Future[Result]]) -> tuple[Future[Result], Sequence[_RankStatus]]:
        """Start the work; returns it and the last status of each rank."""
        with ExitStack() as undo:
            undo.callback(self.cancel_token.cancel)
            working, done_s = start(), None
            self.working = working
            while True:
                wait([working], timeout=HEARTBEAT_S)
                if done_s is None and working.done():
                    done_s = time.monotonic()
                statuses = self.comm.gather(self._status(working, done_s), awaiting=self.awaiting)
                if any(status.state == "failed" for status in statuses):
                    return working, statuses
                if all(status.state == "done" for status in statuses):
                    undo.pop_all()
                    return working, statuses

    def result(self, beating: Future[Beaten]) -> Beaten:
        """What `beat` returned or raised; where ranks lost each other, the work may know which one died."""
        try:
            return beating.result()
        except RankError as error:
            cause = self.working.exception() if self.working is not None else None
            if isinstance(cause, RankError):
                raise cause from error
            raise

    def _status(self, working: Future[Result], done_s: float | None) -> _RankStatus:
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
    """What this rank has read, received and verified."""

    read_bytes: int
    received_bytes: int
    num_verified: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadContext:
    """What executing a plan needs besides the plan."""

    checkpoint: CheckpointSource
    item_index: ByteItemIndex
    group: RankGroup
    buffers: reader.ReadBuffers
    progress: Progress
    storage: Storage
    """The checkpoint's, or faster access to the same files."""
    links: HostLinks | None = None
    """To the ranks of this host whose reads the plan has as seen ones; None if it has none."""

    @property
    def element_sizes(self) -> Ints:
        """Bytes of one element, by tensor number."""
        return element_sizes(self.item_index.tensors)

    def open_file(self, number: int) -> Source:
        """One of the checkpoint's files."""
        return self.storage.open(self.key(number))

    def key(self, number: int) -> str:
        """The key of one of the checkpoint's files."""
        return self.checkpoint.key(self.checkpoint.index.files[number])

    def checksummed_items(self, rows: Ints) -> dict[int, reader.ChecksummedItem]:
        """The items of rows of `item_index` with their checksums; empty if these are not known."""
        sums, objects = self.checkpoint.index.sums, self.checkpoint.index.objects
        if sums is None:
            return {}
        stored, tensors = self.item_index.stored, self.item_index.tensors
        files = [f"{self.checkpoint.uri}/{name}" for name in self.checkpoint.index.files]
        begin = stored.item_offset[rows]
        columns = (
            *(rows, stored.regions.tensor[rows], stored.file[rows]),
            *(begin, begin + stored.item_bytes[rows], self.item_index.source_row[rows]),
        )
        return {
            row: reader.ChecksummedItem(
                tensors[tensor].name,
                files[file],
                low,
                high,
                objects[-1 - source].sum if source < 0 else sums[source].tobytes(),
            )
            for row, tensor, file, low, high, source in zip(
                *(column.tolist() for column in columns), strict=True
            )
        }


def execute_plan(
    plan: LoadPlan, wanted: Regions, targets: Sequence[placement.Target], context: LoadContext
) -> LoadTotals:
    """Read, exchange, place and verify this rank's part. Collective.

    `targets` are the memory of the `wanted` regions, row by row. Raises on all ranks if one fails.
    """

    def work(cancel_token: CancelToken) -> LoadTotals:
        with context.checkpoint.explaining_damage():
            totals = _move(plan, targets, context, cancel_token)
            num_verified = _verify_cut_items(plan, wanted, targets, context)
        return replace(totals, num_verified=totals.num_verified + num_verified)

    placement.wait_for_devices(targets)
    return run_with_heartbeat(context.group.comm, work, awaiting=AWAITED)


def _move(
    plan: LoadPlan, targets: Sequence[placement.Target], context: LoadContext, cancel_token: CancelToken
) -> LoadTotals:
    """Read, exchange and place. After a cancellation nothing more is read.

    What other ranks wait for is then sent with whatever content it has, so that they end as well.
    """
    begin, end = _payload_ranges(plan, context)
    destinations, outbox = _open_destinations(plan, begin, targets, context)
    incoming = placement.incoming_messages(plan.receives, context.item_index.tensors, targets)
    is_for_cuda = any(target.memory.device.type == "cuda" for target in targets)
    with _exchanging(outbox, incoming, context) as exchange:
        items = _find_whole_items(plan, begin, end, context)
        spans = _plan_spans(plan, context.item_index.stored.file, begin, end, items)
        settings, blocks = _plan_blocks(spans[: plan.num_own], context)
        sharing = _open_sharing(plan, spans, destinations, context, is_for_cuda=is_for_cuda)
        block_reader = reader.BlockReader(
            blocks,
            spans,
            open_file=context.open_file,
            sink=destinations,
            items=items,
            progress=context.progress,
            wait_for_room=outbox.wait_for_room,
            viewers=sharing,
        )
        num_read = sum(block.end - block.begin for block in blocks)
        context.progress.begin("loading", num_read)
        stops = [block_reader.stop, outbox.give_up] + ([sharing.stop] if sharing is not None else [])
        num_links = len(context.links.links) if context.links is not None else 0
        with (
            ThreadPoolExecutor(settings.streams, thread_name_prefix="penstock-load") as readers,
            ThreadPoolExecutor(num_links or 1, thread_name_prefix="penstock-share") as listeners,
            ExitStack() as undo,
        ):
            for stop in stops:
                undo.callback(stop)
            pin = pin_memory if is_for_cuda else None
            reading = block_reader.start(context.buffers, readers, pin, streams=settings.streams)
            futures = [*exchange, *reading, *(sharing.start(listeners) if sharing is not None else [])]
            _wait(futures, stops, cancel_token)
    block_reader.close()
    for future in futures:
        future.result()
    received_bytes = sum(message.size_bytes for message in incoming)
    return LoadTotals(
        read_bytes=num_read,
        received_bytes=received_bytes + (sharing.seen_bytes if sharing is not None else 0),
        num_verified=len(items),
    )


def _plan_blocks(
    spans: Sequence[reader.Span], context: LoadContext
) -> tuple[reader.ReadSettings, list[reader.Block]]:
    """How this rank reads its own spans."""
    settings = context.buffers.settings
    if context.links is not None:
        settings = settings_for_sharing(context.links, settings)
    is_local = find_local_paths(context.storage) is not None
    if is_local:
        # Services are asked for few and large ranges, whatever the size of a load.
        settings = settings.fit(sum(span.end - span.begin for span in spans))
    blocks = reader.plan_blocks(
        spans,
        block_bytes=settings.block_bytes,
        alignment_bytes=PAGE_BYTES,
        tapered_for=settings.streams if is_local else 0,
    )
    return settings, blocks


@contextmanager
def _exchanging(
    outbox: Outbox, incoming: Sequence[Incoming], context: LoadContext
) -> Iterator[list[Future[None]]]:
    """Send and receive beside the reading. Others wait for what is sent, also if reading never begins."""
    group = context.group
    if group.torch_group is None or not (outbox.messages or incoming):
        yield []
        return
    run = partial(run_rounds, group.comm.transfer(), outbox, incoming, group.comm.timeout_s)
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-exchange") as threads, ExitStack() as undo:
        undo.callback(outbox.give_up)
        try:
            exchange = threads.submit(run)
        except RuntimeError as error:
            outbox.give_up()
            run()
            raise no_thread(error) from error
        yield [exchange]


def _open_sharing(
    plan: LoadPlan,
    spans: Sequence[reader.Span],
    destinations: placement.Destinations,
    context: LoadContext,
    *,
    is_for_cuda: bool,
) -> HostSharing | None:
    if context.links is None:
        return None
    return HostSharing(
        context.links,
        plan,
        spans,
        destinations,
        timeout_s=context.group.comm.timeout_s,
        # Devices copy from pinned memory, which the reader's buffers are.
        reads_into_window=not is_for_cuda,
    )


def _open_destinations(
    plan: LoadPlan, begin: Ints, targets: Sequence[placement.Target], context: LoadContext
) -> tuple[placement.Destinations, Outbox]:
    tensors = context.item_index.tensors
    messages, places = placement.outgoing_messages(plan.sends, tensors)
    outbox = Outbox(messages, context.group.comm.timeout_s)
    paths = find_local_paths(context.storage)
    destinations = placement.Destinations(
        plan,
        begin.tolist(),
        targets,
        tensors=tensors,
        outbox=outbox,
        messages=places,
        # Direct I/O needs aligned memory, and is slower into small pages than into our huge ones.
        takes_any_address=paths is None or paths.uses_page_cache,
    )
    return destinations, outbox


def _wait(
    futures: Sequence[Future[None]], stops: Sequence[Callable[[], None]], cancel_token: CancelToken
) -> None:
    """Wait for the threads, and stop all of them when one fails or the work is cancelled."""

    def stop() -> None:
        for each in stops:
            each()

    cancel_token.on_cancel(stop)
    for future in futures:
        future.add_done_callback(lambda done: stop() if done.exception() is not None else None)
    with ExitStack() as undo:
        undo.callback(stop)
        wait(futures)


def _payload_ranges(plan: LoadPlan, context: LoadContext) -> tuple[Ints, Ints]:
    """Where each read's payload begins and ends in its file."""
    element_bytes, stored = context.element_sizes, context.item_index.stored
    starts = payload_starts(plan.regions, stored.regions.take(plan.row)) * element_bytes[plan.regions.tensor]
    begin = stored.payload_offset[plan.row] + starts
    return begin, begin + plan.regions.num_bytes(element_bytes)


def _find_whole_items(
    plan: LoadPlan, begin: Ints, end: Ints, context: LoadContext
) -> dict[int, reader.ChecksummedItem]:
    """Items that this rank reads from end to end, by row of `ByteItemIndex`: they are verified while read."""
    stored = context.item_index.stored
    sizes = stored.regions.num_bytes(context.element_sizes)
    own_row = plan.row[: plan.num_own]
    if not len(own_row):
        return {}
    is_first = np.ones(len(own_row), dtype=np.bool_)
    is_first[1:] = own_row[1:] != own_row[:-1]
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(own_row)) - 1
    row = own_row[first]
    _, run, counts = np.unique(row, return_inverse=True, return_counts=True)
    skips = np.zeros(len(own_row), dtype=np.int64)
    skips[1:] = ~is_first[1:] & (begin[1 : len(own_row)] != end[: len(own_row) - 1])
    num_skips = np.add.reduceat(skips, first)
    payload = stored.payload_offset[row]
    is_whole = (begin[first] == payload) & (end[last] == payload + sizes[row])
    return context.checksummed_items(row[is_whole & (num_skips == 0) & (counts[run] == 1)])


def _plan_spans(
    plan: LoadPlan, files: Ints, begin: Ints, end: Ints, items: Mapping[int, reader.ChecksummedItem]
) -> list[reader.Span]:
    """The bytes that each read needs: its payload and, of an item to verify, also the envelope around it."""
    spans = []
    rows = plan.row.tolist()
    columns = (rows, files[plan.row].tolist(), begin.tolist(), end.tolist())
    for row, before, after, file, low, high in zip(
        rows, [-1, *rows][:-1], [*rows, -1][1:], *columns[1:], strict=True
    ):
        item = items.get(row)
        if item is None:
            spans.append(reader.Span(file, low, high))
            continue
        first = item.begin if before != row else low
        spans.append(reader.Span(file, first, item.end if after != row else high, row))
    return spans


@dataclass(frozen=True, slots=True, eq=False)
class _LoadedItem:
    """An item whose payload is complete in this rank's memory."""

    item: reader.ChecksummedItem
    file: int
    payload_offset: int
    payload: ByteArray


def _verify_cut_items(
    plan: LoadPlan, wanted: Regions, targets: Sequence[placement.Target], context: LoadContext
) -> int:
    """Verify items that several ranks have read in parts; returns how many this rank verified.

    The rank that read the beginning of an item verifies it, if the item ended up whole in its memory.
    `DataDamaged` names the first bad one.
    """
    loaded = [
        item
        for row in _find_cut_rows(plan, context).tolist()
        if (item := _find_loaded_item(row, wanted, targets, context)) is not None
    ]
    if loaded:
        with ThreadPoolExecutor(NUM_VERIFYING_THREADS) as threads:
            list(threads.map(lambda item: _verify(item, context), loaded))
    return len(loaded)


def _find_cut_rows(plan: LoadPlan, context: LoadContext) -> Ints:
    """Rows of which this rank read the beginning of the payload, and other ranks the rest."""
    element_bytes, stored = context.element_sizes, context.item_index.stored
    row, regions = plan.row[: plan.num_own], plan.regions.take(slice(plan.num_own))
    outer = stored.regions.take(row)
    starts = payload_starts(regions, outer) == 0
    own_bytes = np.zeros(len(stored), dtype=np.int64)
    np.add.at(own_bytes, row, regions.num_bytes(element_bytes))
    is_cut = own_bytes[row] < outer.num_bytes(element_bytes)
    return distinct(row[starts & is_cut])


def _find_loaded_item(
    row: int, wanted: Regions, targets: Sequence[placement.Target], context: LoadContext
) -> _LoadedItem | None:
    item = context.checksummed_items(np.array([row])).get(row)
    if item is None:
        return None
    stored = context.item_index.stored
    region = stored.regions.take(np.array([row]))
    overlaps = find_overlaps(region, wanted)
    whole = np.flatnonzero(overlaps.regions.num_elements == region.num_elements)
    for place in overlaps.right[whole].tolist():
        facts = context.item_index.tensors[int(region.tensor[0])]
        payload = targets[place].contiguous_bytes(*region.region(0, len(facts.shape)))
        if payload is not None:
            return _LoadedItem(item, int(stored.file[row]), int(stored.payload_offset[row]), payload)
    return None


def _verify(loaded: _LoadedItem, context: LoadContext) -> None:
    """Checksum the payload in memory between the envelope's two parts, which are read from the file."""
    item = loaded.item
    end = loaded.payload_offset + loaded.payload.nbytes
    prefix, suffix = bytearray(loaded.payload_offset - item.begin), bytearray(item.end - end)
    with closing(context.open_file(loaded.file)) as source:
        source.read_into(item.begin, memoryview(prefix))
        source.read_into(end, memoryview(suffix))
    item.require(checksum_of(prefix, loaded.payload.data, suffix))
