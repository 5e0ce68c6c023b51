"""What the ranks measured of a pipeline phase: timestamps and byte counts of one rank, figures of all.

Timestamps go to columns that are allocated beforehand, so timing costs no memory while bytes flow.
Invariants: each cell is written once; a ledger that does not add up is an error, never a slower rate; the
rate of all ranks is all bytes over the time from the earliest first byte to the latest durable one, so no
rank can hide behind the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from penstock.errors import ShortTransfer
from penstock.storage.protocol import Counters, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.transfer.pipeline import PlannedObject

    Column = NDArray[np.int64]
    from penstock.cluster.comm import Comm


_NS_PER_S = 1e9


def union_ns(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """How long at least one of the spans was in progress; spans of length 0 or less do not count."""
    lasting = ends > begins
    order = np.argsort(begins[lasting], kind="stable")
    starts, stops = begins[lasting][order], ends[lasting][order]
    if not starts.size:
        return 0
    # A span adds the part that lies beyond everything that began before it.
    covered_until = np.maximum.accumulate(stops)
    before = np.concatenate([starts[:1], covered_until[:-1]])
    return int(np.maximum(stops - np.maximum(starts, before), 0).sum())


@dataclass(slots=True)
class StreamFacts:
    """What a stream counts besides its timestamps; each field is written by one thread."""

    num_objects: int = 0
    durable_bytes: int = 0
    storage_stall_ns: int = 0
    content_stall_ns: int = 0


class CounterDeltas:
    """What the storages of a phase count from its beginning, when this is made, to its end."""

    def __init__(self, storages: Sequence[Storage], num_streams: int) -> None:
        self._counters = [storages[stream % len(storages)].counters for stream in range(num_streams)]
        self._before = [counters.snapshot() for counters in self._counters]

    def by_stream(self) -> list[Counters]:
        """The counts of each stream's storage; zeros where an earlier stream shares it."""
        counted: set[int] = set()
        deltas: list[Counters] = []
        for counters, before in zip(self._counters, self._before, strict=True):
            now = before if id(counters) in counted else counters.snapshot()
            counted.add(id(counters))
            deltas.append(_difference(now, before))
        return deltas


