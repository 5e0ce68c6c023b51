"""Puts the bytes that were read where they belong: into this rank's tensors and messages to other ranks.

A share that is one contiguous part of a tensor in host memory is read directly into it; any other share
passes through a buffer. A share is passed on once, when its last byte has arrived, by the thread that read
that byte. Both ends know every message from the plan, so no sizes are negotiated. Invariant: a rank finishes
one round of messages before it begins the next, and its reads for one round never wait for a later one, so
ranks cannot deadlock. A rank that fails still sends its messages.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
from penstock.checkpoint.plan.load_plan import LoadPlan, LoadRequests, Transfers
from penstock.checkpoint.state.regions import (
    ByteArray,
    Region,
    TensorFacts,
    element_sizes,
)
from penstock.checkpoint.state.tensors import as_words, flatten_bytes, narrow_region
from penstock.cluster.comm import PointToPoint
from penstock.errors import UsageError, WaitTimeout
from penstock.storage.aligned import copy_bytes
from penstock.transfer.reader import Part


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Memory of this rank into which a wanted region is loaded; `facts` describe the stored tensor."""

    offsets: tuple[int, ...]
    memory: torch.Tensor
    facts: TensorFacts

    def __post_init__(self) -> None:
        if _overlaps_itself(self.memory):
            raise UsageError(
                f"Elements of {self.facts.name!r} share memory in the state, so they cannot be loaded",
                where=f"size {list(self.memory.size())}, stride {list(self.memory.stride())}",
                fix="Load into a tensor with its own memory, for example expanded.clone().",
            )

    @property
    def has_stored_bytes(self) -> bool:
        """True if the stored bytes are the bytes of this memory, without any conversion."""
        has_other_bits = self.memory.is_conj() or self.memory.is_neg()
        return self.memory.dtype == getattr(torch, self.facts.dtype) and not has_other_bits

    def direct_bytes(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        """Return a region's bytes within the target, on its device; None unless contiguous and as stored."""
        view = narrow_region(self.memory, self.offsets, offsets, sizes)
        return flatten_bytes(view) if view.is_contiguous() and self.has_stored_bytes else None

    def contiguous_bytes(self, offsets: Sequence[int], sizes: Sequence[int]) -> ByteArray | None:
        """Return the same bytes, or None unless they are in host memory."""
        found = self.direct_bytes(offsets, sizes) if self.memory.is_cpu else None
        return None if found is None else found.numpy()

    def fill(self, offsets: Sequence[int], sizes: Sequence[int], content: NDArray[Any]) -> None:
        """Copy a region from `content`, in words of the stored element size."""
        view = narrow_region(self.memory, self.offsets, offsets, sizes)
        if view.is_cpu and self.has_stored_bytes:
            own_words = as_words(view).numpy()
            np.copyto(own_words, content.view(own_words.dtype))
            return
        words = torch.from_numpy(np.ascontiguousarray(content).reshape(-1).view(np.uint8))
        view.copy_(words.view(getattr(torch, self.facts.dtype)).reshape(tuple(sizes)))


def item_targets(requests: LoadRequests, tensors: Sequence[TensorFacts]) -> list[Target]:
    """Allocate memory for the requested whole items. Their targets follow those of the wanted regions."""
    items = [tensors[number] for number in requests.items]
    return [Target((0,), torch.empty(facts.shape, dtype=torch.uint8, device="cpu"), facts) for facts in items]


def unpack(
    checkpoint: CheckpointSource, requests: LoadRequests, targets: Sequence[Target], *, trust: bool
) -> dict[str, Any]:
    """Copy parts of packed items to their tensors, and return the objects by leaf name."""
    items = [target.memory.numpy().data for target in targets[len(targets) - len(requests.items) :]]
    for place, row, want, inner in requests.unpacking:
        facts = targets[want].facts
        elements = checkpoint.tensor_bytes(row, items[place])
        outer = checkpoint.index.stored.regions.region(row, len(facts.shape))
        # The copy is aligned, as torch requires of its memory.
        aligned = np.frombuffer(bytes(elements), dtype=np.uint8)
        targets[want].fill(*inner, cut_region(aligned, facts.element_bytes, outer, inner))
    objects = checkpoint.index.objects
    return {
        name: checkpoint.value(objects[number], trust=trust, item=items[place])
        for name, (number, place) in requests.objects.items()
    }


def find_tied(
    targets: Sequence[Target], is_copied: Callable[[int], bool], are_alike: Callable[[int, int], bool]
) -> list[tuple[int, int]]:
    """Return pairs of targets that are the same memory but may get different values, like tied weights.

    The first target of a pair `is_copied` only if the second is as well; `are_alike` tells whether two
    targets get the same values anyway. Raises `UsageError` if two targets share only a part of their memory.
    """

    def span(memory: torch.Tensor) -> tuple[int, int]:
        steps = zip(memory.shape, memory.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps) if memory.numel() else -1
        return memory.data_ptr(), memory.data_ptr() + (last + 1) * memory.itemsize

    def view(memory: torch.Tensor) -> tuple[object, ...]:
        return memory.dtype, memory.stride(), memory.is_conj(), memory.is_neg()

    spans = [span(target.memory) for target in targets]
    begins, ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T
    order = np.flatnonzero(begins < ends)
    order = order[np.argsort(begins[order], kind="stable")]
    # Nearly always, no tensors overlap: with many of them, there is no time for more than this.
    reaches = np.append(False, begins[order[1:]] < np.maximum.accumulate(ends[order])[:-1])[: len(order)]
    crowded = order[reaches | np.roll(reaches, -1)].tolist()
    tied = []
    known: dict[object, int] = {}
    others: list[tuple[int, NDArray[np.uint8]]] = []
    for number in sorted(crowded, key=lambda each: (begins[each], is_copied(each))):
        own, held = targets[number], _byte_places(targets[number].memory)
        first = known.setdefault((own.memory.device, spans[number][0], held.shape, held.strides), number)
        if first != number:
            if view(own.memory) != view(targets[first].memory) or not are_alike(first, number):
                tied.append((first, number))
            continue
        others = [(before, places) for before, places in others if ends[before] > begins[number]]
        for before, places in others:
            other = targets[before]
            if other.memory.device != own.memory.device:
                continue
            if np.may_share_memory(held, places, max_work=_MOST_WORK):  # type: ignore[arg-type]  # its stubs lack it
                raise UsageError(
                    f"{other.facts.name!r} and {own.facts.name!r} share a part of their memory in the state",
                    fix="Load into tensors that do not share memory.",
                )
        others.append((number, held))
    return tied


_MOST_WORK = 100_000
"""The number of steps, a millisecond's worth, after which two views are taken to share an element."""


def _byte_places(memory: torch.Tensor) -> NDArray[np.uint8]:
    """Return an array at the addresses of a tensor's bytes, in their order. It must not be read.

    For all tensors that consist of the same bytes, the array has the same address, shape and strides.
    """
    shape, strides = [memory.itemsize], [1]
    for stride, size in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if size > 1 and stride * memory.itemsize == shape[-1] * strides[-1]:
            shape[-1] *= size
        elif size > 1:
            shape.append(size)
            strides.append(stride * memory.itemsize)
    layout = {"shape": tuple(shape), "strides": tuple(strides), "typestr": "|u1", "version": 3}
    addresses: Any = SimpleNamespace(__array_interface__={**layout, "data": (memory.data_ptr(), True)})
    return np.asarray(addresses)


def untie(
    targets: Sequence[Target],
    names: Sequence[str],
    tied: Iterable[tuple[int, int, torch.Tensor]],
    copied: Container[str],
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str]]]:
    """Return tensors for leaves that were loaded into shared memory, and the pairs that cannot be separated.

    Leaves that are `copied` when their part loads its state may have any memory; `names` has the name of each
    target. The last item of each entry of `tied` is the second target as a view of the shared memory.
    """
    untied, split = {}, []
    for first, second, shared in tied:
        own = targets[second].memory
        plain = (each.cpu().resolve_conj().resolve_neg().contiguous() for each in (shared, own))
        if torch.equal(*map(flatten_bytes, plain)):
            continue
        if names[second] in copied:
            untied[names[second]] = own
        else:
            split.append((names[first], names[second]))
    return untied, split


