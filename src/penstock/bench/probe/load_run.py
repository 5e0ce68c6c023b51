"""A load of one storage from start to knee: how fast in a closed loop, then rates on a schedule.

Collective: all ranks offer their share of each rate at the same time, and choose the next one from the same
figures. The closed loop comes first and lasts until the storage is steady, so that caches and credit for
bursts are spent, and told apart, before a rate is judged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.bench.probe import timed_streams
from penstock.bench.probe.block_targets import FileTarget, ObjectTarget, find_local_files, slot_key
from penstock.bench.probe.load_loops import LoadLoop, LoadRun, Operations, RingLoop, ThreadLoop, blocks_ahead
from penstock.bench.probe.load_plan import (
    NS,
    RULE,
    LoadInterval,
    LoadShape,
    OfferedLoad,
    OperationTimes,
    SteadyState,
    arrivals,
    describe_load,
    find_knee,
    find_limit,
    find_steady_state,
    intervals,
    next_rate,
)
from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.probe_plan import ProbeStep
from penstock.bench.probe.timed_streams import Blocks, StreamTask
from penstock.cluster.comm import Comm
from penstock.errors import Unavailable, UsageError
from penstock.progress import RunProgress
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.units import format_bytes

_FILL_BLOCK_BYTES: Final = 8 << 20
_FILL_BLOCKS: Final = 4
_TRIAL_S: Final = 0.5
_ROUND_S: Final = 0.5
_PIECE_ROUNDS: Final = 6
_FEWEST_OPERATIONS: Final = 100
"""A load lasts longer where it would be fewer: a p99 of less says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The closed loop: as many operations in flight as allowed, all the time.

    The rate and latencies are those of the steady state; `first_seconds` before it, if any, had another rate.
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
    """The load beyond which waits grow. `limited_by` is "storage", "depth", "host", or "" if none failed."""

    operations_per_s: float
    gib_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    limited_by: str
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One load: its shape, the loop that performed it (`rates_of_loops` is why), and what was seen."""

    mode: str
    ranks: int
    block_bytes: int
    read_percent: int
    is_sequential: bool
    depth: int
    size_bytes: int
    loop: str
    rates_of_loops: Mapping[str, float]
    saturation: Saturation
    points: tuple[OfferedLoad, ...]
    knee: Knee | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What to offer: each rate for `seconds`, the closed loop for at most `max_seconds`."""

    shape: LoadShape
    size_bytes: int
    seconds: float = 3.0
    max_seconds: float = 20.0
    loops: tuple[str, ...] = ("threads", "io_uring")
    rates: tuple[float, ...] | None = None
    """Operations a second to offer, instead of looking for the knee."""


def measure_load(
    request: LoadRequest, place: ProbeFolder, *, comm: Comm, progress: RunProgress
) -> LoadResult:
    """Write what is to be read, find out what the storage does at most, then the knee."""
    _check_request(request.shape, place)
    progress.begin(f"{place.mode} load: writing {format_bytes(request.size_bytes)}", request.size_bytes)
    progress.enter("moving", unit="written_bytes", times=comm.size)
    share_bytes = _fill(request, place, comm=comm, progress=progress)
    operations = Operations.of(request.shape, share_bytes, comm.rank)
    notes: list[str] = []
    with _open_loops(request, place, comm, notes) as loops:
        load = _Load(request, operations, comm, progress)
        rates = load.try_loops(loops)
        loop = max(loops, key=lambda one: rates[one.name])
        progress.begin(f"{place.mode} load: in a closed loop, until steady", request.max_seconds)
        saturation = load.saturate(loop)
        points: list[OfferedLoad] = []
        while rate := _next_rate(request, points, saturation.operations_per_s):
            progress.begin(f"{place.mode} load: {rate:,.0f} operations a second", request.seconds)
            points.append(load.offer(loop, rate))
    place.remove_objects()
    comm.barrier(awaiting="all ranks to remove the files of a load")
    if not saturation.is_steady:
        notes.append(
            f"{place.mode}: the closed loop was not steady after {saturation.seconds:.0f} s; "
            "--max-seconds gives it longer."
        )
    return LoadResult(
        mode=place.mode,
        ranks=comm.size,
        block_bytes=request.shape.block_bytes,
        read_percent=request.shape.read_percent,
        is_sequential=request.shape.is_sequential,
        depth=request.shape.depth,
        size_bytes=share_bytes * comm.size,
        loop=loop.name,
        rates_of_loops=rates,
        saturation=saturation,
        points=tuple(points),
        knee=_describe_knee(points, request.shape.block_bytes),
        notes=tuple(notes),
    )


_SECTOR_BYTES: Final = 512


