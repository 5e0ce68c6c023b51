"""Measurements as rows of text, for a terminal and for a page alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.bench.probe.measure import Measurement


def measurement_rows(measurements: Iterable[Measurement]) -> list[dict[str, str]]:
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


def headline_rows(measurements: Iterable[Measurement]) -> list[dict[str, str]]:
    """The best of each operation and mode: the limits to remember."""
    best: dict[tuple[str, str], Measurement] = {}
    for seen in measurements:
        kept = best.setdefault((seen.op, seen.mode), seen)
        if seen.gib_per_s > kept.gib_per_s:
            best[seen.op, seen.mode] = seen
    return measurement_rows(best.values())
