"""The exchange of a rank's files with its group: protecting them as they are written, restoring, relocating.

    write     files -> storage, and a copy of their bytes -> blocks -> the members that keep parity of them
    restore   blocks of surviving members -> weighted sums -> the files of the members that lost theirs

Parity knows nothing of files: it sees the bytes of a member's files in the order in which they were written,
followed by zeros. All members of a group take the same steps; in each step a member sends one block and
receives one for each parity, so no member needs memory for more than a few blocks. Invariants: files are
written only under the keys that were passed in; a rank whose part fails continues until the others have
finished, so that a failure leaves no rank waiting.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Final, Literal

import numpy as np

from penstock.checkpoint.engine import StagedSave, WrittenShare
from penstock.checkpoint.formats.description import WrittenFile, start_checksum
from penstock.checkpoint.levels.redundancy import (
    GroupRecord,
    Layout,
    Order,
    RecordedFile,
    add,
    add_scaled,
    double_and_add,
)
from penstock.cluster.comm import Comm, PendingTransfer, PointToPoint
from penstock.errors import StorageError, WaitTimeout
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.aligned import aligned_buffer, copy_bytes, flat
from penstock.storage.capabilities import no_thread, prefer_direct_access
from penstock.storage.protocol import Release, Sink, Source, WrappedSink, WrappedSource, WrappedStorage
from penstock.transfer.buffers import WarmMemory

KeyOf = Callable[[str], str]

NUM_FED: Final = 3
"""The number of blocks between the files and parity: one is sent while another is filled."""
NUM_SUMS: Final = 2
"""The number of blocks for sums: one is added to and written, one receives the next stripe's first block."""
NUM_SPARE: Final = 2
"""The number of blocks for what arrives: one is added to a sum while the next one arrives."""
TAGS: Final = 4
"""The number of message tags in one exchange: two parities, in two consecutive steps."""
DISTINCT_EXCHANGES: Final = 4096
"""The number of exchanges before tags repeat, because MPI has few tags. A late message of a failed exchange
cannot be mistaken for one of the exchanges in between.
"""

logger = logging.getLogger(__name__)


# The bytes of a member's files as one sequence.


def _list_extents(sizes: Sequence[int], order: Order) -> list[tuple[int, int, int]]:
    """Return the extents of files in the order of their bytes: number of the file, offset in it, length."""
    offsets, extents = [0] * len(sizes), []
    for number, length in order or enumerate(sizes):
        if length:
            extents.append((number, offsets[number], length))
            offsets[number] += length
    return extents


