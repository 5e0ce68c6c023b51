"""Watch a user's loader from outside: DataLoaders by their fetches, other loaders by the kernel's figures.

While `TorchWatch` runs, `DataLoader.__iter__` returns iterators that note when the consumer asked for each
batch and received it, and workers start with a probe that times each fetch. Torch has no public hook for a
fetch, so the probe replaces `fetch` of torch's two fetchers and restores it at the end. Invariant: the loader
yields what it would without the watch, and its data set, samples and functions are the user's own.

`ProcessWatch` reads the kernel's figures of the loader's processes: bytes read, memory, and how busy their
threads are. For loaders other than torch's, nothing more can be observed. One thread reads /proc from time to
time, and spends at most 0.1 % of its time on that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from struct import Struct
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

from penstock.bench.own_loader.user_code import lost_connection
from penstock.bench.own_loader.waits import Delivery, Fetch
from penstock.errors import UsageError

WATCH_THREAD: Final = "penstock-watch"
_LEAST_INTERVAL_S: Final = 0.1
_MOST_COST: Final = 0.001
"""The largest share of the time that watching may take."""
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - not a file that is written
_HELPERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


_own_reads: Counter[str] = Counter()
"""Reads of this process that belong to the measurement itself, not to the loader."""


def read_proc(path: str) -> str:
    """Read a file of /proc; "" if its process or thread is gone."""
    with suppress(OSError):
        file = os.open(f"/proc/{path}", os.O_RDONLY)
        try:
            return read_open_proc(file)
        finally:
            os.close(file)
    return ""


def read_open_proc(file: int) -> str:
    """Read the current content of an open file of /proc."""
    content = os.pread(file, 1 << 16, 0)
    _own_reads["syscr"] += 1
    _own_reads["rchar"] += len(content)
    return content.decode(errors="replace")


def read_io(process: int, *, without: Iterable[int | None] = ()) -> Counter[str]:
    """Return the kernel's counts of a process's reads, except those of `without` and of the measurement."""
    own_reads = _own_reads.copy() if process == os.getpid() else Counter[str]()
    found: Counter[str] = Counter()
    for path, counts in (("io", 1), *((f"task/{thread}/io", -1) for thread in without)):
        for line in read_proc(f"{process}/{path}").splitlines():
            name, _, value = line.partition(": ")
            found[name] += counts * int(value)
    if found:
        found.subtract(own_reads)
    return found


def find_descendants() -> list[int]:
    """Return the children and further descendants of this process, but not `multiprocessing`'s helpers."""
    found: list[int] = []
    unseen = [(os.getpid(), False)]
    while unseen:
        pid, is_server = unseen.pop()
        for task in _tasks(pid):
            for child in map(int, read_proc(f"{pid}/task/{task}/children").split()):
                command = read_proc(f"{child}/cmdline").encode()
                # A process that was forked by a fork server still has the server's command line.
                is_helper = not is_server and any(helper in command for helper in _HELPERS)
                unseen.append((child, is_helper))
                if not is_helper:
                    found.append(child)
    return found


