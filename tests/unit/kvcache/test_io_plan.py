"""Plans: what is read, written and evicted, in which order, and how ranks divide it."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.kvcache.test_lru_simulation import REQUESTS, trace_of

from penstock.kvcache.block_trace import find_reuse, generate_trace
from penstock.kvcache.io_plan import IoPlan, ObjectLayout, Op, TierNumber, TierSizes, plan_blocks
from penstock.kvcache.models import MODELS

MODEL = MODELS["llama3.1-8b"]


def steps_of(plan: IoPlan) -> list[tuple[int, str, int]]:
    rows = plan.in_storage
    return [(int(row["request"]), Op(row["op"]).name.lower(), int(row["entry"])) for row in rows]


def test_requests_read_their_prefix_then_write_what_is_new() -> None:
    plan = plan_blocks(trace_of([[0, 1], [0, 1, 2], [3]]), MODEL, tiers=TierSizes(storage=3))
    assert steps_of(plan) == [
        (0, "write", 0),
        (0, "write", 1),
        (1, "read", 0),
        (1, "read", 1),
        (1, "write", 2),
        (2, "delete", 0),
        (2, "write", 3),
    ]
    assert plan.hit_tokens.tolist() == [0, 1024, 0]
    assert plan.capacity_bytes == 3 * 512 * MODEL.bytes_per_token


@given(REQUESTS, st.integers(1, 6), st.integers(0, 3))
def test_plans_are_consistent_and_keep_to_the_capacity(
    requests: list[list[int]], capacity: int, gpu: int
) -> None:
    trace = trace_of(requests)
    plan = plan_blocks(trace, MODEL, tiers=TierSizes(gpu=gpu, storage=capacity))
    stored: set[int] = set()
    for _, op, entry in steps_of(plan):
        assert (entry in stored) is (op != "write")
        if op == "write":
            stored.add(entry)
        elif op == "delete":
            stored.remove(entry)
        assert len(stored) <= capacity
    reads = plan.operations[plan.operations["op"] == Op.READ]
    ratio = find_reuse(trace).prefix_hit_ratio(max(capacity, gpu))
    assert len(reads) == round(ratio * trace.num_blocks)
    assert (reads["tier"] != TierNumber.CPU).all()


def test_ranks_divide_a_plan_by_entry_and_its_digest_stays() -> None:
    trace = generate_trace(requests=300, most_input_tokens=30_000)
    plan = plan_blocks(trace, MODEL, tiers=TierSizes(storage=2000))
    again = plan_blocks(
        generate_trace(requests=300, most_input_tokens=30_000),
        MODEL,
        tiers=TierSizes(storage=2000),
    )
    assert plan.digest == again.digest
    for ranks in (2, 4):
        shares = [plan.share_of(rank, ranks) for rank in range(ranks)]
        assert sum(map(len, shares)) == len(plan.in_storage)
        entries = [set(share["entry"].tolist()) for share in shares]
        assert not set.intersection(*entries)
        assert min(map(len, shares)) > 0.8 * len(plan.in_storage) / ranks
        most = plan.most_stored_bytes(ranks)
        assert most <= 1.05 * (plan.capacity_bytes or 0)
    other = generate_trace(requests=300, most_input_tokens=30_000, seed=7)
    assert plan_blocks(other, MODEL, tiers=TierSizes(storage=2000)).digest != plan.digest


@pytest.mark.parametrize(
    ("layout", "num", "size"),
    [
        pytest.param(ObjectLayout(), 1, 80 << 20, id="whole"),
        pytest.param(ObjectLayout(tensor=8), 8, 10 << 20, id="tp8"),
        pytest.param(ObjectLayout(tensor=16), 8, 10 << 20, id="tp16"),
        pytest.param(ObjectLayout(is_per_layer=True), 80, 1 << 20, id="layers"),
        pytest.param(ObjectLayout(pipeline=4), 4, 20 << 20, id="pp4"),
        pytest.param(ObjectLayout(scale=Fraction(1, 1024)), 1, 80 << 10, id="scaled"),
    ],
)
def test_objects_of_a_chunk_add_up_to_it(layout: ObjectLayout, num: int, size: int) -> None:
    assert layout.part_bytes(MODELS["llama3.1-70b-instruct"], 256) == [size] * num
    latent = MODELS["deepseek-v3"]
    assert sum(ObjectLayout(tensor=8, pipeline=3).part_bytes(latent, 256)) == 256 * latent.bytes_per_token


def test_fewer_users_come_back_after_fewer_requests_of_others() -> None:
    few, many = (
        find_reuse(generate_trace(requests=400, users=users)).prefix_hit_ratio(None) for users in (20, 200)
    )
    assert few > 0.2 > 3 * many


def test_generated_requests_have_the_statistics_of_the_conversation_trace() -> None:
    trace = generate_trace(requests=12_000)
    figures, reuse = trace.statistics(), find_reuse(trace)
    assert figures["input_tokens"]["mean"] == pytest.approx(12_035, rel=0.05)
    assert figures["input_tokens"]["p50"] == pytest.approx(6_909, rel=0.05)
    assert figures["blocks"] == pytest.approx(288_500, rel=0.05)
    published = {1000: 0.044, 10_000: 0.211, 30_000: 0.326, 100_000: 0.364, None: 0.366}
    for capacity, ratio in published.items():
        assert reuse.prefix_hit_ratio(capacity) == pytest.approx(ratio, abs=0.03)
    assert np.diff(trace.arrival_s).mean() == pytest.approx(0.3, rel=0.05)
