"""The layout of a data file before it is written, and how tensors and objects are copied into it.

The hot loop of a save: each copy runs in the thread that asks for it, with the GIL released, because torch's
own thread pool would take the cores that other streams need. Invariants: large payloads begin at multiples
of 4 KiB, items follow in the order of the bucket, every other byte is zero, and an item's checksum is over
the very bytes that are written; a copy from a device sees what the caller's stream had queued when its
`DeviceStream` was made, and nothing queued later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash

from penstock.checkpoint.formats.dcp_item import apply_transforms, envelope, item_start
from penstock.checkpoint.formats.manifest import start_checksum
from penstock.checkpoint.state.regions import Ints, TensorFacts
from penstock.checkpoint.state.tensors import contiguous_bytes
from penstock.storage.aligned import FEW_BYTES
from penstock.transfer.buffers import WarmMemory, pin_memory
from penstock.transfer.pipeline import DeferringProducer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.plan.save_plan import Bucket
    from penstock.transfer.pipeline import PlannedObject


class Payload(Protocol):
    """The bytes of one item's payload."""

    block_bytes: int | None
    """Bytes to copy at a time, so that the checksum finds them in the processor's cache; None: all."""

    def copy_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on."""


class Fetching(Protocol):
    """Copies tensors from a device asynchronously."""

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy; `source` is kept alive until the copy is done."""


@runtime_checkable
class SupportsFetching(Protocol):
    """A `Payload` that a device can copy by itself while the calling thread continues."""

    device: torch.device

    def fetch_into(self, start: int, target: memoryview, fetching: Fetching) -> None:
        """Begin to fill `target` with the bytes from `start` on."""


HOT_BLOCK_BYTES = 512 * 1024
"""Fits into the second-level cache of a core, and takes far longer to copy than Python needs for the call."""


SMALL_BYTES = 64 * 1024
"""Items up to this size are put together in one go."""


class PlainPayload:
    """Contiguous bytes in host memory: packed objects, and contiguous tensors."""

    block_bytes: int | None = HOT_BLOCK_BYTES

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = content

    def copy_into(self, start: int, target: memoryview) -> None:
        """Copy a slice."""
        if len(target) <= FEW_BYTES:
            target[:] = self._content[start : start + len(target)].data
            return
        np.copyto(np.frombuffer(target, dtype=np.uint8), self._content[start : start + len(target)])


class StridedPayload:
    """A non-contiguous tensor in host memory."""

    block_bytes: int | None = HOT_BLOCK_BYTES

    def __init__(self, elements: NDArray[Any]) -> None:
        self._elements = elements

    def copy_into(self, start: int, target: memoryview) -> None:
        """Gather a range of elements, in row-major order."""
        row = np.frombuffer(target, dtype=self._elements.dtype)
        begin = start // self._elements.itemsize
        for piece, place in split_range(self._elements.shape, begin, begin + row.size):
            source = self._elements[piece]
            np.copyto(row[place].reshape(source.shape), source)


class TorchPayload:
    """A tensor that torch has to fetch or convert: on a device, or saved with another dtype."""

    block_bytes: int | None = None

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype) -> None:
        self.device = memory.device
        self._memory = memory
        self._dtype = dtype

    def copy_into(self, start: int, target: memoryview) -> None:
        """Have torch copy a range of elements."""
        for place, source in self._pairs(start, target):
            place.copy_(source)

    def fetch_into(self, start: int, target: memoryview, fetching: Fetching) -> None:
        """Have the device begin to copy a range of elements."""
        for place, source in self._pairs(start, target):
            fetching.fetch(place, source)

    def _pairs(self, start: int, target: memoryview) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        row = torch.frombuffer(target, dtype=self._dtype)
        begin = start // self._dtype.itemsize
        for piece, place in split_range(tuple(self._memory.shape), begin, begin + row.numel()):
            source = self._memory[piece]
            yield row[place].view(source.shape), source


def payload_of_bytes(content: bytes) -> Payload:
    """The payload of a packed object."""
    return PlainPayload(np.frombuffer(content, dtype=np.uint8))


