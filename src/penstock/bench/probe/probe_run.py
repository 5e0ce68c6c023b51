"""A probe from start to finish: its steps at each location, group by group, as large as the time allows.

Collective: every rank runs the same steps in the same order and returns the same result. A rank's time runs
from the common start to its last durable byte; the job's rate is all bytes divided by the longest of these
times. A stream that fails stops all others, and its error is raised.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from operator import add
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import TypeAdapter

from penstock import __version__
from penstock.bench.probe import timed_streams
from penstock.bench.probe.load_plan import (
    LoadInterval,
    LoadRequest,
    find_steady_state,
    interval_s,
    intervals,
)
from penstock.bench.probe.load_run import LoadResult, measure_load
from penstock.bench.probe.metadata_rates import MetadataRate, measure_metadata
from penstock.bench.probe.probe_folder import FOLDER_PREFIX, ProbeFolder
from penstock.bench.probe.timed_streams import (
    Blocks,
    Mode,
    ProbeStep,
    StartGate,
    StreamTask,
    StreamTimes,
    run_together,
)
from penstock.bench.recorded_run import RunSettings
from penstock.cluster.comm import Comm
from penstock.cluster.facts.read_host import find_mount
from penstock.environment import Environment
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.results import published_files
from penstock.results.run_folder import MEASURED_FILES
from penstock.storage import Counters, residency
from penstock.storage.protocol import OptionValue
from penstock.storage.uri import Location, is_plain_path, parse_uri
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.workload.spec import Workload

_CALIBRATION_BLOCKS: Final = 4
_CALIBRATION_BLOCK_BYTES: Final = 8 << 20
_SMALLEST_SIZE_BYTES: Final = 16 << 20
_ROUND_S: Final = 0.5
_REPEATS: Final = 3


Part = Literal["best", "knee", "metadata"]
"""The parts of a probe: the best rates, the load up to the knee, and calls on files."""

RANDOM_BLOCK_BYTES: Final = 128 << 10
SMALL_OBJECT_BYTES: Final = 64 << 10
FSYNC_BLOCK_BYTES: Final = 4 << 10
MAX_RANDOM_READS: Final = 4096
NUM_SMALL_OBJECTS: Final = 256
NUM_FSYNCS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The user's request. Each measurement transfers `size_bytes`, over all streams and ranks.

    Measurements that would take longer than `max_seconds` transfer less. `load` is increased up to the knee.
    """

    uri: str
    size_bytes: int = 2 << 30
    streams: tuple[int, ...] = (1, 8)
    block_bytes: tuple[int, ...] = (1 << 20, 8 << 20)
    max_seconds: float = 20.0
    parts: tuple[Part, ...] = ("best",)
    load: LoadRequest = field(default_factory=LoadRequest)

    def __post_init__(self) -> None:
        if min(self.size_bytes, *self.streams, *self.block_bytes) < 1 or self.max_seconds <= 0:
            raise UsageError(
                "Sizes, streams, blocks and seconds must be positive",
                fix="Leave an option out for its default.",
            )


def probe_locations(uri: str) -> tuple[Location, ...]:
    """Return the locations to measure: a path with and without the page cache, a URI only as given."""
    location = parse_uri(uri)
    return (location, Location("direct", location.root)) if is_plain_path(uri) else (location,)