def _overlaps_itself(memory: torch.Tensor) -> bool:
    """Return True if two elements may have the same address, as in expanded tensors and sliding windows."""
    reach = 0
    # Starting with the innermost dimension, each step must lead beyond all elements so far.
    for stride, size in sorted(zip(memory.stride(), memory.size(), strict=True)):
        if size > 1 and stride <= reach and memory.numel():
            return True
        reach += stride * (size - 1)
    return False


def wait_for_devices(targets: Sequence[Target]) -> None:
    """Wait for this thread's work on devices, because other threads copy to them in other streams."""
    devices = {target.memory.device for target in targets if target.memory.device.type in ("cuda", "xpu")}
    for device in devices:
        torch.get_device_module(device).current_stream(device).synchronize()


def cut_region(memory: ByteArray, element_bytes: int, outer: Region, inner: Region) -> NDArray[Any]:
    """View the elements of the region `inner`, as words, in the contiguous bytes of the region `outer`."""
    words: NDArray[Any] = memory.view(np.dtype(f"V{element_bytes}")).reshape(outer[1])
    bounds = zip(outer[0], *inner, strict=True)
    inside: tuple[Any, ...] = tuple(slice(begin - own, begin - own + size) for own, begin, size in bounds)
    # The ellipsis keeps a 0-d array from becoming a scalar.
    return words[(*inside, ...)]