def payload_of_tensor(memory: torch.Tensor, dtype: torch.dtype | None = None) -> Payload:
    """The payload of a region: its elements in row-major order, converted to `dtype` if that is given."""
    if memory.requires_grad:
        memory = memory.detach()
    if memory.is_conj() or memory.is_neg():
        memory = memory.resolve_conj().resolve_neg()
    wanted = memory.dtype if dtype is None else dtype
    if wanted != memory.dtype or not memory.is_cpu:
        return TorchPayload(memory, wanted)
    if memory.is_contiguous():
        return PlainPayload(contiguous_bytes(memory))
    if memory.dim() == 0:
        memory = memory.reshape(1)
    return StridedPayload(memory.view(_PLAIN_TYPES[memory.dtype.itemsize]).numpy())


_PLAIN_TYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""numpy has no bfloat16 and no float8: elements that are only copied are viewed as a type of equal width."""


def split_range(shape: Sequence[int], begin: int, end: int) -> list[tuple[tuple[int | slice, ...], slice]]:
    """Elements `begin` to `end` of a row-major array as few rectangular pieces.

    Each has the index that selects it and its place among the elements from `begin` on. There are at most two
    pieces for each dimension, plus one: the rest of a row, whole rows, the beginning of a row.
    """
    pieces: list[tuple[tuple[int | slice, ...], slice]] = []
    _collect_pieces(pieces, (), shape, (begin, end), 0)
    return pieces


def _collect_pieces(
    pieces: list[tuple[tuple[int | slice, ...], slice]],
    outer: tuple[int, ...],
    shape: Sequence[int],
    wanted: tuple[int, int],
    place: int,
) -> None:
    begin, end = wanted
    if begin >= end:
        return
    if not shape:
        pieces.append((outer or (...,), slice(place, place + 1)))  # type: ignore[arg-type]
        return
    inner = int(np.prod(shape[1:], dtype=np.int64))
    first, last = -(-begin // inner), end // inner
    if first > last:
        # The range is within one row.
        row = begin // inner
        _collect_pieces(pieces, (*outer, row), shape[1:], (begin - row * inner, end - row * inner), place)
        return
    if begin < first * inner:
        row = first - 1
        _collect_pieces(pieces, (*outer, row), shape[1:], (begin - row * inner, inner), place)
    if first < last:
        start = place + first * inner - begin
        pieces.append(((*outer, slice(first, last)), slice(start, start + (last - first) * inner)))
    if last * inner < end:
        start = place + last * inner - begin
        _collect_pieces(pieces, (*outer, last), shape[1:], (0, end - last * inner), start)


ASYNCHRONOUS = "cuda"
"""Devices of this type, AMD's included, copy asynchronously in a separate stream."""
SYNCHRONIZED = "xpu"
"""Work on devices of this type is waited for, because threads copy in their own streams. Others have none."""


class DeviceModule(Protocol):
    """The part of `torch.cuda`, and of torch's modules for other devices, that is used here."""

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - torch's name
        """A stream of our own."""

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802 - torch's name
        """An event that a thread can wait for."""

    def current_stream(self, device: torch.device) -> Any:
        """The calling thread's stream."""

    def stream(self, stream: Any) -> Any:
        """A context in which the thread uses another stream."""


class DeviceStream:
    """A side stream of one device. Made in the caller's thread; any thread may fetch through it."""

    def __init__(self, device: torch.device, module: DeviceModule) -> None:
        self._module = module
        self._stream = module.Stream(device)
        # The device waits, not this thread: what is queued there may take as long as a training step.
        self._stream.wait_stream(module.current_stream(device))

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy, converting to the target's dtype on the device. Both stay alive until `catch_up`."""
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def catch_up(self) -> None:
        """Return when all copies begun so far are done."""
        # A blocking event lets this thread sleep, so that others can compute checksums and write.
        event = self._module.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """The streams of one save."""

    by_device: Mapping[torch.device, DeviceStream]

    def catch_up(self) -> None:
        """Return when all copies begun so far are done."""
        for stream in self.by_device.values():
            stream.catch_up()

    def fetch(self, payload: Payload, start: int, target: memoryview) -> bool:
        """Have a device begin to fill `target`; False if the calling thread has to copy this payload."""
        # The protocol is asked last, which takes long, for most states have no device.
        if not self.by_device or not isinstance(payload, SupportsFetching):
            return False
        if payload.device not in self.by_device:
            return False
        payload.fetch_into(start, target, self.by_device[payload.device])
        return True

    def pin(self, memory: WarmMemory) -> None:
        """Pin `memory` if there are devices that copy to it."""
        if self.by_device:
            pin_memory(memory)


