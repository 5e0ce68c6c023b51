"""How a run of cache operations went over time, by tier: hits and bytes of the plan, rates and latencies.

The plan's times are the workload's own; the run's are those of the clock. Both are divided into equal parts.
Latencies are counted in buckets of a ninth of their value, so that ranks can be added up. Pure.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.kvcache.block_trace import Integers
from penstock.kvcache.entries import EntryOutcome
from penstock.kvcache.io_plan import IoPlan, Op, Operations, TierNumber
from penstock.kvcache.latency_histogram import COARSE_BUCKETS, coarse_buckets, coarse_percentile_ms

PARTS: Final = 48
_DIRECTIONS: Final = {"read": Op.READ, "write": Op.WRITE}


def hits_over_time(plan: IoPlan) -> list[dict[str, Any]]:
    """The plan in parts of the workload's time: chunks asked for, and what each tier serves or takes."""
    if plan.arrival_s is None or plan.chunks is None or not plan.num_requests:
        return []
    span_s = float(plan.arrival_s[-1]) or 1.0
    of_request = _parts(plan.arrival_s, span_s)
    first_parts = plan.operations[plan.operations["part"] == 0]
    rows: list[dict[str, Any]] = [
        {"begin_s": part * span_s / PARTS, "requests": requests, "chunks": chunks}
        for part, (requests, chunks) in enumerate(
            zip(_count(of_request), _count(of_request, plan.chunks), strict=True)
        )
    ]
    for tier in TierNumber:
        name = tier.name.lower()
        hits = first_parts[(first_parts["op"] == Op.READ) & (first_parts["tier"] == tier)]
        moved = {
            word: plan.operations[(plan.operations["op"] == op) & (plan.operations["tier"] == tier)]
            for word, op in (("read", Op.READ), ("written", Op.WRITE))
        }
        columns = {f"{name}_hits": _count(of_request[hits["request"]])} | {
            f"{name}_{word}_bytes": _count(of_request[rows_of["request"]], rows_of["bytes"])
            for word, rows_of in moved.items()
        }
        for column, values in columns.items():
            for row, value in zip(rows, values, strict=True):
                row[column] = value
    return rows


def _parts(times: NDArray[np.float64], end: float) -> Integers:
    return np.clip((times / end * PARTS).astype(np.int64), 0, PARTS - 1)


def _count(parts: Integers, weights: Integers | None = None) -> list[int]:
    return [int(value) for value in np.bincount(parts, weights, minlength=PARTS)]


def count_rank(operations: Operations, timed: NDArray[np.void], end_ns: int) -> Integers:
    """One rank's bytes and latencies in parts of the run; those of all ranks are added up.

    For each direction and part: its bytes, then how many operations have a latency in each bucket. An
    operation belongs to the part in which it ended.
    """
    counts: Integers = np.zeros((len(_DIRECTIONS), PARTS, 1 + COARSE_BUCKETS), np.int64)
    is_done = timed["outcome"] == EntryOutcome.DONE
    for direction, op in enumerate(_DIRECTIONS.values()):
        which = is_done & (operations["op"] == op)
        parts = _parts(timed["end_ns"][which].astype(np.float64), float(max(end_ns, 1)))
        np.add.at(counts[direction, :, 0], parts, operations["bytes"][which])
        np.add.at(counts[direction], (parts, 1 + coarse_buckets(timed["busy_ns"][which])), 1)
    return counts


def run_over_time(ranks: Sequence[Integers], end_ns: int) -> list[dict[str, Any]]:
    """The run in parts of its time: bytes, and the median and the 95th percentile of latencies."""
    if not end_ns:
        return []
    total = np.sum(ranks, axis=0)
    return [
        {
            "begin_s": part * end_ns / PARTS / 1e9,
            **{
                f"{name}_{figure}": value
                for direction, name in enumerate(_DIRECTIONS)
                for figure, value in _describe(total[direction, part]).items()
            },
        }
        for part in range(PARTS)
    ]


def _describe(counted: Integers) -> dict[str, Any]:
    return {
        "bytes": int(counted[0]),
        "p50_ms": coarse_percentile_ms(counted[1:], 50),
        "p95_ms": coarse_percentile_ms(counted[1:], 95),
    }