@dataclass(slots=True, eq=False)
class _Share:
    """One read of the plan while it is in progress; `memory` is allocated when its first byte arrives."""

    begin: int
    """The offset of the payload in the file."""
    num_bytes: int
    num_missing: int
    region: Region
    facts: TensorFacts
    local: list[int]
    """Rows of the plan's local transfers that take bytes from this read."""
    sends: list[int]
    memory: ByteArray | None = None
    own_row: int | None = None
    """The row of the local transfer whose tensor provides `memory`; None if `memory` is a buffer."""
    on_device: torch.Tensor | None = None
    """A tensor's bytes on a device, to which each part is copied on arrival, without a host buffer."""


class Destinations:
    """The destinations of a load plan's spans. `begins` has the offset of each read's payload in its file."""

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
        self._outbox = outbox
        self._messages = messages
        self._takes_any_address = takes_any_address
        self._lock = threading.Lock()
        sizes = plan.regions.num_bytes(element_sizes(tensors)).tolist()
        self._shares = [
            _Share(begin, size, size, region, facts, [], [])
            for begin, size, (facts, region) in zip(
                begins, sizes, plan.regions.with_facts(tensors), strict=True
            )
        ]
        local = zip(plan.local.want.tolist(), plan.local.regions.with_facts(tensors), strict=True)
        self._local = [(targets[want], region) for want, (_, region) in local]
        self._sent = [region for _, region in plan.sends.regions.with_facts(tensors)]
        for row, read in enumerate(plan.local.read.tolist()):
            self._shares[read].local.append(row)
        for row, read in enumerate(plan.sends.read.tolist()):
            self._shares[read].sends.append(row)
        for share in self._shares:
            if len(share.local) == 1 and not share.sends:
                target, region = self._local[share.local[0]]
                if region == share.region and not target.memory.is_cpu:
                    share.on_device = target.direct_bytes(*region)

    def place(self, span: int, begin: int, end: int) -> memoryview | None:
        """Return memory for a part of a span, or None if the storage cannot read to any address."""
        share = self._shares[span]
        is_inside = share.begin <= begin and end <= share.begin + share.num_bytes
        if not self._takes_any_address or not is_inside or share.on_device is not None:
            return None
        return memoryview(self._memory(share).data)[begin - share.begin : end - share.begin]

    def take(self, span: int, begin: int, content: memoryview) -> None:
        """Copy the payload in `content`; the rest of an item was only needed for its checksum."""
        share = self._shares[span]
        first = max(share.begin, begin)
        last = min(begin + len(content), share.begin + share.num_bytes)
        if first >= last:
            return
        copied, inside = content[first - begin : last - begin], slice(first - share.begin, last - share.begin)
        if share.on_device is not None:
            share.on_device[inside].copy_(torch.frombuffer(copied, dtype=torch.uint8))
        else:
            copy_bytes(memoryview(self._memory(share).data)[inside], copied)

    def arrived(self, part: Part) -> None:
        """Called when `part` has arrived; pass its share on if that completes the payload."""
        share = self._shares[part.span]
        num_bytes = min(share.begin + share.num_bytes, part.end) - max(share.begin, part.begin)
        with self._lock:
            share.num_missing -= max(num_bytes, 0)
            is_whole = share.num_missing == 0
        if is_whole and share.memory is not None:
            self._pass_on(share, share.memory)
            share.memory = None

    def _memory(self, share: _Share) -> ByteArray:
        """Return the memory of a tensor that takes the whole share, or else a buffer."""
        with self._lock:
            for row in share.local if share.memory is None else ():
                target, region = self._local[row]
                if region == share.region and share.memory is None:
                    share.memory, share.own_row = target.contiguous_bytes(*region), row
            if share.memory is None:
                share.memory, share.own_row = np.empty(share.num_bytes, dtype=np.uint8), None
            return share.memory

    def _pass_on(self, share: _Share, memory: ByteArray) -> None:
        # Own tensors first: if the share is in one of them, messages can be sent from it without a buffer.
        for row in share.local:
            target, region = self._local[row]
            if row != share.own_row:
                target.fill(*region, cut_region(memory, share.facts.element_bytes, share.region, region))
        for row in share.sends:
            message, offset = self._messages[row]
            content = cut_region(memory, share.facts.element_bytes, share.region, self._sent[row])
            if content.nbytes == message.size_bytes and content.flags.c_contiguous:
                is_buffer = share.own_row is None
                self._outbox.lend(message, content.reshape(-1).view(np.uint8), counts=is_buffer)
            else:
                place = self._outbox.buffer(message)[offset : offset + content.nbytes]
                np.copyto(place.view(content.dtype).reshape(content.shape), content)
            self._outbox.filled(message)