def _check_request(shape: LoadShape, place: ProbeFolder) -> None:
    """Past the page cache the kernel moves whole sectors only, and says no more than "Invalid argument"."""
    if place.mode == "direct" and shape.block_bytes % _SECTOR_BYTES:
        raise UsageError(
            f"Operations of {shape.block_bytes} bytes cannot pass the page cache",
            where=place.storage.uri,
            fix=f"Use --request {round_up(shape.block_bytes, PAGE_BYTES)}, or probe file:// instead.",
        )


def _next_rate(request: LoadRequest, points: Sequence[OfferedLoad], closed_loop_per_s: float) -> float | None:
    if request.rates is None:
        return next_rate(points, closed_loop_per_s)
    return sorted(request.rates)[len(points)] if len(points) < len(request.rates) else None


def _fill(request: LoadRequest, place: ProbeFolder, *, comm: Comm, progress: RunProgress) -> int:
    """Write this rank's object; its size is a whole number of blocks of the load and of writing."""
    step_bytes = max(_FILL_BLOCK_BYTES, request.shape.block_bytes)
    step_bytes -= step_bytes % request.shape.block_bytes
    blocks = max(1, request.size_bytes // comm.size // step_bytes)
    key = _key(comm)
    place.expect_objects([key])
    task = StreamTask(
        storage=place.storage,
        step=ProbeStep(
            op="write", mode=place.mode, streams=1, block_bytes=step_bytes, blocks_per_stream=blocks
        ),
        key=key,
        blocks=Blocks(_FILL_BLOCKS, step_bytes, stream_id=comm.rank << 12),
        gate=threading.Barrier(1),
        stop=threading.Event(),
        progress=progress,
    )
    timed_streams.write(task)
    return blocks * step_bytes


def _key(comm: Comm) -> str:
    return f"rank{comm.rank}-load"


@contextmanager
def _open_loops(
    request: LoadRequest, place: ProbeFolder, comm: Comm, notes: list[str]
) -> Iterator[Sequence[LoadLoop]]:
    """The ways to try: threads, and io_uring for files past the page cache, if every rank has it."""
    shape, storage = request.shape, place.storage
    with ExitStack() as undo:
        files = find_local_files(storage)
        if files is None:
            place.expect_objects(_slot_keys(shape, comm))
            target = ObjectTarget(storage, _key(comm))
            undo.callback(target.close)
            yield [ThreadLoop(target, _blocks(shape, comm), shape.depth, storage.uri)]
            return
        file = FileTarget(files, _key(comm), storage.uri, is_sequential=shape.is_sequential)
        undo.callback(file.close)
        blocks = _blocks(shape, comm, more=blocks_ahead(shape.block_bytes))
        loops: list[LoadLoop] = [ThreadLoop(file, blocks, shape.depth, storage.uri)]
        if not files.uses_page_cache and shape.depth > 1:  # one at a time a plain call is the shorter way
            ring = RingLoop(file, blocks, shape.depth, storage.uri)
            reasons = list(filter(None, comm.gather(_why_no_ring(ring), awaiting="io_uring on all ranks")))
            loops += [] if reasons else [ring]
            notes += reasons[:1]
        yield [loop for loop in loops if loop.name in request.loops] or loops[:1]


def _blocks(shape: LoadShape, comm: Comm, *, more: int = 0) -> Blocks:
    return Blocks(shape.depth + more, shape.block_bytes, stream_id=comm.rank << 12 | 1)


def _slot_keys(shape: LoadShape, comm: Comm) -> list[str]:
    writers = shape.depth if shape.read_percent < 100 else 0
    return [slot_key(_key(comm), slot) for slot in range(writers)]


def _why_no_ring(ring: RingLoop) -> str:
    try:
        ring.check()
    except Unavailable as error:
        return f"No io_uring here, so threads keep the operations in flight: {error}"
    return ""


class _Load:
    """Runs of one load on this rank; no run repeats the operations of the one before."""

    def __init__(
        self, request: LoadRequest, operations: Operations, comm: Comm, progress: RunProgress
    ) -> None:
        self._progress = progress
        self._request = request
        self._operations = operations
        self._comm = comm
        self._first = 0

    def try_loops(self, loops: Sequence[LoadLoop]) -> dict[str, float]:
        """The rate of each loop in a short time, over all ranks.

        In two turns, the second backwards: what a storage has just taken it often gives faster than the rest.
        """
        seconds = min(_TRIAL_S, self._request.seconds) / 2
        rates = dict.fromkeys((loop.name for loop in loops), 0.0)
        for loop in (*loops, *reversed(loops)):
            times = self._run(loop, None, seconds)
            ended = float(np.count_nonzero(times.ended < seconds * NS))
            rate = self._comm.reduce(ended / seconds, "sum", awaiting="the rates of all ranks")
            rates[loop.name] += rate / 2
        return rates

    def saturate(self, loop: LoadLoop) -> Saturation:
        """Pieces of a closed loop, until the storage is steady or the time is over."""
        parts: list[OperationTimes] = []
        rounds: list[float] = []
        seconds = 0.0
        round_s = min(_ROUND_S, self._request.max_seconds / _PIECE_ROUNDS)
        piece_s = _PIECE_ROUNDS * round_s
        while True:
            piece = self._gather(self._run(loop, None, piece_s))
            parts.append(_shift(piece, round(seconds * NS)))
            numbers = piece.ended // round(round_s * NS)
            rounds += (np.bincount(numbers, minlength=_PIECE_ROUNDS)[:_PIECE_ROUNDS] / round_s).tolist()
            seconds += piece_s
            state = find_steady_state(rounds)
            if state.is_steady or seconds + piece_s > self._request.max_seconds + round_s:
                times = OperationTimes.concatenate(parts)
                return _describe_saturation(
                    times, state, seconds, self._request.shape.block_bytes, round_s=round_s
                )

    def offer(self, loop: LoadLoop, rate_per_s: float) -> OfferedLoad:
        """One rate on its schedule, long enough for some operations."""
        seconds = max(self._request.seconds, min(_FEWEST_OPERATIONS / rate_per_s, self._request.max_seconds))
        due = arrivals(rate_per_s, seconds, rank=self._comm.rank, num_ranks=self._comm.size)
        times = self._gather(self._run(loop, due, seconds))
        return describe_load(times, rate_per_s=rate_per_s, seconds=seconds)

    def _run(self, loop: LoadLoop, due: Sequence[int] | None, seconds: float) -> OperationTimes:
        times = loop.run(
            LoadRun(
                operations=self._operations,
                due_ns=due,
                seconds=seconds,
                first=self._first,
                start=lambda: self._comm.barrier(awaiting="all ranks to be ready for a load"),
            )
        )
        self._first += times.due.size
        self._progress.advance(seconds)
        moved_bytes = self._request.shape.block_bytes * self._comm.size
        writes = int(np.count_nonzero(times.is_write))
        self._progress.count(
            read_bytes=(times.due.size - writes) * moved_bytes, written_bytes=writes * moved_bytes
        )
        return times

    def _gather(self, times: OperationTimes) -> OperationTimes:
        return OperationTimes.concatenate(self._comm.gather(times, awaiting="all ranks to end a load"))


def _shift(times: OperationTimes, by_ns: int) -> OperationTimes:
    return OperationTimes(
        times.due + by_ns, times.free + by_ns, times.begun + by_ns, times.ended + by_ns, times.is_write
    )


def _describe_saturation(
    times: OperationTimes, state: SteadyState, seconds: float, block_bytes: int, *, round_s: float
) -> Saturation:
    first_s = state.begins * round_s
    steady = times.between(round(first_s * NS), round(seconds * NS))
    if not steady.due.size:  # the storage was silent to the end
        steady = times
    rate = state.rate or times.due.size / (float(times.ended.max()) / NS)
    p50, p99 = np.percentile(steady.latencies, (50, 99)) / 1e6
    return Saturation(
        operations_per_s=rate,
        gib_per_s=rate * block_bytes / 2**30,
        p50_ms=float(p50),
        p99_ms=float(p99),
        seconds=seconds,
        is_steady=state.is_steady,
        first_seconds=first_s,
        first_operations_per_s=state.first_rate,
        intervals=intervals(times.ended, times.latencies, seconds),
    )


def _describe_knee(points: Sequence[OfferedLoad], block_bytes: int) -> Knee | None:
    point = find_knee(points)
    if point is None:
        return None
    return Knee(
        operations_per_s=point.offered_per_s,
        gib_per_s=point.offered_per_s * block_bytes / 2**30,
        p50_ms=point.p50_ms,
        p99_ms=point.p99_ms,
        p999_ms=point.p999_ms,
        limited_by=find_limit(points, point),
        rule=RULE,
    )


def load_rows(load: LoadResult) -> list[dict[str, str]]:
    """A row for each rate that was offered, the closed loop last."""
    knee = load.knee.operations_per_s if load.knee and load.knee.limited_by else None
    rows = [
        {
            "offered/s": f"{point.offered_per_s:,.0f}",
            "": "knee" if point.offered_per_s == knee else "",
            "answered/s": f"{point.achieved_per_s:,.0f}",
            "GiB/s": f"{point.offered_per_s * load.block_bytes / 2**30:.3f}",
            "p50 ms": f"{point.p50_ms:.2f}",
            "p99 ms": f"{point.p99_ms:.2f}",
            "p99.9 ms": f"{point.p999_ms:.2f}",
            "lag ms": f"{point.lag_p99_ms:.2f}",
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
    }
    return [*rows, closed]
