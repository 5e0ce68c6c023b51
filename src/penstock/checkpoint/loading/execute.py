"""One rank's part of a load plan: threads read while another exchanges with the other ranks.

Invariant: a rank whose reads fail still sends and receives everything, so that no rank waits for it in vain;
it raises afterwards. Every item that lies whole in a tensor of the rank responsible for it is verified.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.formats.checksums import running_sum
from penstock.checkpoint.loading.placement import Landings, incoming_messages, outgoing_messages
from penstock.checkpoint.loading.reader import OpenFiles, Reading, Span, SummedItem, damaged, lay_out
from penstock.checkpoint.loading.transport import Outbox, run_rounds
from penstock.checkpoint.plan.load_plan import payload_starts
from penstock.checkpoint.plan.region_arithmetic import overlaps
from penstock.checkpoint.saving.buffers import pin
from penstock.checkpoint.state.regions import item_bytes_of
from penstock.storage.aligned import PAGE_BYTES
from penstock.storage.capabilities import find_local_paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.checkpoint.formats.checkpoint_source import Opened
    from penstock.checkpoint.loading.heartbeat import Stopping
    from penstock.checkpoint.loading.placement import Target
    from penstock.checkpoint.loading.reader import ReadBuffers
    from penstock.checkpoint.loading.requests import ByteItemIndex
    from penstock.checkpoint.loading.transport import Transport
    from penstock.checkpoint.plan.load_plan import LoadPlan
    from penstock.checkpoint.state.regions import Boxes, Ints
    from penstock.progress import Progress
    from penstock.storage import Storage
    from penstock.storage.protocol import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What moving cost."""

    read_bytes: int
    received_bytes: int
    num_summed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Means:
    """What moving needs besides the plan."""

    opened: Opened
    storage: Storage
    """The opened one, or a faster way to the same files."""
    carrier: Transport | None
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
        return self.storage.open(self.opened.key(self.opened.contents.files[number]))

    def summed(self, lines: ByteItemIndex, row: int) -> SummedItem | None:
        """The sum of the item of a row of `lines`, where it is known."""
        summed = self.opened.summed
        if summed is None:
            return None
        source = int(lines.source_row[row])
        expected = summed.object_sums[-1 - source] if source < 0 else summed.sums[source].tobytes()
        begin = int(lines.stored.item_offset[row])
        return SummedItem(
            name=lines.tensors[int(lines.stored.boxes.tensor[row])].name,
            file=f"{self.opened.uri}/{self.opened.contents.files[int(lines.stored.file[row])]}",
            begin=begin,
            end=begin + int(lines.stored.item_bytes[row]),
            expected=expected,
        )


def move(
    plan: LoadPlan, lines: ByteItemIndex, targets: Sequence[Target], means: Means, stopping: Stopping
) -> Moved:
    """Read, sum, exchange and put in place; `targets` are this rank's wanted boxes, in their order.

    Once `stopping` says so, nothing more is read, and what others wait for is sent as it is.
    """
    begin, end = _ranges(plan, lines)
    items = _whole_items(plan, lines, begin, end, means)
    spans = _spans(plan, lines, begin, end, items)
    settings = means.buffers.settings
    blocks = lay_out(spans, block_bytes=settings.block_bytes, alignment_bytes=PAGE_BYTES)
    messages, places = outgoing_messages(plan.sends, lines.tensors)
    outbox = Outbox(messages, means.timeout_s)
    landings = Landings(
        plan,
        begin.tolist(),
        targets,
        tensors=lines.tensors,
        outbox=outbox,
        messages=places,
        takes_any_address=means.takes_any_address,
    )
    files = OpenFiles(blocks, means.open_file)
    reading = Reading(
        blocks,
        spans,
        files=files,
        landing=landings,
        items=items,
        progress=means.progress,
        wait_for_room=outbox.wait_for_room,
    )
    incoming = incoming_messages(plan.receives, lines.tensors, targets)
    means.progress.begin("loading", sum(block.end - block.begin for block in blocks))
    with ThreadPoolExecutor(settings.streams + 1, thread_name_prefix="penstock-load") as threads:
        is_for_cuda = any(each.memory.device.type == "cuda" for each in targets)
        under_way = list(reading.start(means.buffers, threads, pin if is_for_cuda else None))
        if means.carrier is not None and (messages or incoming):
            exchange = threads.submit(run_rounds, means.carrier, outbox, incoming, means.timeout_s)
            under_way.append(exchange)

        def stop() -> None:
            reading.stop()
            outbox.give_up()

        stopping.then(stop)
        for future in under_way:
            future.add_done_callback(lambda done: stop() if done.exception() is not None else None)
        with ExitStack() as undo:
            undo.callback(stop)
            wait(under_way)
    files.close()
    for future in under_way:
        future.result()
    return Moved(
        read_bytes=sum(block.end - block.begin for block in blocks),
        received_bytes=sum(message.size_bytes for message in incoming),
        num_summed=len(items),
    )