def open_device_streams(
    payloads: Mapping[str, Sequence[Payload]],
    module_of: Callable[[torch.device], DeviceModule] = torch.get_device_module,
) -> DeviceStreams:
    """A stream for each device that has payloads, ordered after the calling thread's work on the device."""
    # Asked for by name: asking each of a hundred thousand payloads for the protocol takes seconds.
    every = (getattr(payload, "device", None) for each in payloads.values() for payload in each)
    devices = {device: None for device in every if device is not None}
    for device in devices:
        if device.type == SYNCHRONIZED:
            module_of(device).current_stream(device).synchronize()
    return DeviceStreams(
        {device: DeviceStream(device, module_of(device)) for device in devices if device.type == ASYNCHRONOUS}
    )


@dataclass(slots=True)
class FileItem:
    """One item in its file: `prefix`, `payload_bytes` from elsewhere, `suffix`, from `offset` on."""

    offset: int
    prefix: bytes
    payload_bytes: int
    suffix: bytes
    payload_offset: int = field(init=False)
    payload_end: int = field(init=False)
    """The beginning of the suffix."""
    end: int = field(init=False)
    """The first place for the next item."""

    def __post_init__(self) -> None:
        self.payload_offset = self.offset + len(self.prefix)
        self.payload_end = self.payload_offset + self.payload_bytes
        self.end = self.payload_end + len(self.suffix)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One data file: its items in order, objects first, as in the bucket."""

    name: str
    items: tuple[FileItem, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.items[-1].end if self.items else 0

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Offset, size and payload's offset of every item."""
        # Numbers alone: a tuple for each of a hundred thousand items makes Python collect garbage among them.
        offset, end, payload = (
            np.fromiter(map(attrgetter(name), self.items), dtype=np.int64, count=len(self.items))
            for name in ("offset", "end", "payload_offset")
        )
        return offset, end - offset, payload


def lay_out_file(bucket: Bucket, tensors: Sequence[TensorFacts]) -> FileLayout:
    """The layout of a bucket's file: its objects one after another, then each region in its envelope."""
    items: list[FileItem] = []
    position = 0
    for placed in bucket.objects:
        items.append(FileItem(position, b"", placed.size_bytes, b""))
        position += placed.size_bytes
    all_sizes = bucket.regions.sizes.tolist()
    for number, sizes in zip(bucket.regions.tensor.tolist(), all_sizes, strict=True):
        facts = tensors[number]
        around = envelope(facts.dtype, tuple(sizes[: len(facts.shape)]))
        # Payloads, not items, are aligned, so that a reader with direct I/O needs no copy of them.
        start = item_start(position, around)
        items.append(FileItem(start, around.prefix, around.payload_bytes, around.suffix))
        position = items[-1].end
    return FileLayout(bucket.file, tuple(items))


def pack_file(
    layout: FileLayout, payloads: Sequence[Payload], transforms: Sequence[str]
) -> tuple[FileLayout, list[Payload]]:
    """The file with each item transformed, one after another without gaps, and their payloads."""
    items: list[FileItem] = []
    packed: list[Payload] = []
    position = 0
    for item, payload in zip(layout.items, payloads, strict=True):
        content = apply_transforms(_whole(item, payload), transforms)
        items.append(FileItem(position, b"", len(content), b""))
        packed.append(payload_of_bytes(content))
        position += len(content)
    return FileLayout(layout.name, tuple(items)), packed


def _whole(item: FileItem, payload: Payload) -> bytearray:
    """An item with its envelope."""
    content = bytearray(item.prefix) + bytearray(item.payload_bytes) + item.suffix
    start = len(item.prefix)
    if item.payload_bytes:
        payload.copy_into(0, memoryview(content)[start : start + item.payload_bytes])
    return content


Summing = Literal["while copying", "afterwards"]
"""Whether checksums are computed block by block while copying, or by `settle` in a separate pass."""


@dataclass(slots=True)
class _Cursor:
    """The position in one file: the item that is in progress, or comes next."""

    layout: FileLayout
    number: int = 0

    @property
    def item(self) -> FileItem | None:
        return self.layout.items[self.number] if self.number < len(self.layout.items) else None


