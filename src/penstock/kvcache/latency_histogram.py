"""Latencies as counts in buckets that are 0.4 % wide: small, and added up over ranks without loss.

The percentile of a merged histogram is that of all values together, not the largest of any rank. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SUB_BITS: Final = 8
"""Each power of two has 2**8 buckets."""
_NUM_BUCKETS: Final = 64 << _SUB_BITS
_COARSER: Final = 32
COARSE_BUCKETS: Final = _NUM_BUCKETS // _COARSER
"""Eight for each power of two: for many small histograms, as those of a run's parts."""
PERCENTILES: Final[Mapping[str, float]] = {"p50": 50, "p95": 95, "p99": 99, "p999": 99.9, "p9999": 99.99}


def _empty() -> NDArray[np.int64]:
    return np.zeros(_NUM_BUCKETS, np.int64)


@dataclass(slots=True)
class LatencyHistogram:
    """Counts of latencies in nanoseconds, with their exact sum, smallest and largest."""

    counts: NDArray[np.int64] = field(default_factory=_empty)
    sum_ns: float = 0.0
    max_ns: int = 0

    @classmethod
    def of(cls, latencies_ns: ArrayLike) -> Self:
        """The histogram of these latencies; negative ones count as 0."""
        values = np.maximum(np.asarray(latencies_ns, np.int64), 0)
        if not len(values):
            return cls()
        counts = np.bincount(_bucket(values), minlength=_NUM_BUCKETS)
        return cls(counts, float(values.sum(dtype=np.float64)), int(values.max()))

    @classmethod
    def merged(cls, parts: Iterable[LatencyHistogram]) -> Self:
        """The histogram of all latencies of several."""
        total = cls()
        for part in parts:
            total.counts = total.counts + part.counts
            total.sum_ns += part.sum_ns
            total.max_ns = max(total.max_ns, part.max_ns)
        return total

    @property
    def num_values(self) -> int:
        """How many latencies were counted."""
        return int(self.counts.sum())

    def percentile_ms(self, percent: float) -> float | None:
        """The latency below which this share is, to 0.4 %; None without values."""
        num = self.num_values
        if not num:
            return None
        wanted = max(1, int(np.ceil(num * percent / 100)))
        bucket = int(np.searchsorted(np.cumsum(self.counts), wanted))
        return min(_middle(bucket), self.max_ns) / 1e6

    def document(self) -> dict[str, Any]:
        """The distribution in milliseconds, as plain data."""
        num = self.num_values
        if not num:
            return {"count": 0}
        return {
            "count": num,
            "mean": self.sum_ns / num / 1e6,
            **{name: self.percentile_ms(percent) for name, percent in PERCENTILES.items()},
            "max": self.max_ns / 1e6,
        }


def coarse_buckets(latencies_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket of each latency where a few percent do not matter."""
    return _bucket(np.maximum(latencies_ns, 0)) // _COARSER


def coarse_percentile_ms(counts: NDArray[np.int64], percent: float) -> float | None:
    """The latency below which this share is; None without values."""
    if not (num := int(counts.sum())):
        return None
    bucket = int(np.searchsorted(np.cumsum(counts), max(1, int(np.ceil(num * percent / 100)))))
    return _middle(bucket * _COARSER + _COARSER // 2) / 1e6


def _bucket(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values below 2**8 have buckets of their own; the others the power of two and the 8 bits below it."""
    _, exponents = np.frexp(values.astype(np.float64))
    shift = np.maximum(exponents.astype(np.int64) - (_SUB_BITS + 1), 0)
    return (shift << _SUB_BITS) + (values >> shift)


def _middle(bucket: int) -> float:
    shift = max((bucket >> _SUB_BITS) - 1, 0)
    return ((bucket - (shift << _SUB_BITS)) << shift) + ((1 << shift) - 1) / 2
