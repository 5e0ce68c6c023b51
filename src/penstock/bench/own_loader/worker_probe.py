"""Times each fetch of a torch DataLoader, in the process that does it: a worker, or the trainer itself.

A fetch leaves one record of fixed size in the process's own mapped file, so there are no locks, no calls to
the kernel, and a killed worker loses nothing. What the fetching thread slept is told from what it computed by
the kernel's clocks, which are read so seldom that fast loaders stay fast. Invariant: the data set, its
samples and the functions of the user stay what they are.
"""

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
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple
from weakref import WeakSet

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
    """What measuring has read in this process by then, as far as clocks were read, and how many bytes."""
    own_bytes: int = 0


FETCH_TYPE: Final = np.dtype([(name, "<i8") for name in Fetch._fields])


class FetchMoments(NamedTuple):
    """A fetch as its process leaves it; `tag` 0: nothing is here yet.

    `tag` has `_HAS_CLOCKS`, `_IS_BATCH`, and from its third bit on one more than the files opened so far.
    """

    began_ns: int
    loaded_ns: int
    ended_ns: int
    tag: int


class FetchClocks(NamedTuple):
    """What follows a fetch at which clocks were read, in three records' room; -1: this one was not read."""

    cpu_before_ns: int
    cpu_loaded_ns: int
    cpu_after_ns: int
    first_tag: int
    queued_before_ns: int
    queued_after_ns: int
    other_before_ns: int
    second_tag: int
    other_after_ns: int
    own_reads: int
    own_bytes: int
    third_tag: int


MOMENTS_TYPE: Final = np.dtype([(name, "<i8") for name in FetchMoments._fields])
CLOCKS_TYPE: Final = np.dtype([(name, "<i8") for name in FetchClocks._fields])
_NUM_MORE: Final = CLOCKS_TYPE.itemsize // MOMENTS_TYPE.itemsize
_HAS_CLOCKS, _IS_BATCH, _OPEN = 1, 2, 4
_MOMENTS: Final = Struct(f"<{len(FetchMoments._fields)}q")
_CLOCKS: Final = Struct(f"<{len(FetchClocks._fields)}q")
_MOMENTS_SIZE: Final = _MOMENTS.size
_pack_moments, _now_ns, _get_ident = _MOMENTS.pack_into, time.monotonic_ns, threading.get_ident
_CHUNK: Final = mmap.PAGESIZE * 16
Fetches = Callable[[Any, Any], Any]
"""`fetch` of torch's fetchers: `(fetcher, index)`."""
_Clocks = tuple[int, int, int]
_UNREAD: Final[_Clocks] = (-1, -1, -1)
_CLOCKS_EVERY_NS: Final = 8_000_000
"""The clock of the thread, which costs 2 us, is read no more often for fast fetches."""
_ALL_EVERY_NS: Final = 50_000_000
"""Likewise those of the scheduler and of other threads, which cost 25 us behind a computation."""
_LONG_NS: Final = 20_000_000
"""A fetch that takes so long has readings of all."""
_AT_ONCE_NS: Final = 50_000
"""A fetch that begins so soon after another begins with its clocks."""
_IDLE, _LOADING, _COLLATING = 0, 1, 2


def fetches_path(folder: Path, worker: int) -> Path:
    """The file of a worker's records; what it sampled lies beside it, as JSON."""
    return folder / f"worker-{worker}.fetches"


