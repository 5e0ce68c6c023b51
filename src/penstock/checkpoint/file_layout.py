"""The layout of a data file before it is written, and how tensors and objects are copied into it.

This is the hot loop of a save. Each copy runs in the thread that requests it, with the GIL released, because
torch's own thread pool would occupy the cores that other streams need. Invariants: large payloads begin at
multiples of 4 KiB, items follow each other in the order of the bucket, every byte between them is zero, and
an item's checksum covers exactly the bytes that are written; a copy from a device sees what the caller's
stream had queued when its `DeviceStream` was created, and nothing queued later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.checkpoint.formats.dcp_item import apply_transforms, envelope, item_start
from penstock.checkpoint.formats.description import ItemChecksums
from penstock.checkpoint.state.regions import Ints, TensorFacts
from penstock.checkpoint.state.tensors import as_words, flatten_bytes
from penstock.transfer.pipeline import DeferringProducer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.plan.save_plan import Bucket
    from penstock.transfer.pipeline import PlannedObject


HOT_BLOCK_BYTES = 512 * 1024
"""A block that fits into a core's L2 cache, and takes far longer to copy than Python takes for the call."""


class HostPayload:
    """Elements in host memory: a packed object, or a tensor, contiguous or strided."""

    device = None

    def __init__(self, elements: NDArray[Any]) -> None:
        self._elements = elements

    def copy_into(self, start: int, target: memoryview, stream: DeviceStream | None = None) -> None:  # noqa: ARG002 - no device
        """Fill `target` with the bytes from offset `start` onward, in row-major order."""
        row = np.frombuffer(target, dtype=self._elements.dtype)
        begin = start // row.itemsize
        if self._elements.ndim == 1:
            np.copyto(row, self._elements[begin : begin + row.size])
            return
        for piece, place in split_range(self._elements.shape, begin, begin + row.size):
            source = self._elements[piece]
            np.copyto(row[place].reshape(source.shape), source)


class TorchPayload:
    """A tensor that torch has to fetch or convert: it is on a device, or is saved with a different dtype."""

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype) -> None:
        self.device = memory.device
        self._memory = memory
        self._dtype = dtype

    def copy_into(self, start: int, target: memoryview, stream: DeviceStream | None = None) -> None:
        """Fill `target` with the bytes from offset `start` onward; with a `stream`, only begin the copy."""
        row = torch.frombuffer(target, dtype=self._dtype)
        begin = start // self._dtype.itemsize
        for piece, place in split_range(tuple(self._memory.shape), begin, begin + row.numel()):
            source = self._memory[piece]
            (stream.fetch if stream else torch.Tensor.copy_)(row[place].view(source.shape), source)


Payload = HostPayload | TorchPayload
"""The bytes of one item's payload."""


def payload_of_bytes(content: bytes) -> Payload:
    """Return the payload of a packed object."""
    return HostPayload(np.frombuffer(content, dtype=np.uint8))


def payload_of_tensor(memory: torch.Tensor, dtype: torch.dtype | None = None) -> Payload:
    """Return a region's payload: its elements in row-major order, converted to `dtype` if that is given."""
    if memory.requires_grad:
        memory = memory.detach()
    if memory.is_conj() or memory.is_neg():
        memory = memory.resolve_conj().resolve_neg()
    wanted = memory.dtype if dtype is None else dtype
    if wanted != memory.dtype or not memory.is_cpu:
        return TorchPayload(memory, wanted)
    if memory.is_contiguous():
        return HostPayload(flatten_bytes(memory).numpy())
    if memory.dim() == 0:
        memory = memory.reshape(1)
    return HostPayload(as_words(memory).numpy())


def split_range(shape: Sequence[int], begin: int, end: int) -> list[tuple[tuple[int | slice, ...], slice]]:
    """Divide elements `begin` to `end` of a row-major array into a few rectangular pieces.

    Each piece has the index that selects it in the array, and its place among the elements from `begin`
    onward. There are at most two pieces for each dimension, plus one: the rest of a row, whole rows, the
    beginning of a row.
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
        # The range is within a single row.
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
"""The device type, which includes AMD's, that copies asynchronously in a separate stream."""
SYNCHRONIZED = "xpu"
"""The one device type whose work must be awaited, because each thread copies in its own stream."""


class DeviceStream:
    """A side stream of one device. Created in the caller's thread; any thread may fetch through it."""

    def __init__(self, device: torch.device, module: Any) -> None:
        """Create the stream. `module` is `torch.cuda`, or torch's module for another type of device."""
        self._module = module
        self._stream = module.Stream(device)
        # The device waits, not this thread: the work queued there may take as long as a training step.
        self._stream.wait_stream(module.current_stream(device))

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy, converting to the target's dtype on the device.

        Keep both tensors alive until `catch_up`.
        """
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def catch_up(self) -> None:
        """Wait until all copies begun so far are done."""
        # A blocking event lets this thread sleep, so that others can compute checksums and write.
        event = self._module.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()


DeviceStreams = Mapping[torch.device | None, DeviceStream]
"""The streams of one save, by device."""


def open_device_streams(
    payloads: Iterable[Payload], module_of: Callable[[torch.device], Any] = torch.get_device_module
) -> DeviceStreams:
    """Open a stream for each device with payloads, ordered after the calling thread's work on the device."""
    devices = dict.fromkeys(payload.device for payload in payloads if payload.device is not None)
    for device in devices:
        if device.type == SYNCHRONIZED:
            module_of(device).current_stream(device).synchronize()
    return {
        device: DeviceStream(device, module_of(device)) for device in devices if device.type == ASYNCHRONOUS
    }


