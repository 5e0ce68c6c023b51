"""Shows the progress of a round, on every rank and in total, while it runs.

Ranks meet only at the end of a round, so each writes its bytes to a small file of the run's folder, and
rank 0 adds them up. A failure to report never fails the round.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from penstock.progress import Progress, RunProgress
from penstock.results.checkpoint_files import MovedBytes

logger = logging.getLogger(__name__)

PROGRESS_FILE: Final = "progress"
_SLOT_BYTES: Final = 8
LOOK_INTERVAL_S: Final = 1.0
MOST_NOTES_PER_S: Final = 100
"""Of all ranks together: those of a large job note their bytes less often than every second."""
SIGN_INTERVAL_S: Final = 10.0
BUCKET_S: Final = 0.05
MOST_BUCKETS: Final = 240
"""Of the throughput over time of a round: buckets of longer rounds are longer."""


class ProgressBoard:
    """One number per rank, in a file that all ranks see; a rank writes its own, rank 0 reads all of them."""

    def __init__(self, path: Path, *, rank: int, num_ranks: int) -> None:
        self._path = path
        self._rank = rank
        self._num_ranks = num_ranks

    def note(self, moved_bytes: int) -> None:
        """Note how many bytes this rank has moved."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # Ranks on all hosts share the file without a lock: each has a slot of its own.
                os.pwrite(descriptor, moved_bytes.to_bytes(_SLOT_BYTES, "little"), self._rank * _SLOT_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.debug("Progress could not be noted: %s", error)

    def read(self) -> list[int]:
        """The bytes that each rank has noted; 0 for a rank that has noted nothing yet."""
        try:
            content = self._path.read_bytes()
        except OSError as error:
            logger.debug("Progress could not be read: %s", error)
            content = b""
        whole = content[: len(content) // _SLOT_BYTES * _SLOT_BYTES]
        moved = np.frombuffer(whole, dtype="<i8").tolist()[: self._num_ranks]
        return [*moved, *[0] * (self._num_ranks - len(moved))]

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressOutputs:
    """Where rank 0 reports progress: to whoever follows the run, and to its record (a sign of life)."""

    progress: RunProgress
    heartbeat: Callable[[], None]


class RoundProgress(Progress):
    """Follows the rounds of one rank. It is the `Progress` that the pipeline advances, from any thread."""

    def __init__(self, board: ProgressBoard, *, rank: int, outputs: ProgressOutputs) -> None:
        self._board = board
        self._is_first = rank == 0
        self._outputs = outputs
        self._lock = threading.Lock()
        self._moved_bytes = 0
        self._shown_bytes = 0
        self._began_ns = time.monotonic_ns()
        self._moved_by_bucket: Counter[int] = Counter()

    def begin(self, phase: str, total: float) -> None:
        """Ignored: the pipeline's phases are parts of a round, which `track` has announced."""

    def expect(self, total: float, *units: str) -> None:
        """Pass on how many bytes all rounds of all ranks will move."""
        self._outputs.progress.expect(total, *(units or ("written_bytes", "read_bytes")))

    def advance(self, amount: float) -> None:
        """Count what the pipeline has moved."""
        bucket = max(0, int((time.monotonic_ns() - self._began_ns) / 1e9 / BUCKET_S))
        with self._lock:
            self._moved_bytes += int(amount)
            self._moved_by_bucket[bucket] += int(amount)

    def begin_at(self, origin_ns: int) -> None:
        """The moment, of CLOCK_MONOTONIC, at which all ranks begin to move the round's bytes."""
        self._began_ns = origin_ns

    def moved_over_time(self, planned_bytes: int) -> MovedBytes:
        """What this rank has moved of the last round's `planned_bytes`, in at most `MOST_BUCKETS` buckets."""
        # Chunks are counted whole, so the last of a file may overshoot.
        scale = planned_bytes / self._moved_bytes if self._moved_bytes else 0.0
        length, fold = max(self._moved_by_bucket, default=-1) + 1, 1
        while length > fold * MOST_BUCKETS:
            fold *= 2
        sizes = [0.0] * -(-length // fold)
        for bucket, moved_bytes in self._moved_by_bucket.items():
            sizes[bucket // fold] += moved_bytes * scale
        return MovedBytes(BUCKET_S * fold, [round(size) for size in sizes])

    @contextmanager
    def track(self, title: str, bytes_of_ranks: list[int], *, unit: str) -> Iterator[None]:
        """Follow one round, in which each rank moves its `bytes_of_ranks`, counted as `unit`."""
        self._moved_bytes = 0
        self._moved_by_bucket.clear()
        self._began_ns = time.monotonic_ns()
        self._board.note(0)
        total_bytes = sum(bytes_of_ranks)
        if self._is_first:
            self._outputs.progress.begin(f"{title}, all ranks", total_bytes)
            self._outputs.progress.enter("moving", unit=unit)
        self._shown_bytes = 0
        ended = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(bytes_of_ranks, ended), name="penstock-watch", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            if self._is_first:
                self._outputs.progress.remark("")
        self._show(total_bytes)
        if self._is_first:
            self._outputs.progress.enter("working")

    def _watch(self, bytes_of_ranks: list[int], ended: threading.Event) -> None:
        heartbeat_s = time.monotonic()
        pause_s = (
            LOOK_INTERVAL_S
            if self._is_first
            else max(LOOK_INTERVAL_S, len(bytes_of_ranks) / MOST_NOTES_PER_S)
        )
        while not ended.wait(pause_s):
            self._board.note(self._moved_bytes)
            if not self._is_first:
                continue
            moved = [min(pair) for pair in zip(self._board.read(), bytes_of_ranks, strict=True)]
            self._show(sum(moved))
            self._outputs.progress.remark(name_last_rank(moved, bytes_of_ranks))
            now_s = time.monotonic()
            if now_s - heartbeat_s >= SIGN_INTERVAL_S:
                self._outputs.heartbeat()
                heartbeat_s = now_s

    def _show(self, moved_bytes: int) -> None:
        if self._is_first and moved_bytes > self._shown_bytes:
            self._outputs.progress.advance(moved_bytes - self._shown_bytes)
            self._shown_bytes = moved_bytes


def name_last_rank(moved: list[int], planned: list[int]) -> str:
    """The rank that is furthest behind, and how far it is, unless all are alike."""
    shares = {rank: moved[rank] / size for rank, size in enumerate(planned) if size}
    if len(shares) < 2 or min(shares.values()) == max(shares.values()):
        return ""
    last = min(shares, key=shares.__getitem__)
    return f"rank {last} is last with {shares[last]:.0%}"
