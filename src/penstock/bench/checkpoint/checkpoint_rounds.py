"""The rounds of a checkpoint benchmark: which checkpoints are written and read, in which order, and how.

All writes come before all reads, as in MLPerf Storage and DLIO. In a round, which is collective, all ranks
write or read one checkpoint through the engine's pipeline. A round that fails on one rank fails on all of
them, and a failed write leaves no files behind. Content follows from the seed and the object's key, so
nothing needs to be stored to verify it.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from penstock.bench.checkpoint import checkpoint_result, read_pipeline
from penstock.bench.checkpoint.checkpoint_result import EPOCH, CheckpointRound
from penstock.bench.page_cache_eviction import CacheEviction, evict
from penstock.bench.recorded_run import StepRecorder
from penstock.bench.state_layout import StateLayout, checkpoint_folder
from penstock.cluster.comm import Comm, all_gather_results, decide_on_rank0
from penstock.dataset.content import Content
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.results.checkpoint_files import MovedBytes, Throughput
from penstock.results.step_events import SpanEvent, SpanKind, StepPhase
from penstock.storage import Storage
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.ledger import Measurement, combine_ranks, common_origin_ns
from penstock.transfer.pipeline import MIN_BUFFERS_PER_STREAM, PipelineSettings, PlannedObject, write_objects
from penstock.units import format_seconds

logger = logging.getLogger(__name__)

PROGRESS_FILE: Final = "progress"
_SLOT_BYTES: Final = 8
LOOK_INTERVAL_S: Final = 1.0
MOST_NOTES_PER_S: Final = 100
"""The most notes per second of all ranks together. In a large job, each rank therefore notes its bytes less
often than every second.
"""
SIGN_INTERVAL_S: Final = 10.0
BUCKET_S: Final = 0.05
MOST_BUCKETS: Final = 240
"""The most intervals in which a round's throughput is shown; in longer rounds, each interval is longer."""


