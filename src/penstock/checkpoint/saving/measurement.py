"""What one rank measured of one pipeline phase: timestamps, byte counts, and the check that they add up.

Timestamps go to columns that are allocated beforehand, so timing costs no memory while bytes flow. Invariant:
each cell is written once, and a ledger that does not add up is an error, never just a slower rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from penstock.errors import ShortTransfer
from penstock.storage.protocol import Counters

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.saving.pipeline import PlannedObject
    from penstock.storage.protocol import Storage

    Column = NDArray[np.int64]


_NS_PER_S = 1e9


def union_ns(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """How long at least one of the spans was under way; spans of length 0 or less count for nothing."""
    lasting = ends > begins
    order = np.argsort(begins[lasting], kind="stable")
    starts, stops = begins[lasting][order], ends[lasting][order]
    if not starts.size:
        return 0
    # A span adds what lies beyond everything that began before it.
    covered_until = np.maximum.accumulate(stops)
    before = np.concatenate([starts[:1], covered_until[:-1]])
    return int(np.maximum(stops - np.maximum(starts, before), 0).sum())


@dataclass(slots=True)
class StreamFacts:
    """What a stream counts by itself, beside the stamps; each field has one thread that adds."""

    num_objects: int = 0
    durable_bytes: int = 0
    storage_stall_ns: int = 0
    content_stall_ns: int = 0


class Tally:
    """What the storages of a phase count meanwhile: made when it begins, asked when it is over."""

    def __init__(self, storages: Sequence[Storage], num_streams: int) -> None:
        self._counters = [storages[stream % len(storages)].counters for stream in range(num_streams)]
        self._before = [counters.snapshot() for counters in self._counters]

    def by_stream(self) -> list[Counters]:
        """What was counted by the storage of each stream; nothing where an earlier stream shares it."""
        seen: set[int] = set()
        counted: list[Counters] = []
        for counters, before in zip(self._counters, self._before, strict=True):
            now = before if id(counters) in seen else counters.snapshot()
            seen.add(id(counters))
            counted.append(_difference(now, before))
        return counted


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
    """What `measure` cannot read off the stamps."""

    direction: Direction
    rank: int
    origin_ns: int
    entered_ns: int
    planned_bytes: int


def measure(
    phase: PhaseFacts,
    stamps: Stamps,
    streams: Sequence[StreamFacts],
    tally: Tally,
    *,
    wrong_bytes: tuple[WrongByte, ...] = (),
) -> Measurement:
    """The measurement of a phase that went well."""
    counted = tally.by_stream()
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
        # Opening the first objects is set-up, as it comes before the first byte.
        storage_busy_s=union_ns(np.maximum(begins, first_submit_ns), ends) / _NS_PER_S,
        call_time_sum_s=int(calls.sum() + objects.sum()) / _NS_PER_S,
        content_busy_s=union_ns(stamps.content_begin, stamps.content_end) / _NS_PER_S,
        content_stall_s=sum(each.content_stall_ns for each in streams) / _NS_PER_S,
        storage_stall_s=sum(each.storage_stall_ns for each in streams) / _NS_PER_S,
        latencies_ns=stamps.acknowledged - stamps.submitted,
        streams=tuple(
            _record(phase, stamps, number, facts, counted[number]) for number, facts in enumerate(streams)
        ),
        counters=sum(counted[1:], counted[0]),
        wrong_bytes=wrong_bytes,
    )


def _ledger(phase: PhaseFacts, stamps: Stamps, streams: Sequence[StreamFacts]) -> Ledger:
    made_bytes = _bytes_at(stamps, stamps.content_end)
    moved_bytes = _bytes_at(stamps, stamps.acknowledged)
    if phase.direction == "read":
        right_bytes = made_bytes - int(stamps.size_bytes[stamps.is_wrong].sum())
        return Ledger(planned_bytes=phase.planned_bytes, read_bytes=moved_bytes, verified_bytes=right_bytes)
    return Ledger(
        planned_bytes=phase.planned_bytes,
        generated_bytes=made_bytes,
        submitted_bytes=_bytes_at(stamps, stamps.returned),
        acknowledged_bytes=moved_bytes,
        durable_bytes=sum(each.durable_bytes for each in streams),
    )


def _record(
    phase: PhaseFacts, stamps: Stamps, number: int, facts: StreamFacts, counted: Counters
) -> StreamRecord:
    mine = (stamps.stream == number) & (stamps.acknowledged != 0)
    objects = stamps.object_stream == number
    begins = np.concatenate([stamps.submitted[mine], stamps.ending[objects, 0]])
    ends = np.concatenate([stamps.acknowledged[mine], stamps.ending[objects, 1]])
    return StreamRecord(
        rank=phase.rank,
        stream=number,
        objects=facts.num_objects,
        chunks=int(mine.sum()),
        moved_bytes=int(stamps.size_bytes[mine].sum()),
        busy_s=union_ns(begins, ends) / _NS_PER_S,
        stall_s=facts.storage_stall_ns / _NS_PER_S,
        requests=counted.requests,
        retries=counted.retries,
        errors=counted.errors,
    )


def _bytes_at(stamps: Stamps, station: Column) -> int:
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
    """What one writer or reader of one rank did. Kept for each and merged, none overwritten.

    `requests`, `retries` and `errors` are those of the storage that this stream used: its own where each was
    given one, else they stand with stream 0 alone. `stall_s` is how long it waited for the other side.
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
    """What one rank saw of one phase. All `*_ns` are CLOCK_MONOTONIC; `origin_ns` is one moment of all ranks.

    Content is made (writing) or verified (reading) beside the storage: `content_busy_s` is the union of these
    times, `content_stall_s` what its threads waited for buffers, `storage_stall_s` what the streams waited
    for content, or for free buffers to read into. `latencies_ns` has one entry a chunk.
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
                fix=f"Bytes were lost before they were {name}; nothing of this phase counts.",
            )


now_ns = time.monotonic_ns


@dataclass(frozen=True, slots=True, eq=False)
class Stamps:
    """Nanoseconds of CLOCK_MONOTONIC, one row a chunk; 0 where something did not happen.

    Content is made or verified from `content_begin` to `content_end`; the storage has a chunk from
    `submitted` to `acknowledged`; the call that gave it to the storage came back at `returned`. `stream` is
    the number of the stream. `opening` and `ending` are spans of the calls for whole objects, (objects, 2),
    by `object_stream`. `is_wrong` marks chunks that were not what they should be.
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
class Job:
    """One planned object on its way; its chunks are numbered from `first_chunk`."""

    number: int
    planned: PlannedObject
    first_chunk: int
    num_chunks: int


def number_chunks(planned: Sequence[PlannedObject], chunk_bytes: int) -> tuple[Job, ...]:
    """Every object with its range of chunk numbers; an empty object has none."""
    jobs: list[Job] = []
    first = 0
    for number, each in enumerate(planned):
        num_chunks = -(-each.size_bytes // chunk_bytes)
        jobs.append(Job(number, each, first, num_chunks))
        first += num_chunks
    return tuple(jobs)


def total_chunks(jobs: Sequence[Job]) -> int:
    """Of all objects."""
    return jobs[-1].first_chunk + jobs[-1].num_chunks if jobs else 0
