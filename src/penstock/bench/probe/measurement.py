"""One step of the probe, timed on all streams of all ranks, and its figures as rows of text.

A rank's time runs from the common start to its last durable byte; the job's rate is all bytes divided by the
longest of these times. A stream that fails stops all others, and its error is the one that is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.bench.probe import timed_streams
from penstock.bench.probe.timed_streams import Blocks, StreamStopped, StreamTask, StreamTimes
from penstock.storage.residency import evict_file
from penstock.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.bench.probe.probe_folder import ProbeFolder
    from penstock.bench.probe.probe_plan import ProbeStep
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress


_BLOCK_MEMORY_BYTES: Final = 512 << 20
"""What all blocks of one rank may take, whatever depth a storage would like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMeasurement:
    """One step, over all ranks. `resident_before` is the share of the files that memory held before a read.

    `streams` is per rank; `drain_s` is the part of `elapsed_s` that the slowest stream waited for durability.
    """

    op: str
    mode: str
    ranks: int
    streams: int
    block_bytes: int
    moved_bytes: int
    elapsed_s: float
    drain_s: float
    gib_per_s: float
    operations_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    copied_bytes: int
    resident_before: float | None


@dataclass(frozen=True, slots=True)
class _RankTimes:
    """What one rank contributes to a measurement; `resident` is (in memory, in total) bytes of its files."""

    elapsed_ns: int
    drain_ns: int
    copied_bytes: int
    resident: tuple[int, int]
    latencies_ns: NDArray[np.int64]


_OPERATIONS: Final[Mapping[str, Callable[[StreamTask], StreamTimes]]] = {
    "write": timed_streams.write,
    "read": timed_streams.read,
    "random_read": timed_streams.random_read,
    "small_write": timed_streams.small_write,
    "small_read": timed_streams.small_read,
}


def measure(step: ProbeStep, place: ProbeFolder, *, comm: Comm, progress: Progress) -> ProbeMeasurement:
    """Time one step; collective. Steps that read need the step that wrote to have run in the same place."""
    phase = f"{place.mode} {step.op}, {step.streams} x {format_bytes(step.block_bytes)}"
    progress.begin(phase, step.size_bytes)
    if step.op in ("write", "small_write", "fsync"):
        place.expect_objects(_keys_written(step, comm.rank))
    resident = _drop_from_memory(step, place)
    copied_before = place.storage.counters.snapshot().copied_bytes.total()
    times = _run_streams(step, place, comm=comm, progress=progress)
    mine = _RankTimes(
        elapsed_ns=max(seen.end_ns for seen in times) - min(seen.start_ns for seen in times),
        drain_ns=max(seen.drain_ns for seen in times),
        copied_bytes=place.storage.counters.snapshot().copied_bytes.total() - copied_before,
        resident=resident,
        latencies_ns=np.concatenate([seen.latencies_ns for seen in times]),
    )
    return _summed_up(step, comm.gather(mine, awaiting=f"all ranks to finish {phase}"))


def _summed_up(step: ProbeStep, ranks: list[_RankTimes]) -> ProbeMeasurement:
    latencies_ms = np.concatenate([rank.latencies_ns for rank in ranks]) / 1e6
    elapsed_s = max(rank.elapsed_ns for rank in ranks) / 1e9
    moved_bytes = step.size_bytes * len(ranks)
    resident_bytes = sum(rank.resident[0] for rank in ranks)
    file_bytes = sum(rank.resident[1] for rank in ranks)
    return ProbeMeasurement(
        op=step.op,
        mode=step.mode,
        ranks=len(ranks),
        streams=step.streams,
        block_bytes=step.block_bytes,
        moved_bytes=moved_bytes,
        elapsed_s=elapsed_s,
        drain_s=max(rank.drain_ns for rank in ranks) / 1e9,
        gib_per_s=moved_bytes / elapsed_s / 2**30,
        operations_per_s=latencies_ms.size / elapsed_s,
        p50_ms=float(np.percentile(latencies_ms, 50)),
        p99_ms=float(np.percentile(latencies_ms, 99)),
        max_ms=float(latencies_ms.max()),
        copied_bytes=sum(rank.copied_bytes for rank in ranks),
        resident_before=resident_bytes / file_bytes if file_bytes else None,
    )