def outgoing_messages(
    transfers: Transfers, tensors: Sequence[TensorFacts]
) -> tuple[list[Outgoing], list[tuple[Outgoing, int]]]:
    """Group these sends into messages; for each send, also return its message and the offset in it."""
    messages: dict[tuple[int, int], Outgoing] = {}
    places: list[tuple[Outgoing, int]] = []
    sizes = transfers.regions.num_bytes(element_sizes(tensors))
    columns = (transfers.peer, transfers.message, transfers.in_round, sizes)
    for peer, number, in_round, size in zip(*(column.tolist() for column in columns), strict=True):
        message = messages.setdefault((peer, number), Outgoing(peer, number, in_round, 0, 0))
        places.append((message, message.size_bytes))
        message.size_bytes += size
        message.num_missing += 1
    return list(messages.values()), places


def incoming_messages(
    transfers: Transfers, tensors: Sequence[TensorFacts], targets: Sequence[Target]
) -> list[Incoming]:
    """Group these receives into messages.

    Each has memory to receive into, or a function that distributes its content.
    """
    sizes = transfers.regions.num_bytes(element_sizes(tensors))
    columns = (transfers.peer, transfers.message, transfers.in_round, transfers.want, sizes)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    # No message contains transfers of two rounds.
    parts_of: dict[tuple[int, int, int], list[tuple[Target, Region, int]]] = defaultdict(list)
    regions = transfers.regions.with_facts(tensors)
    for (peer, number, in_round, want, size), (_, region) in zip(rows, regions, strict=True):
        parts_of[peer, number, in_round].append((targets[want], region, size))
    messages = []
    for (peer, number, in_round), parts in parts_of.items():
        target, region, _ = parts[0]
        memory = target.contiguous_bytes(*region) if len(parts) == 1 else None
        size = sum(size for _, _, size in parts)
        messages.append(Incoming(peer, number, in_round, size, memory, partial(_unpack_message, parts)))
    return messages


