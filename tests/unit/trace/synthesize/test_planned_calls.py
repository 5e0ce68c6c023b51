"""The planned calls of a rank: whole durations, exact budgets, no overlap within a thread."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.trace.synthesize import SynthesisSpec, read_description
from penstock.trace.synthesize.planned_calls import plan_rank, share_exactly
from penstock.trace.yaml_documents import parse_document


def described(text: str) -> SynthesisSpec:
    return parse_document(SynthesisSpec, text, source="test.yaml")


SMALL = """
patterns:
  file:
    path: "{root}/part-{copy}-{step}-{rank}.pt"
    copies: 3
    calls: [{op: open64}, {op: write, sizes: [10, 1048576]}, {op: close}]
  drain: {path: "{root}/x", calls: [{op: read, total_bytes: 100, chunk_bytes: 30, lane: flush}]}
lanes: {flush: {after_us: 5000, threads: 2}}
runs:
  a:
    ranks: 2
    places: {root: /d}
    checkpoints: {steps: [1, 2], first_us: 7, every_us: 100000}
    does:
      - {pattern: file, ranks: [0], fixed_us: {part-1-2-0.pt: {write: [40, 2]}}}
      - {pattern: drain}
    budgets: [{ops: [write], us: {0: 1000}}]
"""


@given(st.integers(0, 10**12), st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_shares_are_whole_in_proportion_and_add_up(total: int, weights: list[int]) -> None:
    shares = share_exactly(total, weights)
    assert sum(shares) == total
    assert all(
        abs(got * sum(weights) - total * weight) <= sum(weights)
        for got, weight in zip(shares, weights, strict=True)
    )


def test_durations_of_a_budget_add_up_to_it_with_the_fixed_ones_in_it() -> None:
    description = described(SMALL)
    calls = plan_rank(description, description.runs["a"], 0)
    writes = [call for call in calls if call.name == "write"]
    assert len(writes) == 2 * 3 * 2
    assert sum(call.dur_us for call in writes) == 1000
    assert [call.dur_us for call in writes if call.path == "/d/part-1-2-0.pt"] == [40, 2]


def test_calls_of_one_thread_follow_one_another() -> None:
    description = read_description("seven_runs")
    for name, run in description.runs.items():
        ends: dict[int, int] = defaultdict(int)
        for call in plan_rank(description, run, 0):
            if call.cat == "POSIX":
                assert call.ts_us >= ends[call.thread], (name, call)
                ends[call.thread] = call.ts_us + call.dur_us


def test_a_lane_with_threads_deals_its_calls_to_fresh_threads_of_each_checkpoint() -> None:
    description = described(SMALL)
    calls = [call for call in plan_rank(description, description.runs["a"], 1) if call.name == "read"]
    assert [call.size_bytes for call in calls] == [30, 30, 30, 10] * 2
    assert len({call.thread for call in calls}) == 4


def test_others_are_the_ranks_that_no_earlier_entry_named() -> None:
    text = SMALL.replace(
        "{pattern: drain}", "{pattern: drain, ranks: [1]}\n      - {pattern: drain, ranks: others}"
    )
    description = described(text)
    per_rank = [
        sum(call.name == "read" for call in plan_rank(description, description.runs["a"], rank))
        for rank in (0, 1)
    ]
    assert per_rank == [8, 8]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ranks: 2", "rank: 2", "unknown key runs.a.rank: did you mean ranks?"),
        ("{pattern: drain}", "{pattern: drian}", "choose from: file, drain"),
        ("lane: flush}", "lane: fluhs}", "'fluhs'"),
        ("places: {root: /d}", "places: {}", "{root}"),
        ("us: {0: 1000}", "us: {0: 10}", "exceed their budget by 32 us"),
        ("ranks: 2", "ranks: many", "runs.a.ranks is 'many'"),
    ],
)
def test_an_error_in_a_description_names_its_place_and_the_nearest_key(old: str, new: str, said: str) -> None:
    def plan() -> None:
        description = described(SMALL.replace(old, new))
        plan_rank(description, description.runs["a"], 0)

    with pytest.raises(UsageError) as refused:
        plan()
    assert said in str(refused.value)


def test_an_unknown_name_lists_the_shipped_descriptions() -> None:
    with pytest.raises(UsageError, match="seven_runs"):
        read_description("no_such")
