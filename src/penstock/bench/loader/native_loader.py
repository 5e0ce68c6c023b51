"""The native loader: threads, each with a buffer, that read ranges some batches ahead.

Files and objects are read with the same depth: `threads` requests in flight, whichever batch they belong to.
Memory is one buffer per thread, plus one block per thread if blocks are decoded, whatever the size of samples
and files.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final

from penstock.bench.loader.loader_protocol import (
    Batch,
    BatchRequest,
    BlockRequest,
    FormatDecoder,
    OpenStorage,
    ReadRequest,
)
from penstock.dataset.formats.format_protocol import Extent
from penstock.errors import ShortTransfer, UsageError
from penstock.storage import Counters, Source, Storage, aligned
from penstock.transfer.buffers import WarmMemory

DEFAULT_BUFFER_BYTES: Final = 8 << 20
_ALIGNMENT: Final = 4096


class RangeReader:
    """Reads ranges into one buffer.

    Keeps the last object open, because consecutive ranges are often of one file.
    """

    def __init__(self, storage: Storage, buffer_bytes: int, decoder: FormatDecoder | None = None) -> None:
        self._storage = storage
        # Huge pages, as in the probe: with ordinary pages, the kernel pins each one for O_DIRECT.
        self._buffer = _warm_buffer(buffer_bytes)
        self._block = self._buffer
        self._decoder = decoder
        self._key: str | None = None
        self._source: Source | None = None

    def serve(self, request: ReadRequest | BlockRequest, totals: Batch) -> None:
        """Read the ranges of a request, and decode them if it is a block. Both are counted in `totals`."""
        began_ns = time.monotonic_ns()
        if not isinstance(request, BlockRequest):
            totals.read_bytes += self._read(request)
            totals.num_reads += 1
            totals.read_ns += time.monotonic_ns() - began_ns
            return
        pieces = self._read_block(request)
        read_ns = time.monotonic_ns()
        assert self._decoder is not None
        self._decoder.decode(request, pieces)
        totals.read_bytes += sum(len(piece.content) for piece in pieces)
        totals.num_reads += len(pieces)
        totals.read_ns += read_ns - began_ns
        totals.decode_ns += time.monotonic_ns() - read_ns

    def _read(self, request: ReadRequest) -> int:
        """Read one range and return its length."""
        source = self._open(request)
        size_bytes = _length(request, source)
        done = 0
        while done < size_bytes:
            piece = self._buffer[: min(len(self._buffer), size_bytes - done)]
            source.read_into(request.offset + done, piece)
            done += len(piece)
        if request.size_bytes is None:
            self.close()  # an object that was read whole is not requested again in this epoch
        return done

    def close(self) -> None:
        """Close the open object, if there is one."""
        if self._source is not None:
            self._source.close()
            self._source = self._key = None

    def _read_block(self, block: BlockRequest) -> list[Extent]:
        """Read all ranges of a block, side by side, into memory that the next block reuses."""
        lengths = [_length(read, self._open(read)) for read in block.reads]
        places = [aligned.round_up(length, _ALIGNMENT) for length in lengths]
        if sum(places) > len(self._block):
            self._block = _warm_buffer(sum(places))
        pieces, begin = [], 0
        for read, length, place in zip(block.reads, lengths, places, strict=True):
            piece = self._block[begin : begin + length]
            self._open(read).read_into(read.offset, piece)
            pieces.append(Extent(read.offset, piece))
            begin += place
        if any(read.size_bytes is None for read in block.reads):
            self.close()
        return pieces

    def _open(self, request: ReadRequest) -> Source:
        if self._source is None or request.key != self._key:
            self.close()
            self._source = self._storage.open(request.key)
            self._key = request.key
        expected_bytes, actual_bytes = request.expected_bytes, self._source.size_bytes
        if expected_bytes not in (None, actual_bytes):
            raise ShortTransfer(
                f"This file has {actual_bytes} bytes instead of {expected_bytes}",
                uri=f"{self._storage.uri}/{request.key}",
                expected_bytes=expected_bytes or 0,
                actual_bytes=actual_bytes,
                fix="Generate or copy it again; `penstock training verify` finds all such files.",
            )
        return self._source


def _warm_buffer(size_bytes: int) -> memoryview:
    memory = WarmMemory(size_bytes)
    memory.touch()
    return memory.view[:size_bytes]


def _length(request: ReadRequest, source: Source) -> int:
    return source.size_bytes - request.offset if request.size_bytes is None else request.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """Settings: `threads` requests in flight, for up to `prefetch_batches` batches beyond the next one."""

    threads: int = 4
    prefetch_batches: int = 2
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    preprocess_threads: int | None = None
    """The number of threads that preprocess a batch; None for all threads."""

    def __post_init__(self) -> None:
        least = min(self.threads, self.preprocess_threads or 1, self.buffer_bytes)
        if least < 1 or self.prefetch_batches < 0:
            raise UsageError(
                "A loader needs at least one thread, a prefetch of 0 or more and a buffer",
                fix="Leave an option out for its default.",
            )

    def start(
        self, storage: Storage, _reopen: OpenStorage | None = None, decoder: FormatDecoder | None = None
    ) -> NativeLoader:
        """Start the threads, which all read from `storage`."""
        return NativeLoader(storage, self, decoder)

    def document(self) -> dict[str, Any]:
        """Return the settings as plain data, with the loader's name."""
        return {"name": "native", **asdict(self)}