def _run_streams(step: ProbeStep, place: ProbeFolder, *, comm: Comm, progress: Progress) -> list[StreamTimes]:
    """Start all threads, start the clocks together on all ranks, wait; the first real failure is raised."""
    gate = threading.Barrier(step.streams + 1)
    stop = threading.Event()
    with ThreadPoolExecutor(step.streams) as pool, ExitStack() as undo:
        undo.callback(stop.set)
        undo.callback(gate.abort)
        futures = [
            pool.submit(
                _run_stream,
                _operation(step, place),
                StreamTask(
                    storage=place.storage,
                    step=step,
                    key=_stream_key(comm.rank, stream),
                    blocks=_blocks(step, place, stream_id=comm.rank << 12 | stream),
                    gate=gate,
                    stop=stop,
                    progress=progress,
                ),
            )
            for stream in range(step.streams)
        ]
        with suppress(threading.BrokenBarrierError):  # the stream that broke the gate carries the reason
            gate.wait()
            comm.barrier(awaiting=f"all ranks to be ready for {step.op}")
            gate.wait()
        return _results(futures)


def _operation(step: ProbeStep, place: ProbeFolder) -> Callable[[StreamTask], StreamTimes]:
    if step.op == "fsync":
        return partial(timed_streams.fsync, folder=str(place.folder))
    return _OPERATIONS[step.op]


def _run_stream(operation: Callable[[StreamTask], StreamTimes], task: StreamTask) -> StreamTimes:
    """Run one stream; if it fails, the others stop and none waits for it."""
    with ExitStack() as undo:
        undo.callback(task.stop.set)
        undo.callback(task.gate.abort)
        times = operation(task)
        undo.pop_all()
    return times


def _results(futures: list[Future[StreamTimes]]) -> list[StreamTimes]:
    failures = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in failures if not isinstance(error, StreamStopped)]
    if failures:
        raise (causes or failures)[0]
    return [future.result() for future in futures]


def _blocks(step: ProbeStep, place: ProbeFolder, *, stream_id: int) -> Blocks:
    """As many blocks as the storage keeps in flight, and one to fill meanwhile, as far as memory allows.

    A storage that writes in the caller's thread gets a single block, which stays in the processor's cache.
    """
    options = place.storage.options
    in_flight = options.get("parts_in_flight") or options.get("writes_in_flight")
    overlaps = step.op == "write" and isinstance(in_flight, int) and in_flight > 1
    wanted = in_flight + 1 if overlaps and isinstance(in_flight, int) else 1
    most = max(2, _BLOCK_MEMORY_BYTES // (step.streams * step.block_bytes))
    return Blocks(min(wanted, most), step.block_bytes, stream_id=stream_id)


def _stream_key(rank: int, stream: int) -> str:
    return f"rank{rank}-stream{stream}"


def _keys_written(step: ProbeStep, rank: int) -> Iterator[str]:
    for stream in range(step.streams):
        key = _stream_key(rank, stream)
        if step.op == "small_write":
            yield from (timed_streams.small_key(key, number) for number in range(step.blocks_per_stream))
        else:
            yield key


def _drop_from_memory(step: ProbeStep, place: ProbeFolder) -> tuple[int, int]:
    """Before a buffered read: drop this rank's files from the page cache; what stayed, of how much."""
    if place.folder is None or place.mode != "buffered" or "read" not in step.op:
        return 0, 0
    resident_bytes = file_bytes = 0
    for key in place.keys:
        left = evict_file(str(place.folder / key)).after
        resident_bytes += left.resident_bytes
        file_bytes += left.total_bytes
    return resident_bytes, file_bytes


def measurement_rows(measurements: Iterable[ProbeMeasurement]) -> list[dict[str, str]]:
    """One row a measurement, to be read from left to right: what was done, how fast, how evenly."""
    return [
        {
            "operation": seen.op.replace("_", " "),
            "mode": seen.mode,
            "streams": str(seen.streams),
            "block": format_bytes(seen.block_bytes),
            "GiB/s": f"{seen.gib_per_s:.3f}",
            "ops/s": f"{seen.operations_per_s:,.0f}",
            "p50 ms": f"{seen.p50_ms:.2f}",
            "p99 ms": f"{seen.p99_ms:.2f}",
        }
        for seen in measurements
    ]


def headline_rows(measurements: Iterable[ProbeMeasurement]) -> list[dict[str, str]]:
    """The best of each operation and mode: the limits to remember."""
    best: dict[tuple[str, str], ProbeMeasurement] = {}
    for seen in measurements:
        kept = best.setdefault((seen.op, seen.mode), seen)
        if seen.gib_per_s > kept.gib_per_s:
            best[seen.op, seen.mode] = seen
    return measurement_rows(best.values())