def _tasks(pid: int) -> list[str]:
    with suppress(OSError):
        return [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
    return []


class ProcessWatch:
    """Watches this process and its descendants while its block runs.

    `waited_ns` returns how long the consumer has waited so far.
    """

    def __init__(self, waited_ns: Callable[[], int]) -> None:
        workers = ("worker_rss_bytes", "workers_rss_bytes", "workers_shared_bytes")
        self.memory: dict[str, int] = dict.fromkeys((*workers, "shm_used_bytes", "shm_total_bytes"), 0)
        self.num_workers = 0
        """The largest number of processes present in two successive looks: a helper that reads one sample
        does not count.
        """
        self._waited_ns = waited_ns
        self._strangers = frozenset(find_descendants())
        self._busy_ns = self._observed_ns = 0.0
        self._io: dict[int, Counter[str]] = {}
        self._threads: dict[str, int] = {}
        self._present: frozenset[int] = frozenset()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=WATCH_THREAD, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._look_at_memory([])  # the loader may be gone before the first interval ends
        self._first_io = read_io(os.getpid())
        self._thread.start()

    def stop(self) -> None:
        """Stop the watching thread."""
        self._stopped.set()
        self._thread.join(5.0)

    def read_so_far(self) -> Counter[str]:
        """Return the reads since the start: of the loader's processes if it has any, else of this process."""
        for pid in self._find_pids():
            self._io[pid] = read_io(pid) or self._io.get(pid, Counter())
        if self._io:
            return sum(self._io.values(), Counter())
        found = read_io(os.getpid())
        found.subtract(self._first_io)
        return found

    @property
    def busy_share(self) -> float:
        """The share of the waits in which the loader's busiest thread was computing or waiting for a core."""
        return min(self._busy_ns / self._observed_ns, 1.0) if self._observed_ns else 0.0

    def _find_pids(self) -> list[int]:
        return [pid for pid in find_descendants() if pid not in self._strangers]

    def _run(self) -> None:
        interval_s, looked_ns, waited_ns, cost_s = _LEAST_INTERVAL_S, time.monotonic_ns(), 0, 0.0
        while not self._stopped.wait(interval_s):
            now_ns, total_ns, pids = time.monotonic_ns(), self._waited_ns(), self._find_pids()
            self._look_at_threads(pids, now_ns - looked_ns, total_ns - waited_ns)
            looked_ns, waited_ns = now_ns, total_ns
            self._look_at_memory(pids)
            self.read_so_far()  # for a process that ends, the last figures read count
            self.num_workers = max(self.num_workers, len(self._present.intersection(pids)))
            self._present = frozenset(pids)
            before_s, cost_s = cost_s, time.thread_time()
            interval_s = max(_LEAST_INTERVAL_S, (cost_s - before_s) / _MOST_COST)

    def _look_at_threads(self, pids: list[int], elapsed_ns: int, waited_ns: int) -> None:
        """Find the thread that was busiest since the last look; count it if the consumer mostly waited."""
        own = {str(threading.main_thread().native_id), str(self._thread.native_id)}
        times = {}
        for pid in (os.getpid(), *pids):
            for task in _tasks(pid):
                if task not in own and (figures := read_proc(f"{pid}/task/{task}/schedstat").split()):
                    times[task] = int(figures[0]) + int(figures[1])  # computing, and waiting for a core
        busiest_ns = max((times[task] - self._threads.get(task, times[task]) for task in times), default=0)
        self._threads = times
        if waited_ns > elapsed_ns // 2:
            self._busy_ns += waited_ns * min(busiest_ns / elapsed_ns, 1.0)
            self._observed_ns += waited_ns

    def _look_at_memory(self, pids: list[int]) -> None:
        rss, shared = [0], [0]
        for pid in pids:
            lines = (line.split() for line in read_proc(f"{pid}/status").splitlines())
            status = {words[0]: int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
            rss.append(status.get("VmRSS:", 0))
            shared.append(status.get("RssShmem:", 0))
        found = {
            "worker_rss_bytes": max(rss),
            "workers_rss_bytes": sum(rss),
            "workers_shared_bytes": sum(shared),
        }
        with suppress(OSError):
            room = os.statvfs(_SHARED_MEMORY)
            found["shm_total_bytes"] = room.f_blocks * room.f_frsize
            found["shm_used_bytes"] = (room.f_blocks - room.f_bfree) * room.f_frsize
        for name, value in found.items():
            self.memory[name] = max(self.memory[name], value)


_RECORD: Final = Struct(f"<{len(Fetch._fields)}q")
_REPORTED_EVERY_NS: Final = 100_000_000
"""The interval between a worker's reports of its reads, each of which takes about 0.1 ms."""
_SIGNAL_S: Final = 1.0
"""The time within which the signal of a worker's death follows the end of its connection."""
_MESSENGERS: Final = ("QueueFeeder", "(_serve)")
"""Names of the threads in which `multiprocessing` sends batches and hands over their memory."""


class FetchProbe:
    """Times the fetches of the thread that created it, and passes each record to `keep`.

    Reading the time takes about 0.5 us, reading each of the kernel's clocks 1 us; every clock is read twice
    for each batch.
    """

    def __init__(self, keep: Callable[[Fetch], object]) -> None:
        self._keep = keep
        self._schedule: int | None = None
        with suppress(OSError):  # not all kernels have it
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._thread = threading.get_ident()
        self._is_fetching = False
        self._undo = ExitStack()
        fetchers: Any = sys.modules["torch.utils.data._utils.fetch"]
        for kind in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):  # noqa: SLF001
            self._undo.callback(setattr, kind, "fetch", kind.fetch)
            # A forked worker inherits its parent's probe and replaces it with its own.
            plain = getattr(kind.fetch, "of_torch", kind.fetch)
            kind.fetch = self._timed(plain)

    def remove(self) -> None:
        """Restore torch's own functions."""
        self._undo.close()
        if self._schedule is not None:
            os.close(self._schedule)

    def _timed(self, plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def fetch(fetcher: Any, index: Any) -> Any:
            # The consumer does not wait for a loader within a data set, or for one in another thread.
            if self._is_fetching or threading.get_ident() != self._thread:
                return plain(fetcher, index)
            collate, is_batch, loaded = fetcher.collate_fn, False, (0, 0)

            def timed_collation(samples: Any) -> Any:
                nonlocal loaded
                loaded = loaded if loaded[0] else self._read_clocks()
                return collate(samples)

            self._is_fetching, fetcher.collate_fn = True, timed_collation
            began_ns, before_ns = self._read_clocks()
            try:
                batch = plain(fetcher, index)
                is_batch = True
            finally:
                ended_ns = time.monotonic_ns()
                loaded_ns, after_ns = loaded if loaded[0] else self._read_clocks()
                self._is_fetching, fetcher.collate_fn = False, collate
                self._keep(Fetch(began_ns, loaded_ns, ended_ns, after_ns - before_ns, is_batch))
            return batch

        fetch.of_torch = plain  # type: ignore[attr-defined]
        return fetch

    def _read_clocks(self) -> tuple[int, int]:
        """Return the time, and the time for which this process was awake.

        A process is awake while any of its threads computes or this one waits for a core.
        """
        queued_ns = 0 if self._schedule is None else int(read_open_proc(self._schedule).split()[1])
        return time.monotonic_ns(), time.process_time_ns() + queued_ns


class FetchLog:
    """Records a worker's fetches and reads in `folder`. The file `worker-N` has one record for each fetch."""

    def __init__(self, folder: Path, worker_id: int) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._records = os.open(folder / f"worker-{worker_id}", flags, 0o600)
        self._report = folder / f"{os.getpid()}.json"
        self._first_io = self._read_io()
        self._due_ns = 0

    def keep(self, fetch: Fetch) -> None:
        """Write one record and, from time to time, a report of the reads so far."""
        # A full disk must not end the loader: the rest of its fetches then stays unknown.
        with suppress(OSError):
            os.write(self._records, _RECORD.pack(*fetch))
        if fetch.ended_ns >= self._due_ns:
            self._due_ns = fetch.ended_ns + _REPORTED_EVERY_NS
            self.write_report()

    def write_report(self) -> None:
        """Replace the report of what this process has read for samples."""
        found = self._read_io()
        found.subtract(self._first_io)
        with suppress(OSError):
            unfinished = self._report.with_suffix(".part")
            unfinished.write_text(json.dumps(found))
            unfinished.replace(self._report)

    def _read_io(self) -> Counter[str]:
        """Return the reads of this process, without those by threads that send batches."""
        threads = threading.enumerate()
        senders = [one.native_id for one in threads if any(name in one.name for name in _MESSENGERS)]
        return read_io(os.getpid(), without=senders)


class ProbedWorker:
    """A `worker_init_fn` that calls the user's own, then starts the probe. It can be pickled."""

    def __init__(self, folder: Path, user_init: Callable[[int], object] | None) -> None:
        self._folder = folder
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        """Start the probe in a worker, before torch creates the fetcher."""
        if self._user_init is not None:
            self._user_init(worker_id)
        log = FetchLog(self._folder, worker_id)
        FetchProbe(log.keep)
        Finalize(None, log.write_report, exitpriority=100)


@dataclass(slots=True)
class _Iteration:
    """One pass over a DataLoader: its settings, and when each batch was requested and delivered."""

    loader: Any
    folder: Path
    began_ns: int
    starts_workers: bool
    moments: list[tuple[int, int]] = field(default_factory=list)


class WorkerDeaths(ExitStack):
    """Lets torch raise the death of a worker only where a batch is awaited, while its block runs.

    Torch learns of a death by SIGCHLD, and raises wherever the main thread happens to be: in the user's step,
    or in the cleanup after another error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._torchs: Any = None
        self._is_awaited = False
        self._held_back: RuntimeError | None = None

    def take_over(self) -> None:
        """Replace the handler that torch has set with its first workers."""
        handler = signal.getsignal(signal.SIGCHLD)
        if handler != self._on_signal and callable(handler):
            with suppress(ValueError):  # not in the main thread, so torch did not set it
                signal.signal(signal.SIGCHLD, self._on_signal)
                self._torchs = handler
                self.callback(signal.signal, signal.SIGCHLD, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        try:
            self._torchs(number, frame)
        except RuntimeError as death:
            if self._is_awaited:
                raise
            self._held_back = death

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise a death here, also one that was held back."""
        self._is_awaited = threading.current_thread() is threading.main_thread()
        try:
            if self._held_back is not None:
                raise self._held_back
            yield
        except (OSError, EOFError) as error:
            # The connection to a worker breaks a moment before the signal, which has the worker's number.
            if lost_connection(error):
                time.sleep(_SIGNAL_S)
            raise
        finally:
            self._is_awaited = False


class _WatchedIterator:
    """A DataLoader's iterator that notes when each batch is requested and delivered."""

    def __init__(self, plain: Any, moments: list[tuple[int, int]], deaths: WorkerDeaths) -> None:
        self._plain = plain
        self._moments = moments
        self._deaths = deaths
        self._consumer = threading.get_ident()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        asked_ns = time.monotonic_ns()
        with self._deaths.raised():
            batch = next(self._plain)
        # The consumer may not be waiting for a batch that another thread requests.
        if threading.get_ident() == self._consumer:
            self._moments.append((asked_ns, time.monotonic_ns()))
        return batch

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class TorchWatch:
    """Watches the DataLoaders that this thread iterates while its block runs.

    `changes` are settings that each loader receives before it is iterated.
    """

    def __init__(self, deaths: WorkerDeaths, changes: Mapping[str, Any] | None = None) -> None:
        self._deaths = deaths
        self._changes = dict(changes or {})
        self._folder: Path | None = None
        self._iterations: list[_Iteration] = []
        self._folders: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()
        self._own: list[Fetch] = []
        self._undo = ExitStack()
        self.settings: dict[str, Any] = {}
        """The settings of the loader that delivered the most batches in the last epoch."""

    def __enter__(self) -> Self:
        # If the user's factory has not imported torch, there is no DataLoader to watch.
        if "torch.utils.data" in sys.modules:
            self._undo.callback(FetchProbe(self._own.append).remove)
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-loader-"))
            self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            kind: Any = sys.modules["torch.utils.data"].DataLoader
            self._undo.callback(setattr, kind, "__iter__", kind.__iter__)
            kind.__iter__ = self._watched(kind.__iter__)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _watched(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterate(loader: Any) -> Any:
            # This bypasses DataLoader's refusal to be changed, which is safe because nothing has been
            # iterated yet.
            loader.__dict__.update(self._changes)
            if loader.num_workers and loader.prefetch_factor is None:
                loader.prefetch_factor = 2
            is_new = loader not in self._folders
            if is_new:
                self._folders[loader] = Path(tempfile.mkdtemp(dir=self._folder))
            iteration = _Iteration(
                loader=loader,
                folder=self._folders[loader],
                began_ns=time.monotonic_ns(),
                starts_workers=is_new or not loader.persistent_workers,
            )
            self._iterations.append(iteration)
            users = loader.worker_init_fn
            loader.worker_init_fn = ProbedWorker(iteration.folder, users)
            try:
                with self._deaths.raised():
                    started = plain(loader)
                return _WatchedIterator(started, iteration.moments, self._deaths)
            finally:
                self._deaths.take_over()
                loader.worker_init_fn = users

        return iterate

    def read_so_far(self) -> Counter[str]:
        """Return the workers' reads for samples, as far as they have reported them."""
        found: Counter[str] = Counter()
        for path in self._folder.glob("*/*.json") if self._folder else ():
            with suppress(OSError, ValueError):
                found.update(json.loads(path.read_text()))
        return found

    def take_deliveries(self) -> list[Delivery]:
        """Return the batches delivered since the last call, each with the fetches of its worker."""
        iterations, self._iterations[:] = self._iterations[:], []
        own, self._own[:] = self._own[:], []
        found: list[Delivery] = []
        for number, iteration in enumerate(iterations):
            end_ns = min(
                (one.began_ns for one in iterations[number + 1 :] if one.folder == iteration.folder),
                default=sys.maxsize,
            )
            if iteration.loader.num_workers:
                found += _deliveries_of_workers(iteration, end_ns)
        # Without workers, the consumer itself fetches.
        began_ns = next((one.began_ns for one in iterations if not one.loader.num_workers), 0)
        found += [Delivery(row.began_ns, row.ended_ns, began_ns, own, row) for row in own if row.is_batch]
        if iterations:
            most = max(iterations, key=lambda one: len(one.moments)).loader
            self.settings = {
                "workers": most.num_workers,
                "prefetch": most.prefetch_factor or 0,
                "persistent": bool(most.persistent_workers),
            }
        return sorted(found, key=lambda one: one.given_ns)


def _deliveries_of_workers(iteration: _Iteration, end_ns: int) -> Iterator[Delivery]:
    """Find the fetch of each batch. Workers take turns, and batches are delivered in that order."""
    began_ns = iteration.began_ns if iteration.starts_workers else 0
    workers = []
    for number in range(iteration.loader.num_workers):
        content = b""
        with suppress(OSError):
            content = (iteration.folder / f"worker-{number}").read_bytes()
        records = map(
            Fetch._make, _RECORD.iter_unpack(content[: len(content) // _RECORD.size * _RECORD.size])
        )
        workers.append([row for row in records if iteration.began_ns <= row.began_ns < end_ns])
    # Worker 0's first batch, worker 1's first batch, ..., worker 0's second; a worker without more batches is
    # skipped.
    order = sorted(
        (turn, number)
        for number, rows in enumerate(workers)
        for turn in range(sum(row.is_batch for row in rows))
    )
    batches = [[row for row in rows if row.is_batch] for rows in workers]
    made = [(batches[number][turn], workers[number]) for turn, number in order]
    if not getattr(iteration.loader, "in_order", True):
        made.sort(key=lambda one: one[0].ended_ns)
    for (asked_ns, given_ns), (row, rows) in zip(iteration.moments, made, strict=False):
        yield Delivery(asked_ns, given_ns, began_ns, rows, row)


TRIALS: Final[Mapping[str, str]] = {
    "workers": "num_workers",
    "prefetch": "prefetch_factor",
    "persistent": "persistent_workers",
}
"""The DataLoader settings that a trial can change, by their names in `--try`."""


def parse_trial(change: str) -> dict[str, Any]:
    """Parse changes such as `workers=8`, `prefetch=4` or `persistent=1`, separated by commas."""
    settings: dict[str, Any] = {}
    for assignment in change.split(","):
        name, _, text = assignment.strip().partition("=")
        if name not in TRIALS or not text.isdecimal():
            raise UsageError(
                f"{assignment!r} cannot be tried", where="--try", fix=f"Try {'=N, '.join(TRIALS)}=N."
            )
        settings[TRIALS[name]] = bool(int(text)) if name == "persistent" else int(text)
    return settings