class NativeLoader:
    """A `Loader` on threads, which start once and serve all epochs."""

    def __init__(
        self, storage: Storage, options: NativeOptions, decoder: FormatDecoder | None = None
    ) -> None:
        self._storage = storage
        self._options = options
        self._decoder = decoder
        self._tasks: SimpleQueue[_PendingBatch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"penstock-loader-{number}", daemon=True)
            for number in range(options.threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def counters(self) -> Counters:
        """Zero, because the threads read from the rank's storage, which has its own counters."""
        return Counters()

    def epoch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches of one epoch, in order."""
        remaining = iter(requests)
        window: deque[_PendingBatch] = deque()
        try:
            for request in islice(remaining, self._options.prefetch_batches + 1):
                window.append(self._submit(request))
            while window:
                batch = window.popleft().wait()
                for request in islice(remaining, 1):
                    window.append(self._submit(request))
                yield batch
        finally:
            # If an epoch is left early, its reads must not mix with those of the next one.
            for pending in window:
                pending.cancel()
            for pending in window:
                pending.wait_until_done()

    def close(self) -> None:
        """End the threads once their current reads are done."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join()

    def _submit(self, request: BatchRequest) -> _PendingBatch:
        works: list[_Work] = [*request.requests, *self._split(request.preprocess_ns)]
        pending = _PendingBatch(request.num_samples, works)
        for _ in range(min(len(works), len(self._threads))):
            self._tasks.put(pending)
        return pending

    def _split(self, preprocess_ns: tuple[int, ...]) -> list[int]:
        """Divide a batch's preprocessing into one part per thread; the parts are queued behind the reads."""
        threads = self._options.preprocess_threads or self._options.threads
        return [sum(share) for first in range(threads) if (share := preprocess_ns[first::threads])]

    def _serve(self) -> None:
        reader = RangeReader(self._storage, self._options.buffer_bytes, self._decoder)
        try:
            while (batch := self._tasks.get()) is not None:
                batch.work_on(reader)
        finally:
            reader.close()


class _PendingBatch:
    """A batch that is being read: the remaining work, the totals so far, and the first error.

    Each free thread takes the next piece of work until none is left, so that a batch of hundreds of small
    reads wakes each thread only once. Work that has not begun when the batch is cancelled is skipped.
    """

    def __init__(self, num_samples: int, works: Sequence[_Work]) -> None:
        self._left = deque(works)
        self._missing = len(works)
        self._totals = Batch(num_samples)
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def work_on(self, reader: RangeReader) -> None:
        """Work until nothing is left to begin. The end is always reported, because `wait` waits for it."""
        done, totals, error = 0, Batch(), None
        while (work := self._take()) is not None:
            done += 1
            try:
                if isinstance(work, int):
                    _preprocess(work, totals)
                else:
                    reader.serve(work, totals)
            except Exception as failure:  # noqa: BLE001 - it is raised where the batch is awaited
                error = error or failure
        self._report(done, totals, error)

    def wait(self) -> Batch:
        """Wait for the complete batch.

        Storage limits the time of each read, so no time limit is needed here.
        """
        self.wait_until_done()
        if self._error is not None:
            raise self._error
        return self._totals

    def wait_until_done(self) -> None:
        """Wait until no work on this batch is running or queued."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 0)

    def cancel(self) -> None:
        """Begin no further work."""
        while self._take() is not None:
            self._report(1, Batch(), None)

    def _take(self) -> _Work | None:
        with suppress(IndexError):
            return self._left.popleft()
        return None

    def _report(self, done: int, totals: Batch, error: Exception | None) -> None:
        with self._changed:
            self._totals.add(totals)
            self._error = self._error or error
            self._missing -= done
            if self._missing == 0:
                self._changed.notify_all()


_Work = ReadRequest | BlockRequest | int
"""One read, or the nanoseconds of one thread's part of a batch's preprocessing."""


def _preprocess(duration_ns: int, totals: Batch) -> None:
    """Emulate preprocessing for this long. The thread reads nothing meanwhile, like a DLIO worker."""
    began_ns = time.monotonic_ns()
    time.sleep(duration_ns / 1e9)
    totals.decode_ns += time.monotonic_ns() - began_ns
