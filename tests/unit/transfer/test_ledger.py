"""Figures from timestamps: busy times are unions, durations end with durability, ledgers add up or raise."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.comm import SoloComm
from penstock.errors import ShortTransfer
from penstock.storage.protocol import Counters
from penstock.transfer.ledger import (
    Ledger,
    Measurement,
    StreamRecord,
    combine_ranks,
    common_origin_ns,
    union_ns,
)

GIB = 2**30
SECOND = 10**9


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))))
def test_the_union_counts_each_moment_once(spans: list[tuple[int, int]]) -> None:
    begins = np.array([begin for begin, _ in spans], dtype=np.int64)
    ends = np.array([end for _, end in spans], dtype=np.int64)
    moments = {moment for begin, end in spans for moment in range(begin, end)}
    assert union_ns(begins, ends) == len(moments)


def _measurement(rank: int = 0, **changes: Any) -> Measurement:
    """A rank that wrote 1 GiB from second 1 to 3, and waited for durability from second 2.5 on."""
    plain = Measurement(
        direction="write",
        rank=rank,
        ledger=Ledger(
            planned_bytes=GIB,
            generated_bytes=GIB,
            submitted_bytes=GIB,
            acknowledged_bytes=GIB,
            durable_bytes=GIB,
        ),
        origin_ns=0,
        entered_ns=SECOND // 2,
        first_submit_ns=SECOND,
        last_submit_ns=SECOND * 5 // 2,
        end_ns=3 * SECOND,
        storage_busy_s=1.6,
        call_time_sum_s=3.0,
        content_busy_s=0.5,
        content_stall_s=1.0,
        storage_stall_s=0.1,
        latencies_ns=np.array([10**6, 3 * 10**6], dtype=np.int64),
        streams=(
            StreamRecord(
                rank=rank,
                stream=0,
                objects=1,
                chunks=2,
                moved_bytes=GIB,
                busy_s=1.6,
                stall_s=0.1,
                requests=2,
                retries=0,
                errors=0,
            ),
        ),
        counters=Counters(requests=2),
    )
    return replace(plain, **changes)


def test_one_rank_is_reported_with_its_three_parts_of_time() -> None:
    figures = combine_ranks([_measurement()])
    assert (figures.setup_s, figures.pipeline_s, figures.drain_s) == (0.5, 1.5, 0.5)
    assert figures.duration_s == 2.0
    assert figures.gib_per_s == figures.mean_gib_per_s == figures.min_gib_per_s == 0.5
    assert figures.overhead_percent == pytest.approx(20)
    record = figures.record()
    assert (record["p50_ms"], record["max_ms"]) == (2.0, 3.0)


def test_a_job_lasts_from_the_earliest_begin_to_the_latest_end_despite_clock_offsets() -> None:
    late_host = 10**15
    other = _measurement(
        1,
        origin_ns=late_host,
        entered_ns=late_host,
        first_submit_ns=late_host + 2 * SECOND,
        last_submit_ns=late_host + 6 * SECOND,
        end_ns=late_host + 6 * SECOND,
    )
    figures = combine_ranks([_measurement(), other])
    assert figures.duration_s == 5.0
    assert figures.gib_per_s == pytest.approx(2 / 5)
    assert figures.mean_gib_per_s == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert figures.min_gib_per_s == 0.25
    assert figures.max_duration_s == 4.0
    assert figures.slowest_rank == 1
    assert [(stream.rank, stream.stream) for stream in figures.streams] == [(0, 0), (1, 0)]
    assert figures.counters.requests == 4


def test_figures_become_plain_data_and_measurements_travel_between_ranks() -> None:
    again = pickle.loads(pickle.dumps(_measurement()))
    record = combine_ranks([again]).record()
    assert record["moved_bytes"] == GIB
    assert record["streams"] == [
        {
            "rank": 0,
            "stream": 0,
            "objects": 1,
            "chunks": 2,
            "moved_bytes": GIB,
            "busy_s": 1.6,
            "stall_s": 0.1,
            "requests": 2,
            "retries": 0,
            "errors": 0,
        }
    ]


def test_a_phase_without_chunks_has_figures_too() -> None:
    empty = _measurement(latencies_ns=np.zeros(0, dtype=np.int64), content_busy_s=0.0, storage_busy_s=0.0)
    figures = combine_ranks([empty])
    assert figures.record()["p99_ms"] == 0.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "storage"),
        ({"storage_stall_s": 2.0}, "generator"),
        # Generating never waited for a buffer, but the streams hardly ever waited for it either.
        ({"content_stall_s": 0.0}, "storage"),
        ({"content_stall_s": 0.0, "storage_stall_s": 1.5}, "storage"),
        ({"last_submit_ns": SECOND * 3 // 2}, "durability"),
        ({"direction": "read"}, "storage"),
        ({"direction": "read", "storage_stall_s": 2.0}, "verifier"),
        ({"direction": "read", "content_stall_s": 0.0}, "storage"),
    ],
)
def test_the_bottleneck_is_named(changes: dict[str, Any], named: str) -> None:
    assert _measurement(**changes).find_bottleneck() == named


@pytest.mark.parametrize(
    "station", ["generated_bytes", "submitted_bytes", "acknowledged_bytes", "durable_bytes"]
)
def test_a_ledger_with_missing_bytes_raises_and_lists_all_stations(station: str) -> None:
    ledger = replace(_measurement().ledger, **{station: GIB - 1})
    with pytest.raises(ShortTransfer, match=f"planned {GIB} bytes") as caught:
        _measurement(ledger=ledger).require_complete("file:///pfs")
    assert station.removesuffix("_bytes") in str(caught.value)
    assert caught.value.actual_bytes == GIB - 1


def test_a_ledger_that_adds_up_passes() -> None:
    _measurement().require_complete("file:///pfs")
    read = _measurement(direction="read", ledger=Ledger(planned_bytes=5, read_bytes=5))
    read.require_complete("file:///pfs")
    with pytest.raises(ShortTransfer, match="read 4"):
        replace(read, ledger=Ledger(planned_bytes=5, read_bytes=4)).require_complete("file:///pfs")


def test_all_ranks_share_an_origin() -> None:
    first = common_origin_ns(SoloComm(), "all ranks to be ready")
    assert common_origin_ns(SoloComm(), "all ranks to be ready") >= first