def _ranges(plan: LoadPlan, lines: ByteItemIndex) -> tuple[Ints, Ints]:
    """Where each read's payload begins and ends in its file."""
    item_bytes = item_bytes_of(lines.tensors)
    outer = lines.stored.boxes.take(plan.row)
    begin = lines.stored.payload_offset[plan.row]
    begin = begin + payload_starts(plan.boxes, outer) * item_bytes[plan.boxes.tensor]
    return begin, begin + plan.boxes.num_bytes(item_bytes)


def _whole_items(
    plan: LoadPlan, lines: ByteItemIndex, begin: Ints, end: Ints, means: Means
) -> dict[int, SummedItem]:
    """Items that this rank reads from end to end, by row of `ByteItemIndex`: they are verified on the way."""
    found = {}
    item_bytes = item_bytes_of(lines.tensors)
    sizes = lines.stored.boxes.num_bytes(item_bytes)
    is_first = np.ones(len(plan.row), dtype=np.bool_)
    is_first[1:] = plan.row[1:] != plan.row[:-1]
    bounds = [*np.flatnonzero(is_first).tolist(), len(plan.row)]
    rows, counts = np.unique(plan.row[is_first], return_counts=True)
    in_one_run = dict(zip(rows.tolist(), (counts == 1).tolist(), strict=True))
    for low, high in pairwise(bounds):
        row = int(plan.row[low])
        payload = int(lines.stored.payload_offset[row])
        follows = (begin[low + 1 : high] == end[low : high - 1]).all()
        is_whole = begin[low] == payload and end[high - 1] == payload + sizes[row]
        if in_one_run[row] and follows and is_whole and (item := means.summed(lines, row)) is not None:
            found[row] = item
    return found


def _spans(
    plan: LoadPlan, lines: ByteItemIndex, begin: Ints, end: Ints, items: Mapping[int, SummedItem]
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
        spans.append(Span(int(lines.stored.file[row]), low, high, row if item is not None else None))
    return spans


NUM_THREADS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Landed:
    item: SummedItem
    file: int
    payload_offset: int
    payload: NDArray[np.uint8]


def recheck(
    plan: LoadPlan, lines: ByteItemIndex, wanted: Boxes, targets: Sequence[Target], means: Means
) -> int:
    """Verify what this rank answers for; how many items that were. `DataDamaged` names the first bad one.

    `wanted` is row by row what `targets` hold.
    """
    found = [
        landed
        for row in _opened_here(plan, lines).tolist()
        if (landed := _landed(row, lines, wanted, targets, means)) is not None
    ]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(lambda landed: _verify(landed, means), found))
    return len(found)


def _opened_here(plan: LoadPlan, lines: ByteItemIndex) -> Ints:
    """Rows whose payload this rank began to read, and others went on with."""
    item_bytes = item_bytes_of(lines.tensors)
    outer = lines.stored.boxes.take(plan.row)
    starts = payload_starts(plan.boxes, outer) == 0
    own = np.zeros(len(lines.stored), dtype=np.int64)
    np.add.at(own, plan.row, plan.boxes.num_bytes(item_bytes))
    is_cut = own[plan.row] < outer.num_bytes(item_bytes)
    return np.unique(plan.row[starts & is_cut])


def _landed(
    row: int, lines: ByteItemIndex, wanted: Boxes, targets: Sequence[Target], means: Means
) -> _Landed | None:
    item = means.summed(lines, row)
    if item is None:
        return None
    box = lines.stored.boxes.take(np.array([row]))
    met = overlaps(box, wanted)
    whole = np.flatnonzero(met.boxes.num_elements == box.num_elements)
    for place in met.right[whole].tolist():
        facts = lines.tensors[int(box.tensor[0])]
        payload = targets[place].straight(*box.box(0, len(facts.shape)))
        if payload is not None:
            offset = int(lines.stored.payload_offset[row])
            return _Landed(item, int(lines.stored.file[row]), offset, payload)
    return None


def _verify(landed: _Landed, means: Means) -> None:
    item = landed.item
    prefix = bytearray(landed.payload_offset - item.begin)
    end = landed.payload_offset + landed.payload.nbytes
    suffix = bytearray(item.end - end)
    source = means.open_file(landed.file)
    try:
        source.read_into(item.begin, memoryview(prefix))
        source.read_into(end, memoryview(suffix))
    finally:
        source.close()
    total = running_sum()
    for part in (prefix, landed.payload.data, suffix):
        total.update(part)
    if total.digest() != item.expected:
        raise damaged(item)
