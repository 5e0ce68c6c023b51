"""Parity and copies of a group, computed while its members write their files.

    send     each member sends the next block of its feed to the members that keep parity of it
    add      each member adds up the blocks that arrive for its own parity, of one stripe after another
    write    a thread of its own writes the sums to the parity file

All members take the same steps, in each of which a member sends one block and receives one for each parity,
so none needs more memory than a few blocks, and none waits for a later step of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from queue import SimpleQueue
from typing import Final, Self

from penstock.checkpoint.levels.redundancy import gf256
from penstock.checkpoint.levels.redundancy.feed import ByteFeed
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout
from penstock.checkpoint.levels.redundancy.redundancy_record import ConcatenatedWriter, RecordedFile
from penstock.checkpoint.levels.redundancy.ring import FirstFailure, Ring
from penstock.cluster.comm import PendingTransfer
from penstock.storage.aligned import address_of

NUM_SUMS: Final = 8
"""One is added to, one gets the first block of the next stripe, three are being written and three wait: a
busy device takes as long for a small request as for a large one, so that several are written at once."""
NUM_SPARE: Final = 2
"""One is added to the sum while the next one arrives."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which members get a member's block in one step, and whose blocks it gets: one for each parity."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]


def plan_routes(layout: ParityLayout, place: int) -> list[Route]:
    """The steps of a stripe for the member at `place`: one for each chunk of its own."""
    kept = [place, (place - 1) % layout.members][: layout.parities]
    return [
        Route(
            targets=tuple(parity.member for parity in layout.parity(layout.stripe_of(place, chunk))),
            sources=tuple(layout.data(stripe)[chunk].member for stripe in kept),
        )
        for chunk in range(layout.num_chunks)
    ]


def plan_copies(members: int, place: int) -> list[Route]:
    """For copies: each member sends its blocks to the next one."""
    return [Route(targets=((place + 1) % members,), sources=((place - 1) % members,))]


class SumWriter:
    """Writes blocks of sums to a member's parity file in a thread of its own: at once those that have come.

    If the file cannot be written, blocks are still taken, and `failure` says why. `sums` lie in `memory`.
    """

    def __init__(
        self,
        create: Callable[[], ConcatenatedWriter],
        failure: FirstFailure,
        sums: Sequence[Sequence[memoryview]],
        memory: memoryview,
    ) -> None:
        self._memory = memory
        self._ready: deque[tuple[Sequence[memoryview], int]] = deque()
        self._file: ConcatenatedWriter | None = None
        self._failure = failure
        self._free: SimpleQueue[Sequence[memoryview]] = SimpleQueue()
        for each in sums:
            self._free.put(each)
        self._pending: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(
            1, thread_name_prefix="penstock-parity-file"
        )
        self._submit(lambda: self._create(create))

    def take(self) -> Sequence[memoryview]:
        """A buffer for each sum of a stripe; waits until one was written."""
        return self._free.get()

    def put(self, sums: Sequence[memoryview], length: int) -> None:
        """Write the first `length` bytes of each sum."""
        self._ready.append((sums, length))
        self._submit(self._write_ready)

    def finish(self) -> RecordedFile | None:
        """Wait until everything is durable; None if it could not be written."""
        while self._pending:
            self._pending.popleft().result()
        return self._file.written[0] if self._file and self._file.written else None

    def _submit(self, work: Callable[[], None]) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if self._thread is not None:
            try:
                self._pending.append(self._thread.submit(work))
            except RuntimeError:
                # No thread may be started here, so this one writes: the others wait for its blocks.
                self._thread = None
        if self._thread is None:
            work()

    def _create(self, create: Callable[[], ConcatenatedWriter]) -> None:
        with self._failure.noted():
            self._file = create()

    def _write_ready(self) -> None:
        taken = [self._ready.popleft() for _ in range(len(self._ready))]
        try:
            with self._failure.noted():
                if self._file is not None:
                    for part in self._joined([each[:length] for sums, length in taken for each in sums]):
                        self._file.write(part)
        finally:
            for sums, _ in taken:
                self._free.put(sums)

    def _joined(self, parts: Sequence[memoryview]) -> Iterator[memoryview]:
        """The same bytes, neighbours in memory as one part."""
        begin = end = 0
        for part in parts:
            start = address_of(part) - address_of(self._memory)
            if start != end:
                yield self._memory[begin:end]
                begin = start
            end = start + part.nbytes
        yield self._memory[begin:end]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._file is not None:
            self._file.__exit__()


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    chunk: int
    length: int


@dataclass(frozen=True, slots=True)
class _Incoming:
    """Blocks that are arriving: they begin `sums`, or will be added to them."""

    sums: Sequence[memoryview]
    blocks: Sequence[memoryview]
    pending: list[PendingTransfer | None]


class Encoder:
    """One member's part in encoding. `spare` are two buffers for the block of each parity that arrives."""

    def __init__(
        self,
        ring: Ring,
        routes: Sequence[Route],
        feed: ByteFeed,
        out: SumWriter,
        spare: Sequence[Sequence[memoryview]],
    ) -> None:
        self._ring = ring
        self._routes = routes
        self._feed = feed
        self._out = out
        self._spare = spare

    def run(self, total_bytes: int) -> None:
        """Take the steps of `total_bytes` of each chunk."""
        ring = self._ring
        incoming: _Incoming | None = None
        for step, following in pairwise(chain(self._steps(total_bytes), [None])):
            assert step is not None, "None comes last"
            block = self._feed.take(step.length)
            sent = [
                ring.begin_send(target, block, tag=_tag(step, parity))
                for parity, target in enumerate(self._routes[step.chunk].targets)
            ]
            incoming = incoming or self._receive(step, None)
            for pending in incoming.pending:
                ring.finish(pending, awaiting="blocks for parity")
            arriving = None if following is None else self._receive(following, incoming.sums)
            self._add(step, incoming)
            for pending in sent:
                ring.finish(pending, awaiting="other ranks to take blocks for parity")
            self._feed.release_taken()
            incoming = arriving

    def _steps(self, total_bytes: int) -> Iterator[_Step]:
        number = 0
        for _, length in self._ring.blocks(total_bytes):
            for chunk in range(len(self._routes)):
                yield _Step(number, chunk, length)
                number += 1

    def _receive(self, step: _Step, sums: Sequence[memoryview] | None) -> _Incoming:
        """Begin to receive, before others send, so that arriving bytes need no buffer of the transport."""
        if sums is None or not step.chunk:
            blocks = sums = self._out.take()
        else:
            blocks = self._spare[step.number % NUM_SPARE]
        pending = [
            self._ring.begin_receive(source, block[: step.length], tag=_tag(step, parity))
            for parity, (source, block) in enumerate(
                zip(self._routes[step.chunk].sources, blocks, strict=True)
            )
        ]
        return _Incoming(sums, blocks, pending)

    def _add(self, step: _Step, incoming: _Incoming) -> None:
        if step.chunk:
            # The first chunk has the largest weight, so Horner's rule gives the others theirs.
            adding = (gf256.add, gf256.double_and_add)
            for add, total, block in zip(adding, incoming.sums, incoming.blocks, strict=False):
                add(total[: step.length], block[: step.length])
        if step.chunk == len(self._routes) - 1:
            self._out.put(incoming.sums, step.length)


def _tag(step: _Step, parity: int) -> int:
    """Tells the messages of neighbouring steps between the same ranks apart."""
    return 2 * (step.number % 2) + parity
