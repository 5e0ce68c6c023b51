"""The ledger of a phase: timestamps and bytes of one rank, and the figures of all ranks.

Timestamps go to columns that are allocated in advance, so timing needs no memory while bytes flow.
Invariants: each cell is written once; a ledger that does not add up raises an error instead of yielding a
slower rate; the rate of all ranks is all bytes divided by the time from the earliest first byte to the latest
durable one, so a slow rank cannot hide behind faster ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.errors import ShortTransfer
from penstock.storage.protocol import Counters, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cluster.comm import Comm

_GIB = 2**30
_NS_PER_S = 1e9
_DRAIN_SHARE = 0.5
"""A phase that spends more than this share of its duration waiting at the end is bound by durability."""

Direction = Literal["write", "read"]
Bottleneck = Literal["storage", "generator", "verifier", "durability"]

now_ns = time.monotonic_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The bytes that passed each station of a write or a read.

    A write uses all fields but the last two; a read uses `planned_bytes` and the last two.
    """

    planned_bytes: int
    generated_bytes: int = 0
    submitted_bytes: int = 0
    acknowledged_bytes: int = 0
    durable_bytes: int = 0
    read_bytes: int = 0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WrongByte:
    """The position of the first wrong byte of a chunk; the rest of the object is still read and verified."""

    key: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """The work of one writer or reader of one rank.

    `requests`, `retries` and `errors` are counted by the stream's own `Storage`; if streams share one, all
    are attributed to stream 0. `stall_s` is the time that the stream waited for content or free buffers.
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

    All `*_ns` are CLOCK_MONOTONIC; `origin_ns` is the same moment on all ranks.

    Content is generated (writing) or verified (reading) while the storage works: `content_busy_s` is the
    union of these times, `content_stall_s` the time that content's threads waited for buffers, and
    `storage_stall_s` the time that streams waited for content, or for free buffers to read into.
    `latencies_ns` has one entry per chunk.
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

    @property
    def moved_bytes(self) -> int:
        """The bytes that the storage acknowledged or returned."""
        return self.ledger.read_bytes if self.direction == "read" else self.ledger.acknowledged_bytes

    @property
    def duration_ns(self) -> int:
        """The time from the first byte to the last durable or verified one, at least 1 ns."""
        return max(self.end_ns - self.first_submit_ns, 1)

    def require_complete(self, uri: str) -> None:
        """Raise unless every planned byte reached every station of the phase."""
        passed = (
            ("read",) if self.direction == "read" else ("generated", "submitted", "acknowledged", "durable")
        )
        stations = {name: getattr(self.ledger, f"{name}_bytes") for name in passed}
        for name, size_bytes in stations.items():
            if size_bytes != self.ledger.planned_bytes:
                account = ", ".join(f"{each} {reached}" for each, reached in stations.items())
                raise ShortTransfer(
                    f"The ledger does not add up: planned {self.ledger.planned_bytes} bytes, {account}",
                    uri=uri,
                    expected_bytes=self.ledger.planned_bytes,
                    actual_bytes=size_bytes,
                    fix=f"Bytes were lost before they were {name}; no result of this phase is valid.",
                )

    def find_bottleneck(self) -> Bottleneck:
        """Name the part for which the phase waited most.

        Content is the bottleneck if streams waited for it (or, when reading, for buffers that were still
        being verified) longer than for the storage, and longer than content waited for buffers.
        """
        if self.direction == "write" and self.end_ns - self.last_submit_ns > _DRAIN_SHARE * self.duration_ns:
            return "durability"
        busy_s = sum(stream.busy_s for stream in self.streams)
        if self.storage_stall_s <= max(self.content_stall_s, busy_s):
            return "storage"
        return "generator" if self.direction == "write" else "verifier"


class Timestamps:
    """The times at which each chunk of a phase passed each station on this rank, and each stream's counts.

    Times are nanoseconds of CLOCK_MONOTONIC, one row per chunk, or 0 for an event that did not happen.
    Content is generated or verified from `content_begin` to `content_end`; the storage has a chunk from
    `submitted` to `acknowledged`; the call that submitted it returned at `returned`. `opening` and `ending`,
    of shape (objects, 2), are when the calls that open and finish each object began and ended; the stream
    `object_stream` made them. `is_wrong` marks chunks with wrong bytes. Objects of `sizes` bytes have
    consecutive chunk numbers; an empty object has none.
    """

    def __init__(self, sizes: Sequence[int], chunk_bytes: int, num_streams: int, entered_ns: int) -> None:
        self.entered_ns = entered_ns
        self.planned_bytes = sum(sizes)
        self._first_chunk = [0, *accumulate(-(-size // chunk_bytes) for size in sizes)]
        columns = np.zeros((7, self._first_chunk[-1]), dtype=np.int64)
        self.content_begin, self.content_end, self.submitted, self.returned, self.acknowledged = columns[:5]
        self.size_bytes, self.stream = columns[5:]
        self.is_wrong = np.zeros(self._first_chunk[-1], dtype=np.bool_)
        self.opening, self.ending = np.zeros((2, len(sizes), 2), dtype=np.int64)
        self.object_stream = np.zeros(len(sizes), dtype=np.int64)
        # Each cell of these arrays is written by one thread.
        counts = np.zeros((4, num_streams), dtype=np.int64)
        self.num_objects, self.durable_bytes, self.storage_stall_ns, self.content_stall_ns = counts
        self._counters: list[tuple[Counters, Counters]] = []

    def begin_counting(self, storages: Sequence[Storage]) -> None:
        """Attribute to this phase whatever `storages` count from now on; stream i uses `storages[i % n]`."""
        counters = [storages[stream % len(storages)].counters for stream in range(len(self.num_objects))]
        self._counters = [(each, each.snapshot()) for each in counters]

    def chunks(self, number: int) -> range:
        """Return the chunk numbers of an object."""
        return range(self._first_chunk[number], self._first_chunk[number + 1])

    def measure(
        self,
        direction: Direction,
        *,
        rank: int = 0,
        origin_ns: int | None = None,
        wrong_bytes: tuple[WrongByte, ...] = (),
    ) -> Measurement:
        """Return the measurement of a phase that succeeded."""
        counted: list[Counters] = []
        for number, (counters, before) in enumerate(self._counters):
            is_shared = any(counters is other for other, _ in self._counters[:number])
            counted.append((before if is_shared else counters.snapshot()) - before)
        begins = np.concatenate([self.submitted, self.opening[:, 0], self.ending[:, 0]])
        ends = np.concatenate([self.acknowledged, self.opening[:, 1], self.ending[:, 1]])
        first = np.concatenate([self.submitted, self.ending[:, 0]])
        first_submit_ns = int(first[first != 0].min(initial=2**63 - 1)) if first.any() else self.entered_ns
        calls = int((self.returned - self.submitted).sum())
        calls += int((np.diff(self.opening) + np.diff(self.ending)).sum())
        return Measurement(
            direction=direction,
            rank=rank,
            ledger=self._ledger(direction),
            origin_ns=self.entered_ns if origin_ns is None else origin_ns,
            entered_ns=self.entered_ns,
            first_submit_ns=first_submit_ns,
            last_submit_ns=int(self.returned.max(initial=0)) or first_submit_ns,
            end_ns=int(np.concatenate([ends, self.content_end]).max(initial=0)) or first_submit_ns,
            # Opening the first objects is set-up, because it precedes the first byte.
            storage_busy_s=union_ns(np.maximum(begins, first_submit_ns), ends) / _NS_PER_S,
            call_time_sum_s=calls / _NS_PER_S,
            content_busy_s=union_ns(self.content_begin, self.content_end) / _NS_PER_S,
            content_stall_s=float(self.content_stall_ns.sum()) / _NS_PER_S,
            storage_stall_s=float(self.storage_stall_ns.sum()) / _NS_PER_S,
            latencies_ns=self.acknowledged - self.submitted,
            streams=tuple(self._stream_record(rank, stream, each) for stream, each in enumerate(counted)),
            counters=sum(counted[1:], counted[0]),
            wrong_bytes=wrong_bytes,
        )

    def _ledger(self, direction: Direction) -> Ledger:
        def reached(station: NDArray[np.int64]) -> int:
            return int(self.size_bytes[station != 0].sum())

        if direction == "read":
            return Ledger(
                planned_bytes=self.planned_bytes,
                read_bytes=reached(self.acknowledged),
                verified_bytes=reached(self.content_end) - int(self.size_bytes[self.is_wrong].sum()),
            )
        return Ledger(
            planned_bytes=self.planned_bytes,
            generated_bytes=reached(self.content_end),
            submitted_bytes=reached(self.returned),
            acknowledged_bytes=reached(self.acknowledged),
            durable_bytes=int(self.durable_bytes.sum()),
        )

    def _stream_record(self, rank: int, stream: int, counted: Counters) -> StreamRecord:
        own = (self.stream == stream) & (self.acknowledged != 0)
        objects = self.object_stream == stream
        begins = np.concatenate([self.submitted[own], self.ending[objects, 0]])
        ends = np.concatenate([self.acknowledged[own], self.ending[objects, 1]])
        return StreamRecord(
            rank=rank,
            stream=stream,
            objects=int(self.num_objects[stream]),
            chunks=int(own.sum()),
            moved_bytes=int(self.size_bytes[own].sum()),
            busy_s=union_ns(begins, ends) / _NS_PER_S,
            stall_s=float(self.storage_stall_ns[stream]) / _NS_PER_S,
            requests=counted.requests,
            retries=counted.retries,
            errors=counted.errors,
        )


def union_ns(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    """Return the time in which at least one span was in progress; empty and negative spans do not count."""
    lasting = ends > begins
    order = np.argsort(begins[lasting], kind="stable")
    starts, stops = begins[lasting][order], ends[lasting][order]
    if not starts.size:
        return 0
    # A span adds the part of itself that lies beyond everything that began before it.
    covered_until = np.maximum.accumulate(stops)
    before = np.concatenate([starts[:1], covered_until[:-1]])
    return int(np.maximum(stops - np.maximum(starts, before), 0).sum())


def common_origin_ns(comm: Comm, awaiting: str) -> int:
    """Return the same moment for all ranks, on this rank's own clock, because the clocks of hosts differ."""
    comm.barrier(awaiting=awaiting)
    return now_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFigures:
    """The figures of a phase over all ranks.

    Set-up, pipeline, drain and busy times are the longest of any rank; `latencies_ns` are those of all ranks.

    `duration_s` runs from the earliest first submit to the latest durable end. `content` is what was
    generated or verified. Stalls and `call_time_sum_s` are sums over all streams, for diagnosis only.
    """

    direction: Direction
    ranks: int
    moved_bytes: int
    verified_bytes: int
    wrong_bytes: int
    """The number of wrong bytes that were found, at most one per chunk."""
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
    overhead_percent: float
    latencies_ns: NDArray[np.int64]
    bottleneck: Bottleneck
    slowest_rank: int
    streams: tuple[StreamRecord, ...]
    counters: Counters

    def record(self) -> dict[str, object]:
        """Return all figures as plain data, for the results of a run."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "latencies_ns"}
        plain["streams"] = [asdict(stream) for stream in self.streams]
        plain["counters"] = self.counters.record()
        return plain | summarize_latencies(self.latencies_ns)


def summarize_latencies(latencies_ns: NDArray[np.int64]) -> dict[str, float]:
    """Return p50, p99 and maximum in milliseconds, 0 if there are no latencies."""
    found = np.percentile(latencies_ns if latencies_ns.size else 0, (50, 99, 100)) / 1e6
    return dict(zip(("p50_ms", "p99_ms", "max_ms"), found.tolist(), strict=True))


def combine_ranks(measurements: Sequence[Measurement]) -> PipelineFigures:
    """Return the figures of one phase from the measurements of all ranks, in rank order."""
    begins = [each.first_submit_ns - each.origin_ns for each in measurements]
    ends = [each.end_ns - each.origin_ns for each in measurements]
    own_s = [max(end - begin, 1) / _NS_PER_S for begin, end in zip(begins, ends, strict=True)]
    moved = [each.moved_bytes for each in measurements]
    rates = [size / _GIB / took_s for size, took_s in zip(moved, own_s, strict=True)]
    duration_s = max(max(ends) - min(begins), 1) / _NS_PER_S
    slowest = measurements[int(np.argmax(own_s))]
    slowest_busy_s = max(slowest.storage_busy_s, slowest.content_busy_s)

    first, *others = [each.counters for each in measurements]
    return PipelineFigures(
        direction=slowest.direction,
        ranks=len(measurements),
        moved_bytes=sum(moved),
        verified_bytes=sum(each.ledger.verified_bytes for each in measurements),
        wrong_bytes=sum(len(each.wrong_bytes) for each in measurements),
        duration_s=duration_s,
        gib_per_s=sum(moved) / _GIB / duration_s,
        mean_gib_per_s=float(np.mean(rates)),
        min_gib_per_s=min(rates),
        max_duration_s=max(own_s),
        setup_s=max(each.first_submit_ns - each.entered_ns for each in measurements) / _NS_PER_S,
        pipeline_s=max(each.last_submit_ns - each.first_submit_ns for each in measurements) / _NS_PER_S,
        drain_s=max(each.end_ns - each.last_submit_ns for each in measurements) / _NS_PER_S,
        storage_busy_s=max(each.storage_busy_s for each in measurements),
        content_busy_s=max(each.content_busy_s for each in measurements),
        call_time_sum_s=sum(each.call_time_sum_s for each in measurements),
        content_stall_s=sum(each.content_stall_s for each in measurements),
        storage_stall_s=sum(each.storage_stall_s for each in measurements),
        # The share of the slowest rank's time in which neither the storage nor the content was busy.
        overhead_percent=max(0.0, (1 - slowest_busy_s * _NS_PER_S / slowest.duration_ns) * 100),
        latencies_ns=np.concatenate([each.latencies_ns for each in measurements]),
        bottleneck=slowest.find_bottleneck(),
        slowest_rank=slowest.rank,
        streams=tuple(stream for each in measurements for stream in each.streams),
        counters=sum(others, first),
    )