def _difference(now: Counters, before: Counters) -> Counters:
    return Counters(
        requests=now.requests - before.requests,
        retries=now.retries - before.retries,
        errors=now.errors - before.errors,
        written_bytes=now.written_bytes - before.written_bytes,
        read_bytes=now.read_bytes - before.read_bytes,
        copied_bytes=now.copied_bytes - before.copied_bytes,
        requests_by_endpoint=now.requests_by_endpoint - before.requests_by_endpoint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFacts:
    """What `measure` cannot derive from timestamps."""

    direction: Direction
    rank: int
    origin_ns: int
    entered_ns: int
    planned_bytes: int


def measure(
    phase: PhaseFacts,
    stamps: Timestamps,
    streams: Sequence[StreamFacts],
    counter_deltas: CounterDeltas,
    *,
    wrong_bytes: tuple[WrongByte, ...] = (),
) -> Measurement:
    """The measurement of a successful phase."""
    counters = counter_deltas.by_stream()
    begins = np.concatenate([stamps.submitted, stamps.opening[:, 0], stamps.ending[:, 0]])
    ends = np.concatenate([stamps.acknowledged, stamps.opening[:, 1], stamps.ending[:, 1]])
    first_submit_ns = _earliest(stamps.submitted, stamps.ending[:, 0], default=phase.entered_ns)
    calls = stamps.returned - stamps.submitted
    objects = (stamps.opening[:, 1] - stamps.opening[:, 0]) + (stamps.ending[:, 1] - stamps.ending[:, 0])
    return Measurement(
        direction=phase.direction,
        rank=phase.rank,
        ledger=_ledger(phase, stamps, streams),
        origin_ns=phase.origin_ns,
        entered_ns=phase.entered_ns,
        first_submit_ns=first_submit_ns,
        last_submit_ns=_latest(stamps.returned, default=first_submit_ns),
        end_ns=_latest(ends, stamps.content_end, default=first_submit_ns),
        # Opening the first objects is set-up, because it comes before the first byte.
        storage_busy_s=union_ns(np.maximum(begins, first_submit_ns), ends) / _NS_PER_S,
        call_time_sum_s=int(calls.sum() + objects.sum()) / _NS_PER_S,
        content_busy_s=union_ns(stamps.content_begin, stamps.content_end) / _NS_PER_S,
        content_stall_s=sum(facts.content_stall_ns for facts in streams) / _NS_PER_S,
        storage_stall_s=sum(facts.storage_stall_ns for facts in streams) / _NS_PER_S,
        latencies_ns=stamps.acknowledged - stamps.submitted,
        streams=tuple(
            _record(phase, stamps, number, facts, counters[number]) for number, facts in enumerate(streams)
        ),
        counters=sum(counters[1:], counters[0]),
        wrong_bytes=wrong_bytes,
    )


def _ledger(phase: PhaseFacts, stamps: Timestamps, streams: Sequence[StreamFacts]) -> Ledger:
    content_bytes = _bytes_at(stamps, stamps.content_end)
    moved_bytes = _bytes_at(stamps, stamps.acknowledged)
    if phase.direction == "read":
        right_bytes = content_bytes - int(stamps.size_bytes[stamps.is_wrong].sum())
        return Ledger(planned_bytes=phase.planned_bytes, read_bytes=moved_bytes, verified_bytes=right_bytes)
    return Ledger(
        planned_bytes=phase.planned_bytes,
        generated_bytes=content_bytes,
        submitted_bytes=_bytes_at(stamps, stamps.returned),
        acknowledged_bytes=moved_bytes,
        durable_bytes=sum(facts.durable_bytes for facts in streams),
    )


def _record(
    phase: PhaseFacts, stamps: Timestamps, number: int, facts: StreamFacts, counted: Counters
) -> StreamRecord:
    own = (stamps.stream == number) & (stamps.acknowledged != 0)
    objects = stamps.object_stream == number
    begins = np.concatenate([stamps.submitted[own], stamps.ending[objects, 0]])
    ends = np.concatenate([stamps.acknowledged[own], stamps.ending[objects, 1]])
    return StreamRecord(
        rank=phase.rank,
        stream=number,
        objects=facts.num_objects,
        chunks=int(own.sum()),
        moved_bytes=int(stamps.size_bytes[own].sum()),
        busy_s=union_ns(begins, ends) / _NS_PER_S,
        stall_s=facts.storage_stall_ns / _NS_PER_S,
        requests=counted.requests,
        retries=counted.retries,
        errors=counted.errors,
    )


def _bytes_at(stamps: Timestamps, station: Column) -> int:
    """Bytes of all chunks that reached a station."""
    return int(stamps.size_bytes[station != 0].sum())


def _earliest(*columns: Column, default: int) -> int:
    happened = np.concatenate([column[column != 0] for column in columns])
    return int(happened.min()) if happened.size else default


def _latest(*columns: Column, default: int) -> int:
    return max((int(column.max()) for column in columns if column.size), default=default) or default


Direction = Literal["write", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes at each station. Writing uses all but the last two, reading `planned`, `read` and `verified`."""

    planned_bytes: int
    generated_bytes: int = 0
    submitted_bytes: int = 0
    acknowledged_bytes: int = 0
    durable_bytes: int = 0
    read_bytes: int = 0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WrongByte:
    """Where the first wrong byte of one chunk was read; the rest of the object is still read and verified."""

    key: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """What one writer or reader of one rank did.

    `requests`, `retries` and `errors` are those of the stream's own storage; where streams share one, they
    are all with stream 0. `stall_s` is how long the stream waited for content or free buffers.
    """

    rank: int
    stream: int
    objects: int
    chunks: int
    moved_bytes: int
    busy_s: float
    stall_s: float
    requests: int
    retries: int
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One rank's measurement of one phase.

    All `*_ns` are CLOCK_MONOTONIC; ranks share the moment `origin_ns`.

    Content is generated (writing) or verified (reading) while the storage works: `content_busy_s` is the
    union of these times, `content_stall_s` what its threads waited for buffers, `storage_stall_s` what the
    streams waited for content, or for free buffers to read into. `latencies_ns` has one entry per chunk.
    """

    direction: Direction
    rank: int
    ledger: Ledger
    origin_ns: int
    entered_ns: int
    first_submit_ns: int
    last_submit_ns: int
    end_ns: int
    storage_busy_s: float
    call_time_sum_s: float
    content_busy_s: float
    content_stall_s: float
    storage_stall_s: float
    latencies_ns: NDArray[np.int64]
    streams: tuple[StreamRecord, ...]
    counters: Counters
    wrong_bytes: tuple[WrongByte, ...] = ()


def require_durable(ledger: Ledger, *, uri: str) -> None:
    """Raise unless every planned byte was generated, submitted, acknowledged and made durable."""
    stations = {
        "generated": ledger.generated_bytes,
        "submitted": ledger.submitted_bytes,
        "acknowledged": ledger.acknowledged_bytes,
        "durable": ledger.durable_bytes,
    }
    _require(ledger.planned_bytes, stations, uri)


def require_read(ledger: Ledger, *, uri: str) -> None:
    """Raise unless every planned byte was read."""
    _require(ledger.planned_bytes, {"read": ledger.read_bytes}, uri)


def _require(planned_bytes: int, stations: dict[str, int], uri: str) -> None:
    account = ", ".join(f"{name} {size_bytes}" for name, size_bytes in stations.items())
    for name, size_bytes in stations.items():
        if size_bytes != planned_bytes:
            raise ShortTransfer(
                f"The ledger does not add up: planned {planned_bytes} bytes, {account}",
                uri=uri,
                expected_bytes=planned_bytes,
                actual_bytes=size_bytes,
                fix=f"Bytes were lost before they were {name}; no result of this phase is valid.",
            )


now_ns = time.monotonic_ns


@dataclass(frozen=True, slots=True, eq=False)
class Timestamps:
    """Nanoseconds of CLOCK_MONOTONIC, one row per chunk; 0 where something did not happen.

    Content is generated or verified from `content_begin` to `content_end`; the storage has a chunk from
    `submitted` to `acknowledged`; the call that submitted it returned at `returned`. `stream` is the number
    of the stream. `opening` and `ending` are the spans of the calls for whole objects, (objects, 2), made by
    `object_stream`. `is_wrong` marks chunks with wrong bytes.
    """

    content_begin: Column
    content_end: Column
    submitted: Column
    returned: Column
    acknowledged: Column
    size_bytes: Column
    stream: Column
    opening: Column
    ending: Column
    object_stream: Column
    is_wrong: NDArray[np.bool_]

    @classmethod
    def for_chunks(cls, num_chunks: int, num_objects: int) -> Self:
        """Empty columns."""
        chunks = np.zeros((7, num_chunks), dtype=np.int64)
        spans = np.zeros((2, num_objects, 2), dtype=np.int64)
        return cls(
            content_begin=chunks[0],
            content_end=chunks[1],
            submitted=chunks[2],
            returned=chunks[3],
            acknowledged=chunks[4],
            size_bytes=chunks[5],
            stream=chunks[6],
            opening=spans[0],
            ending=spans[1],
            object_stream=np.zeros(num_objects, dtype=np.int64),
            is_wrong=np.zeros(num_chunks, dtype=np.bool_),
        )


@dataclass(frozen=True, slots=True)
class ObjectJob:
    """One planned object in the pipeline; its chunks are numbered from `first_chunk`."""

    number: int
    planned: PlannedObject
    first_chunk: int
    num_chunks: int


def number_chunks(planned: Sequence[PlannedObject], chunk_bytes: int) -> tuple[ObjectJob, ...]:
    """Every object with its range of chunk numbers; an empty object has none."""
    jobs: list[ObjectJob] = []
    first = 0
    for number, planned_object in enumerate(planned):
        num_chunks = -(-planned_object.size_bytes // chunk_bytes)
        jobs.append(ObjectJob(number, planned_object, first, num_chunks))
        first += num_chunks
    return tuple(jobs)


def total_chunks(jobs: Sequence[ObjectJob]) -> int:
    """The number of chunks of all objects."""
    return jobs[-1].first_chunk + jobs[-1].num_chunks if jobs else 0


Bottleneck = Literal["storage", "generator", "verifier", "durability"]

_DRAIN_SHARE = 0.5
"""A phase that waits at the end for more than this share of its duration is bound by durability."""


def find_bottleneck(measurement: Measurement) -> Bottleneck:
    """What the phase waited for most.

    If content waits for buffers, storage is the bottleneck; if storage waits for content (or, reading, for
    buffers that are still being verified), content is.
    """
    duration_ns = max(measurement.end_ns - measurement.first_submit_ns, 1)
    if measurement.direction == "write":
        if (measurement.end_ns - measurement.last_submit_ns) / duration_ns > _DRAIN_SHARE:
            return "durability"
        return "generator" if measurement.storage_stall_s > measurement.content_stall_s else "storage"
    return "verifier" if measurement.storage_stall_s > measurement.content_stall_s else "storage"


_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFigures:
    """The figures of a phase over all ranks.

    Set-up, pipeline, drain and busy times are the longest of any rank.

    `duration_s` runs from the earliest first submit to the latest durable end. `content` is what was
    generated or verified. Stalls and `call_time_sum_s` are sums over all streams, for diagnosis only. Rates
    of what did not happen (as verification that was switched off) are None.
    """

    direction: Direction
    ranks: int
    moved_bytes: int
    verified_bytes: int
    wrong_bytes: int
    """Places, at most one per chunk."""
    duration_s: float
    gib_per_s: float
    mean_gib_per_s: float
    min_gib_per_s: float
    max_duration_s: float
    setup_s: float
    pipeline_s: float
    drain_s: float
    storage_busy_s: float
    content_busy_s: float
    call_time_sum_s: float
    content_stall_s: float
    storage_stall_s: float
    content_gib_per_s: float | None
    storage_gib_per_s: float | None
    content_to_storage: float | None
    overhead_percent: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    bottleneck: Bottleneck
    slowest_rank: int
    streams: tuple[StreamRecord, ...]
    counters: Counters

    def record(self) -> dict[str, object]:
        """All figures as plain data, for the results of a run."""
        plain: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        plain["streams"] = [asdict(stream) for stream in self.streams]
        plain["counters"] = self.counters.record()
        return plain


def common_origin_ns(comm: Comm, awaiting: str) -> int:
    """A moment that all ranks share, on each rank's own clock, because clocks of hosts differ."""
    comm.barrier(awaiting=awaiting)
    return now_ns()


def combine_ranks(measurements: Sequence[Measurement]) -> PipelineFigures:
    """The figures of one phase from the measurements of all ranks, in rank order."""
    begins = [measurement.first_submit_ns - measurement.origin_ns for measurement in measurements]
    ends = [measurement.end_ns - measurement.origin_ns for measurement in measurements]
    own_s = [max(end - begin, 1) / _NS_PER_S for begin, end in zip(begins, ends, strict=True)]
    moved = [moved_bytes(measurement) for measurement in measurements]
    rates = [size / _GIB / took_s for size, took_s in zip(moved, own_s, strict=True)]
    duration_s = max(max(ends) - min(begins), 1) / _NS_PER_S
    slowest = measurements[int(np.argmax(own_s))]
    content_rate = _rate(measurements, [measurement.content_busy_s for measurement in measurements])
    storage_rate = _rate(measurements, [measurement.storage_busy_s for measurement in measurements])
    latencies_ms = np.concatenate([measurement.latencies_ns for measurement in measurements]) / 1e6
    p50, p99, most = (
        np.percentile(latencies_ms, (50, 99, 100)).tolist() if latencies_ms.size else (0.0, 0.0, 0.0)
    )
    first, *others = [measurement.counters for measurement in measurements]
    return PipelineFigures(
        direction=slowest.direction,
        ranks=len(measurements),
        moved_bytes=sum(moved),
        verified_bytes=sum(measurement.ledger.verified_bytes for measurement in measurements),
        wrong_bytes=sum(len(measurement.wrong_bytes) for measurement in measurements),
        duration_s=duration_s,
        gib_per_s=sum(moved) / _GIB / duration_s,
        mean_gib_per_s=float(np.mean(rates)),
        min_gib_per_s=min(rates),
        max_duration_s=max(own_s),
        setup_s=max(measurement.first_submit_ns - measurement.entered_ns for measurement in measurements)
        / _NS_PER_S,
        pipeline_s=max(
            measurement.last_submit_ns - measurement.first_submit_ns for measurement in measurements
        )
        / _NS_PER_S,
        drain_s=max(measurement.end_ns - measurement.last_submit_ns for measurement in measurements)
        / _NS_PER_S,
        storage_busy_s=max(measurement.storage_busy_s for measurement in measurements),
        content_busy_s=max(measurement.content_busy_s for measurement in measurements),
        call_time_sum_s=sum(measurement.call_time_sum_s for measurement in measurements),
        content_stall_s=sum(measurement.content_stall_s for measurement in measurements),
        storage_stall_s=sum(measurement.storage_stall_s for measurement in measurements),
        content_gib_per_s=content_rate,
        storage_gib_per_s=storage_rate,
        content_to_storage=content_rate / storage_rate if content_rate and storage_rate else None,
        overhead_percent=_overhead_percent(slowest),
        p50_ms=p50,
        p99_ms=p99,
        max_ms=most,
        bottleneck=find_bottleneck(slowest),
        slowest_rank=slowest.rank,
        streams=tuple(stream for measurement in measurements for stream in measurement.streams),
        counters=sum(others, first),
    )


def moved_bytes(measurement: Measurement) -> int:
    """The bytes that the storage acknowledged or returned."""
    ledger = measurement.ledger
    return ledger.read_bytes if measurement.direction == "read" else ledger.acknowledged_bytes


def _rate(measurements: Sequence[Measurement], busy_s: Sequence[float]) -> float | None:
    """GiB/s of all ranks together while busy; of moved bytes, so that the rates can be compared."""
    rates = [
        moved_bytes(measurement) / _GIB / took_s
        for measurement, took_s in zip(measurements, busy_s, strict=True)
        if took_s > 0
    ]
    return sum(rates) if rates else None


def _overhead_percent(measurement: Measurement) -> float:
    """The share of a rank's time in which neither the storage nor the content was busy."""
    duration_s = max(measurement.end_ns - measurement.first_submit_ns, 1) / _NS_PER_S
    busy_s = max(measurement.storage_busy_s, measurement.content_busy_s)
    return max(0.0, (duration_s - busy_s) / duration_s * 100)