def plan_groups(request: ProbeRequest, mode: Mode, *, num_ranks: int) -> tuple[tuple[ProbeStep, ...], ...]:
    """Return all steps of one mode, in groups that share a set of files.

    The first step of a group writes the files, the other steps read them, and then the files are removed, so
    that a probe never occupies more than one `size_bytes` on disk.
    """
    share_bytes, most = max(1, request.size_bytes // num_ranks), max(request.streams)
    groups = []
    for streams in request.streams:
        for block_bytes in request.block_bytes:
            blocks = max(1, share_bytes // (streams * block_bytes))
            write = ProbeStep(
                op="write", mode=mode, streams=streams, block_bytes=block_bytes, blocks_per_stream=blocks
            )
            groups.append((write, replace(write, op="read")))
    # Random reads use the last files, and only as many as a stable figure needs.
    write, read = groups[-1]
    stream_bytes = write.block_bytes * write.blocks_per_stream
    random_bytes = min(RANDOM_BLOCK_BYTES, stream_bytes)
    count = min(stream_bytes // random_bytes, max(1, MAX_RANDOM_READS // write.streams))
    random = replace(write, op="random_read", block_bytes=random_bytes, blocks_per_stream=count)
    small = ProbeStep(
        op="small_write",
        mode=mode,
        streams=most,
        block_bytes=SMALL_OBJECT_BYTES,
        blocks_per_stream=max(1, min(NUM_SMALL_OBJECTS, share_bytes // SMALL_OBJECT_BYTES) // most),
    )
    fsync = ProbeStep(
        op="fsync", mode=mode, streams=1, block_bytes=FSYNC_BLOCK_BYTES, blocks_per_stream=NUM_FSYNCS
    )
    has_files = mode in ("buffered", "direct")
    return (
        *groups[:-1],
        (write, read, random),
        (small, replace(small, op="small_read")),
        *([(fsync,)] * has_files),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All measurements of one probe, with the storage options of each mode and the storages' counters.

    `size_bytes` is the requested size; each measurement has the bytes that it transferred, and `notes`
    explain any difference. `place` is when and where the probe ran: time, version, kernel, and the mount
    of a local folder.
    """

    uri: str
    ranks: int
    hosts: tuple[str, ...]
    size_bytes: int
    storage: Mapping[str, Mapping[str, OptionValue]]
    counters: Mapping[str, Mapping[str, int | dict[str, int]]]
    measurements: tuple[ProbeMeasurement, ...]
    notes: tuple[str, ...]
    loads: tuple[LoadResult, ...] = ()
    metadata: tuple[MetadataRate, ...] = ()
    buffers: str = "huge pages"
    place: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: ProbeResult) -> ProbeResult:
        """Add the measurements of another location."""
        return replace(
            self,
            storage={**self.storage, **other.storage},
            counters={**self.counters, **other.counters},
            measurements=(*self.measurements, *other.measurements),
            notes=(*self.notes, *other.notes),
            loads=(*self.loads, *other.loads),
            metadata=(*self.metadata, *other.metadata),
        )


def probe(
    request: ProbeRequest,
    *,
    comm: Comm,
    environment: Environment,
    options: Mapping[str, str],
    progress: Progress,
    keep: Callable[[ProbeResult], object] = lambda _: None,
) -> ProbeResult:
    """Measure what `request` specifies, with the storage options in `options`. Nothing is left behind.

    After each part, at each location, `keep` receives all that was measured so far.
    """
    folder_name = comm.broadcast(
        f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}", awaiting="the name of the probe's folder"
    )
    probed: tuple[ProbeResult, ...] = ()
    locations = probe_locations(request.uri)
    for location in locations:
        # Loads bypass the page cache, which would answer from memory.
        parts = [part for part in request.parts if part == "best" or location == locations[-1]]
        if parts:
            with ProbeFolder(
                location, folder_name, comm=comm, environment=environment, options=options
            ) as place:
                before = probed
                here = replace(request, parts=tuple(parts))
                for result in _probe_location(here, place, comm=comm, progress=progress):
                    probed = (*before, result)
                    keep(reduce(add, probed))
    return reduce(add, probed)


_FILE: Final = MEASURED_FILES["probe"]


def probe_in_folder(
    settings: RunSettings,
    request: ProbeRequest,
    *,
    comm: Comm,
    options: Mapping[str, str],
    progress: Progress,
    keep: Callable[[ProbeResult], object] = lambda _: None,
) -> ProbeResult:
    """Run the probe in a run folder, where it can be followed and its result is kept. Collective."""
    access = {"access": {"to": request.uri, "storage": dict(options)}}
    with settings.open_run(
        Workload(name="storage-probe"),
        comm=comm,
        seeds={},
        plan={"kind": "probe", **access, **asdict(request)},
        progress=progress,
    ) as (run, folder):

        def keep_here(result: ProbeResult) -> None:
            keep(result)
            if run is not None:
                published_files.write_json(folder, _FILE, asdict(result))

        result = probe(
            request,
            comm=comm,
            environment=settings.environment,
            options=options,
            progress=progress,
            keep=keep_here,
        )
        if run is not None:
            run.finish()
        return result


def read_probe(folder: Path) -> ProbeResult:
    """Read the result from the folder of a probe's run; `ObjectNotFound` if the run did not finish."""
    path = folder / _FILE
    try:
        return TypeAdapter(ProbeResult).validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ObjectNotFound("This probe left no result", uri=str(path), fix="Probe again.") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read this result: {error}", uri=str(path)) from error


def _describe_place(folder: Path | None) -> dict[str, str]:
    facts = platform.uname()
    place = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "penstock_version": __version__,
        "kernel": f"{facts.system} {facts.release}",
    }
    if folder is not None and (mount := find_mount(folder)) is not None:
        options = ",".join(mount.options)
        place |= {"device": mount.device, "file_system": mount.kind, "mount_options": options}
    return place


def _probe_location(
    request: ProbeRequest, place: ProbeFolder, *, comm: Comm, progress: Progress
) -> Iterator[ProbeResult]:
    """Measure one location with as many bytes as the time allows; after each part, yield all results."""
    affordable_bytes, is_memory = request.size_bytes, False
    if set(request.parts) != {"metadata"}:  # files for metadata calls are empty
        # Every stream transfers at least one block, however small the size.
        steps = (step for group in plan_groups(request, place.mode, num_ranks=comm.size) for step in group)
        largest_bytes = comm.size * max(step.size_bytes for step in steps)
        place.check_free_space(max(request.size_bytes, largest_bytes))
        affordable_bytes, is_memory = _calibrate(request, place, comm=comm, progress=progress)
    sized = replace(request, size_bytes=min(request.size_bytes, affordable_bytes))
    measurements: list[ProbeMeasurement] = []
    loads: list[LoadResult] = []
    metadata: list[MetadataRate] = []
    for part in ("best", "knee", "metadata"):
        if part not in request.parts:
            continue
        if part == "best":
            measurements += _measure_all(sized, place, comm=comm, progress=progress)
        elif part == "knee":
            loads.append(
                measure_load(
                    request.load,
                    place,
                    size_bytes=sized.size_bytes,
                    max_seconds=request.max_seconds,
                    comm=comm,
                    progress=progress,
                )
            )
        else:
            metadata += measure_metadata(place, request.streams, comm=comm, progress=progress)
        mine = place.storage.counters.snapshot()
        counters = sum(comm.gather(mine, awaiting="what the storages of all ranks counted"), Counters())
        notes = [*notes_on_rates(measurements), *(note for load in loads for note in load.notes)]
        if is_memory:
            notes.append(
                f"{place.mode}: files there cannot leave this host's memory, so these are its figures"
                " (tmpfs?)."
            )
        if any(one.moved_bytes > request.size_bytes for one in measurements):
            notes.append(f"{place.mode}: each stream moves at least one block, which is more than --size.")
        if affordable_bytes < request.size_bytes:
            expected_s = request.size_bytes / affordable_bytes * request.max_seconds
            notes.append(
                f"{place.mode}: {format_bytes(request.size_bytes)} would take about"
                f" {format_seconds(expected_s)} a measurement, so each moved"
                f" {format_bytes(affordable_bytes)}."
            )
        if counters.retries or counters.errors:
            notes.append(f"{place.mode}: {counters.retries} retries and {counters.errors} errors.")
        yield ProbeResult(
            uri=request.uri,
            ranks=comm.size,
            hosts=tuple(dict.fromkeys(comm.gather(comm.host, awaiting="the names of all hosts"))),
            size_bytes=request.size_bytes,
            storage={place.mode: place.storage.options},
            counters={place.mode: counters.record()},
            measurements=tuple(measurements),
            notes=tuple(notes),
            loads=tuple(loads),
            metadata=tuple(metadata),
            place=comm.broadcast(_describe_place(place.folder), awaiting="where rank 0 measures"),
        )


def _measure_all(
    request: ProbeRequest, place: ProbeFolder, *, comm: Comm, progress: Progress
) -> Iterator[ProbeMeasurement]:
    """Measure every step. The first also runs once beforehand, uncounted: memory not used lately is slow.

    The files of the uncounted run are removed at once, so that the timed write gets the same memory, now
    warm.
    """
    for number, steps in enumerate(plan_groups(request, place.mode, num_ranks=comm.size)):
        if number == 0:
            measure(steps[0], place, comm=comm, progress=progress)
            place.remove_objects()
        for step in steps:
            yield _measure_repeatedly(step, place, request.max_seconds, comm=comm, progress=progress)
        place.remove_objects()
        comm.barrier(awaiting="all ranks to remove their files between measurements")


def _measure_repeatedly(
    step: ProbeStep, place: ProbeFolder, max_seconds: float, *, comm: Comm, progress: Progress
) -> ProbeMeasurement:
    """Return the median of up to three reads within one time limit; a write needs new files, so it runs once.

    A single short measurement is noisy, and the best of several is biased upward.
    """
    found = [measure(step, place, comm=comm, progress=progress)]
    while (
        "read" in step.op
        and len(found) < _REPEATS
        and sum(one.elapsed_s for one in found) * (1 + 1 / len(found)) < max_seconds
    ):
        found.append(measure(step, place, comm=comm, progress=progress))
    found.sort(key=lambda one: one.gib_per_s)
    rates = tuple(one.gib_per_s for one in found)
    return replace(found[(len(found) - 1) // 2], repeats=rates)


def _calibrate(
    request: ProbeRequest, place: ProbeFolder, *, comm: Comm, progress: Progress
) -> tuple[int, bool]:
    """Estimate from a short write, which also warms up, what one stream per rank moves in `max_seconds`.

    Also return whether the written files stay in memory even after they are evicted.
    """
    block_bytes = min(_CALIBRATION_BLOCK_BYTES, request.size_bytes)
    step = ProbeStep(
        op="write",
        mode=place.mode,
        streams=1,
        block_bytes=block_bytes,
        blocks_per_stream=_CALIBRATION_BLOCKS,
    )
    measured = measure(step, place, comm=comm, progress=progress)
    resident_bytes, file_bytes = _evict(place)
    kept = comm.reduce(float(resident_bytes >= file_bytes > 0), "sum", awaiting="evicting the first write")
    place.remove_objects()
    affordable_bytes = int(measured.moved_bytes / measured.elapsed_s * request.max_seconds)
    return max(_SMALLEST_SIZE_BYTES, affordable_bytes), kept > 0


_NOTED_SHARE: Final = 0.1
_NOTED_S: Final = 0.1


def notes_on_rates(measurements: Sequence[ProbeMeasurement]) -> Iterator[str]:
    """Yield notes on what sequential rates hide: slow creation, and a phase before the steady state."""
    slowest = max(measurements, key=lambda measured: measured.create_s, default=None)
    if slowest is not None and slowest.create_s > max(_NOTED_S, _NOTED_SHARE * slowest.elapsed_s):
        yield (
            f"{_name(slowest)}: creating files and reserving their space took {slowest.create_s:.2f} s "
            f"before the {slowest.elapsed_s:.2f} s of writing, and is not in the rate."
        )
    for measured in measurements:
        if measured.op not in ("read", "write"):
            continue
        step_s = interval_s(measured.elapsed_s)
        each = max(1, round(_ROUND_S / step_s))
        # No write completes while the storage makes durable what it has accepted.
        moving = measured.intervals[: int((measured.elapsed_s - measured.drain_s) / step_s)]
        ended = [one.operations_per_s for one in moving]
        rounds = [float(np.mean(ended[at : at + each])) for at in range(0, len(ended) - each + 1, each)]
        is_steady, begins, *rates = find_steady_state(rounds) if rounds else (False, 0, 0.0, 0.0)
        if is_steady and begins:
            then, first = (format_rate(rate * measured.block_bytes) for rate in rates)
            yield (
                f"{_name(measured)}: the first {begins * each * step_s:g} s were another phase: "
                f"{first}, then {then}."
            )


def _name(step: ProbeMeasurement | ProbeStep) -> str:
    return f"{step.mode} {step.op}, {step.streams} x {format_bytes(step.block_bytes)}"


_BLOCK_MEMORY_BYTES: Final = 512 << 20
"""The limit of the memory of one rank's blocks, whatever depth the storage requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMeasurement:
    """The figures of one step over all ranks.

    `streams` is per rank. `resident_before` is the share of the files that was in memory before a read.
    `drain_s` is the part of `elapsed_s` in which the slowest stream waited for durability. `create_s`, the
    time before `elapsed_s`, is what the slowest stream took to create its object and reserve its space.
    `repeats` are the GiB/s of all repetitions, of which this measurement is the median.
    """

    op: str
    mode: str
    ranks: int
    streams: int
    block_bytes: int
    moved_bytes: int
    elapsed_s: float
    create_s: float
    drain_s: float
    gib_per_s: float
    operations_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    copied_bytes: int
    resident_before: float | None
    intervals: tuple[LoadInterval, ...]
    repeats: tuple[float, ...] = ()


_OPERATIONS: Final[Mapping[str, Callable[[StreamTask], StreamTimes]]] = {
    "write": timed_streams.write,
    "read": timed_streams.read,
    "random_read": timed_streams.read,
    "small_write": timed_streams.small_write,
    "small_read": timed_streams.small_read,
    "fsync": timed_streams.fsync,
}


def measure(step: ProbeStep, place: ProbeFolder, *, comm: Comm, progress: Progress) -> ProbeMeasurement:
    """Time one step.

    Collective. Before a step that reads, the step that writes its files must have run in `place`.
    """
    phase = _name(step)
    progress.begin(phase, step.size_bytes)
    unit = "read_bytes" if "read" in step.op else "written_bytes"
    progress.enter("moving", unit=unit, times=comm.size)
    if "read" not in step.op:
        numbers = [f"-{number}" for number in range(step.blocks_per_stream)]
        endings = numbers if step.op == "small_write" else [""]
        place.keys.update(
            f"rank{comm.rank}-stream{stream}{ending}" for stream in range(step.streams) for ending in endings
        )
    # A buffered read starts cold: its files are evicted, and what stayed in memory is reported.
    resident = _evict(place) if place.mode == "buffered" and "read" in step.op else (0, 0)
    copied_before = place.storage.counters.snapshot().copied_bytes.total()
    times = _run_streams(step, place, comm=comm, progress=progress)
    copied_bytes = place.storage.counters.snapshot().copied_bytes.total() - copied_before
    ranks = comm.gather((times, copied_bytes, resident), awaiting=f"all ranks to finish {phase}")
    # The clocks of hosts differ, so each rank's timestamps count from its own start.
    starts_ns = [min(stream.start_ns for stream in streams) for streams, *_ in ranks]
    every = [
        (stream, start) for (streams, *_), start in zip(ranks, starts_ns, strict=True) for stream in streams
    ]
    latencies_ns = np.concatenate([stream.latencies_ns for stream, _ in every])
    ended_ns = np.concatenate([stream.ended_ns - start for stream, start in every])
    elapsed_s = max(stream.end_ns - start for stream, start in every) / 1e9
    moved_bytes, latencies_ms = step.size_bytes * len(ranks), latencies_ns / 1e6
    resident_bytes, file_bytes = (sum(resident[which] for *_, resident in ranks) for which in (0, 1))
    return ProbeMeasurement(
        op=step.op,
        mode=step.mode,
        ranks=len(ranks),
        streams=step.streams,
        block_bytes=step.block_bytes,
        moved_bytes=moved_bytes,
        elapsed_s=elapsed_s,
        create_s=max(stream.create_ns for stream, _ in every) / 1e9,
        drain_s=max(stream.drain_ns for stream, _ in every) / 1e9,
        gib_per_s=moved_bytes / elapsed_s / 2**30,
        operations_per_s=latencies_ms.size / elapsed_s,
        p50_ms=float(np.percentile(latencies_ms, 50)),
        p99_ms=float(np.percentile(latencies_ms, 99)),
        max_ms=float(latencies_ms.max()),
        copied_bytes=sum(copied for _, copied, _ in ranks),
        resident_before=resident_bytes / file_bytes if file_bytes else None,
        intervals=intervals(ended_ns, latencies_ns, elapsed_s),
    )


def _run_streams(step: ProbeStep, place: ProbeFolder, *, comm: Comm, progress: Progress) -> list[StreamTimes]:
    """Run the step in all streams of this rank. Each has its own blocks, allocated before any clock starts.

    A stream has one block for each write that the storage keeps in flight, and one to fill meanwhile, if the
    memory limit allows. A storage that writes in the caller's thread gets a single block, which stays in the
    processor's cache.
    """
    options = place.storage.options
    in_flight = options.get("parts_in_flight") or options.get("writes_in_flight")
    overlaps = step.op == "write" and isinstance(in_flight, int) and in_flight > 1
    wanted = in_flight + 1 if overlaps and isinstance(in_flight, int) else 1
    num_blocks = min(wanted, max(2, _BLOCK_MEMORY_BYTES // (step.streams * step.block_bytes)))
    blocks = [
        Blocks(num_blocks, step.block_bytes, stream_id=comm.rank << 12 | stream)
        for stream in range(step.streams)
    ]

    def run_stream(stream: int, gate: StartGate) -> StreamTimes:
        return _OPERATIONS[step.op](
            StreamTask(
                storage=place.storage,
                step=step,
                key=f"rank{comm.rank}-stream{stream}",
                blocks=blocks[stream],
                gate=gate,
                progress=progress,
            )
        )

    return run_together(step.streams, run_stream, comm=comm, what=step.op)


def _evict(place: ProbeFolder) -> tuple[int, int]:
    """Evict this rank's files from the page cache. Returns the bytes that stayed in memory, and all bytes."""
    if place.folder is None:
        return 0, 0
    left = [residency.evict_file(str(place.folder / key)).after for key in place.keys]
    return sum(one.resident_bytes for one in left), sum(one.total_bytes for one in left)


def measurement_rows(measurements: Iterable[ProbeMeasurement]) -> list[dict[str, str]]:
    """Return one row for each measurement: the operation, its rate and its variation."""
    return [
        {
            "operation": measured.op.replace("_", " "),
            "mode": measured.mode,
            "streams": str(measured.streams),
            "block": format_bytes(measured.block_bytes),
            "GiB/s": f"{measured.gib_per_s:.3f}",
            "spread": _spread(measured),
            "ops/s": f"{measured.operations_per_s:,.0f}",
            "p99 ms": f"{measured.p99_ms:.2f}",
        }
        for measured in measurements
    ]


def _spread(measured: ProbeMeasurement) -> str:
    """Return the difference between the fastest and the slowest repetition, relative to the median."""
    rates = measured.repeats
    return f"{(rates[-1] - rates[0]) / measured.gib_per_s:.0%}" if len(rates) > 1 else "-"


def headline_rows(measurements: Iterable[ProbeMeasurement]) -> list[dict[str, str]]:
    """Return the best measurement of each operation and mode."""
    best: dict[tuple[str, str], ProbeMeasurement] = {}
    for measured in measurements:
        key = (measured.op, measured.mode)
        best[key] = max(best.get(key, measured), measured, key=lambda other: other.gib_per_s)
    return measurement_rows(best.values())