@dataclass(slots=True)
class FileItem:
    """One item in its file, from `offset` onward: `prefix`, `payload_bytes` from elsewhere, `suffix`."""

    offset: int
    prefix: bytes
    payload_bytes: int
    suffix: bytes
    payload_offset: int = field(init=False)
    payload_end: int = field(init=False)
    """The beginning of the suffix."""
    end: int = field(init=False)
    """The first offset at which another item can begin."""

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
        return self.items[-1].end if self.items else 0

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Return the offset, size and payload offset of every item."""
        # Plain numbers: with a tuple for each of a hundred thousand items, Python would start collecting
        # garbage.
        offset, end, payload = (
            np.fromiter(map(attrgetter(name), self.items), dtype=np.int64, count=len(self.items))
            for name in ("offset", "end", "payload_offset")
        )
        return offset, end - offset, payload


def lay_out_file(bucket: Bucket, tensors: Sequence[TensorFacts]) -> FileLayout:
    """Lay out a bucket's file: its objects one after another, then each region in its envelope."""
    items: list[FileItem] = []
    position = 0
    for placed in bucket.objects:
        items.append(FileItem(position, b"", placed.size_bytes, b""))
        position += placed.size_bytes
    for facts, (_, sizes) in bucket.regions.with_facts(tensors):
        around = envelope(facts.dtype, sizes)
        # Payloads rather than items are aligned, so that a reader with direct I/O need not copy them.
        start = item_start(position, around)
        items.append(FileItem(start, around.prefix, around.payload_bytes, around.suffix))
        position = items[-1].end
    return FileLayout(bucket.file, tuple(items))


def pack_file(
    layout: FileLayout, payloads: Sequence[Payload], transforms: Sequence[str]
) -> tuple[FileLayout, list[Payload]]:
    """Transform each item and lay the results out without gaps; return the new layout and its payloads."""
    items: list[FileItem] = []
    packed: list[Payload] = []
    position = 0
    for item, payload in zip(layout.items, payloads, strict=True):
        whole = bytearray(item.prefix) + bytearray(item.payload_bytes) + item.suffix
        start = len(item.prefix)
        if item.payload_bytes:
            payload.copy_into(0, memoryview(whole)[start : start + item.payload_bytes])
        content = apply_transforms(whole, transforms)
        items.append(FileItem(position, b"", len(content), b""))
        packed.append(payload_of_bytes(content))
        position += len(content)
    return FileLayout(layout.name, tuple(items)), packed


class LayoutFiller(DeferringProducer):
    """A `Producer` of laid-out files. `payloads` has, by file name, the payload of each item.

    With `sums_hot`, checksums are computed block by block while copying, and otherwise by `settle`. For
    payloads on devices, whose bytes arrive later, `settle` always computes them.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        payloads: Mapping[str, Sequence[Payload]],
        *,
        device_streams: DeviceStreams,
        sums_hot: bool,
    ) -> None:
        self._payloads = payloads
        self._device_streams = device_streams
        self._sums_hot = sums_hot and not device_streams
        self._items = {layout.name: layout.items for layout in layouts}
        self._ends = {layout.name: [item.end for item in layout.items] for layout in layouts}
        self._sums = {
            layout.name: ItemChecksums([item.offset for item in layout.items], self._ends[layout.name])
            for layout in layouts
        }

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Write the next bytes of a file to `buffer`."""
        step = HOT_BLOCK_BYTES if self._sums_hot else len(buffer)
        for start in range(0, len(buffer), step):
            block = buffer[start : start + step]
            self._copy(planned.key, offset + start, block)
            if self._sums_hot:
                self._sums[planned.key].add(block)

    def catch_up(self) -> None:
        """Wait until payloads from devices have arrived."""
        for stream in self._device_streams.values():
            stream.catch_up()

    def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:  # noqa: ARG002 - in order
        """Compute the checksums that were not computed while copying."""
        if not self._sums_hot:
            self.catch_up()
            self._sums[planned.key].add(buffer)

    def sums(self, name: str) -> bytes:
        """Return the checksums of a file's items, once the whole file has been filled and settled."""
        return self._sums[name].all()

    def _copy(self, name: str, begin: int, block: memoryview) -> None:
        """Fill `block` with the file's bytes from `begin` onward: gaps, and each item's three parts."""
        items, end, filled = self._items[name], begin + len(block), begin

        def put(at: int, content: bytes) -> None:
            first, last = max(at, begin), min(at + len(content), end)
            if first < last:
                block[first - begin : last - begin] = content[first - at : last - at]

        for number in range(bisect_right(self._ends[name], begin), len(items)):
            item = items[number]
            put(filled, bytes(max(min(item.offset, end) - filled, 0)))
            if item.offset >= end:
                break
            put(item.offset, item.prefix)
            first, last = max(item.payload_offset, begin), min(item.payload_end, end)
            if first < last:
                payload, target = self._payloads[name][number], block[first - begin : last - begin]
                stream = self._device_streams.get(payload.device)
                payload.copy_into(first - item.payload_offset, target, stream)
            put(item.payload_end, item.suffix)
            filled = item.end
