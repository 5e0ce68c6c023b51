"""Times each fetch of a torch DataLoader, in the process that does it: a worker, or the trainer itself.

A fetch leaves one record of fixed size in the process's own mapped file, so there are no locks, no calls to
the kernel, and a killed worker loses nothing. What the fetching thread slept is told from what it computed by
the kernel's clocks, which are read so seldom that fast loaders stay fast. Invariant: the data set, its
samples and the functions of the user stay what they are.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bench.own_loader.own_reads import OWN_THREADS, OwnReads
from penstock.bench.own_loader.work_sampler import COLLATE, WorkSampler


class Fetch(NamedTuple):
    """One fetch: when it began, had its samples, was collated; how its time divides. Nanoseconds.

    `queued` is the time for which the thread could run and no core was free. `other_cpu_ns` is what other
    threads of the process computed meanwhile, but for the one that sends batches. `opens` are all so far.
    """

    seq: int
    is_batch: int
    began_ns: int
    loaded_ns: int
    ended_ns: int
    load_cpu_ns: int
    load_queued_ns: int
    collate_cpu_ns: int
    collate_queued_ns: int
    other_cpu_ns: int
    opens: int
    own_reads: int = 0
    """What measuring has read in this process by then, and how many bytes."""
    own_bytes: int = 0


FETCH_TYPE: Final = np.dtype([(name, "<i8") for name in Fetch._fields])


class FetchRecord(NamedTuple):
    """A fetch as its process leaves it. Clocks that were not read are -1; `number` 0: nothing is here yet."""

    is_batch: int
    began_ns: int
    loaded_ns: int
    ended_ns: int
    cpu_before_ns: int
    cpu_loaded_ns: int
    cpu_after_ns: int
    queued_before_ns: int
    queued_after_ns: int
    other_before_ns: int
    other_after_ns: int
    opens: int
    number: int
    own_reads: int = 0
    own_bytes: int = 0


RECORD_TYPE: Final = np.dtype([(name, "<i8") for name in FetchRecord._fields])
_PACK: Final = Struct(f"<{len(FetchRecord._fields)}q")
_CHUNK: Final = mmap.PAGESIZE * 16
_UNREAD: Final = (-1, -1, -1)
_CLOCKS_EVERY_NS: Final = 8_000_000
"""Clocks of the kernel, which cost a microsecond each, are read no more often; between, they run evenly."""
_AT_ONCE_NS: Final = 50_000
"""A fetch that begins so soon after another begins with its clocks."""
_IDLE, _LOADING, _COLLATING = 0, 1, 2


def fetches_path(folder: Path, worker: int) -> Path:
    """The file of a worker's records; what it sampled lies beside it, as JSON."""
    return folder / f"worker-{worker}.fetches"


