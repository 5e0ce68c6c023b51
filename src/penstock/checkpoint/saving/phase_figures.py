"""One phase over all ranks: measurements become the figures that are published, and its bottleneck.

Invariant: a job's rate is all bytes over the time from the earliest first byte to the latest durable one, so
no rank can hide behind the others; the ranks' own mean and extremes stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.checkpoint.saving.measurement import now_ns

if TYPE_CHECKING:
    from penstock.checkpoint.saving.measurement import Direction, Measurement, StreamRecord
    from penstock.cluster.comm import Comm
    from penstock.storage.protocol import Counters


Bottleneck = Literal["storage", "generator", "verifier", "durability"]

_DRAIN_SHARE = 0.5
"""Of the duration: a longer wait at the end than this is what the phase consisted of."""


def bottleneck(measurement: Measurement) -> Bottleneck:
    """What the phase waited for most.

    Content that waits for buffers has the storage ahead of it; a storage that waits for content (or, reading,
    for buffers that are still being verified) has the content ahead.
    """
    duration_ns = max(measurement.end_ns - measurement.first_submit_ns, 1)
    if measurement.direction == "write":
        if (measurement.end_ns - measurement.last_submit_ns) / duration_ns > _DRAIN_SHARE:
            return "durability"
        return "generator" if measurement.storage_stall_s > measurement.content_stall_s else "storage"
    return "verifier" if measurement.storage_stall_s > measurement.content_stall_s else "storage"


_GIB = 2**30
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """A phase over all ranks. Of set-up, pipeline, drain and busy times the longest of any rank stands here.

    `duration_s` runs from the earliest first submit to the latest durable end. `content` is what was
    generated or verified. Stalls and `call_time_sum_s` are sums over all streams, good for diagnosis only.
    Rates of what did not happen (verification that was switched off) are None.
    """

    direction: Direction
    ranks: int
    moved_bytes: int
    verified_bytes: int
    wrong_bytes: int
    """Places, at most one a chunk."""
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
        """All figures as plain data, for the record of a run."""
        plain: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        plain["streams"] = [asdict(stream) for stream in self.streams]
        plain["counters"] = self.counters.record()
        return plain


def common_origin_ns(comm: Comm, awaiting: str) -> int:
    """A moment that all ranks share, by each one's own clock: those of different hosts do not agree."""
    comm.barrier(awaiting=awaiting)
    return now_ns()


def figures_of(measurements: Sequence[Measurement]) -> PhaseFigures:
    """One phase from the measurements of all ranks, in rank order."""
    begins = [each.first_submit_ns - each.origin_ns for each in measurements]
    ends = [each.end_ns - each.origin_ns for each in measurements]
    own_s = [max(end - begin, 1) / _NS_PER_S for begin, end in zip(begins, ends, strict=True)]
    moved = [moved_bytes(each) for each in measurements]
    rates = [size / _GIB / took_s for size, took_s in zip(moved, own_s, strict=True)]
    duration_s = max(max(ends) - min(begins), 1) / _NS_PER_S
    slowest = measurements[int(np.argmax(own_s))]
    content_rate = _rate(measurements, [each.content_busy_s for each in measurements])
    storage_rate = _rate(measurements, [each.storage_busy_s for each in measurements])
    latencies_ms = np.concatenate([each.latencies_ns for each in measurements]) / 1e6
    p50, p99, most = (
        np.percentile(latencies_ms, (50, 99, 100)).tolist() if latencies_ms.size else (0.0, 0.0, 0.0)
    )
    first, *others = [each.counters for each in measurements]
    return PhaseFigures(
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
        content_gib_per_s=content_rate,
        storage_gib_per_s=storage_rate,
        content_to_storage=content_rate / storage_rate if content_rate and storage_rate else None,
        overhead_percent=_overhead_percent(slowest),
        p50_ms=p50,
        p99_ms=p99,
        max_ms=most,
        bottleneck=bottleneck(slowest),
        slowest_rank=slowest.rank,
        streams=tuple(stream for each in measurements for stream in each.streams),
        counters=sum(others, first),
    )


def moved_bytes(measurement: Measurement) -> int:
    """What the storage acknowledged, or gave."""
    ledger = measurement.ledger
    return ledger.read_bytes if measurement.direction == "read" else ledger.acknowledged_bytes


def _rate(measurements: Sequence[Measurement], busy_s: Sequence[float]) -> float | None:
    """GiB/s of all ranks together while they were at it; over moved bytes, so that rates can be compared."""
    rates = [
        moved_bytes(each) / _GIB / took_s
        for each, took_s in zip(measurements, busy_s, strict=True)
        if took_s > 0
    ]
    return sum(rates) if rates else None


def _overhead_percent(measurement: Measurement) -> float:
    """The share of a rank's time in which neither the storage nor the content was at work."""
    duration_s = max(measurement.end_ns - measurement.first_submit_ns, 1) / _NS_PER_S
    at_work_s = max(measurement.storage_busy_s, measurement.content_busy_s)
    return max(0.0, (duration_s - at_work_s) / duration_s * 100)