class MemberReader:
    """Reads a member's files as one endless sequence of bytes: the files' bytes, then zeros."""

    def __init__(
        self, files: Sequence[RecordedFile], storage: Storage, key: KeyOf, order: Order = ()
    ) -> None:
        self._extents = _list_extents([file.size_bytes for file in files], order)
        self._ends = np.cumsum([length for _, _, length in self._extents], dtype=np.int64)
        self._keys = [key(file.name) for file in files]
        self._storage = storage
        self._sources: dict[int, Source] = {}
        self._opened = ExitStack()
        self.close = self._opened.close

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset` of the sequence."""
        while buffer.nbytes:
            place = int(np.searchsorted(self._ends, offset, side="right"))
            if place == len(self._extents):
                np.frombuffer(buffer, np.uint8)[:] = 0
                return
            number, begin, length = self._extents[place]
            if number not in self._sources:
                source = self._storage.open(self._keys[number])
                self._sources[number] = self._opened.enter_context(closing(source))
            inside = offset - (int(self._ends[place]) - length)
            part = buffer[: length - inside]
            self._sources[number].read_into(begin + inside, part)
            offset, buffer = offset + part.nbytes, buffer[part.nbytes :]


class MemberWriter:
    """Writes a sequence of bytes to the files they belong to, and drops what follows the last file's bytes.

    Each file is finished as soon as it is full; `close` aborts unfinished files.
    """

    def __init__(
        self, files: Sequence[tuple[str, int]], storage: Storage, key: KeyOf, order: Order = ()
    ) -> None:
        self._files = files
        self._storage = storage
        self._key = key
        self._extents = deque(_list_extents([size for _, size in files], order))
        self._left = [size for _, size in files]
        self._sinks: dict[int, Sink] = {}
        self._sums = [start_checksum() for _ in files]
        self._written: dict[int, RecordedFile] = {}

    def write(self, buffer: memoryview) -> None:
        """Write the next bytes; `buffer` may change once this returns."""
        while buffer.nbytes and self._extents:
            number, offset, length = self._extents.popleft()
            part = buffer[:length]
            self._append(number, part)
            if part.nbytes < length:
                self._extents.appendleft((number, offset + part.nbytes, length - part.nbytes))
            buffer = buffer[part.nbytes :]

    def finish(self) -> list[RecordedFile]:
        """Write the empty files as well, and return all files that are finished."""
        for number, (_, size_bytes) in enumerate(self._files):
            if not size_bytes:
                self._append(number, memoryview(b""))
        return [file for _, file in sorted(self._written.items())]

    def _append(self, number: int, part: memoryview) -> None:
        name, size_bytes = self._files[number]
        if number not in self._sinks:
            self._sinks[number] = self._storage.create(self._key(name), size_bytes)
        if part.nbytes:
            released = threading.Event()
            self._sinks[number].submit(part, released.set)
            self._sums[number].update(part)
            released.wait()
            self._left[number] -= part.nbytes
        if not self._left[number]:
            self._sinks[number].finish()
            del self._sinks[number]
            found = self._sums[number].digest().hex()
            self._written[number] = RecordedFile(name=name, size_bytes=size_bytes, sum=found)

    def close(self) -> None:
        """Abort the files that are not finished."""
        for sink in self._sinks.values():
            sink.abort()


# The same bytes while a save writes them: parity never opens a file.


class ByteFeed:
    """The bytes that a save writes, as blocks, in the order of writing; zeros follow the last bytes.

    Any thread may put bytes in, and waits while all blocks are full. One thread takes blocks and gives them
    back.
    """

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self._free: SimpleQueue[memoryview | None] = SimpleQueue()
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        self.give_back = self._free.put
        """Takes a block back so that it can be filled again."""
        for block in blocks:
            self.give_back(block)
        self._lock = threading.Lock()
        self._filling: memoryview | None = None
        self._filled = 0
        self._has_ended = self._is_abandoned = False
        self._extents: list[tuple[str, int]] = []

    def put(self, key: str, content: memoryview) -> None:
        """Copy the next bytes of a file, so that their buffer is free once the storage has written it."""
        with self._lock:
            if content.nbytes and self._extents and self._extents[-1][0] == key:
                self._extents[-1] = key, self._extents[-1][1] + content.nbytes
            elif content.nbytes:
                self._extents.append((key, content.nbytes))
            while content.nbytes and not self._is_abandoned:
                if self._filling is None:
                    self._filling, self._filled = self._free.get(), 0
                    continue  # it may have been abandoned in the meantime
                part = content[: self._filling.nbytes - self._filled]
                copy_bytes(self._filling[self._filled : self._filled + part.nbytes], part)
                self._filled, content = self._filled + part.nbytes, content[part.nbytes :]
                if self._filled == self._filling.nbytes:
                    self._full.put(self._filling)
                    self._filling = None

    def close(self) -> None:
        """Called when nothing more will be put in."""
        with self._lock:
            if self._filling is not None:
                np.frombuffer(self._filling[self._filled :], np.uint8)[:] = 0
                self._full.put(self._filling)
                self._filling = None
            self._full.put(None)

    def take(self) -> memoryview | None:
        """Wait for the next block and return it; None if only zeros follow."""
        block = None if self._has_ended else self._full.get()
        self._has_ended = block is None
        return block

    def abandon(self) -> None:
        """Stop making callers of `put` wait for free blocks, because no one will take the full ones."""
        self._is_abandoned = True
        self._free.put(None)

    def order_of(self, files: Sequence[WrittenFile], keys: Sequence[str]) -> Order:
        """Return the order in which the bytes of `files` came; raise `StorageError` unless each came once."""
        numbers = {key: number for number, key in enumerate(keys)}
        counts: Counter[str] = Counter()
        for key, length in self._extents:
            counts[key] += length
        for key, file in zip(keys, files, strict=True):
            if counts.pop(key, 0) != file.size_bytes:
                raise StorageError(
                    f"Parity has not seen the {file.size_bytes} bytes of {file.name} once each, in order",
                    uri=key,
                    fix="Write each file of a save once, from its beginning to its end.",
                )
        if counts:
            raise StorageError("A save wrote a file that it does not name", uri=next(iter(counts)))
        return tuple((numbers[key], length) for key, length in self._extents)


class _FedStorage(WrappedStorage):
    """A `Storage` that passes the bytes of new objects, and of objects that are read once, to a feed."""

    def __init__(self, inside: Storage, feed: ByteFeed) -> None:
        super().__init__(inside)
        self._feed = feed

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        sink = _FedSink(super().create(key, size_bytes))
        sink.put = partial(self._feed.put, key)
        return sink

    def open(self, key: str) -> Source:
        source = _FedSource(super().open(key))
        source.put = partial(self._feed.put, key)
        return source


class _FedSink(WrappedSink):
    put: Callable[[memoryview], None]

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        # Feed first: once submitted, the buffer may be reused by others.
        self.put(flat(buffer))
        self.inside.submit(buffer, release)


class _FedSource(WrappedSource):
    put: Callable[[memoryview], None]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.inside.read_into(offset, buffer)
        self.put(flat(buffer))


class FirstFailure:
    """The first error in a rank's part of an exchange with other ranks.

    After an error, the rank continues with whatever bytes it has, so that the others do not wait for it.
    """

    _error: Exception | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record an error raised in the block, but not `WaitTimeout`: a silent rank is not awaited twice."""
        try:
            yield
        except WaitTimeout:
            raise
        except Exception as error:  # noqa: BLE001 - raised once the others have what they wait for
            self._error = self._error or error

    def attempt(self, work: Callable[..., object], *arguments: object) -> None:
        """Call `work` unless something has failed before."""
        if self._error is None:
            with self.noted():
                work(*arguments)

    def raise_noted(self) -> None:
        """Raise the noted error, if any."""
        if self._error is not None:
            raise self._error


class Protector:
    """One rank's part in protecting and rebuilding steps. Creating and closing one is collective."""

    def __init__(self, storage: Storage, comm: Comm) -> None:
        self._storage = storage
        self._comm = comm
        self._transfer: PointToPoint | None = comm.transfer() if comm.size > 1 else None
        self._num_exchanges = 0

    def close(self) -> None:
        """Close the connections between ranks."""
        if self._transfer is not None:
            self._transfer.close()

    def write(
        self,
        staged: StagedSave,
        storage: Storage,
        key: KeyOf,
        *,
        ranks: Sequence[int],
        sizes: Sequence[int],
        layout: Layout,
        progress: Progress | None = None,
    ) -> tuple[WrittenShare, Order, tuple[RecordedFile, ...]]:
        """Write this rank's files and, in step with its group, the parity or copy that it keeps for others.

        `ranks` are the group's members, and `sizes` the number of bytes that each will write. A group of one
        rank is not protected.
        """
        if layout.members == 1:
            return staged.write_to(storage, key, progress), (), ()
        # Devices write from the huge pages of warm memory with fewer and larger requests.
        num_blocks = NUM_FED + (NUM_SUMS + NUM_SPARE) * max(layout.parities, 1)
        memory = WarmMemory(num_blocks * layout.block_bytes)
        memory.touch()
        starts = range(0, num_blocks * layout.block_bytes, layout.block_bytes)
        blocks = [memory.view[start : start + layout.block_bytes] for start in starts]
        feed = ByteFeed(blocks[:NUM_FED])
        encode = partial(
            self._encode, feed, blocks[NUM_FED:], storage, key, ranks=ranks, sizes=sizes, layout=layout
        )
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-parity") as thread:
            try:
                encoding = thread.submit(encode)
            except RuntimeError as error:
                # The rest of the group still waits for this rank's blocks, whatever their content.
                feed.close()
                with suppress(StorageError):
                    encode()
                raise no_thread(error) from error
            try:
                share = staged.write_to(_FedStorage(storage, feed), key, progress)
            finally:
                feed.close()
            kept = encoding.result()
        return share, feed.order_of(share.files, [key(file.name) for file in share.files]), (kept,)

    def _encode(
        self,
        feed: ByteFeed,
        blocks: Sequence[memoryview],
        storage: Storage,
        key: KeyOf,
        *,
        ranks: Sequence[int],
        sizes: Sequence[int],
        layout: Layout,
    ) -> RecordedFile:
        """Send this member's blocks, add up the blocks that arrive, and write the sums."""
        place, failure, zeros = ranks.index(self._comm.rank), FirstFailure(), bytearray(layout.block_bytes)
        tag = self._next_tag()
        width = max(layout.parities, 1)
        sums, following, *spare = (blocks[start : start + width] for start in range(0, len(blocks), width))
        kept_bytes = layout.parities * layout.chunk_bytes if layout.parities else sizes[place - 1]
        # For each chunk, the members that receive this member's block, and those whose blocks arrive: one per
        # parity.
        routes = [_route(layout, place, chunk) for chunk in range(layout.num_chunks)]
        num_steps = len(routes) * (layout.chunk_bytes // layout.block_bytes)

        def receive(step: int, first: Sequence[memoryview]) -> list[PendingTransfer]:
            if step == num_steps:
                return []
            into = spare[step % NUM_SPARE] if step % len(routes) else first
            _, sources = routes[step % len(routes)]
            peers = [(ranks[source], block) for source, block in zip(sources, into, strict=True)]
            return self._begin("receive", peers, tag + 2 * (step % 2), failure)

        with (
            ExitStack() as undo,
            closing(MemberWriter([(f"parity-{self._comm.rank}.bin", kept_bytes)], storage, key)) as out,
        ):
            undo.callback(feed.abandon)
            arriving = receive(0, sums)
            for step in range(num_steps):
                block = feed.take()
                leaving = memoryview(zeros) if block is None else block
                peers = [(ranks[target], leaving) for target in routes[step % len(routes)][0]]
                sent = self._begin("send", peers, tag + 2 * (step % 2), failure)
                self._wait(arriving, "blocks for parity", failure)
                # Receives begin before others send, so that arriving blocks need no buffer in the transport.
                arriving = receive(step + 1, following)
                if step % len(routes):
                    # The first chunk has the largest weight, so Horner's rule gives the others theirs.
                    pieces = spare[step % NUM_SPARE]
                    for total, piece, sum_up in zip(sums, pieces, (add, double_and_add), strict=False):
                        sum_up(total, piece)
                self._wait(sent, "other ranks to take blocks for parity", failure)
                if block is not None:
                    feed.give_back(block)
                if (step + 1) % len(routes) == 0:
                    for total in sums:
                        failure.attempt(out.write, total)
                    sums, following = following, sums
            found: list[RecordedFile] = []
            failure.attempt(lambda: found.extend(out.finish()))
            failure.raise_noted()
        return found[0]

    def restore(
        self,
        record: GroupRecord,
        lost: Collection[int],
        *,
        holders: Mapping[int, int],
        targets: Mapping[int, int],
        from_key: KeyOf,
        to_key: KeyOf,
        failure: FirstFailure,
    ) -> None:
        """Take part in writing the shares of a group that are `lost` or are relocated.

        `targets` maps each share to be written to the rank that writes it. A lost share is computed as sums
        of what the `holders` of the group's other shares have; any other share is copied from its holder.
        `from_key` gives the keys of existing files on this node, `to_key` the keys of files to write.
        """
        tag, layout, rank = self._next_tag(), record.layout, self._comm.rank
        missing = [place for place, each in enumerate(record.ranks) if each in lost]
        wanted = {each: targets[each] for each in record.ranks if each in targets}
        if not wanted or rank not in {*wanted.values(), *(holders[each] for each in record.ranks)}:
            return
        total, part = aligned_buffer(layout.block_bytes), aligned_buffer(layout.block_bytes)
        with ExitStack() as opened:
            # For each member whose share is on this node, the bytes of its own files and those that it keeps
            # for others.
            readers = {
                place: [
                    opened.enter_context(closing(MemberReader(files, self._storage, from_key, order)))
                    for files, order in _parts_of_share(record, place)
                ]
                for place, member in enumerate(record.members)
                if holders[member.rank] == rank and place not in missing
            }
            target_storage = prefer_direct_access(self._storage)
            for place, member in enumerate(record.members):
                if (target := wanted.get(member.rank)) is None:
                    continue
                writers = []
                for files, order in _parts_of_share(record, place):
                    sizes = [(file.name, file.size_bytes) for file in files]
                    writer = MemberWriter(sizes, target_storage, to_key, order)
                    writers.append(opened.enter_context(closing(writer)))
                for is_kept, length, terms in list_blocks(record, layout, place, missing):
                    if target == rank:
                        np.frombuffer(total, np.uint8)[:length] = 0
                    for source, from_kept, offset, factor in terms:
                        block, holder = part[:length], holders[record.ranks[source]]
                        if holder == rank:
                            failure.attempt(readers[source][from_kept].read_into, offset, block)
                        if holder == rank != target:
                            sent = self._begin("send", [(target, block)], tag, failure)
                            self._wait(sent, f"rank {target} to take lost bytes", failure)
                        elif holder != rank == target:
                            received = self._begin("receive", [(holder, block)], tag, failure)
                            self._wait(received, f"lost bytes from rank {holder}", failure)
                        if target == rank:
                            add_scaled(total[:length], part[:length], factor)
                    if target == rank:
                        failure.attempt(writers[is_kept].write, total[:length])
                if target == rank:
                    for writer in writers:
                        failure.attempt(writer.finish)
                    logger.info("Wrote %s of rank %d from its group", record.step, member.rank)

    def _begin(
        self,
        verb: Literal["send", "receive"],
        peers: Sequence[tuple[int, memoryview]],
        tag: int,
        failure: FirstFailure,
    ) -> list[PendingTransfer]:
        """Begin to send or receive one block for each parity."""
        assert self._transfer is not None, "several ranks have connections"
        begin, pending = getattr(self._transfer, verb), []
        for number, (rank, block) in enumerate(peers):
            with failure.noted():
                pending.append(begin(rank, block, tag=tag + number))
        return pending

    def _wait(self, pending: Sequence[PendingTransfer], awaiting: str, failure: FirstFailure) -> None:
        for each in pending:
            with failure.noted():
                each.wait(awaiting=awaiting, timeout_s=self._comm.timeout_s)

    def _next_tag(self) -> int:
        self._num_exchanges += 1
        return self._num_exchanges % DISTINCT_EXCHANGES * TAGS


def _parts_of_share(record: GroupRecord, place: int) -> list[tuple[tuple[RecordedFile, ...], Order]]:
    """Return the files of a member with their order, then what the member keeps for its group."""
    member = record.members[place]
    return [(member.files, member.order), (record.kept[place : place + 1], ())]


def _route(layout: Layout, place: int, chunk: int) -> tuple[list[int], list[int]]:
    """Return the members that receive a member's block of a chunk, and those that send it theirs."""
    if not layout.parities:
        return [(place + 1) % layout.members], [(place - 1) % layout.members]
    stripe = layout.stripe_of(place, chunk)
    targets = [(stripe + number) % layout.members for number in range(layout.parities)]
    sources = [(kept + layout.parities + chunk) % layout.members for kept in layout.kept_stripes(place)]
    return targets, sources


def list_blocks(
    record: GroupRecord, layout: Layout, place: int, missing: Collection[int]
) -> Iterator[tuple[bool, int, list[tuple[int, bool, int, int]]]]:
    """Yield the blocks of a member's share: whether each is kept for others, its length, its bytes as a sum.

    A sum is a list of terms: a member, whether the term's bytes are among those it keeps for others, their
    offset, and a factor. If the member itself is not missing, each sum has a single term: the member.
    """
    own_bytes = record.members[place].size_bytes
    kept_bytes = sum(file.size_bytes for file in record.kept[place : place + 1])
    if place not in missing or not layout.parities:
        before, after = (place - 1) % layout.members, (place + 1) % layout.members
        for is_kept, size_bytes, giver in ((False, own_bytes, after), (True, kept_bytes, before)):
            term = (place, is_kept) if place not in missing else (giver, not is_kept)
            for start, length in layout.blocks(size_bytes):
                yield is_kept, length, [(*term, start, 1)]
        return

    def terms_of(stripe: int, start: int, length: int) -> list[tuple[int, bool, int, int]]:
        factors = layout.recover(stripe, missing, place)
        return [
            (member, *layout.locate(member, stripe, start, length), factor)
            for member, factor in factors.items()
        ]

    for start, length in layout.blocks():
        for chunk in range(layout.num_chunks):
            yield False, length, terms_of(layout.stripe_of(place, chunk), start, length)
    for start, length in layout.blocks():
        for stripe in layout.kept_stripes(place):
            yield True, length, terms_of(stripe, start, length)