def read_fetches(content: bytes) -> NDArray[np.void]:
    """The fetches in such a file, as rows of `FETCH_TYPE`."""
    records = np.frombuffer(content[: len(content) // _PACK.size * _PACK.size], RECORD_TYPE)
    records = records[: int(np.count_nonzero(records["number"]))]
    rows = np.zeros(len(records), FETCH_TYPE)
    for name in ("is_batch", "began_ns", "loaded_ns", "ended_ns", "opens", "own_reads", "own_bytes"):
        rows[name] = records[name]
    rows["seq"] = np.arange(len(records))
    began, loaded, ended = (records[name] for name in ("began_ns", "loaded_ns", "ended_ns"))
    cpu = _between(records, ("cpu_before_ns", "cpu_loaded_ns", "cpu_after_ns"))
    rows["load_cpu_ns"], rows["collate_cpu_ns"] = cpu(loaded) - cpu(began), cpu(ended) - cpu(loaded)
    others = _between(records, ("other_before_ns", "", "other_after_ns"))
    rows["other_cpu_ns"] = np.maximum(others(ended) - others(began), 0)
    queued = _between(records, ("queued_before_ns", "", "queued_after_ns"))
    waited = queued(ended) - queued(began)
    # Collation hardly ever sleeps: what it did not compute, it waited for a core.
    collating = np.clip(ended - loaded - rows["collate_cpu_ns"], 0, waited)
    rows["collate_queued_ns"], rows["load_queued_ns"] = collating, waited - collating
    _fill_short(rows, records)
    return rows


def _fill_short(rows: NDArray[np.void], records: NDArray[np.void]) -> None:
    """Give fetches without readings the shares of those like them: in between, a step may have computed."""
    lasted = records["ended_ns"] - records["began_ns"]
    is_short = records["cpu_after_ns"] < 0
    is_known = ~is_short & (records["cpu_before_ns"] >= 0) & (lasted < _CLOCKS_EVERY_NS)
    if not is_short.any() or not is_known.any():
        return
    loading = records["loaded_ns"] - records["began_ns"]
    for spent, names in (
        (loading, ("load_cpu_ns", "load_queued_ns", "other_cpu_ns")),
        (lasted - loading, ("collate_cpu_ns", "collate_queued_ns")),
    ):
        known_ns = max(1, int(spent[is_known].sum()))
        for name in names:
            rows[name][is_short] = spent[is_short] * (rows[name][is_known].sum() / known_ns)


def _between(records: NDArray[np.void], names: tuple[str, str, str]) -> Callable[[Any], NDArray[np.int64]]:
    """What a clock showed at any moment, of its readings at the moments of the records."""
    ats = ("began_ns", "loaded_ns", "ended_ns")
    moments = [(at, name) for at, name in zip(ats, names, strict=True) if name]
    times = np.stack([records[at] for at, _ in moments], axis=1).ravel()
    values = np.stack([records[name] for _, name in moments], axis=1).ravel()
    is_read = values >= 0
    times, values = times[is_read], values[is_read]
    if not len(times):
        return lambda at: np.zeros(len(at), np.int64)
    # Relative to the first, so that nanoseconds fit into the numbers that interpolate.
    return lambda at: np.interp(at - times[0], times - times[0], values - values[0]).astype(np.int64)


class FetchProbe:
    """Times the fetches of this process, of the thread that made it. `samples` is off where others sample."""

    def __init__(self, folder: Path, worker: int, *, reads: OwnReads, samples: bool = True) -> None:
        self._reads = reads
        path = fetches_path(folder, worker)
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self._map: mmap.mmap | None = None
        self._grow(0)
        self._schedule = _open_schedule()
        self._own = threading.get_ident()
        self._phase = _IDLE
        self._num_fetches = self._opens = self._position = 0
        self._due_ns = self._began_ns = self._loaded_ns = self._ended_ns = 0
        self._has_clocks = False
        self._cpu_loaded_ns = -1
        self._clocks: tuple[int, int, int] = _UNREAD
        self._feeder_clock: int | None = None
        self._feeder_ns = 0
        self._sampler: WorkSampler | None = None
        if samples:
            self._sampler = WorkSampler(
                lambda: "" if self._phase == _LOADING else None,
                own=self._own,
                reads=reads,
                path=path.with_suffix(".json"),
            )
            self._sampler.write()
            self._sampler.start()
        _listen_to_opens(self)

    def finish(self) -> None:
        """Write what was found, at the end of the process or of the run."""
        _listeners.pop(os.getpid(), None)
        if self._sampler is not None:
            self._sampler.stop()
        for file in (self._file, self._schedule):
            if file is not None and file >= 0:
                os.close(file)
        self._file, self._schedule, self._map = -1, None, None

    def label(self) -> str:
        """What the stack of the fetching thread can't tell of this moment."""
        return COLLATE if self._phase == _COLLATING else ""

    def count_open(self) -> None:
        """A file was opened, by any thread."""
        if self._phase == _LOADING and not threading.current_thread().name.startswith(OWN_THREADS):
            self._opens += 1

    def fetch(self, plain: Callable[[Any, Any], Any], fetcher: Any, index: Any) -> Any:
        """Fetch a batch as `plain` does, and record it."""
        # A loader within a data set, or of another thread, is no business of whoever waits.
        if self._phase != _IDLE or threading.get_ident() != self._own:
            return plain(fetcher, index)
        if type(fetcher.collate_fn) is not _TimedCollate:
            fetcher.collate_fn = _TimedCollate(self, fetcher.collate_fn)
        self._phase = _LOADING
        self._loaded_ns, self._cpu_loaded_ns = 0, -1
        before, is_batch = _UNREAD, False
        self._began_ns = began_ns = time.monotonic_ns()
        self._has_clocks = began_ns >= self._due_ns
        if self._has_clocks:
            is_close = self._clocks[0] >= 0 and began_ns - self._ended_ns < _AT_ONCE_NS
            before = self._clocks if is_close else self._read_clocks()
        try:
            batch = plain(fetcher, index)
            is_batch = True
        finally:
            self._phase = _IDLE
            self._record(began_ns, before, is_batch=is_batch)
        return batch

    def end_loading(self) -> None:
        """The samples of the present fetch are there; collation begins."""
        if self._phase == _LOADING:
            self._phase = _COLLATING
            self._loaded_ns = time.monotonic_ns()
            if self._has_clocks or self._loaded_ns - self._began_ns >= _CLOCKS_EVERY_NS:
                self._has_clocks = True
                self._cpu_loaded_ns = time.thread_time_ns()

    def _record(self, began_ns: int, before: tuple[int, int, int], *, is_batch: bool) -> None:
        ended_ns = self._ended_ns = time.monotonic_ns()
        self._clocks = _UNREAD
        if self._has_clocks or ended_ns - began_ns >= _CLOCKS_EVERY_NS:
            self._clocks = self._read_clocks()
            self._due_ns = ended_ns + _CLOCKS_EVERY_NS
        self._num_fetches += 1
        if self._sampler is not None:  # a worker: it was asked for this batch through a pipe, in two reads
            self._reads.num_reads += 2
        if self._map is None:
            return
        _PACK.pack_into(
            self._map,
            self._position,
            is_batch,
            began_ns,
            self._loaded_ns or ended_ns,
            ended_ns,
            before[0],
            self._cpu_loaded_ns,
            self._clocks[0],
            before[1],
            self._clocks[1],
            before[2],
            self._clocks[2],
            self._opens,
            self._num_fetches,
            self._reads.num_reads,
            self._reads.read_bytes,
        )
        self._position += _PACK.size
        if self._position + _PACK.size > len(self._map):
            self._grow(len(self._map))

    def _grow(self, size: int) -> None:
        """Room for more records. A full disk must not end the loader: its later fetches are unknown."""
        try:
            # Blocks are taken now: a page without one would end the process as it is written.
            os.posix_fallocate(self._file, 0, size + _CHUNK)
            self._map = mmap.mmap(self._file, size + _CHUNK)
        except OSError:
            self._map = None

    def _read_clocks(self) -> tuple[int, int, int]:
        """What this thread computed, for how long it waited for cores, and what other threads computed."""
        cpu_ns = time.thread_time_ns()
        other_ns = max(0, time.process_time_ns() - cpu_ns - self._read_feeder())
        if self._schedule is None:
            return cpu_ns, 0, other_ns
        text = os.pread(self._schedule, 80, 0)
        self._reads.add(len(text))
        return cpu_ns, int(text.split()[1]), other_ns

    def _read_feeder(self) -> int:
        """The processor time of the thread that sends this worker's batches."""
        if self._feeder_clock is None:
            for one in threading.enumerate():
                if one.name.startswith("QueueFeeder") and one.ident is not None:
                    self._feeder_clock = time.pthread_getcpuclockid(one.ident)
        if self._feeder_clock is not None:
            with suppress(OSError):  # it ends with its queue
                self._feeder_ns = time.clock_gettime_ns(self._feeder_clock)
        return self._feeder_ns


def _open_schedule() -> int | None:
    """The scheduler's figures of this thread, which not all kernels have."""
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None


class _TimedCollate:
    """A collation that says when it begins; only the fetcher that calls it sees it."""

    __slots__ = ("_collate", "_probe")

    def __init__(self, probe: FetchProbe, collate: Callable[[Any], Any]) -> None:
        self._probe = probe
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        """Collate."""
        self._probe.end_loading()
        return self._collate(samples)


_listeners: dict[int, FetchProbe] = {}
"""The probe that hears of opens, by process: a hook can't be taken away again, and children inherit it."""
_hooks: list[Callable[[str, Any], None]] = []


def _hear(event: str, _: Any) -> None:
    if event == "open" and (probe := _listeners.get(os.getpid())) is not None:
        probe.count_open()


def _listen_to_opens(probe: FetchProbe) -> None:
    _listeners[os.getpid()] = probe
    if not _hooks:
        _hooks.append(_hear)
        sys.addaudithook(_hear)


class ProbedWorker:
    """A worker's `worker_init_fn`: the user's own first, then the probe. It can be pickled."""

    def __init__(self, folder: Path, user_init: Callable[[int], object] | None) -> None:
        self._folder = folder
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        """Called in the worker, before it builds what fetches."""
        if self._user_init is not None:
            self._user_init(worker_id)
        probe = FetchProbe(self._folder, worker_id, reads=OwnReads())
        Finalize(None, probe.finish, exitpriority=100)
        _patch_fetchers(probe)


def _patch_fetchers(probe: FetchProbe) -> None:
    """Let all fetchers of this process report to `probe`; it lives as long as the process."""
    fetchers: Any = sys.modules["torch.utils.data._utils.fetch"]
    for kind in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):  # noqa: SLF001
        _patch(kind, probe)


def _patch(kind: Any, probe: FetchProbe) -> None:
    plain = kind.fetch
    kind.fetch = lambda fetcher, index: probe.fetch(plain, fetcher, index)


def probe_fetcher(fetcher: Any, probe: FetchProbe) -> None:
    """Probe one fetcher of this process, that of a loader without workers."""
    plain = type(fetcher).fetch
    fetcher.fetch = lambda index: probe.fetch(plain, fetcher, index)