@dataclass(slots=True)
class _ItemChecksums:
    """Computes the checksums of one file's items from its bytes, in order."""

    cursor: _Cursor
    sum: xxhash.xxh3_128 = field(default_factory=start_checksum)
    done: list[bytes] = field(default_factory=list)

    def add(self, offset: int, content: memoryview) -> None:
        """Add the next bytes of the file; those in gaps belong to no item."""
        position, end = offset, offset + len(content)
        while (item := self.cursor.item) is not None and item.offset < end:
            if position <= item.offset and item.end <= end:
                whole = content[item.offset - offset : item.end - offset]
                self.done.append(xxhash.xxh3_128_digest(whole))
                self.cursor.number += 1
                position = item.end
                continue
            begin, stop = max(position, item.offset), min(end, item.end)
            self.sum.update(content[begin - offset : stop - offset])
            if stop < item.end:
                return
            self.finish_item()
            position = stop

    def finish_item(self) -> None:
        """Keep the checksum of the item in progress and go to the next."""
        self.done.append(self.sum.digest())
        self.sum = start_checksum()
        self.cursor.number += 1


class LayoutFiller(DeferringProducer):
    """A `Producer` of laid out files: `payloads` has one for each item of each file, by file name.

    With payloads on devices, checksums cannot be computed while copying, as the bytes arrive later.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        payloads: Mapping[str, Sequence[Payload]],
        *,
        device_streams: DeviceStreams,
        summing: Summing,
    ) -> None:
        self._payloads = payloads
        self._device_streams = device_streams
        self._sums_hot = summing == "while copying" and not device_streams.by_device
        self._cursors = {layout.name: _Cursor(layout) for layout in layouts}
        self._sums = {layout.name: _ItemChecksums(_Cursor(layout)) for layout in layouts}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Write the next bytes of a file to `buffer`."""
        cursor, position, end = self._cursors[planned.key], offset, offset + len(buffer)
        while position < end:
            item = cursor.item
            assert item is not None, "a file ends with its last item"
            if position <= item.offset and item.end <= end and item.end - position <= SMALL_BYTES:
                self._put_whole(planned.key, item, buffer[position - offset : item.end - offset], position)
                position = item.end
                continue
            view = buffer[position - offset :]
            if position < item.offset:
                position += self._put(
                    planned.key, position, view, bytes(min(len(view), item.offset - position))
                )
            elif position < item.payload_offset:
                position += self._put(planned.key, position, view, item.prefix[position - item.offset :])
            elif position < item.payload_end:
                position += self._copy(planned.key, position, view[: item.payload_end - position])
            else:
                position += self._put(planned.key, position, view, item.suffix[position - item.payload_end :])
            while (item := cursor.item) is not None and position == item.end:
                cursor.number += 1

    def catch_up(self) -> None:
        """Return when payloads from devices have arrived."""
        self._device_streams.catch_up()

    def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Compute the checksums that were not computed while copying."""
        if not self._sums_hot:
            self._device_streams.catch_up()
            self._sums[planned.key].add(offset, buffer)

    def sums(self, name: str) -> bytes:
        """The checksums of a file's items, once it is filled and settled to its end."""
        sums = self._sums[name]
        # Empty items at the end of a file get no bytes that would finish them.
        while sums.cursor.item is not None and sums.cursor.item.end == sums.cursor.layout.size_bytes:
            sums.finish_item()
        return b"".join(sums.done)

    def _put_whole(self, name: str, item: FileItem, view: memoryview, position: int) -> None:
        """Write a small item and the gap before it at once: there may be a hundred thousand of them."""
        cursor, lead, begin = self._cursors[name], item.offset - position, item.payload_offset - position
        if lead:
            view[:lead] = bytes(lead)
        view[lead:begin] = item.prefix
        stop = begin + item.payload_bytes
        if item.payload_bytes:
            payload = self._payloads[name][cursor.number]
            if not self._device_streams.fetch(payload, 0, view[begin:stop]):
                payload.copy_into(0, view[begin:stop])
        view[stop:] = item.suffix
        if self._sums_hot:
            self._sums[name].add(position, view)
        cursor.number += 1

    def _put(self, name: str, position: int, view: memoryview, content: bytes) -> int:
        part = content[: len(view)]
        view[: len(part)] = part
        if self._sums_hot:
            self._sums[name].add(position, view[: len(part)])
        return len(part)

    def _copy(self, name: str, position: int, view: memoryview) -> int:
        cursor = self._cursors[name]
        item = cursor.item
        assert item is not None, "the payload belongs to an item"
        payload, start = self._payloads[name][cursor.number], position - item.payload_offset
        if self._device_streams.fetch(payload, start, view):
            return len(view)
        step = (payload.block_bytes if self._sums_hot else None) or len(view)
        for done in range(0, len(view), step):
            block = view[done : done + step]
            payload.copy_into(start + done, block)
            if self._sums_hot:
                self._sums[name].add(position + done, block)
        return len(view)
