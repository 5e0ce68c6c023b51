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
from typing import TYPE_CHECKING, Any

from penstock.bench.loader.loader_protocol import Batch, BatchRequest
from penstock.bench.loader.range_reader import DEFAULT_BUFFER_BYTES, RangeReader, ReadTotals
from penstock.errors import PenstockError, UsageError
from penstock.storage import Counters

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import Decoder, OpenStorage
    from penstock.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """`threads` requests are in flight, for up to `prefetch_batches` batches beyond the next one."""

    threads: int = 4
    prefetch_batches: int = 2
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    preprocess_threads: int | None = None
    """In how many parts at once a batch is preprocessed, if not by all threads."""

    def __post_init__(self) -> None:
        if (
            min(self.threads, self.preprocess_threads or 1) < 1
            or self.prefetch_batches < 0
            or self.buffer_bytes < 1
        ):
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
        """Nothing: threads read from the rank's storage."""
        return Counters()

    def epoch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The batches of one epoch, in order."""
        ahead = iter(requests)
        window: deque[_Arrival] = deque()
        try:
            for request in islice(ahead, self._options.prefetch_batches + 1):
                window.append(self._ask(request))
            while window:
                arrived = window.popleft().wait()
                for request in islice(ahead, 1):
                    window.append(self._ask(request))
                yield arrived
        finally:
            # Whoever leaves an epoch early must not find its reads among those of the next one.
            for arrival in window:
                arrival.cancel()
            for arrival in window:
                arrival.wait_until_quiet()

    def close(self) -> None:
        """Let running reads end, then the threads."""
        if not self._is_open:
            return
        self._is_open = False
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _ask(self, request: BatchRequest) -> _Arrival:
        works = [partial(RangeReader.serve, request=read) for read in request.requests]
        works += [partial(_preprocess, some) for some in self._shares(request.preprocess_ns)]
        arrival = _Arrival(request.num_samples, len(works))
        for work in works:
            self._tasks.put(_Task(arrival, work))
        if self._defect is not None:
            self._refuse_tasks(self._defect)
        return arrival

    def _shares(self, preprocess_ns: tuple[int, ...]) -> list[int]:
        """A batch's preprocessing in parts, each for a thread; they wait behind its reads."""
        threads = self._options.preprocess_threads or self._options.threads
        return [sum(some) for first in range(threads) if (some := preprocess_ns[first::threads])]

    def _serve(self) -> None:
        reader = RangeReader(self._storage, self._options.buffer_bytes, self._decoder)
        try:
            while (task := self._tasks.get()) is not None:
                task.run(reader)
        finally:
            reader.close()
            if (defect := sys.exception()) is not None:
                # Only a defect ends a thread early. Nobody may wait for what it would have read.
                self._defect = defect
                self._refuse_tasks(defect)

    def _refuse_tasks(self, reason: BaseException) -> None:
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task.arrival.note(ReadTotals(), reason)


class _Arrival:
    """A batch on its way: what has come, what is missing, and the first thing that went wrong."""

    def __init__(self, num_samples: int, num_tasks: int) -> None:
        self._num_samples = num_samples
        self._missing = num_tasks
        self._served = ReadTotals()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.cancelled = False

    def cancel(self) -> None:
        """Nobody will wait for this batch: what has not begun is skipped."""
        self.cancelled = True

    def note(self, served: ReadTotals, error: BaseException | None) -> None:
        """One task is over."""
        with self._changed:
            self._served = self._served.plus(served)
            self._error = self._error or error
            self._missing -= 1
            if self._missing == 0:
                self._changed.notify_all()

    def wait(self) -> Batch:
        """The batch once it is whole; storage bounds each read, so this needs no limit of its own."""
        self.wait_until_quiet()
        if self._error is not None:
            raise self._error
        return Batch(self._num_samples, *self._served)

    def wait_until_quiet(self) -> None:
        """Return once nothing of this batch is being done or will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 0)


@dataclass(frozen=True, slots=True)
class _Task:
    """One piece of work for one batch, for whichever thread is free."""

    arrival: _Arrival
    work: Callable[[RangeReader], ReadTotals]

    def run(self, reader: RangeReader) -> None:
        """Work, and always report the end: a batch that is never completed would be awaited forever."""
        served = ReadTotals()
        with suppress(PenstockError):  # it comes out where the batch is awaited
            try:
                if not self.arrival.cancelled:
                    served = self.work(reader)
            finally:
                self.arrival.note(served, sys.exception())


def _preprocess(duration_ns: int, _reader: RangeReader) -> ReadTotals:
    """Work on samples for that long; the thread reads nothing meanwhile, as a worker of DLIO."""
    began_ns = time.monotonic_ns()
    time.sleep(duration_ns / 1e9)
    return ReadTotals(decode_ns=time.monotonic_ns() - began_ns)
