"""Tells what the threads of this process compute: one more thread looks at their stacks, and at their clocks.

It looks a hundred times a second at first, then in short bursts, so seldom that it takes a thousandth of the
time. No function of the user's is wrapped.
"""

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from penstock.bench.own_loader.own_reads import OWN_THREADS, OwnReads, find_messengers
from penstock.bench.own_loader.user_code import OWN_FOLDER

INTERVAL_S: Final = 0.01
_FIRST_LOOKS: Final = 50
_BURST: Final = 4
_MOST_COST: Final = 0.001
"""The share of the time that sampling may take after the first looks."""
_LATE_S: Final = 0.0025
_WRITTEN_EVERY_S: Final = 1.0
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
    """Samples a thread and, apart from it, all others.

    `look` says whether the moment counts, and for what: None if it does not, else the label of what the
    thread does, "" where its stack must tell.
    """

    def __init__(
        self, look: Callable[[], str | None], *, own: int, reads: OwnReads, path: Path | None = None
    ) -> None:
        self._look = look
        self._own = own
        self._path = path
        self._labels: dict[CodeType, str | None] = {}
        self._clocks: dict[int, int] = {}
        self._stopped = threading.Event()
        self._cpu_ns: Counter[str] = Counter()
        self._others_cpu_ns: Counter[str] = Counter()
        self._spots: Counter[str] = Counter()
        self._reads = reads
        self._io = reads.io_of(os.getpid())
        self._is_over = False
        self._looked_s = self._paused_s = 0.0
        self.late_samples = self.num_samples = 0
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}sampler", daemon=True)

    @property
    def cpu_ns(self) -> Counter[str]:
        """What the thread has computed, by label."""
        return self._scale(self._cpu_ns)

    @property
    def others_cpu_ns(self) -> Counter[str]:
        """What all other threads have, by label."""
        return self._scale(self._others_cpu_ns)

    @property
    def spots(self) -> Counter[str]:
        """The same by function of the user's."""
        return self._scale(self._spots)

    def _scale(self, seen: Counter[str]) -> Counter[str]:
        """What bursts have seen stands for the pauses between them, too."""
        factor = 1 + self._paused_s / self._looked_s if self._looked_s else 1.0
        return Counter({name: round(spent * factor) for name, spent in seen.copy().items()})

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End, and write what was found."""
        self._stopped.set()
        self._thread.join(1.0)
        self._is_over = True
        self.write()

    def write(self) -> None:
        """Leave the figures for the process that reads them; a full disk only loses them."""
        if self._path is None:
            return
        text = json.dumps(self._document())
        try:
            unfinished = self._path.with_suffix(".part")
            unfinished.write_text(text)
            unfinished.replace(self._path)
        except OSError:
            self._path = None

    def _document(self) -> dict[str, Any]:
        """What was found: processor time by what it went to, and the functions that used most of it."""
        messengers = find_messengers()
        read = self._reads.io_without(os.getpid(), messengers)
        return {
            "pid": os.getpid(),
            "is_over": self._is_over,
            "io_before": self._io,
            "own": {"rchar": self._reads.read_bytes, "syscr": self._reads.num_reads},
            "messengers": messengers,
            "cpu_ns": dict(self.cpu_ns + self.others_cpu_ns),
            "spots": dict(self.spots.most_common(_MOST_SPOTS)),
            # Only what samples take counts: not the imports of a worker that begins.
            "io": {name: value - self._io.get(name, 0) for name, value in read.items()},
        }

    def _run(self) -> None:
        written_s, num_looks, pause_s = time.monotonic(), 0, INTERVAL_S
        num_threads = threading.active_count()
        began_s = time.monotonic()
        while not self._stopped.wait(pause_s):
            num_looks += 1
            waited_s = time.monotonic() - began_s
            if num_looks > _FIRST_LOOKS and num_looks % _BURST == 1:
                self._paused_s += waited_s
            else:
                self._looked_s += waited_s
            # A sampler that gets the interpreter late competes for it with threads that compute.
            self._sample(is_late=waited_s - pause_s > _LATE_S)
            is_burst_over = num_looks > _FIRST_LOOKS and num_looks % _BURST == 0
            pause_s = INTERVAL_S
            if is_burst_over:
                self._clocks.clear()
                pause_s = max(INTERVAL_S, _BURST * time.thread_time() / num_looks / _MOST_COST)
            before, num_threads = num_threads, threading.active_count()
            # Threads that send batches begin with the first one.
            if num_threads != before or time.monotonic() - written_s > _WRITTEN_EVERY_S:
                self.write()
                written_s = time.monotonic()
            began_s = time.monotonic()

    def _sample(self, *, is_late: bool) -> None:
        label = self._look()
        if label is None:
            self._clocks.clear()
            return
        self.num_samples += 1
        self.late_samples += is_late
        ours = {one.ident for one in threading.enumerate() if one.name.startswith(OWN_THREADS)}
        frames = sys._current_frames()  # noqa: SLF001 - documented, and the only way to see other threads
        for ident, frame in frames.items():
            if ident not in ours:
                self._add(ident, frame, label if ident == self._own else "")

    def _add(self, ident: int, frame: FrameType, known: str) -> None:
        try:
            now_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(ident))
        except OSError:  # it has just ended
            return
        used_ns = now_ns - self._clocks.get(ident, now_ns)
        self._clocks[ident] = now_ns
        if not used_ns:
            return
        label, spot = self._find_label(frame)
        label = known or label
        (self._cpu_ns if ident == self._own else self._others_cpu_ns)[label or "other"] += used_ns
        if spot:
            self._spots[spot] += used_ns

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
    return "-packages/" in path or path.startswith((sys.base_prefix + "/lib", "<", OWN_FOLDER))
