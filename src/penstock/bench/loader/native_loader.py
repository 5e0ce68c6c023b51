"""The native loader: threads that read ranges into buffers of their own, some batches ahead.

Files and objects get the same depth: `threads` requests in flight, whatever their batch. Memory is one buffer
per thread, and one block per thread where blocks are decoded, whatever the size of samples and files.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from penstock.bench.loader.loader_protocol import Batch, BatchRequest, Decoder, OpenStorage
from penstock.bench.loader.range_reader import DEFAULT_BUFFER_BYTES, RangeReader, ReadTotals
from penstock.errors import PenstockError, UsageError
from penstock.storage import Counters, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """`threads` requests are in flight, for up to `prefetch_batches` batches beyond the next one."""

    threads: int = 4
    prefetch_batches: int = 2
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    preprocess_threads: int | None = None
    """How many threads preprocess a batch, if not all of them."""

    def __post_init__(self) -> None:
        least = min(self.threads, self.preprocess_threads or 1, self.buffer_bytes)
        if least < 1 or self.prefetch_batches < 0:
            raise UsageError(
                "A loader needs at least one thread, a prefetch of 0 or more and a buffer",
                fix="Leave an option out for its default.",
            )

    def start(
        self, storage: Storage, _reopen: OpenStorage | None = None, decoder: Decoder | None = None
    ) -> NativeLoader:
        """Start the threads, which all read from `storage`."""
        return NativeLoader(storage, self, decoder)

    def document(self) -> dict[str, Any]:
        """As plain data, with the loader's name."""
        return {"name": "native", **asdict(self)}


class NativeLoader:
    """A `Loader` on threads. They are started once and serve all epochs."""

    def __init__(self, storage: Storage, options: NativeOptions, decoder: Decoder | None = None) -> None:
        self._storage = storage
        self._options = options
        self._decoder = decoder
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"penstock-loader-{number}", daemon=True)
            for number in range(options.threads)
        ]
        self._is_open = True
        self._defect: BaseException | None = None
        for thread in self._threads:
            thread.start()

    @property
    def counters(self) -> Counters:
        """Zero: the threads read from the rank's storage, which counts for itself."""
        return Counters()

    def epoch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The batches of one epoch, in order."""
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
            # An epoch that is left early must not leave its reads among those of the next one.
            for pending in window:
                pending.cancelled = True
            for pending in window:
                pending.wait_until_done()

    def close(self) -> None:
        """End the threads once their current reads are done."""
        if not self._is_open:
            return
        self._is_open = False
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _submit(self, request: BatchRequest) -> _PendingBatch:
        works = [partial(RangeReader.serve, request=read) for read in request.requests]
        works += [partial(_preprocess, share_ns) for share_ns in self._split(request.preprocess_ns)]
        pending = _PendingBatch(request.num_samples, len(works))
        for work in works:
            self._tasks.put(_Task(pending, work))
        if self._defect is not None:
            self._fail_tasks(self._defect)
        return pending

    def _split(self, preprocess_ns: tuple[int, ...]) -> list[int]:
        """A batch's preprocessing in one part per thread, queued behind its reads."""
        threads = self._options.preprocess_threads or self._options.threads
        return [sum(share) for first in range(threads) if (share := preprocess_ns[first::threads])]

    def _serve(self) -> None:
        reader = RangeReader(self._storage, self._options.buffer_bytes, self._decoder)
        try:
            while (task := self._tasks.get()) is not None:
                task.run(reader)
        finally:
            reader.close()
            if (defect := sys.exception()) is not None:
                # Only a defect ends a thread early. What it would have read must fail, or its epoch hangs.
                self._defect = defect
                self._fail_tasks(defect)

    def _fail_tasks(self, reason: BaseException) -> None:
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task.batch.complete_task(ReadTotals(), reason)


class _PendingBatch:
    """A batch that is being read: its totals so far, the tasks still missing, and the first error.

    Tasks that have not begun are skipped once it is `cancelled`.
    """

    def __init__(self, num_samples: int, num_tasks: int) -> None:
        self._num_samples = num_samples
        self._missing = num_tasks
        self._totals = ReadTotals()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.cancelled = False

    def complete_task(self, totals: ReadTotals, error: BaseException | None) -> None:
        """Add one task's totals, or its error."""
        with self._changed:
            self._totals = self._totals.plus(totals)
            self._error = self._error or error
            self._missing -= 1
            if self._missing == 0:
                self._changed.notify_all()

    def wait(self) -> Batch:
        """The complete batch; storage bounds each read, so this needs no time limit of its own."""
        self.wait_until_done()
        if self._error is not None:
            raise self._error
        return Batch(self._num_samples, *self._totals)

    def wait_until_done(self) -> None:
        """Return once no task of this batch runs or waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 0)


@dataclass(frozen=True, slots=True)
class _Task:
    """One piece of work for one batch, for the next free thread."""

    batch: _PendingBatch
    work: Callable[[RangeReader], ReadTotals]

    def run(self, reader: RangeReader) -> None:
        """Work, and always report the end: a batch that is never completed would be awaited forever."""
        totals = ReadTotals()
        with suppress(PenstockError):  # it is raised where the batch is awaited
            try:
                if not self.batch.cancelled:
                    totals = self.work(reader)
            finally:
                self.batch.complete_task(totals, sys.exception())


def _preprocess(duration_ns: int, _reader: RangeReader) -> ReadTotals:
    """Emulate work on samples for that long; the thread reads nothing meanwhile, like a worker of DLIO."""
    began_ns = time.monotonic_ns()
    time.sleep(duration_ns / 1e9)
    return ReadTotals(decode_ns=time.monotonic_ns() - began_ns)