def read_fetches(content: bytes) -> NDArray[np.void]:
    """The fetches in such a file, as rows of `FETCH_TYPE`."""
    slots = np.frombuffer(content[: len(content) // _MOMENTS.size * _MOMENTS.size], MOMENTS_TYPE)
    slots = slots[: int(np.count_nonzero(slots["tag"]))]
    at = np.flatnonzero(slots["tag"] > 0)
    moments = slots[at]
    clocks = np.full(len(at) * len(FetchClocks._fields), -1, np.int64).view(CLOCKS_TYPE)
    whole = np.flatnonzero(moments["tag"] & _HAS_CLOCKS)
    whole = whole[at[whole] + _NUM_MORE < len(slots)]  # all of them, unless a worker was killed in between
    after = at[whole, np.newaxis] + np.arange(1, 1 + _NUM_MORE)
    clocks[whole] = slots[after].view(CLOCKS_TYPE)[:, 0]
    rows = np.zeros(len(moments), FETCH_TYPE)
    began, loaded, ended = (moments[name] for name in _ATS)
    rows["began_ns"], rows["loaded_ns"], rows["ended_ns"] = began, loaded, ended
    rows["is_batch"], rows["opens"] = moments["tag"] & _IS_BATCH != 0, moments["tag"] // _OPEN - 1
    for name in ("own_reads", "own_bytes"):
        rows[name] = np.maximum.accumulate(clocks[name]).clip(0)
    rows["seq"] = np.arange(len(moments))
    cpu = _between(moments, clocks, ("cpu_before_ns", "cpu_loaded_ns", "cpu_after_ns"))
    rows["load_cpu_ns"], rows["collate_cpu_ns"] = cpu(loaded) - cpu(began), cpu(ended) - cpu(loaded)
    others = _between(moments, clocks, ("other_before_ns", "", "other_after_ns"))
    rows["other_cpu_ns"] = np.maximum(others(ended) - others(began), 0)
    queued = _between(moments, clocks, ("queued_before_ns", "", "queued_after_ns"))
    waited = queued(ended) - queued(began)
    # Collation hardly ever sleeps: what it did not compute, it waited for a core.
    collating = np.clip(ended - loaded - rows["collate_cpu_ns"], 0, waited)
    rows["collate_queued_ns"], rows["load_queued_ns"] = collating, waited - collating
    _fill_unread(rows, clocks)
    return rows


def _fill_unread(rows: NDArray[np.void], clocks: NDArray[np.void]) -> None:
    """Give fetches without readings the shares of those like them: in between, a step may have computed."""
    lasted = rows["ended_ns"] - rows["began_ns"]
    loading = rows["loaded_ns"] - rows["began_ns"]
    is_slow = lasted >= _CLOCKS_EVERY_NS
    for spent, kind, name in (
        (loading, "cpu", "load_cpu_ns"),
        (loading, "queued", "load_queued_ns"),
        (loading, "other", "other_cpu_ns"),
        (lasted - loading, "cpu", "collate_cpu_ns"),
        (lasted - loading, "queued", "collate_queued_ns"),
    ):
        is_read = clocks[f"{kind}_after_ns"] >= 0
        is_known = is_read & (clocks[f"{kind}_before_ns"] >= 0)
        for alike in (is_slow, ~is_slow):
            known_ns = int(spent[is_known & alike].sum())
            if known_ns:
                share = rows[name][is_known & alike].sum() / known_ns
                rows[name][~is_read & alike] = spent[~is_read & alike] * share


_ATS: Final = ("began_ns", "loaded_ns", "ended_ns")


def _between(
    moments: NDArray[np.void], clocks: NDArray[np.void], names: tuple[str, str, str]
) -> Callable[[Any], NDArray[np.int64]]:
    """What a clock showed at any moment, of its readings at the moments of the records."""
    readings = [(at, name) for at, name in zip(_ATS, names, strict=True) if name]
    times = np.stack([moments[at] for at, _ in readings], axis=1).ravel()
    values = np.stack([clocks[name] for _, name in readings], axis=1).ravel()
    is_read = values >= 0
    times, values = times[is_read], values[is_read]
    if not len(times):
        return lambda at: np.zeros(len(at), np.int64)
    # Relative to the first, so that nanoseconds fit into the numbers that interpolate.
    return lambda at: np.interp(at - times[0], times - times[0], values - values[0]).astype(np.int64)


class FetchProbe:
    """Times the fetches of this process, of the thread that made it. `samples` is off where others sample."""

    __slots__ = (
        "_all_due_ns",
        "_all_timed",
        "_began_ns",
        "_clocks",
        "_cpu_loaded_ns",
        "_due_ns",
        "_ended_ns",
        "_feeder_clock",
        "_feeder_ns",
        "_file",
        "_last_position",
        "_loaded_ns",
        "_map",
        "_own",
        "_phase",
        "_position",
        "_reads",
        "_sampler",
        "_schedule",
        "_tag",
        "_timed",
    )

    def __init__(self, folder: Path, worker: int, *, reads: OwnReads, samples: bool = True) -> None:
        self._reads = reads
        path = fetches_path(folder, worker)
        self._file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self._map: mmap.mmap | None = None
        self._position, self._last_position = 0, -1
        self._grow(0)
        self._schedule = _open_schedule()
        self._own = threading.get_ident()
        self._phase = _IDLE
        self._tag = _OPEN | _IS_BATCH
        self._due_ns = self._all_due_ns = self._began_ns = self._loaded_ns = self._ended_ns = 0
        self._cpu_loaded_ns = -1
        self._clocks = _UNREAD
        self._timed: Any = None
        self._all_timed: WeakSet[Callable[[Any], Any]] = WeakSet()
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
        self._file, self._schedule, self._map, self._last_position = -1, None, None, -1

    def label(self) -> str:
        """What the stack of the fetching thread can't tell of this moment."""
        return COLLATE if self._phase == _COLLATING else ""

    def count_open(self) -> None:
        """A file was opened, by any thread."""
        if self._phase == _LOADING and not threading.current_thread().name.startswith(OWN_THREADS):
            self._tag += _OPEN

    def time(self, plain: Fetches) -> Fetches:
        """What fetches a batch as `plain` does, and records it.

        Each call and each look at an object costs a fast loader: nothing is called that need not be.
        """

        def fetch(fetcher: Any, index: Any) -> Any:
            # A loader within a data set, or of another thread, is no business of whoever waits.
            if self._phase or _get_ident() != self._own:
                return plain(fetcher, index)
            if fetcher.collate_fn is not self._timed:
                self._time_collation(fetcher)
            self._phase = _LOADING
            self._loaded_ns = 0
            self._began_ns = began_ns = _now_ns()
            if began_ns >= self._due_ns:
                return self._fetch_by_clocks(plain, fetcher, index)
            is_batch = False
            try:
                batch = plain(fetcher, index)
                is_batch = True
            finally:
                if not is_batch:
                    self._record(_UNREAD, is_batch=False)
            ended_ns, position, room = _now_ns(), self._position, self._map
            if (
                room is not None
                and ended_ns - began_ns < _CLOCKS_EVERY_NS
                and position <= self._last_position
            ):
                _pack_moments(room, position, began_ns, self._loaded_ns or ended_ns, ended_ns, self._tag)
                self._position = position + _MOMENTS_SIZE
                self._phase = _IDLE
            else:
                self._record(_UNREAD, is_batch=True)
            return batch

        return fetch

    def _time_collation(self, fetcher: Any) -> None:
        """Let the fetcher's collation say when it begins; only the fetcher that calls it sees that."""
        collate = fetcher.collate_fn
        # A user's own object may have no hash.
        if not (isinstance(collate, FunctionType) and collate in self._all_timed):
            collate = self._timed_collation(collate)
            self._all_timed.add(collate)
            fetcher.collate_fn = collate
        self._timed = collate

    def _timed_collation(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(samples: Any) -> Any:
            if self._phase == _LOADING:
                self._phase = _COLLATING
                self._loaded_ns = loaded_ns = _now_ns()
                began_ns = self._began_ns
                if began_ns >= self._due_ns or loaded_ns - began_ns >= _CLOCKS_EVERY_NS:
                    self._cpu_loaded_ns = time.thread_time_ns()
            return collate(samples)

        return timed

    def _fetch_by_clocks(self, plain: Fetches, fetcher: Any, index: Any) -> Any:
        """Fetch with readings of the kernel's clocks before and after."""
        is_close = self._clocks[0] >= 0 and self._began_ns - self._ended_ns < _AT_ONCE_NS
        takes_all = self._began_ns >= self._all_due_ns
        is_close &= not takes_all or self._clocks[1] >= 0
        before = self._clocks if is_close else self._read_clocks(takes_all=takes_all)
        is_batch = False
        try:
            batch = plain(fetcher, index)
            is_batch = True
        finally:
            self._record(before, is_batch=is_batch)
        return batch

    def _record(self, before: _Clocks, *, is_batch: bool) -> None:
        """Leave the present fetch, with clocks if some were read before it, or if it was slow."""
        ended_ns = self._ended_ns = _now_ns()
        self._phase = _IDLE
        lasted_ns = ended_ns - self._began_ns
        has_clocks = lasted_ns >= _CLOCKS_EVERY_NS or before[0] >= 0
        cpu_loaded_ns, self._cpu_loaded_ns = self._cpu_loaded_ns, -1
        takes_all = lasted_ns >= _LONG_NS or before[1] >= 0
        after = self._clocks = self._read_clocks(takes_all=takes_all) if has_clocks else _UNREAD
        # Slow fetches can bear that the next one, before which a step may compute, begins with readings.
        if takes_all:
            self._all_due_ns = ended_ns + (0 if lasted_ns >= _LONG_NS else _ALL_EVERY_NS)
        if has_clocks:
            self._due_ns = ended_ns + (0 if lasted_ns >= _CLOCKS_EVERY_NS else _CLOCKS_EVERY_NS)
        if self._map is not None and self._position > self._last_position:
            self._grow(len(self._map))
        if self._map is None:
            return
        position, tag = self._position, self._tag if is_batch else self._tag - _IS_BATCH
        _pack_moments(
            self._map, position, self._began_ns, self._loaded_ns or ended_ns, ended_ns, tag + has_clocks
        )
        self._position += _MOMENTS_SIZE
        if has_clocks:
            _CLOCKS.pack_into(
                self._map,
                self._position,
                *(before[0], cpu_loaded_ns, after[0], -1),
                *(before[1], after[1], before[2], -1),
                *(after[2], self._reads.num_reads, self._reads.read_bytes, -1),
            )
            self._position += _CLOCKS.size

    def _grow(self, size: int) -> None:
        """Room for more records. A full disk must not end the loader: its later fetches are unknown."""
        try:
            # Blocks are taken now: a page without one would end the process as it is written.
            os.posix_fallocate(self._file, 0, size + _CHUNK)
            self._map = mmap.mmap(self._file, size + _CHUNK)
            self._last_position = size + _CHUNK - _MOMENTS_SIZE - _CLOCKS.size
        except OSError:
            self._map, self._last_position = None, -1

    def _read_clocks(self, *, takes_all: bool) -> _Clocks:
        """What this thread computed; for how long it waited for cores, what other threads computed, or -1."""
        cpu_ns = time.thread_time_ns()
        if not takes_all:
            return cpu_ns, -1, -1
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
    kind.fetch = probe.time(kind.fetch)


def probe_fetcher(fetcher: Any, probe: FetchProbe) -> None:
    """Probe one fetcher of this process, that of a loader without workers."""
    fetcher.fetch = MethodType(probe.time(type(fetcher).fetch), fetcher)
