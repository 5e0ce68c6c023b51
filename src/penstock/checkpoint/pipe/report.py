"""What a phase was seen to do, from the stamps of its chunks: pure arithmetic, after everything is over.

Honest time: set-up, pipeline and drain apart; the time that the storage was busy is the union of all spans in
which it had something to do; content that was made or verified meanwhile has a union of its own. Invariant:
rates divide acknowledged (or read) bytes by time that ends when the last of them is durable (or verified).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.pipe.base import Direction, Ledger, Measurement, StreamRecord, WrongByte
from penstock.storage.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.checkpoint.pipe.stamps import Column, Stamps
    from penstock.storage.protocol import Storage

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