def _unpack_message(parts: Sequence[tuple[Target, Region, int]], memory: ByteArray) -> None:
    """Copy the parts of a message, which are stored one after another, to their tensors."""
    begin = 0
    for target, region, size in parts:
        content = memory[begin : begin + size]
        if content.ctypes.data % target.facts.element_bytes:
            content = content.copy()
        target.fill(*region, cut_region(content, target.facts.element_bytes, region, region))
        begin += size


UNSENT_BYTES = 256 << 20
"""Reading pauses while more than this is waiting to be sent."""

FIRST_TAG = 1 << 20
"""The first of the tags used here, above those that programs choose for their own messages."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message that is sent once all of its transfers have been read."""

    peer: int
    number: int
    in_round: int
    size_bytes: int
    num_missing: int
    """The number of transfers that have not been read yet."""
    memory: ByteArray | None = None
    """A tensor's memory, or a buffer that is freed once the message is sent."""
    is_buffered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A message to receive into `memory` or, if that is None, into a buffer whose content `place` copies."""

    peer: int
    number: int
    in_round: int
    size_bytes: int
    memory: ByteArray | None
    place: Callable[[ByteArray], None]


class Outbox:
    """Messages that reading threads prepare and one thread sends."""

    def __init__(self, messages: Sequence[Outgoing], timeout_s: float) -> None:
        self.messages = tuple(messages)
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._buffered_bytes = 0
        self._has_failed = False

    def wait_for_room(self) -> None:
        """Wait, before reading more, until little is left to send."""
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
        """Send `message` directly from `memory`. `counts` is True for a buffer, which is freed once sent."""
        with self._lock:
            message.memory = memory
            message.is_buffered = counts
            self._buffered_bytes += message.size_bytes if counts else 0

    def filled(self, message: Outgoing) -> None:
        """Called when one more transfer of `message` is in its memory."""
        with self._lock:
            message.num_missing -= 1
            self._lock.notify_all()

    def wait_filled(self, message: Outgoing) -> ByteArray:
        """Wait until `message` may be sent, and return its memory.

        The memory is filled or, after a failure, has arbitrary content.
        """
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
        """Send the remaining messages without waiting for content, because other ranks wait for them."""
        with self._lock:
            self._has_failed = True
            self._lock.notify_all()


def run_rounds(line: PointToPoint, outbox: Outbox, incoming: Sequence[Incoming], timeout_s: float) -> None:
    """Send and receive everything. Runs in a separate thread alongside the reading threads.

    Raises `RankError` or a subclass if the connection breaks or nothing arrives for `timeout_s`.
    """
    out: dict[int, list[Outgoing]] = defaultdict(list)
    into: dict[int, list[Incoming]] = defaultdict(list)
    for message in outbox.messages:
        out[message.in_round].append(message)
    for awaited in incoming:
        into[awaited.in_round].append(awaited)
    for number in sorted(out.keys() | into.keys()):
        # All receives are posted before any send is awaited. Even if ranks send around a ring, each send
        # finds its receive, and messages need no memory beyond that of their round.
        receiving = []
        for awaited in sorted(into[number], key=lambda message: message.number):
            memory = (
                np.empty(awaited.size_bytes, dtype=np.uint8) if awaited.memory is None else awaited.memory
            )
            receiving.append(
                (awaited, memory, line.receive(awaited.peer, memory.data, tag=FIRST_TAG + awaited.number))
            )
        sending = []
        for message in out[number]:
            memory = outbox.wait_filled(message)
            sending.append((message, line.send(message.peer, memory.data, tag=FIRST_TAG + message.number)))
        for awaited, memory, pending in receiving:
            awaiting = f"parts of the checkpoint that rank {awaited.peer} reads"
            pending.wait(awaiting=awaiting, timeout_s=timeout_s)
            if awaited.memory is None:
                awaited.place(memory)
        for message, pending in sending:
            awaiting = f"rank {message.peer} to take its part of the checkpoint"
            pending.wait(awaiting=awaiting, timeout_s=timeout_s)
            outbox.sent(message)
