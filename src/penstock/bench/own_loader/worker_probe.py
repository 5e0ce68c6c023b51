"""Times each fetch of a torch DataLoader, in the process that does it: a worker, or the trainer itself.

One record of fixed size is appended to the process's own file a fetch, so there are no locks and a killed
worker loses nothing. What the fetching thread slept is told from what it computed by the scheduler's own
figures; what it computed, a sampler tells from its stack a hundred times a second, weighed by its clock.
Invariant: the data set, its samples and the functions of the user stay what they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from struct import Struct
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import numpy as np

INTERVAL_S: Final = 0.01
_WRITTEN_EVERY: Final = 25
OWN_THREADS: Final = "penstock-"
"""The names of threads that measure begin so."""
_DEEPEST: Final = 60
_MOST_SPOTS: Final = 8

DECODE, TRANSFORM, COLLATE, COPY = "decode", "transform", "collate", "copy"

_FILES: Final = (
    (COPY, r"/multiprocessing/(connection|queues|reduction|shared_memory|managers)\.py|/reductions\.py"),
    (COLLATE, r"/collate\.py"),
    (
        TRANSFORM,
        r"/(torchvision|torchaudio|monai)/transforms/|/albumentations/|/kornia/|/Image(Ops|Filter)\.py",
    ),
    (
        DECODE,
        (
            r"/(gzip|zipfile|lzma|bz2|tarfile|pickle|csv)\.py|/json/|/h5py/|/zarr/|/numcodecs/|/pyarrow/|/cv2/"
            r"|/torchvision/io/|/soundfile\.py|/librosa/|/ImageFile\.py|/torch/serialization\.py"
            r"|/numpy/lib/(_?format|_?npyio)(_impl)?\.py|/webdataset/autodecode\.py"
        ),
    ),
)
_NAMES: Final = (
    (COLLATE, r"collate"),
    (
        TRANSFORM,
        r"transform|augment|crop|flip|rotat|resiz|normali[sz]|jitter|tokeni[sz]|blur|noise|mixup|mask|padd?_",
    ),
    (
        DECODE,
        r"decod|decompress|inflate|parse|unpack|deseriali[sz]|imread|from_bytes|frombuffer|^loads?_|^loads?$",
    ),
)
_PATTERNS: Final = tuple(
    (label, re.compile(pattern, flags), is_name)
    for patterns, flags, is_name in ((_FILES, 0, False), (_NAMES, re.IGNORECASE, True))
    for label, pattern in patterns
)


def label_code(code: CodeType) -> str | None:
    """What a function does, judged by its file or its name; None where neither says."""
    for label, pattern, is_name in _PATTERNS:
        if pattern.search(code.co_name if is_name else code.co_filename):
            return label
    return None


class WorkSampler:
    """Samples a thread and, apart from it, all others; `is_wanted` says whether the moment counts."""

    def __init__(self, is_wanted: Callable[[], bool], *, own: int, path: Path | None = None) -> None:
        self._is_wanted = is_wanted
        self._own = own
        self._path = path
        self._labels: dict[CodeType, str | None] = {}
        self._clocks: dict[int, int] = {}
        self._stopped = threading.Event()
        self.cpu_ns: Counter[str] = Counter()
        self.others_cpu_ns: Counter[str] = Counter()
        self.spots: Counter[str] = Counter()
        self.own_io: Counter[str] = Counter()
        """What measuring itself has read, as the kernel counts it."""
        self.late_samples = self.num_samples = 0
        self._thread = threading.Thread(target=self._run, name="penstock-sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def is_current_thread(self) -> bool:
        """Whether the caller is the thread that samples."""
        return threading.get_ident() == self._thread.ident

    def stop(self) -> None:
        """End, and write what was found."""
        self._stopped.set()
        self._thread.join(1.0)
        self.write()

    def write(self) -> None:
        """Leave the figures for the process that reads them; a full disk only loses them."""
        if self._path is None:
            return
        text = json.dumps(self.document())
        try:
            unfinished = self._path.with_suffix(".part")
            unfinished.write_text(text)
            unfinished.replace(self._path)
        except OSError:
            self._path = None

    def document(self) -> dict[str, Any]:
        """What was found: processor time by what it went to, and the functions that used most of it."""
        return {
            "pid": os.getpid(),
            "cpu_ns": dict(self.cpu_ns + self.others_cpu_ns),
            "spots": dict(self.spots.most_common(_MOST_SPOTS)),
            "io": {name: value - self.own_io[name] for name, value in read_io(os.getpid()).items()},
        }

    def _run(self) -> None:
        due = 0
        while not self._stopped.is_set():
            before = time.monotonic()
            time.sleep(INTERVAL_S)
            # A sampler that gets the interpreter late competes for it with threads that compute.
            late = time.monotonic() - before - INTERVAL_S > INTERVAL_S / 4
            if not self._is_wanted():
                self._clocks.clear()
                continue
            self.num_samples += 1
            self.late_samples += late
            ours = {one.ident for one in threading.enumerate() if one.name.startswith(OWN_THREADS)}
            frames = sys._current_frames()  # noqa: SLF001 - documented, and the only way to see other threads
            for ident, frame in frames.items():
                if ident not in ours:
                    self._add(ident, frame)
            del frames
            due += 1
            if due % _WRITTEN_EVERY == 0:
                self.write()

    def _add(self, ident: int, frame: FrameType) -> None:
        try:
            now_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(ident))
        except OSError:  # it has just ended
            return
        used_ns = now_ns - self._clocks.get(ident, now_ns)
        self._clocks[ident] = now_ns
        if not used_ns:
            return
        label, spot = self._find_label(frame)
        (self.cpu_ns if ident == self._own else self.others_cpu_ns)[label or "other"] += used_ns
        if spot:
            self.spots[spot] += used_ns

    def _find_label(self, frame: FrameType | None) -> tuple[str | None, str]:
        """The innermost function that says what it does, and the innermost of the user's own."""
        label: str | None = None
        spot = ""
        for _ in range(_DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            if code not in self._labels:
                self._labels[code] = label_code(code)
            label = label or self._labels[code]
            if not spot and code.co_name != "<module>" and not _is_library(code.co_filename):
                spot = _spot(code)
            if label and spot:
                break
            frame = frame.f_back
        return label, spot


def _spot(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"


def _is_library(path: str) -> bool:
    return "-packages/" in path or path.startswith((sys.base_prefix + "/lib", "<")) or "/penstock/" in path


def read_io(pid: int) -> dict[str, int]:
    """The kernel's figures of what a process has read; empty where it does not tell."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


class Fetch(NamedTuple):
    """One fetch: when it began, had its samples, was collated; how its time divides. Nanoseconds.

    `queued_ns` is the time for which the thread could run and no core was free. `other_cpu_ns` is what other
    threads of the process computed since the last fetch, `copy_cpu_ns` what sending batches has cost in all.
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
    copy_cpu_ns: int
    opens: int


FETCH_TYPE: Final = np.dtype([(name, "<i8") for name in Fetch._fields])
_FORMAT: Final = "<12q"
_IDLE, _LOADING, _COLLATING = 0, 1, 2


def fetches_path(folder: Path, worker: int) -> Path:
    """The file of a worker's records; what it sampled lies beside it, as JSON."""
    return folder / f"worker-{worker}.fetches"


class FetchProbe:
    """Times the fetches of this process; used by the thread that fetches."""

    def __init__(self, folder: Path, worker: int) -> None:
        path = fetches_path(folder, worker)
        self._pack = Struct(_FORMAT).pack
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._schedule: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._phase = _IDLE
        self.num_fetches = self._opens = self._num_reads = self._read_bytes = 0
        self._feeder: threading.Thread | None = None
        self._process_cpu_ns = time.process_time_ns()
        self._feeder_cpu_ns = 0
        self._before = self._read_schedule()
        self._loaded_ns, self._loaded = 0, self._before
        self.sampler = WorkSampler(
            lambda: self._phase == _LOADING, own=threading.get_ident(), path=path.with_suffix(".json")
        )
        # Only what samples take counts: not the imports of a worker that begins.
        self.sampler.own_io.update(read_io(os.getpid()))
        self.sampler.write()
        self.sampler.start()
        sys.addaudithook(self._hear)

    def finish(self) -> None:
        """Write what was found, at the end of the process."""
        self.sampler.own_io.update({"rchar": self._read_bytes, "syscr": self._num_reads})
        self.sampler.stop()

    def _hear(self, event: str, _: Any) -> None:
        if event == "open" and self._phase == _LOADING and not self.sampler.is_current_thread():
            self._opens += 1

    def _read_schedule(self) -> tuple[int, int]:
        """What this thread has computed, and for how long it waited for a core."""
        if self._schedule is None:
            return time.thread_time_ns(), 0
        text = os.pread(self._schedule, 80, 0)
        self._num_reads += 1
        self._read_bytes += len(text)
        cpu, queued, _ = text.split()
        return int(cpu), int(queued)

    def fetch(self, plain: Callable[[Any, Any], Any], fetcher: Any, index: Any) -> Any:
        """Fetch a batch as `plain` does, and record it."""
        if self._phase != _IDLE:  # a loader within a data set
            return plain(fetcher, index)
        collate, is_batch = fetcher.collate_fn, False

        def timed_collate(samples: Any) -> Any:
            self._loaded_ns, self._loaded, self._phase = (
                time.monotonic_ns(),
                self._read_schedule(),
                _COLLATING,
            )
            return collate(samples)

        self._phase, self._loaded_ns, began_ns = _LOADING, 0, time.monotonic_ns()
        try:
            fetcher.collate_fn = timed_collate
            batch = plain(fetcher, index)
            is_batch = True
        finally:
            fetcher.collate_fn, self._phase = collate, _IDLE
            self._record(began_ns, is_batch=is_batch)
        return batch

    def _record(self, began_ns: int, *, is_batch: bool) -> None:
        ended_ns, after = time.monotonic_ns(), self._read_schedule()
        if not self._loaded_ns:
            self._loaded_ns, self._loaded = ended_ns, after
        process_ns, feeder_ns = time.process_time_ns(), self._read_feeder()
        others_ns = process_ns - self._process_cpu_ns - (after[0] - self._before[0])
        others_ns -= feeder_ns - self._feeder_cpu_ns
        record = self._pack(
            self.num_fetches,
            is_batch,
            began_ns,
            self._loaded_ns,
            ended_ns,
            self._loaded[0] - self._before[0],
            self._loaded[1] - self._before[1],
            after[0] - self._loaded[0],
            after[1] - self._loaded[1],
            max(others_ns, 0),
            feeder_ns,
            self._opens,
        )
        self.num_fetches += 1
        self._process_cpu_ns, self._feeder_cpu_ns, self._before = process_ns, feeder_ns, after
        if self._file >= 0:
            try:
                os.write(self._file, record)
            except OSError:  # a full disk must not end the user's loader: its later fetches are unknown
                os.close(self._file)
                self._file = -1

    def _read_feeder(self) -> int:
        """The processor time of the thread that sends this worker's batches."""
        if self._feeder is None:
            feeders = (one for one in threading.enumerate() if one.name.startswith("QueueFeeder"))
            self._feeder = next(feeders, None)
        if self._feeder is None or not self._feeder.is_alive() or self._feeder.ident is None:
            return self._feeder_cpu_ns
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._feeder.ident))


class ProbedWorker:
    """A worker's `worker_init_fn`: the user's own first, then the probe. It can be pickled."""

    def __init__(self, folder: Path, user_init: Callable[[int], object] | None) -> None:
        self._folder = folder
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        """Called in the worker, before it builds what fetches."""
        if self._user_init is not None:
            self._user_init(worker_id)
        probe = FetchProbe(self._folder, worker_id)
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
