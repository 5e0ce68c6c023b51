"""A probe from start to finish: at each location, as large as the time allows, group by group.

Collective: every rank runs the same steps in the same order and returns the same result.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.bench.probe.measurement import ProbeMeasurement, measure
from penstock.bench.probe.probe_folder import FOLDER_PREFIX, ProbeFolder
from penstock.bench.probe.probe_plan import ProbeRequest, ProbeStep, plan_groups, probe_locations
from penstock.storage import Counters
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.environment import Environment
    from penstock.progress import Progress
    from penstock.storage.protocol import OptionValue

_CALIBRATION_BLOCKS: Final = 4
_CALIBRATION_BLOCK_BYTES: Final = 8 << 20
_SMALLEST_SIZE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """All measurements of one probe; each mode's storage options, and what the storages counted.

    `size_bytes` is what was asked for; a measurement says what it moved, `notes` say why if that is less.
    """

    uri: str
    ranks: int
    hosts: tuple[str, ...]
    size_bytes: int
    storage: Mapping[str, Mapping[str, OptionValue]]
    counters: Mapping[str, Mapping[str, int | dict[str, int]]]
    measurements: tuple[ProbeMeasurement, ...]
    notes: tuple[str, ...]


def probe(
    request: ProbeRequest,
    *,
    comm: Comm,
    environment: Environment,
    options: Mapping[str, str],
    progress: Progress,
) -> ProbeResult:
    """Measure what `request` asks for, with the storage's own `options`; leave nothing behind."""
    folder_name = comm.broadcast(
        f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}", awaiting="the name of the probe's folder"
    )
    seen: list[_SeenPlace] = []
    for location in probe_locations(request.uri):
        with ProbeFolder(location, folder_name, comm=comm, environment=environment, options=options) as place:
            seen.append(_probe_place(request, place, comm=comm, progress=progress))
    return ProbeResult(
        uri=request.uri,
        ranks=comm.size,
        hosts=tuple(dict.fromkeys(comm.gather(comm.host, awaiting="the names of all hosts"))),
        size_bytes=request.size_bytes,
        storage={place.mode: place.options for place in seen},
        counters={place.mode: place.counters.record() for place in seen},
        measurements=tuple(measurement for place in seen for measurement in place.measurements),
        notes=tuple(note for place in seen for note in place.notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenPlace:
    """One location's share of the result."""

    mode: str
    options: Mapping[str, OptionValue]
    counters: Counters
    measurements: tuple[ProbeMeasurement, ...]
    notes: tuple[str, ...]


def _probe_place(request: ProbeRequest, place: ProbeFolder, *, comm: Comm, progress: Progress) -> _SeenPlace:
    place.check_free_space(request.size_bytes)
    affordable_bytes = _affordable_bytes(request, place, comm=comm, progress=progress)
    sized = replace(request, size_bytes=min(request.size_bytes, affordable_bytes))
    measurements = tuple(_measure_all(sized, place, comm=comm, progress=progress))
    mine = place.storage.counters.snapshot()
    counters = sum(comm.gather(mine, awaiting="what the storages of all ranks counted"), Counters())
    notes = []
    if affordable_bytes < request.size_bytes:
        notes.append(_smaller(request, place, affordable_bytes))
    if counters.retries or counters.errors:
        notes.append(f"{place.mode}: {counters.retries} retries and {counters.errors} errors on the way.")
    return _SeenPlace(
        mode=place.mode,
        options=place.storage.options,
        counters=counters,
        measurements=measurements,
        notes=tuple(notes),
    )


def _measure_all(
    request: ProbeRequest, place: ProbeFolder, *, comm: Comm, progress: Progress
) -> Iterator[ProbeMeasurement]:
    """Every step once, and the first one before that untimed: memory not used lately is slow.

    What it wrote is removed at once, so that the timed write gets the same, now warm, memory.
    """
    groups = plan_groups(request, place.mode, num_ranks=comm.size)
    measure(groups[0].steps[0], place, comm=comm, progress=progress)
    place.remove_objects()
    for group in groups:
        for step in group.steps:
            yield measure(step, place, comm=comm, progress=progress)
        place.remove_objects()
        comm.barrier(awaiting="all ranks to remove their files between measurements")


def _affordable_bytes(request: ProbeRequest, place: ProbeFolder, *, comm: Comm, progress: Progress) -> int:
    """What one stream of each rank moves in `max_seconds`: a short first write tells, and warms up."""
    block_bytes = min(_CALIBRATION_BLOCK_BYTES, request.size_bytes)
    step = ProbeStep(
        op="write",
        mode=place.mode,
        streams=1,
        block_bytes=block_bytes,
        blocks_per_stream=_CALIBRATION_BLOCKS,
    )
    seen = measure(step, place, comm=comm, progress=progress)
    place.remove_objects()
    return max(_SMALLEST_SIZE_BYTES, int(seen.moved_bytes / seen.elapsed_s * request.max_seconds))


def _smaller(request: ProbeRequest, place: ProbeFolder, affordable_bytes: int) -> str:
    expected_s = request.size_bytes / affordable_bytes * request.max_seconds
    return (
        f"{place.mode}: {format_bytes(request.size_bytes)} would take about {format_seconds(expected_s)} a "
        f"measurement, so each moved {format_bytes(affordable_bytes)}. --max-seconds changes that."
    )
