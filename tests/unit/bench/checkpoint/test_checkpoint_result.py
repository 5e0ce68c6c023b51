"""What rounds come to: sums, means, streams, warm reads left out, and the bottleneck by time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.bench.checkpoint.checkpoint_result import (
    CheckpointResult,
    CheckpointRound,
    Direction,
    RoundFigures,
    find_bottleneck,
    total_direction,
)
from penstock.bench.page_cache_eviction import CacheEviction
from penstock.storage import Counters
from penstock.transfer.ledger import PipelineFigures, StreamRecord

GIB = 2**30


def stream(rank: int, number: int, **fields: Any) -> StreamRecord:
    base = StreamRecord(
        rank=rank, stream=number, objects=1, chunks=4, moved_bytes=GIB, busy_s=1.0, stall_s=0.25,
        requests=5, retries=1, errors=0,
    )  # fmt: skip
    return replace(base, **fields)


def phase(direction: Direction, duration_s: float, **fields: Any) -> PipelineFigures:
    """Two ranks with one stream each move 2 GiB together."""
    base = PipelineFigures(
        direction=direction, ranks=2, moved_bytes=2 * GIB,
        verified_bytes=2 * GIB if direction == "read" else 0, wrong_bytes=0,
        duration_s=duration_s, gib_per_s=2 / duration_s, mean_gib_per_s=1 / duration_s,
        min_gib_per_s=1 / duration_s, max_duration_s=duration_s, setup_s=0.1, pipeline_s=duration_s - 0.5,
        drain_s=0.5, storage_busy_s=duration_s / 2, content_busy_s=duration_s / 4, call_time_sum_s=3.0,
        content_stall_s=0.5, storage_stall_s=0.25, overhead_percent=10.0,
        latencies_ns=np.array([1_000_000, 3_000_000]),
        bottleneck="storage", slowest_rank=0, streams=(stream(0, 0), stream(1, 0)),
        counters=Counters(requests=10, retries=2),
    )  # fmt: skip
    return replace(base, **fields)


def rounds(
    direction: Direction, *phases: PipelineFigures, cold: CacheEviction | None = None
) -> list[RoundFigures]:
    return [
        RoundFigures(
            round=CheckpointRound(direction=direction, number=number, step=number),
            began_at_s=10.0 * number,
            ended_at_s=10.0 * number + 5,
            phase=each,
            cold=cold,
        )
        for number, each in enumerate(phases, start=1)
    ]


WARM = CacheEviction(path="page cache dropped", resident_bytes=500, total_bytes=1000)


def test_all_bytes_over_all_time_and_the_mean_of_rates_are_two_figures() -> None:
    found = total_direction(rounds("write", phase("write", 1.0), phase("write", 4.0)))
    assert found is not None
    assert found["gib_per_s"] == pytest.approx(4 / 5)
    assert found["mean_gib_per_s"] == pytest.approx((2 + 0.5) / 2)
    assert found["stdev_gib_per_s"] == pytest.approx(0.75)
    assert found["min_gib_per_s"] == 0.25
    assert (found["duration_s"], found["max_duration_s"], found["checkpoints"]) == (5.0, 4.0, 2)
    assert (found["setup_s"], found["drain_s"], found["pipeline_s"]) == pytest.approx((0.2, 1.0, 4.0))
    assert found["store_gib_per_s"] == pytest.approx(4 / 2.5)
    assert found["generate_gib_per_s"] == pytest.approx(4 / 1.25)
    assert found["generate_to_store"] == pytest.approx(2.0)


def test_percentiles_are_those_of_the_requests_of_all_checkpoints() -> None:
    short = phase("write", 1.0, latencies_ns=np.full(50, 9_000_000))
    long = phase("write", 1.0, latencies_ns=np.full(950, 1_000_000))
    found = total_direction(rounds("write", short, long, long))
    assert found is not None
    assert (found["p50_ms"], found["p99_ms"], found["max_ms"]) == (1.0, 9.0, 9.0)
    few = total_direction(rounds("write", phase("write", 1.0, latencies_ns=np.full(2, 9_000_000)), long))
    assert few is not None
    assert (few["p50_ms"], few["p99_ms"], few["max_ms"]) == (1.0, 1.0, 9.0)


def test_every_stream_of_every_rank_survives_with_its_sums() -> None:
    found = total_direction(rounds("read", phase("read", 1.0), phase("read", 1.0), phase("read", 2.0)))
    assert found is not None
    assert [(each["rank"], each["stream"]) for each in found["streams"]] == [(0, 0), (1, 0)]
    assert all(each["moved_bytes"] == 3 * GIB for each in found["streams"])
    assert [
        tuple(each[name] for name in ("objects", "chunks", "requests", "retries"))
        for each in found["streams"]
    ] == [
        (3, 12, 15, 3),
        (3, 12, 15, 3),
    ]


def test_words_of_the_document_are_those_of_its_direction() -> None:
    writing = total_direction(rounds("write", phase("write", 1.0)))
    reading = total_direction(rounds("read", phase("read", 1.0)))
    assert writing is not None
    assert reading is not None
    assert writing["bytes"] == reading["bytes"] == reading["verified_bytes"] == 2 * GIB
    assert (writing["generator_stall_s"], writing["writer_stall_s"]) == (0.5, 0.25)
    assert (reading["verifier_stall_s"], reading["reader_stall_s"]) == (0.5, 0.25)
    assert {"generate_gib_per_s", "store_gib_per_s", "generate_to_store"} <= writing.keys()
    assert "verified_bytes" not in writing
    assert reading["from_memory"] is False


def test_reads_from_memory_have_a_rate_of_their_own_and_no_other() -> None:
    warm = rounds("read", phase("read", 0.1), cold=WARM)
    found = total_direction(warm)
    assert found is not None
    assert (
        found["gib_per_s"]
        is found["mean_gib_per_s"]
        is found["min_gib_per_s"]
        is found["store_gib_per_s"]
        is None
    )
    assert found["memory_gib_per_s"] == pytest.approx(20.0)
    assert found["bottleneck"] == "page cache"
    mixed = total_direction([*warm, *rounds("read", phase("read", 2.0))])
    assert mixed is not None
    assert mixed["gib_per_s"] == pytest.approx(1.0)
    assert mixed["memory_checkpoints"] == 1
    assert mixed["from_memory"] is True


def test_the_bottleneck_is_what_held_the_run_up_longest() -> None:
    found = rounds(
        "write",
        phase("write", 1.0, bottleneck="generator"),
        phase("write", 1.0, bottleneck="generator"),
        phase("write", 3.0, bottleneck="durability"),
    )
    assert find_bottleneck(found) == "durability"


def test_nothing_has_no_figures() -> None:
    assert total_direction([]) is None


def test_counters_of_all_rounds_add_up() -> None:
    result = CheckpointResult(
        model="m",
        ranks=2,
        results_dir="/results",
        target="file:///ckpt",
        total_bytes=GIB,
        full_bytes=GIB,
        seed=1,
        rounds=(*rounds("write", phase("write", 1.0)), *rounds("read", phase("read", 1.0))),
        gap_s=None,
        earlier={"run_folder": "/earlier", "kept_steps": (1, 2)},
        shift=0,
        storage_options={},
        peak_rss_bytes=(1, 2),
    ).document()
    assert (result["storage_counters"]["requests"], result["storage_counters"]["retries"]) == (20, 4)
    assert result["earlier"] == {"run_folder": "/earlier", "kept_steps": (1, 2)}
