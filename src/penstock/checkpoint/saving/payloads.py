"""Where payload bytes come from: tensors in host memory or on a device, copied piece by piece into buffers.

The hot loop of a save. Each copy runs in the thread that asks for it, with the GIL released; torch's own
thread pool would take the cores that other streams need. Invariant: a piece may begin and end at any element,
and a device copy sees what the caller's stream had queued when the link was made, and nothing queued later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from penstock.checkpoint.saving.buffers import pin

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.saving.buffers import WarmMemory


class Payload(Protocol):
    """The bytes of one item's payload."""

    block_bytes: int | None
    """Copy so much at a time, so that it is still in the processor's cache when it is summed; None: all."""

    def copy_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on."""


class Fetching(Protocol):
    """What brings tensors from a device."""

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy; `source` is kept alive until the copy is done."""


@runtime_checkable
class SupportsFetching(Protocol):
    """A `Payload` that a device can bring by itself, while its thread goes on."""

    device: torch.device

    def fetch_into(self, start: int, target: memoryview, link: Fetching) -> None:
        """Begin to fill `target` with the bytes from `start` on."""


HOT_BLOCK_BYTES = 512 * 1024
"""Fits into the second-level cache of a core, and takes far longer to copy than Python needs for the call."""


class PlainPayload:
    """Bytes in a row: packed objects, and contiguous tensors in the memory of this host."""

    block_bytes: int | None = HOT_BLOCK_BYTES

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = content

    def copy_into(self, start: int, target: memoryview) -> None:
        """Copy a slice."""
        np.copyto(np.frombuffer(target, dtype=np.uint8), self._content[start : start + len(target)])


class StridedPayload:
    """A tensor in the memory of this host whose elements do not lie in a row."""

    block_bytes: int | None = HOT_BLOCK_BYTES

    def __init__(self, elements: NDArray[Any]) -> None:
        self._elements = elements

    def copy_into(self, start: int, target: memoryview) -> None:
        """Gather a range of elements, in row-major order."""
        row = np.frombuffer(target, dtype=self._elements.dtype)
        begin = start // self._elements.itemsize
        for piece, place in pieces_of_range(self._elements.shape, begin, begin + row.size):
            source = self._elements[piece]
            np.copyto(row[place].reshape(source.shape), source)


class TorchPayload:
    """A tensor that torch has to fetch or convert: on another device, or saved as another dtype."""

    block_bytes: int | None = None

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype) -> None:
        self.device = memory.device
        self._memory = memory
        self._dtype = dtype

    def copy_into(self, start: int, target: memoryview) -> None:
        """Have torch copy a range of elements."""
        for place, source in self._pairs(start, target):
            place.copy_(source)

    def fetch_into(self, start: int, target: memoryview, link: Fetching) -> None:
        """Have the device begin to copy a range of elements."""
        for place, source in self._pairs(start, target):
            link.fetch(place, source)

    def _pairs(self, start: int, target: memoryview) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        row = torch.frombuffer(target, dtype=self._dtype)
        begin = start // self._dtype.itemsize
        for piece, place in pieces_of_range(tuple(self._memory.shape), begin, begin + row.numel()):
            source = self._memory[piece]
            yield row[place].view(source.shape), source


def payload_of_bytes(content: bytes) -> Payload:
    """The payload of a packed object."""
    return PlainPayload(np.frombuffer(content, dtype=np.uint8))


def payload_of_tensor(memory: torch.Tensor, dtype: torch.dtype | None = None) -> Payload:
    """The payload of a box: its elements in row-major order, as `dtype` where that is another one."""
    memory = memory.detach().resolve_conj().resolve_neg()
    wanted = memory.dtype if dtype is None else dtype
    if wanted != memory.dtype or memory.device.type != "cpu":
        return TorchPayload(memory, wanted)
    if memory.is_contiguous():
        return PlainPayload(memory.reshape(-1).view(torch.uint8).numpy())
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
"""numpy has no bfloat16 and no float8: what is only copied is spoken of as something of the same width."""


def pieces_of_range(
    shape: Sequence[int], begin: int, end: int
) -> list[tuple[tuple[int | slice, ...], slice]]:
    """Elements `begin` to `end` of a row-major array as few rectangular pieces.

    Each with the index that selects it, and its place among the elements from `begin` on. At most two pieces
    for each dimension: the rest of a row, whole rows, the beginning of a row.
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
        # All of it lies within one row.
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


LINKED = "cuda"
"""The kind of devices that copy by themselves here, AMD's among them."""
AWAITED = "xpu"
"""The kind whose work is waited for, as threads copy in streams of their own. Others have no streams."""


class DeviceModule(Protocol):
    """What is asked of `torch.cuda`, and of torch's modules of other devices."""

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - torch's name
        """A stream of our own."""

    def Event(self, *, blocking: bool) -> Any:  # noqa: N802 - torch's name
        """What can be waited for."""

    def current_stream(self, device: torch.device) -> Any:
        """The stream that the calling thread works in."""

    def stream(self, stream: Any) -> Any:
        """A context in which the thread works in another stream."""


class Link:
    """A side stream of one device. Made in the caller's thread; any thread may fetch through it."""

    def __init__(self, device: torch.device, module: DeviceModule) -> None:
        self._module = module
        self._stream = module.Stream(device)
        # The device waits, not this thread: what it was asked for may take as long as a step of training.
        self._stream.wait_stream(module.current_stream(device))

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy, converting to the target's dtype on the device. Both stay alive until `catch_up`."""
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def catch_up(self) -> None:
        """Return when all copies that were begun are done."""
        # A blocking event lets this thread sleep, as others have bytes to sum and to write.
        event = self._module.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()


@dataclass(frozen=True, slots=True)
class Links:
    """Those of one save."""

    by_device: Mapping[torch.device, Link]

    def catch_up(self) -> None:
        """Return when all copies that were begun are done."""
        for link in self.by_device.values():
            link.catch_up()

    def pin(self, memory: WarmMemory) -> None:
        """Have devices copy straight to `memory`, where there are any."""
        if self.by_device:
            pin(memory)


def links_to(
    payloads: Mapping[str, Sequence[Payload]],
    module_of: Callable[[torch.device], DeviceModule] = torch.get_device_module,
) -> Links:
    """A link to each device that payloads lie on. Called in the thread after whose work they are taken."""
    devices = {
        payload.device: None
        for of_file in payloads.values()
        for payload in of_file
        if isinstance(payload, SupportsFetching)
    }
    for device in devices:
        if device.type == AWAITED:
            module_of(device).current_stream(device).synchronize()
    return Links({device: Link(device, module_of(device)) for device in devices if device.type == LINKED})