class ProgressBoard:
    """One number per rank in a file that all ranks share: each rank writes its own, and rank 0 reads all."""

    def __init__(self, path: Path, *, rank: int, num_ranks: int) -> None:
        self._path = path
        self._rank = rank
        self._num_ranks = num_ranks

    def note(self, moved_bytes: int) -> None:
        """Record how many bytes this rank has transferred."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # Ranks on all hosts share the file without a lock, because each has its own slot.
                os.pwrite(descriptor, moved_bytes.to_bytes(_SLOT_BYTES, "little"), self._rank * _SLOT_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.debug("Progress could not be noted: %s", error)

    def read(self) -> list[int]:
        """Return the bytes that each rank has noted; 0 for a rank that has noted nothing yet."""
        moved: list[int] = []
        with suppress(OSError):  # nobody has noted anything yet
            moved = np.fromfile(self._path, dtype="<i8", count=self._num_ranks).tolist()
        return [*moved, *[0] * (self._num_ranks - len(moved))]

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


class RoundProgress(Progress):
    """Follows the rounds of one rank. This is the `Progress` that the pipeline advances, from any thread.

    The pipeline's phases are parts of a round, which `track` announces, so their `begin` shows nothing.
    """

    def __init__(
        self, board: ProgressBoard, *, rank: int, progress: Progress, heartbeat: Callable[[], None]
    ) -> None:
        self._board = board
        self._is_first = rank == 0
        self._progress = progress if rank == 0 else Progress()  # which shows nothing
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._moved_bytes = 0
        self._moved_until_s = 0.0
        self._shown_bytes = 0
        self.began_ns = time.monotonic_ns()
        """The time, by CLOCK_MONOTONIC, at which all ranks begin to transfer the round's bytes."""
        self._moved_by_bucket: Counter[int] = Counter()

    def advance(self, amount: float) -> None:
        """Count what the pipeline has transferred."""
        moved_s = max(0.0, (time.monotonic_ns() - self.began_ns) / 1e9)
        bucket = int(moved_s / BUCKET_S)
        with self._lock:
            self._moved_until_s = max(self._moved_until_s, moved_s)
            self._moved_bytes += int(amount)
            self._moved_by_bucket[bucket] += int(amount)

    def moved_over_time(self, planned_bytes: int) -> MovedBytes:
        """Return this rank's bytes over the time of the last round, in at most `MOST_BUCKETS` intervals.

        The last interval ends with the last bytes; it absorbs a remainder of less than half an interval.
        """
        # Whole chunks are counted, so the last one of a file may overshoot.
        scale = planned_bytes / self._moved_bytes if self._moved_bytes else 0.0
        length, fold = max(self._moved_by_bucket, default=-1) + 1, 1
        while length > fold * MOST_BUCKETS:
            fold *= 2
        width_s, end_s = BUCKET_S * fold, self._moved_until_s
        last = max(round(end_s / width_s) - 1, 0)
        sizes: Counter[int] = Counter()
        for bucket, moved_bytes in self._moved_by_bucket.items():
            sizes[min(bucket // fold, last)] += moved_bytes
        begins = [(number, number * width_s) for number in sorted(sizes)]
        return [
            (begin_s, width_s if number < last else end_s - begin_s, round(sizes[number] * scale))
            for number, begin_s in begins
        ]

    @contextmanager
    def track(self, title: str, bytes_of_ranks: list[int], *, unit: str) -> Iterator[None]:
        """Follow one round, in which each rank transfers its `bytes_of_ranks`, counted in `unit`."""
        self._moved_bytes = 0
        self._moved_until_s = 0.0
        self._moved_by_bucket.clear()
        self.began_ns = time.monotonic_ns()
        self._board.note(0)
        total_bytes = sum(bytes_of_ranks)
        self._progress.begin(f"{title}, all ranks", total_bytes)
        self._progress.enter("moving", unit=unit)
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
            self._progress.remark("")
        self._show(total_bytes)
        self._progress.enter("working")

    def pause(self, pause_s: float) -> None:
        """Wait between two checkpoints, while the emulated job would compute."""
        if pause_s:
            self._progress.begin(f"waiting {format_seconds(pause_s)} before the next checkpoint", 0)
            self._progress.enter("computing")
        time.sleep(pause_s)

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
            self._progress.remark(name_last_rank(moved, bytes_of_ranks))
            now_s = time.monotonic()
            if now_s - heartbeat_s >= SIGN_INTERVAL_S:
                self._heartbeat()
                heartbeat_s = now_s

    def _show(self, moved_bytes: int) -> None:
        self._progress.advance(max(0, moved_bytes - self._shown_bytes))
        self._shown_bytes = max(moved_bytes, self._shown_bytes)


def name_last_rank(moved: list[int], planned: list[int]) -> str:
    """Name the rank that is furthest behind, with its progress; "" if all ranks are equally far."""
    shares = {rank: moved[rank] / size for rank, size in enumerate(planned) if size}
    if len(shares) < 2 or min(shares.values()) == max(shares.values()):
        return ""
    last = min(shares, key=shares.__getitem__)
    return f"rank {last} is last with {shares[last]:.0%}"


def plan_rounds(*, num_writes: int, num_reads: int, kept_steps: Sequence[int]) -> tuple[CheckpointRound, ...]:
    """Plan the rounds still to come. `kept_steps` are the steps of complete checkpoints that stay, ascending.

    Reads take the oldest checkpoints first, as DLIO does, because the newest may still be in a cache.
    """
    missing = (step for step in range(1, num_writes + 1) if step not in kept_steps)
    writes = [CheckpointRound(direction="write", number=step, step=step) for step in missing]
    readable = sorted({*kept_steps, *(write.step for write in writes)})
    if num_reads > len(readable):
        raise UsageError(
            f"{num_reads} checkpoints are to be read, but only {len(readable)} will exist",
            where="--reads",
            fix=f"Read at most {len(readable)}, or write more: --writes {num_reads}.",
        )
    reads = [
        CheckpointRound(direction="read", number=number, step=step)
        for number, step in enumerate(readable[:num_reads], start=1)
    ]
    return (*writes, *reads)


def plan_objects(
    layout: StateLayout, process: int, step: int, *, epoch: int = EPOCH
) -> tuple[PlannedObject, ...]:
    """Return the objects of a checkpoint that one process writes."""
    folder = checkpoint_folder(epoch, step)
    return tuple(
        PlannedObject(f"{folder}/{file.key}", file.size_bytes)
        for file in layout.files_of(process, epoch=epoch, step=step)
    )


def rank_shift(hosts: Sequence[str]) -> int:
    """Return the shift by which every rank reads files that another host wrote; 0 on one host.

    With a shift of n, rank r reads the files of rank r + n. The shift is the largest number of ranks on a
    host. If hosts have different numbers of consecutive ranks, some ranks of a large host still read what
    their own host wrote.
    """
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    return max(counts) if len(counts) > 1 else 0


class StateContent:
    """The bytes of some planned objects. Created before the clock starts; any thread may use them."""

    def __init__(self, seed: int, planned: Iterable[PlannedObject]) -> None:
        # A key names the checkpoint, rank and file, so no two objects of a run have a block in common.
        self._contents = {object_.key: Content(seed, object_.key) for object_ in planned}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite `buffer` with the object's bytes from `offset` onward."""
        self._contents[planned.key].fill(buffer, offset)

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        """Return the index of the first wrong byte in `buffer`; None if all are correct."""
        return self._contents[planned.key].verify(buffer, offset)


LONGEST_ROUND_S: Final = 7 * 24 * 3600.0
"""The limit is long because ranks may take very different times, and because the pipeline itself gives up on
storage that does not respond.
"""

_KINDS: Final = {"write": SpanKind.SAVE, "read": SpanKind.LOAD}
_TITLES: Final = {"write": "writing", "read": "reading"}
_UNITS: Final = {"write": "written_bytes", "read": "read_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRunner:
    """Runs the rounds of one rank. A read takes the files of the rank that is `shift` places further on."""

    comm: Comm
    layout: StateLayout
    storages: Sequence[Storage]
    pipe: PipelineSettings
    memory: WarmMemory
    seed: int
    shift: int
    syncs_ranks: bool
    progress: RoundProgress
    recorder: StepRecorder
    throughput: Throughput = field(default_factory=dict)
    """On rank 0: the throughput of all ranks over the time of each round so far."""

    def run(self, checkpoint: CheckpointRound, *, last: int) -> checkpoint_result.RoundFigures:
        """Run the round and return its figures over all ranks.

        `last` is the number of its direction's last round.
        """
        comm, direction = self.comm, checkpoint.direction
        shift = self.shift if direction == "read" else 0
        process = (comm.rank + shift) % comm.size
        planned = plan_objects(self.layout, process, checkpoint.step, epoch=checkpoint.epoch)
        content = StateContent(self.seed, planned)
        total_bytes = sum(object_.size_bytes for object_ in planned)
        cold: CacheEviction | None = None
        if direction == "read":
            keys = (object_.key for object_ in planned)
            cold = evict(self.storages[0], keys, comm=comm, assumed_bytes=total_bytes)
        title = f"{_TITLES[direction]} checkpoint {checkpoint.number} of {last}"
        began_at_s, began_ns = time.time(), time.monotonic_ns()
        bytes_of_ranks: list[int] = np.roll(self.layout.bytes_of_processes(), -shift).tolist()
        with self.progress.track(title, bytes_of_ranks, unit=_UNITS[direction]):
            measurements = self._move(checkpoint, planned, content)
        self.recorder.add_stall(epoch=checkpoint.epoch, step=checkpoint.step, began_ns=began_ns)

        def keep(ranks: list[MovedBytes]) -> None:
            self.throughput[direction, checkpoint.step] = ranks

        decide_on_rank0(
            comm,
            lambda: self.progress.moved_over_time(total_bytes),
            keep,
            awaiting="what all ranks moved over time",
        )
        busy = [measurement for measurement in measurements if measurement is not None]
        return checkpoint_result.RoundFigures(
            round=checkpoint,
            began_at_s=began_at_s,
            ended_at_s=time.time(),
            phase=combine_ranks(busy),
            cold=cold,
            wrong=tuple(place for measurement in busy for place in measurement.wrong_bytes)[
                : checkpoint_result.MAX_WRONG_PLACES
            ],
        )

    def _move(
        self, checkpoint: CheckpointRound, planned: Sequence[PlannedObject], content: StateContent
    ) -> list[Measurement | None]:
        """Run the timed part. Returns the measurement of each rank, None for a rank without files."""
        with ExitStack() as undo:
            if checkpoint.direction == "write":
                undo.callback(remove_objects, self.storages[0], planned)
            origin_ns = common_origin_ns(self.comm, awaiting="all ranks to begin a checkpoint")
            self.progress.began_ns = origin_ns

            def work() -> Measurement | None:
                if not planned:
                    return None
                move = (
                    partial(write_objects, self.storages, planned, content)
                    if checkpoint.direction == "write"
                    else partial(read_pipeline.read_objects, self.storages, planned, content.verify)
                )
                return move(
                    self.pipe,
                    memory=self.memory,
                    rank=self.comm.rank,
                    origin_ns=origin_ns,
                    progress=self.progress,
                )

            # If any rank fails, this raises on all of them, and each removes what it wrote.
            measurements = all_gather_results(
                self.comm,
                work,
                awaiting="all ranks to finish a checkpoint",
                timeout_s=max(LONGEST_ROUND_S, self.comm.timeout_s),
            )
            undo.pop_all()
        # DLIO's span of the round: this rank's own time or, with `syncs_ranks`, the time until all ranks are
        # done.
        mine = measurements[self.comm.rank]
        end_ns = origin_ns if mine is None else mine.end_ns
        self.recorder.add_span(
            SpanEvent(
                kind=_KINDS[checkpoint.direction],
                phase=StepPhase.TRAIN,
                epoch=checkpoint.epoch,
                block=checkpoint.number,
                step=checkpoint.step,
                start_ns=origin_ns,
                end_ns=time.monotonic_ns() if self.syncs_ranks else end_ns,
                size_bytes=sum(object_.size_bytes for object_ in planned),
            )
        )
        return measurements


def fit_pipe(pipe: PipelineSettings, planned: Sequence[PlannedObject]) -> PipelineSettings:
    """Reduce the settings' memory and streams to what the objects of a checkpoint can use.

    Memory is touched before the clock starts, which takes seconds per GiB: a small checkpoint should not pay
    for it.
    """
    streams = max(1, min(pipe.streams, len(planned)))
    used = sum(-(-object_.size_bytes // pipe.chunk_bytes) for object_ in planned) * pipe.chunk_bytes
    least = MIN_BUFFERS_PER_STREAM * streams * pipe.chunk_bytes
    return replace(pipe, streams=streams, buffer_memory_bytes=max(least, min(pipe.buffer_memory_bytes, used)))


def remove_objects(storage: Storage, planned: Sequence[PlannedObject]) -> None:
    """Delete those objects that exist. Errors are only logged, because a cleanup must not fail."""
    for object_ in planned:
        try:
            storage.delete(object_.key)
        except ObjectNotFound:
            logger.debug("%s did not exist", object_.key)
        except StorageError as error:
            logger.warning("Could not delete what a failed checkpoint left: %s", error)
