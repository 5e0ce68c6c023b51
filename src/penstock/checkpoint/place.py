"""Places what was read: in tensors of this rank, and in messages to other ranks.

A share that is one contiguous part of a tensor in host memory is read right into it; any other share passes
through a buffer of its own. Invariant: a share is passed on once, when its last byte has arrived, by the
thread that read that byte.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
from penstock.checkpoint.formats.dcp_item import load_object
from penstock.checkpoint.match import ByteItemIndex, LoadRequests, Unpacking
from penstock.checkpoint.plan.load_plan import LoadPlan, Transfers
from penstock.checkpoint.state.regions import (
    ByteArray,
    CheckpointIndex,
    Ints,
    Regions,
    TensorFacts,
    element_sizes,
)
from penstock.checkpoint.state.tensors import contiguous_bytes, flatten_bytes, narrow_region
from penstock.cluster.comm import PointToPoint
from penstock.errors import UsageError, WaitTimeout
from penstock.storage.aligned import FEW_BYTES, copy_bytes
from penstock.transfer.reader import Part, SpanSink

if TYPE_CHECKING:
    from numpy.typing import NDArray


Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Memory of this rank that a wanted region is loaded into; `facts` are those of the stored tensor."""

    offsets: tuple[int, ...]
    memory: torch.Tensor
    facts: TensorFacts

    def __post_init__(self) -> None:
        if _overlaps_itself(self.memory):
            raise UsageError(
                f"Elements of {self.facts.name!r} share memory in the state, so they cannot be loaded",
                where=f"size {list(self.memory.size())}, stride {list(self.memory.stride())}",
                fix="Load into a tensor with memory of its own, for example expanded.clone().",
            )

    @property
    def layout(self) -> tuple[object, ...]:
        """What two targets that are the same memory have alike."""
        memory = self.memory
        return memory.data_ptr(), memory.device, memory.dtype, memory.shape, memory.stride(), memory.is_conj()

    def view(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The memory of a region inside."""
        return narrow_region(self.memory, self.offsets, offsets, sizes)

    @property
    def has_stored_dtype(self) -> bool:
        """Whether values need no conversion."""
        return _name_dtype(self.memory.dtype) == self.facts.dtype

    @property
    def has_stored_layout(self) -> bool:
        """Whether the stored bytes are this memory's bytes."""
        is_on_host = self.memory.device.type == "cpu"
        return self.has_stored_dtype and is_on_host and not _is_view_of_other_bits(self.memory)

    def all_bytes(self) -> ByteArray | None:
        """The bytes of all of the memory, if they are contiguous and as stored."""
        if not self.memory.is_contiguous() or not self.has_stored_layout:
            return None
        return contiguous_bytes(self.memory)

    def contiguous_bytes(self, offsets: Sequence[int], sizes: Sequence[int]) -> ByteArray | None:
        """The bytes of a region inside, if they are contiguous and as stored."""
        view = self.view(offsets, sizes)
        if not self.has_stored_layout or not view.is_contiguous():
            return None
        return _words(view, 1).reshape(-1).numpy()

    def contiguous_bytes_on_device(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        """The bytes of a region inside, if they are on a device, contiguous and as stored."""
        view = self.view(offsets, sizes)
        if self.memory.device.type == "cpu" or not self.has_stored_dtype or _is_view_of_other_bits(view):
            return None
        return flatten_bytes(view) if view.is_contiguous() else None

    def fill(self, offsets: Sequence[int], sizes: Sequence[int], content: NDArray[Any]) -> None:
        """Copy a region from words of the stored element size."""
        view = self.view(offsets, sizes)
        if self.has_stored_layout:
            np.copyto(_words(view, self.facts.element_bytes).numpy(), content)
            return
        dtype = getattr(torch, self.facts.dtype)
        words = torch.from_numpy(np.ascontiguousarray(content).reshape(-1).view(np.uint8))
        view.copy_(words.view(dtype).reshape(tuple(sizes)))


def item_targets(requests: LoadRequests, item_index: ByteItemIndex) -> list[Target]:
    """New memory for the whole items that are requested; their targets follow those of the shards."""
    items = [item_index.tensors[number] for number in requests.items]
    return [Target((0,), torch.empty(facts.shape, dtype=torch.uint8, device="cpu"), facts) for facts in items]


def item_contents(requests: LoadRequests, targets: Sequence[Target]) -> dict[int, memoryview]:
    """The contents of the whole items that were loaded, by their tensor numbers in `ByteItemIndex`."""
    return {
        number: memoryview(targets[len(requests.names) + place].memory.numpy().data)
        for place, number in enumerate(requests.items)
    }


def unpack(
    checkpoint: CheckpointSource,
    item_index: ByteItemIndex,
    requests: LoadRequests,
    targets: Sequence[Target],
    *,
    trust: bool,
) -> dict[str, Any]:
    """Copy parts of packed items to their tensors, and return the objects by leaf name."""
    content = item_contents(requests, targets)
    for unpacking in requests.unpacking:
        row = int(item_index.packed_rows[unpacking.row])
        elements = checkpoint.tensor_bytes(row, content[item_index.first_packed + unpacking.row])
        _put_part(unpacking, elements, checkpoint.index, row, targets[unpacking.want])
    values = {}
    for name, number in requests.objects.items():
        stored = checkpoint.index.objects[number]
        if checkpoint.archive is not None:
            values[name] = checkpoint.value(stored, trust=trust)
            continue
        values[name] = load_object(
            content[item_index.first_object + number],
            stored.name,
            transforms=stored.transforms,
            trust=trust,
            where=f"{checkpoint.uri}, {stored.name}",
        )
    return values


def _put_part(
    unpacking: Unpacking, elements: memoryview, index: CheckpointIndex, row: int, target: Target
) -> None:
    """Copy one region from the elements of the stored region around it."""
    facts = target.facts
    inner = unpacking.regions.region(unpacking.part, len(facts.shape))
    outer = index.stored.regions.region(row, len(facts.shape))
    # The copy is aligned, which views as words of the element size need.
    content = np.frombuffer(bytes(elements), dtype=np.uint8)
    target.fill(*inner, cut_region(content, facts.element_bytes, outer, inner))


@cache
def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_tied(targets: Sequence[Target]) -> list[tuple[int, int]]:
    """Pairs of targets that are the same memory and are loaded from different places, as tied weights are.

    Raises `UsageError` for memory of which two targets share only a part. Views with gaps, such as columns
    of one matrix, are taken to share none.
    """
    spans = [_span(target.memory) for target in targets]
    begins, ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T
    order = np.flatnonzero(begins < ends)
    order = order[np.argsort(begins[order], kind="stable")]
    so_far = np.maximum.accumulate(ends[order])
    tied = []
    # Nearly always there is none: a state of many tensors has no time for more than this.
    for place in 1 + np.flatnonzero(begins[order[1:]] < so_far[:-1]):
        before = int(order[int(np.searchsorted(so_far, so_far[place - 1]))])
        number = int(order[place])
        own, other = targets[number], targets[before]
        if own.layout == other.layout:
            if (own.facts, own.offsets) != (other.facts, other.offsets):
                tied.append((before, number))
        elif own.memory.device == other.memory.device and _are_contiguous(own, other):
            raise UsageError(
                f"{other.facts.name!r} and {own.facts.name!r} share a part of their memory in the state",
                fix="Load into tensors with memory of their own.",
            )
    return tied


def _span(memory: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first element and after its last one."""
    begin = memory.data_ptr()
    if memory.is_contiguous():
        return begin, begin + memory.nbytes
    steps = zip(memory.shape, memory.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * memory.itemsize if memory.numel() else begin


def _are_contiguous(*targets: Target) -> bool:
    return all(target.memory.is_contiguous() for target in targets)


def untie(
    targets: Sequence[Target], names: Sequence[str], tied: Iterable[tuple[int, int]], copied: Container[str]
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str]]]:
    """Tensors for leaves that were loaded into one memory with others, and the pairs that cannot be untied.

    Leaves that are `copied` when their part loads its state may have any memory; `names` are of the targets.
    """
    untied, split = {}, []
    for first, second in tied:
        shared, own = targets[first].memory, targets[second].memory
        if _have_same_bytes(shared, own):
            continue
        if names[second] in copied:
            untied[names[second]] = own
        elif names[first] in copied:
            untied[names[first]] = shared.clone()
            shared.copy_(own)
        else:
            split.append((names[first], names[second]))
    return untied, split


def _have_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit, on any devices."""
    first, second = (
        flatten_bytes(tensor.cpu().resolve_conj().resolve_neg().contiguous()) for tensor in (one, other)
    )
    return torch.equal(first, second)


def _overlaps_itself(memory: torch.Tensor) -> bool:
    """Whether two elements have one address, as in expanded tensors."""
    if memory.is_contiguous() or memory.numel() < 2:
        return False
    dims = sorted((stride, size) for size, stride in zip(memory.size(), memory.stride(), strict=True))
    extent, nested = 0, True
    for stride, size in dims:
        if size == 1:
            continue
        if stride == 0:
            return True
        nested &= stride > extent
        extent += stride * (size - 1)
    if nested:
        return False
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in dims:
        offsets = (offsets[:, None] + stride * np.arange(size)).reshape(-1)
    return len(np.unique(offsets)) < len(offsets)


def _is_view_of_other_bits(memory: torch.Tensor) -> bool:
    return memory.is_conj() or memory.is_neg()


def wait_for_devices(targets: Sequence[Target]) -> None:
    """Wait for this thread's work on devices, because other threads copy to them in other streams."""
    devices = {target.memory.device for target in targets if target.memory.device.type in ("cuda", "xpu")}
    for device in devices:
        torch.get_device_module(device).current_stream(device).synchronize()


def _words(memory: torch.Tensor, element_bytes: int) -> torch.Tensor:
    """Host memory of any dtype and strides as words of its element size, or as bytes if it is contiguous."""
    storage = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.untyped_storage())
    own = memory.element_size()
    if element_bytes == 1 and own > 1:
        begin = memory.storage_offset() * own
        return storage[begin : begin + memory.numel() * own]
    words: torch.Tensor = storage[: storage.numel() - storage.numel() % own].view(_WORDS[own])
    return words.as_strided(memory.size(), memory.stride(), memory.storage_offset())


@dataclass(slots=True, eq=False)
class _Share:
    """One read of the plan in progress; `memory` is allocated when its first byte arrives."""

    begin: int
    """Of its payload in the file."""
    num_bytes: int
    num_missing: int
    memory: ByteArray | None = None
    is_own: bool = False
    """Whether `memory` is a tensor's."""
    on_device: torch.Tensor | None = None
    """A tensor's bytes on a device, to which each part is copied as it arrives, without a host buffer."""


class Destinations(SpanSink):
    """The `SpanSink` of a load plan: `begins` says where each read's payload begins in its file."""

    def __init__(
        self,
        plan: LoadPlan,
        begins: Sequence[int],
        targets: Sequence[Target],
        *,
        tensors: Sequence[TensorFacts],
        outbox: Outbox,
        messages: Sequence[tuple[Outgoing, int]],
        takes_any_address: bool,
    ) -> None:
        self._plan = plan
        self._targets = targets
        self._tensors = tensors
        self._outbox = outbox
        self._messages = messages
        self._takes_any_address = takes_any_address
        widths = element_sizes(tensors)
        self._sizes = plan.regions.num_bytes(widths)
        self._shares = [
            _Share(begin, size, size) for begin, size in zip(begins, self._sizes.tolist(), strict=True)
        ]
        self._local = _by_read(plan.local)
        self._whole = self._find_whole(plan.local.regions.num_bytes(widths)).tolist()
        self._sends = _by_read(plan.sends)
        self._lock = threading.Lock()
        if any(not target.memory.is_cpu for target in targets):
            for number, share in enumerate(self._shares):
                share.on_device = self._device_memory(number)

    def place(self, span: int, begin: int, end: int) -> memoryview | None:
        """The share's memory, if the storage can read to any address."""
        share = self._shares[span]
        is_inside = share.begin <= begin and end <= share.begin + share.num_bytes
        if not self._takes_any_address or not is_inside or share.on_device is not None:
            return None
        memory = self._memory(span)
        return memoryview(memory.data)[begin - share.begin : end - share.begin]

    def take(self, span: int, begin: int, content: memoryview) -> None:
        """Copy the part that is payload; the rest of an item was only needed for its checksum."""
        share = self._shares[span]
        skipped = max(share.begin - begin, 0)
        end = min(begin + len(content), share.begin + share.num_bytes)
        if begin + skipped >= end:
            return
        start = begin + skipped - share.begin
        if share.on_device is not None:
            part = torch.frombuffer(content[skipped : end - begin], dtype=torch.uint8)
            share.on_device[start : end - share.begin].copy_(part)
            return
        copied = content[skipped : end - begin]
        if len(copied) == share.num_bytes:
            # No other thread has a part of it, and among a hundred thousand each lock is waited for.
            self._allocate(share, span)
        target = memoryview(self._memory(span).data)[start : end - share.begin]
        if len(copied) <= FEW_BYTES:
            target[:] = copied
        else:
            copy_bytes(target, copied)

    def arrived(self, part: Part) -> None:
        """Pass the share on once all of its payload has arrived."""
        share = self._shares[part.span]
        begin, end = share.begin, share.begin + share.num_bytes
        begin = max(begin, part.begin)
        end = min(end, part.end)
        if end - begin == share.num_bytes:
            is_whole = True
        else:
            with self._lock:
                if end > begin:
                    share.num_missing -= end - begin
                is_whole = share.num_missing == 0
        if is_whole and share.memory is not None:
            self._pass_on(part.span, share, share.memory)
            share.memory = None

    def _find_whole(self, local_bytes: Ints) -> Ints:
        """For each read that goes to all of one tensor's memory and nowhere else, its local row; else -1."""
        local, places = self._plan.local, np.full(len(self._sizes), -1, dtype=np.int64)
        goes_once = np.bincount(local.read, minlength=len(places)) == 1
        goes_once[self._plan.sends.read] = False
        memory_bytes = np.array([target.memory.nbytes for target in self._targets], dtype=np.int64)
        is_whole = goes_once[local.read] & (local_bytes == self._sizes[local.read])
        is_whole &= local_bytes == memory_bytes[local.want]
        places[local.read[is_whole]] = np.flatnonzero(is_whole)
        return places

    def _memory(self, number: int) -> ByteArray:
        share = self._shares[number]
        if share.memory is None:
            with self._lock:
                self._allocate(share, number)
        assert share.memory is not None, "it was allocated"
        return share.memory

    def _allocate(self, share: _Share, number: int) -> None:
        """Unless another thread has, while this one waited."""
        if share.memory is None:
            own = self._own_memory(number)
            share.is_own = own is not None
            share.memory = np.empty(share.num_bytes, dtype=np.uint8) if own is None else own

    def _device_memory(self, number: int) -> torch.Tensor | None:
        """The place on a device that a share belongs to, if it is needed nowhere else."""
        rows = self._local.get(number, ())
        if len(rows) != 1 or number in self._sends or not self._covers(rows[0], number):
            return None
        target = self._targets[int(self._plan.local.want[rows[0]])]
        return target.contiguous_bytes_on_device(*self._region(self._plan.local.regions, rows[0]))

    def _covers(self, row: int, number: int) -> bool:
        return self._num_bytes(self._plan.local.regions, row) == self._shares[number].num_bytes

    def _own_memory(self, number: int) -> ByteArray | None:
        if self._whole[number] >= 0:
            own = self._targets[int(self._plan.local.want[self._whole[number]])].all_bytes()
            if own is not None:
                return own
        rows = self._local.get(number, ())
        for row in rows:
            if self._covers(row, number):
                target = self._targets[int(self._plan.local.want[row])]
                memory = target.contiguous_bytes(*self._region(self._plan.local.regions, row))
                if memory is not None:
                    return memory
        return None

    def _pass_on(self, number: int, share: _Share, memory: ByteArray) -> None:
        if share.is_own and self._whole[number] >= 0:
            return
        # Own tensors first: the share may lie in one of them, from which messages are then sent unbuffered.
        local, sends = self._plan.local, self._plan.sends
        for row in self._local.get(number, ()):
            target = self._targets[int(local.want[row])]
            region = self._region(local.regions, row)
            if share.is_own:
                own = target.contiguous_bytes(*region)
                if own is not None and _same_place(own, memory):
                    continue
            target.fill(*region, self._cut(number, memory, local.regions, row))
        for row in self._sends.get(number, ()):
            message, offset = self._messages[row]
            content = self._cut(number, memory, sends.regions, row)
            size = content.nbytes
            if size == message.size_bytes and content.flags.c_contiguous:
                self._outbox.lend(message, content.reshape(-1).view(np.uint8), counts=not share.is_own)
            else:
                place = self._outbox.buffer(message)[offset : offset + size]
                np.copyto(place.view(content.dtype).reshape(content.shape), content)
            self._outbox.filled(message)

    def _cut(self, number: int, memory: ByteArray, regions: Regions, row: int) -> NDArray[Any]:
        """A region inside a share, as words of its element size."""
        outer = self._region(self._plan.regions, number)
        return cut_region(memory, self._facts(regions, row).element_bytes, outer, self._region(regions, row))

    def _facts(self, regions: Regions, row: int) -> TensorFacts:
        return self._tensors[int(regions.tensor[row])]

    def _region(self, regions: Regions, row: int) -> Region:
        return regions.region(row, len(self._facts(regions, row).shape))

    def _num_bytes(self, regions: Regions, row: int) -> int:
        return int(np.prod(regions.sizes[row])) * self._facts(regions, row).element_bytes


def _word(element_bytes: int) -> np.dtype[Any]:
    return np.dtype("c16") if element_bytes == 16 else np.dtype(f"u{element_bytes}")


def cut_region(memory: ByteArray, element_bytes: int, outer: Region, inner: Region) -> NDArray[Any]:
    """The elements of the region `inner` as words, from the contiguous bytes of the region `outer`."""
    words = memory.view(_word(element_bytes)).reshape(outer[1])
    inside = tuple(
        slice(begin - own, begin - own + extent) for own, begin, extent in zip(outer[0], *inner, strict=True)
    )
    return words[inside]


def _same_place(one: ByteArray, other: ByteArray) -> bool:
    return bool(one.ctypes.data == other.ctypes.data and one.nbytes == other.nbytes)


def _by_read(transfers: Transfers) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, read in enumerate(transfers.read.tolist()):
        rows.setdefault(read, []).append(row)
    return rows


def outgoing_messages(
    transfers: Transfers, tensors: Sequence[TensorFacts]
) -> tuple[list[Outgoing], list[tuple[Outgoing, int]]]:
    """The messages of some sends, and for each send its message and its offset in it."""
    messages: dict[tuple[int, int], Outgoing] = {}
    places: list[tuple[Outgoing, int]] = []
    for row, (peer, number) in enumerate(_ends(transfers)):
        if (peer, number) not in messages:
            messages[peer, number] = Outgoing(peer, number, int(transfers.in_round[row]), 0, 0)
        message = messages[peer, number]
        places.append((message, message.size_bytes))
        message.size_bytes += _transfer_bytes(transfers, row, tensors)
        message.num_missing += 1
    return list(messages.values()), places


def incoming_messages(
    transfers: Transfers, tensors: Sequence[TensorFacts], targets: Sequence[Target]
) -> list[Incoming]:
    """The messages of some receives, each with its place or the function that copies it there."""
    rows: dict[tuple[int, int], list[int]] = {}
    for row, ends in enumerate(_ends(transfers)):
        rows.setdefault(ends, []).append(row)
    messages = []
    for (peer, number), own_rows in rows.items():
        parts = _MessageParts(transfers, own_rows, tensors, targets)
        in_round = int(transfers.in_round[own_rows[0]])
        messages.append(
            Incoming(peer, number, in_round, parts.size_bytes, parts.contiguous_bytes(), parts.unpack)
        )
    return messages


class _MessageParts:
    """Transfers that arrive in one message."""

    def __init__(
        self, transfers: Transfers, rows: list[int], tensors: Sequence[TensorFacts], targets: Sequence[Target]
    ) -> None:
        self._transfers = transfers
        self._rows = rows
        self._tensors = tensors
        self._targets = targets
        self._sizes = [_transfer_bytes(transfers, row, tensors) for row in rows]
        self.size_bytes = sum(self._sizes)

    def contiguous_bytes(self) -> ByteArray | None:
        if len(self._rows) > 1:
            return None
        target, region = self._place(self._rows[0])
        return target.contiguous_bytes(*region)

    def unpack(self, memory: ByteArray) -> None:
        begin = 0
        for row, size in zip(self._rows, self._sizes, strict=True):
            target, region = self._place(row)
            content = memory[begin : begin + size]
            if content.ctypes.data % target.facts.element_bytes:
                content = content.copy()
            target.fill(*region, content.view(_word(target.facts.element_bytes)).reshape(region[1]))
            begin += size

    def _place(self, row: int) -> tuple[Target, Region]:
        regions = self._transfers.regions
        facts = self._tensors[int(regions.tensor[row])]
        return self._targets[int(self._transfers.want[row])], regions.region(row, len(facts.shape))


def _ends(transfers: Transfers) -> list[tuple[int, int]]:
    return list(zip(transfers.peer.tolist(), transfers.message.tolist(), strict=True))


def _transfer_bytes(transfers: Transfers, row: int, tensors: Sequence[TensorFacts]) -> int:
    element_bytes = tensors[int(transfers.regions.tensor[row])].element_bytes
    return int(np.prod(transfers.regions.sizes[row])) * element_bytes


UNSENT_BYTES = 256 << 20
"""Reading pauses while more than this waits to be sent."""

FIRST_TAG = 1 << 20
"""Our tags begin here, above those that programs choose for their own messages."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message to be sent once all of its transfers have been read."""

    peer: int
    number: int
    in_round: int
    size_bytes: int
    num_missing: int
    """Transfers that have not been read yet."""
    memory: ByteArray | None = None
    """A tensor's memory, or a buffer that is freed once it is sent."""
    is_buffered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A message to receive, into `memory`, or if that is None into a buffer that `place` copies."""

    peer: int
    number: int
    in_round: int
    size_bytes: int
    memory: ByteArray | None
    place: Callable[[ByteArray], None]


class Outbox:
    """Messages that reading threads make ready and one thread sends."""

    def __init__(self, messages: Sequence[Outgoing], timeout_s: float) -> None:
        self.messages = tuple(messages)
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._buffered_bytes = 0
        self._has_failed = False

    def wait_for_room(self) -> None:
        """Wait before reading more, until little is left to be sent."""
        with self._lock:
            self._lock.wait_for(lambda: self._has_failed or self._buffered_bytes <= UNSENT_BYTES)

    def buffer(self, message: Outgoing) -> ByteArray:
        """Return a buffer for the transfers of `message`."""
        with self._lock:
            if message.memory is None:
                message.memory = np.empty(message.size_bytes, dtype=np.uint8)
                message.is_buffered = True
                self._buffered_bytes += message.size_bytes
            return message.memory

    def lend(self, message: Outgoing, memory: ByteArray, *, counts: bool) -> None:
        """Send `message` from `memory` itself. `counts` if that is a buffer, which is freed once sent."""
        with self._lock:
            message.memory = memory
            message.is_buffered = counts
            self._buffered_bytes += message.size_bytes if counts else 0

    def filled(self, message: Outgoing) -> None:
        """Note that one more transfer of `message` is in its memory."""
        with self._lock:
            message.num_missing -= 1
            self._lock.notify_all()

    def wait_filled(self, message: Outgoing) -> ByteArray:
        """Return the memory of `message` when it may be sent: filled, or with any content after a failure."""
        with self._lock:
            if not self._lock.wait_for(
                lambda: self._has_failed or message.num_missing == 0, timeout=self._timeout_s
            ):
                raise WaitTimeout("this rank's own reads from storage", self._timeout_s)
            memory = message.memory
        return np.empty(message.size_bytes, dtype=np.uint8) if memory is None else memory

    def sent(self, message: Outgoing) -> None:
        """Free the memory of `message`."""
        with self._lock:
            if message.is_buffered:
                self._buffered_bytes -= message.size_bytes
            message.memory = None
            self._lock.notify_all()

    def give_up(self) -> None:
        """Send the rest without waiting for its content, because other ranks wait for it."""
        with self._lock:
            self._has_failed = True
            self._lock.notify_all()


def run_rounds(line: PointToPoint, outbox: Outbox, incoming: Sequence[Incoming], timeout_s: float) -> None:
    """Send and receive everything, in a separate thread next to the reading ones.

    Raises `RankError` and its subclasses if the connection breaks or nothing arrives for `timeout_s`.
    """
    out: dict[int, list[Outgoing]] = defaultdict(list)
    into: dict[int, list[Incoming]] = defaultdict(list)
    for message in outbox.messages:
        out[message.in_round].append(message)
    for awaited in incoming:
        into[awaited.in_round].append(awaited)
    for number in sorted(out.keys() | into.keys()):
        # All receives are posted before the first send is waited for: even if ranks send around a ring, each
        # send finds its receive, and messages need no memory beyond that of their round.
        receiving = []
        for awaited in sorted(into[number], key=lambda message: message.number):
            memory = (
                np.empty(awaited.size_bytes, dtype=np.uint8) if awaited.memory is None else awaited.memory
            )
            receiving.append((awaited, memory, line.receive(awaited.peer, memory.data, tag=_tag(awaited))))
        sending = []
        for message in out[number]:
            memory = outbox.wait_filled(message)
            sending.append((message, line.send(message.peer, memory.data, tag=_tag(message))))
        for awaited, memory, pending in receiving:
            awaiting = f"parts of the checkpoint that rank {awaited.peer} reads"
            pending.wait(awaiting=awaiting, timeout_s=timeout_s)
            if awaited.memory is None:
                awaited.place(memory)
        for message, pending in sending:
            awaiting = f"rank {message.peer} to take its part of the checkpoint"
            pending.wait(awaiting=awaiting, timeout_s=timeout_s)
            outbox.sent(message)


def _tag(message: Outgoing | Incoming) -> int:
    return FIRST_TAG + message.number
