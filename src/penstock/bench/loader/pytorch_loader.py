"""The pytorch loader: torch's `DataLoader` and its worker processes, which read the batches of our plan.

A `BatchRequest` travels to a worker as torch's index, so persistent workers read what each epoch asks for. A
worker opens its own storage and holds no socket of the rank that started it.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import multiprocessing
import os
import signal
import stat
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from penstock.bench.loader.loader_protocol import Batch, BatchRequest, FormatDecoder, OpenStorage
from penstock.bench.loader.native_loader import DEFAULT_BUFFER_BYTES, RangeReader
from penstock.errors import OutOfSpace, PenstockError, Unavailable, UsageError
from penstock.storage import Counters, Storage
from penstock.units import format_bytes
from penstock.workload.enums import ProcessStart

_KILL_S: Final = 5.0
"""The time within which a worker must end."""
_PURE_PYTHON_CLIENT: Final = "minio"


@dataclass(frozen=True, slots=True, kw_only=True)
class PytorchOptions:
    """Settings. A worker reads one request at a time; with `workers` of 0, the rank itself reads.

    `sample_bytes` is a sample's size when it arrives at the trainer. `prefetch_batches` is divided by the
    number of workers and rounded up; torch's minimum is one batch per worker. `pin_memory` has an effect only
    if CUDA is available.
    """

    workers: int
    sample_bytes: int
    prefetch_batches: int = 2
    context: ProcessStart = ProcessStart.SPAWN
    pin_memory: bool = True
    buffer_bytes: int = DEFAULT_BUFFER_BYTES

    def __post_init__(self) -> None:
        if min(self.workers, self.prefetch_batches) < 0 or min(self.sample_bytes, self.buffer_bytes) < 1:
            raise UsageError(
                "A pytorch loader needs workers and a prefetch of 0 or more, a size of samples and a buffer",
                fix="Look at reader.read_threads, reader.prefetch_size and dataset.record_length_bytes.",
            )

    @property
    def prefetch_factor(self) -> int | None:
        """The number of batches that each worker prefetches, as torch's `prefetch_factor`."""
        return max(1, -(-self.prefetch_batches // self.workers)) if self.workers else None

    def start(
        self, _storage: Storage, reopen: OpenStorage | None, decoder: FormatDecoder | None = None
    ) -> PytorchLoader:
        """Start the workers, each with its own storage. `UsageError` if `reopen` is None."""
        if reopen is None:
            raise UsageError(
                "Nothing tells the pytorch loader's workers how to open storage",
                fix="Give the request's `reopen`: a picklable function that opens the storage again.",
            )
        return PytorchLoader(reopen, self, decoder)

    def document(self) -> dict[str, Any]:
        """Return the settings as plain data, with the loader's name."""
        return {"name": "pytorch", **asdict(self)}


class PytorchLoader:
    """A `Loader` on torch's `DataLoader`. Its workers start when it is created, and serve all epochs."""

    def __init__(
        self, open_storage: OpenStorage, options: PytorchOptions, decoder: FormatDecoder | None = None
    ) -> None:
        self._requests = _Requests()
        self._reads = _Reads(options, decoder)
        # Torch warns if there are more workers than cores, for each loader. The harness limit measures the
        # effect.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        self._torch = _torch_loader(self._reads, self._requests, options)
        self._workers: list[BaseProcess] = []
        self._arrivals: Any = None
        self._counted: dict[int, Counters] = {}
        self._num_readers = max(1, options.workers)
        self._rank_threads = torch.get_num_threads()
        if options.workers:
            self._start_workers(open_storage)
        else:
            # Torch does the same in workers: the threads of ranks that share cores would wait for each other.
            torch.set_num_threads(1)
            with ExitStack() as undo:
                undo.callback(self.close)
                self.change_storage(open_storage)
                undo.pop_all()

    @property
    def counters(self) -> Counters:
        """The counters of all workers' storages, up to the last batch that arrived."""
        return sum(self._counted.values(), Counters())

    def epoch(self, requests: Iterable[BatchRequest | OpenStorage]) -> Iterator[Batch]:
        """Yield the batches of one epoch, in order; raise `Unavailable` if a worker has died."""
        self._requests.of_epoch = requests
        with self._explained_deaths():
            self._arrivals = iter(self._torch)
        yield from self._batches(self._arrivals)

    def change_storage(self, reopen: OpenStorage) -> None:
        """Let all workers open another storage, and wait until they have."""
        self._counted = {}
        deque(self.epoch([reopen] * self._num_readers), maxlen=0)
        assert len(self._counted) == self._num_readers, "torch deals to its workers in turn"

    def close(self) -> None:
        """End all workers, and check that they have ended."""
        if self._workers and self._arrivals is not None:
            # Tracebacks may still refer to torch's iterator, so it might not end by losing its last
            # reference.
            self._arrivals._shutdown_workers()  # noqa: SLF001 - torch has no public way
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join(_KILL_S)
        self._workers = []
        self._reads.close()
        torch.set_num_threads(self._rank_threads)

    def _start_workers(self, open_storage: OpenStorage) -> None:
        """Start all workers and wait until each has opened its storage. No sample is read."""
        others = set(multiprocessing.active_children())

        def own_workers() -> list[BaseProcess]:
            return [child for child in multiprocessing.active_children() if child not in others]

        def abandon() -> None:
            # Workers hold nothing yet, and those that are still importing torch would not notice the end.
            self._workers = own_workers()
            for worker in self._workers:
                worker.kill()
            self.close()

        self._requests.of_epoch = [open_storage] * self._num_readers
        with ExitStack() as undo:
            undo.callback(abandon)
            try:
                # Create more than torch is about to: an iterator that fails while it is being created prints
                # a traceback.
                _ = [multiprocessing.Semaphore() for _ in range(4 * (self._num_readers + 1))]
                with _deaths_awaited(), _interrupts_blocked():
                    self._arrivals = iter(self._torch)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise _shared_memory_is_full("the loader's queues did not fit") from error
                raise
            self._workers = own_workers()
            deque(self._batches(self._arrivals), maxlen=0)
            undo.pop_all()

    def _batches(self, arrivals: Iterator[_Arrival]) -> Iterator[Batch]:
        while True:
            with self._explained_deaths():
                arrival = next(arrivals, None)
            if arrival is None:
                return
            self._counted[arrival.worker] = arrival.counters
            if isinstance(arrival.outcome, PenstockError):
                raise arrival.outcome
            yield arrival.outcome

    @contextmanager
    def _explained_deaths(self) -> Iterator[None]:
        """Name the worker that died if torch notices a death, by its own error or by a broken pipe."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            ended = wait([worker.sentinel for worker in self._workers], timeout=1.0)
            dead = [worker for worker in self._workers if worker.sentinel in ended]
            if not dead:
                raise
            for worker in dead:
                worker.join(_KILL_S)  # its descriptors close before its exit code is available
            causes = []
            for worker in dead:
                code = worker.exitcode
                cause = f"with exit code {code}"
                if code is not None and code < 0:
                    cause = f"by {signal.Signals(-code).name}"
                causes.append(f"process {worker.pid} {cause}")
            raise Unavailable(
                f"A worker of the pytorch loader died: {', '.join(causes)}",
                fix="The system's log says why. Most workers die when memory runs out, or by SIGBUS if "
                "/dev/shm is too small: use fewer workers (reader.read_threads) or a smaller prefetch.",
            ) from error


class _Requests:
    """The sampler of torch's loader, which iterates over it again in each epoch."""

    of_epoch: Iterable[BatchRequest | OpenStorage] = ()

    def __iter__(self) -> Iterator[BatchRequest | OpenStorage]:
        return iter(self.of_epoch)


class _Arrival(NamedTuple):
    """A worker's result.

    An error is sent as an item, because torch would raise an error of the same type with a different message.
    """

    worker: int
    outcome: Batch | PenstockError
    samples: torch.Tensor | None
    counters: Counters


class _Reads(Dataset[_Arrival]):
    """The data set of torch's loader, whose items are whole batches. It is used in the process that reads."""

    def __init__(self, options: PytorchOptions, decoder: FormatDecoder | None = None) -> None:
        self._options = options
        self._decoder = decoder
        self._storage: Storage | None = None
        self._reader: RangeReader | None = None
        self._sample: torch.Tensor | None = None

    def __getitem__(self, request: BatchRequest | OpenStorage) -> _Arrival:
        info = get_worker_info()
        outcome: Batch | PenstockError
        samples = None
        try:
            if not isinstance(request, BatchRequest):
                outcome = self._change(request)
            else:
                outcome = self._read(request)
                samples = self._collate(request.num_samples)
        except PenstockError as error:
            outcome = error
        counters = self._storage.counters.snapshot() if self._storage else Counters()
        return _Arrival(info.id if info else 0, outcome, samples, counters)

    def close(self) -> None:
        """Close the file that was read last."""
        if self._reader is not None:
            self._reader.close()

    def _change(self, open_storage: OpenStorage) -> Batch:
        """Open another storage, and close the file that is open in the previous one."""
        self.close()
        self._storage = open_storage()
        if self._options.context is ProcessStart.FORK and get_worker_info() is not None:
            _require_forkable(self._storage)
        self._reader = RangeReader(self._storage, self._options.buffer_bytes, self._decoder)
        return Batch()

    def _read(self, request: BatchRequest) -> Batch:
        assert self._reader is not None, "the storage comes first"
        served = Batch(request.num_samples)
        for one in request.requests:
            self._reader.serve(one, served)
        if request.preprocess_ns:
            began_ns = time.monotonic_ns()
            time.sleep(sum(request.preprocess_ns) / 1e9)
            served.decode_ns += time.monotonic_ns() - began_ns
        return served

    def _collate(self, num_samples: int) -> torch.Tensor | None:
        """Return a tensor as large as the batch's decoded samples; workers send it in shared memory."""
        if not num_samples:
            return None
        if self._sample is None:
            self._sample = torch.ones(self._options.sample_bytes, dtype=torch.uint8)
        try:
            batch: torch.Tensor = default_collate([self._sample] * num_samples)
        except RuntimeError as error:
            size = format_bytes(num_samples * self._options.sample_bytes)
            raise _shared_memory_is_full(f"a batch of {size} did not fit") from error
        return batch


def _shared_memory_is_full(what: str) -> OutOfSpace:
    return OutOfSpace(
        f"Shared memory is full: {what}",
        where="/dev/shm",  # noqa: S108 - where torch's workers leave their batches
        fix="Give the container more (--shm-size), or use fewer workers (reader.read_threads) or a smaller "
        "prefetch (reader.prefetch_size).",
    )


def _torch_loader(reads: _Reads, requests: _Requests, options: PytorchOptions) -> DataLoader[_Arrival]:
    context = worker_context(options.context) if options.workers else None
    if options.context is ProcessStart.FORKSERVER and context is not None:
        # The server imports torch once, and each worker is forked with it in memory.
        context.set_forkserver_preload([__name__])
    return DataLoader(
        reads,
        batch_size=None,
        sampler=requests,
        collate_fn=_as_it_is,
        num_workers=options.workers,
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.workers > 0,
        multiprocessing_context=context,
        worker_init_fn=partial(_start_worker, options.context, os.getpid()),
        pin_memory=options.pin_memory and torch.cuda.is_available(),
    )


def worker_context(start: ProcessStart) -> BaseContext:
    """Return the start method's context, with an event that survives the death of a worker.

    Workers look at torch's end-of-work event between batches. A `multiprocessing.Event` has a lock: a worker
    that is killed while it holds the lock leaves it locked, and torch, which has noticed the death, then
    waits for the lock forever.
    """
    context = copy.copy(multiprocessing.get_context(start.value))
    context.Event = lambda: _LockFreeEvent(context.RawValue("b", 0))  # type: ignore[method-assign, assignment, return-value]
    return context


class _LockFreeEvent:
    """The part of an event's interface that torch uses, on one byte of shared memory."""

    def __init__(self, flag: ctypes.c_byte) -> None:
        self._flag = flag

    def set(self) -> None:
        self._flag.value = 1

    def is_set(self) -> bool:
        return bool(self._flag.value)


def _as_it_is(arrival: Any) -> Any:
    """Return the item unchanged: it is a whole batch."""
    return arrival


def _start_worker(start: ProcessStart, rank_pid: int, _worker: int) -> None:
    """Prepare a worker, before it reads."""
    # The mask is inherited from the rank, but not from a fork server that was started for something else.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if start is ProcessStart.FORK:
        _leave_the_rank()
    threading.Thread(target=_end_with_the_rank, args=(rank_pid,), daemon=True).start()


def _end_with_the_rank(rank_pid: int) -> None:
    """Wait until the rank ends, then end this process.

    Torch watches the parent process instead, which is the fork server for some workers, and init for a worker
    that started too late.
    """
    try:
        rank = os.pidfd_open(rank_pid)
    except ProcessLookupError:
        pass
    else:
        wait([rank])
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_the_rank() -> None:
    """Drop the rank's sockets and its end-of-process handling in a forked worker.

    Other ranks and the supervisor notice a rank's end by its sockets, so a worker must not hold them open.
    Their descriptor numbers stay taken, so that an object of the rank that is closed later does not close a
    file of the worker.
    """
    devnull = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        with suppress(FileNotFoundError):  # the descriptor of this listing itself
            if number > 2 and stat.S_ISSOCK(entry.stat().st_mode):
                os.dup2(devnull, number, inheritable=False)
    os.close(devnull)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let workers start with Ctrl-C blocked: a terminal sends it to them as well, but the rank ends them."""
    # Started here, because its start unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _require_forkable(storage: Storage) -> None:
    """Refuse clients that would hang in forked workers: fork copies only the thread that calls it."""
    client = storage.options.get("client", _PURE_PYTHON_CLIENT)
    if client != _PURE_PYTHON_CLIENT:
        raise UsageError(
            f"A forked worker cannot use {client}, whose threads stay behind in the rank",
            where=storage.uri,
            fix="Set reader.multiprocessing_context=forkserver or spawn.",
        )


@contextmanager
def _deaths_awaited() -> Iterator[None]:
    """Prevent torch from raising a worker's death wherever the rank happens to be: `epoch` raises it."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)
