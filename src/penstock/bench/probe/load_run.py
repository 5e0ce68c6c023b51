"""Load one storage location up to its knee: first a closed loop at full speed, then rates on a schedule.

Collective: all ranks offer their share of each rate at the same time, and choose the next rate from the same
figures. The closed loop comes first and lasts until the storage is in a steady state, so that caches and
burst credit, which are reported separately, are used up before any rate is judged.

Each slot has a thread, which takes the next operation as soon as it is due. In a closed loop, an operation is
due as soon as a slot is free, which shows the highest rate that the storage can reach.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count, cycle
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.bench.probe.load_plan import (
    NS,
    OPERATION,
    RULE,
    LoadInterval,
    LoadRequest,
    OfferedLoad,
    Operations,
    arrivals,
    describe_load,
    due_between,
    find_knee,
    find_limit,
    find_steady_state,
    intervals,
    next_rate,
)
from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.timed_streams import (
    Blocks,
    BlockTarget,
    FileTarget,
    ObjectTarget,
    ProbeStep,
    StartGate,
    StreamTask,
    StreamTimes,
    run_together,
    write,
)
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import SupportsLocalPaths
from penstock.storage.files.system_calls import translate_os_errors
from penstock.units import format_bytes

_FILL_BLOCK_BYTES: Final = 8 << 20
_FILL_BLOCKS: Final = 4
_ROUND_S: Final = 0.5
_PIECE_ROUNDS: Final = 6
_FEWEST_OPERATIONS: Final = 100
"""A load lasts until it has this many operations, because a p99 of fewer means nothing."""
_SECTOR_BYTES: Final = 512
_PATTERN: Final = 1 << 14
"""The number of operations chosen in advance; then the sequence repeats."""
_SEED: Final = 18
_LONGEST_SLEEP_S: Final = 0.1
_PR_SET_TIMERSLACK: Final = 29


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The closed loop: the allowed number of operations is in flight all the time.

    The rate and latencies are those of the steady state; `first_seconds` is the time before it, if any, which
    had a different rate.
    """

    operations_per_s: float
    gib_per_s: float
    p50_ms: float
    p99_ms: float
    seconds: float
    is_steady: bool
    first_seconds: float
    first_operations_per_s: float
    intervals: tuple[LoadInterval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The load beyond which waits grow.

    `limited_by` is "storage", "depth" or "host"; "" if no load failed.
    """

    operations_per_s: float
    gib_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    limited_by: str
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of one load: its operation, and how the storage coped as the load grew."""

    mode: str
    ranks: int
    block_bytes: int
    read_percent: int
    depth: int
    size_bytes: int
    saturation: Saturation
    points: tuple[OfferedLoad, ...]
    knee: Knee | None
    notes: tuple[str, ...]


def measure_load(
    load: LoadRequest,
    place: ProbeFolder,
    *,
    size_bytes: int,
    max_seconds: float,
    comm: Comm,
    progress: Progress,
) -> LoadResult:
    """Write `size_bytes` of data, then find the highest rate and the knee of operations on it."""
    notes = []
    if place.mode == "direct" and load.block_bytes % _SECTOR_BYTES:
        # The kernel's own message would be "Invalid argument", and nothing more.
        raise UsageError(
            f"Operations of {load.block_bytes} bytes cannot bypass the page cache",
            where=place.storage.uri,
            fix=f"Use --request {round_up(load.block_bytes, PAGE_BYTES)}, or probe file:// instead.",
        )
    progress.begin(f"{place.mode} load: writing {format_bytes(size_bytes)}", size_bytes)
    progress.enter("moving", unit="written_bytes", times=comm.size)
    key = f"rank{comm.rank}-load"
    share_bytes = _fill(load, key, place, size_bytes // comm.size, comm=comm, progress=progress)
    target: BlockTarget
    if isinstance(place.storage, SupportsLocalPaths):
        target = FileTarget(place.storage, key, place.storage.uri, is_sequential=False)
    else:
        target = ObjectTarget(place.storage, key, load.depth)
        if load.read_percent < 100:
            place.keys.update(target.written_keys)
    with closing(target):
        loop = LoadLoop(
            load, target, uri=place.storage.uri, size_bytes=share_bytes, comm=comm, progress=progress
        )
        progress.begin(f"{place.mode} load: in a closed loop, until steady", max_seconds)
        saturation = _saturate(loop, max_seconds)
        points: list[OfferedLoad] = []
        given = sorted(load.rates or ())
        while True:
            if load.rates is None:
                rate = next_rate(points, saturation.operations_per_s)
            else:
                rate = given[len(points)] if len(points) < len(given) else None
            if rate is None:
                break
            progress.begin(f"{place.mode} load: {rate:,.0f} operations a second", load.seconds)
            # Long enough for a minimum of operations.
            seconds = max(load.seconds, min(_FEWEST_OPERATIONS / rate, max_seconds))
            due = arrivals(rate, seconds, rank=comm.rank, num_ranks=comm.size)
            points.append(
                describe_load(
                    loop.run(due, seconds), rate_per_s=rate, seconds=seconds, block_bytes=load.block_bytes
                )
            )
    place.remove_objects()
    comm.barrier(awaiting="all ranks to remove the files of a load")
    if not saturation.is_steady:
        notes.append(f"{place.mode}: the closed loop was not steady after {saturation.seconds:.0f} s.")
    knee = find_knee(points)
    return LoadResult(
        mode=place.mode,
        ranks=comm.size,
        block_bytes=load.block_bytes,
        read_percent=load.read_percent,
        depth=load.depth,
        size_bytes=share_bytes * comm.size,
        saturation=saturation,
        points=tuple(points),
        knee=None
        if knee is None
        else Knee(
            operations_per_s=knee.offered_per_s,
            gib_per_s=knee.gib_per_s,
            p50_ms=knee.p50_ms,
            p99_ms=knee.p99_ms,
            p999_ms=knee.p999_ms,
            limited_by=find_limit(points, knee),
            rule=RULE,
        ),
        notes=tuple(notes),
    )


def _fill(
    load: LoadRequest, key: str, place: ProbeFolder, size_bytes: int, *, comm: Comm, progress: Progress
) -> int:
    """Write this rank's object. Its size is a multiple of the block that fills it and of the load's block."""
    step_bytes = max(_FILL_BLOCK_BYTES, load.block_bytes)
    step_bytes -= step_bytes % load.block_bytes
    num_blocks = max(1, size_bytes // step_bytes)
    step = ProbeStep(
        op="write", mode=place.mode, streams=1, block_bytes=step_bytes, blocks_per_stream=num_blocks
    )
    place.keys.add(key)
    blocks = Blocks(_FILL_BLOCKS, step_bytes, stream_id=comm.rank << 12)

    def fill(_thread: int, gate: StartGate) -> StreamTimes:
        return write(
            StreamTask(storage=place.storage, step=step, key=key, blocks=blocks, gate=gate, progress=progress)
        )

    run_together(1, fill, comm=comm, what="writing the data that a load reads")
    return num_blocks * step_bytes


def _saturate(loop: LoadLoop, max_seconds: float) -> Saturation:
    """Run a closed loop, piece by piece, until the storage is in a steady state or the time is up."""
    pieces: list[Operations] = []
    rounds: list[float] = []
    seconds = 0.0
    round_s = min(_ROUND_S, max_seconds / _PIECE_ROUNDS)
    piece_s = _PIECE_ROUNDS * round_s
    while True:
        piece = loop.run(None, piece_s)
        numbers = piece["ended"] // round(round_s * NS)
        rounds += (np.bincount(numbers, minlength=_PIECE_ROUNDS)[:_PIECE_ROUNDS] / round_s).tolist()
        for moment in ("due", "free", "begun", "ended"):
            piece[moment] += round(seconds * NS)
        pieces.append(piece)
        seconds += piece_s
        is_steady, begins, steady_rate, first_rate = find_steady_state(rounds)
        if is_steady or seconds + piece_s > max_seconds + round_s:
            break
    operations = np.concatenate(pieces)
    ended, first_s = operations["ended"], begins * round_s
    # Empty if the storage did not respond until the end.
    steady = due_between(operations, round(first_s * NS), round(seconds * NS))
    rate = steady_rate or operations.size / (float(ended.max()) / NS)
    p50, p99 = np.percentile(steady["ended"] - steady["due"], (50, 99)) / 1e6
    return Saturation(
        operations_per_s=rate,
        gib_per_s=rate * loop.load.block_bytes / 2**30,
        p50_ms=float(p50),
        p99_ms=float(p99),
        seconds=seconds,
        is_steady=is_steady,
        first_seconds=first_s,
        first_operations_per_s=first_rate,
        intervals=intervals(ended, ended - operations["due"], seconds),
    )


def choose_operations(
    load: LoadRequest, size_bytes: int, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose the offsets of operations, and which of them are writes. Both sequences repeat.

    Each block of the object is used once before any is used again. In each hundred operations, exactly the
    chosen share are writes, in random order.
    """
    random = np.random.Generator(np.random.SFC64(_SEED + rank))
    order = random.permutation(max(1, size_bytes // load.block_bytes))
    hundred = np.arange(100) >= load.read_percent
    writes = np.concatenate([random.permutation(hundred) for _ in range(-(-_PATTERN // 100))])
    return order * load.block_bytes, writes


class LoadLoop:
    """Keeps the operations of one rank in flight, with one thread for each slot."""

    def __init__(
        self,
        load: LoadRequest,
        target: BlockTarget,
        *,
        uri: str,
        size_bytes: int,
        comm: Comm,
        progress: Progress,
    ) -> None:
        self.load = load
        self._target = target
        self._uri = uri
        self._offsets, self._writes = choose_operations(load, size_bytes, comm.rank)
        self._blocks = Blocks(load.depth, load.block_bytes, stream_id=comm.rank << 12 | 1)
        self._comm = comm
        self._progress = progress
        self._first = 0
        """The number of the next operation, so that no run repeats the previous one."""

    def run(self, due_ns: Sequence[int] | None, seconds: float) -> Operations:
        """Perform one load, and gather the operations of all ranks. If a thread fails, all stop.

        `due_ns` is the schedule, None for a closed loop. Operations that have not begun shortly after the end
        are abandoned; those that are merely late can still begin.
        """
        grace_s = 0.0 if due_ns is None else min(1.0, 0.25 * seconds)
        stop_ns, slots = round((seconds + grace_s) * NS), self.load.depth
        offsets = cycle(np.roll(self._offsets, -self._first % self._offsets.size).tolist())
        writes = cycle(np.roll(self._writes, -self._first % self._writes.size).tolist())
        # A `zip` of these iterators is thread-safe, because its items are produced without running Python
        # code.
        operations = zip(count(), offsets, writes, count() if due_ns is None else due_ns)

        def serve(slot: int, gate: StartGate) -> Operations:
            # Let this thread's sleeps end on time: by default, the kernel adds up to 50 us to save power.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
            gate.wait()
            with translate_os_errors("Moving a block", self._uri):
                return self._move_blocks(slot, operations, gate, stop_ns=stop_ns, is_closed=due_ns is None)

        done = np.sort(
            np.concatenate(run_together(slots, serve, comm=self._comm, what="a load")), order="number"
        )
        if due_ns is not None and done.size < len(due_ns):
            # For operations that were due but never began, the events that did not happen have the
            # time at which the operations were abandoned.
            missing = np.setdiff1d(np.arange(len(due_ns)), done["number"])
            is_write = self._writes[(self._first + missing) % self._writes.size]
            never = [
                (number, due_ns[number], stop_ns, stop_ns, stop_ns, write)
                for number, write in zip(missing.tolist(), is_write.tolist(), strict=True)
            ]
            done = np.append(done, np.array(never, OPERATION))
        self._first += done.size
        self._progress.advance(seconds)
        moved_bytes = self.load.block_bytes * self._comm.size
        num_writes = int(np.count_nonzero(done["is_write"]))
        self._progress.count(
            read_bytes=(done.size - num_writes) * moved_bytes, written_bytes=num_writes * moved_bytes
        )
        return np.concatenate(self._comm.gather(done, awaiting="all ranks to end a load"))

    def _move_blocks(
        self,
        slot: int,
        operations: Iterator[tuple[int, int, bool, int]],
        gate: StartGate,
        *,
        stop_ns: int,
        is_closed: bool,
    ) -> Operations:
        """Run one thread's operations."""
        buffer, target = self._blocks.views[slot], self._target
        clock, start_ns = time.monotonic_ns, gate.start_ns
        rows: list[tuple[int, int, int, int, int, bool]] = []
        now_ns = clock() - start_ns
        for number, offset, is_write, scheduled_ns in operations:
            free_ns = now_ns
            gate.require_open()
            if free_ns >= stop_ns and (rows or not is_closed):
                break
            due_ns = free_ns if is_closed else scheduled_ns
            while due_ns > now_ns and not gate.stopped.is_set():
                time.sleep(min((due_ns - now_ns) / NS, _LONGEST_SLEEP_S))
                now_ns = clock() - start_ns
            if is_write:
                self._blocks.renew(slot)
                now_ns = clock() - start_ns
            begun_ns = now_ns
            if is_write:
                target.write(offset, buffer, slot)
            else:
                target.read(offset, buffer)
            now_ns = clock() - start_ns
            rows.append((number, due_ns, free_ns, begun_ns, now_ns, is_write))
        return np.array(rows, OPERATION)


def load_rows(load: LoadResult) -> list[dict[str, str]]:
    """Return one row for each rate that was offered; the closed loop comes last."""
    knee = load.knee.operations_per_s if load.knee and load.knee.limited_by else None
    rows = [
        {
            "offered/s": f"{point.offered_per_s:,.0f}",
            "": "knee" if point.offered_per_s == knee else "",
            "answered/s": f"{point.answered_per_s:,.0f}",
            "GiB/s": f"{point.gib_per_s:.3f}",
            "p50 ms": f"{point.p50_ms:.2f}",
            "p99 ms": f"{point.p99_ms:.2f}",
            "p99.9 ms": f"{point.p999_ms:.2f}",
            "lag ms": f"{point.lag_p99_ms:.2f}",
            "p99 ms without lag": f"{point.storage_p99_ms:.2f}",
        }
        for point in sorted(load.points, key=lambda point: point.offered_per_s)
    ]
    most = load.saturation
    closed = {
        "offered/s": "",
        "": "closed",
        "answered/s": f"{most.operations_per_s:,.0f}",
        "GiB/s": f"{most.gib_per_s:.3f}",
        "p50 ms": f"{most.p50_ms:.2f}",
        "p99 ms": f"{most.p99_ms:.2f}",
        "p99.9 ms": "",
        "lag ms": "",
        "p99 ms without lag": "",
    }
    return [*rows, closed]
