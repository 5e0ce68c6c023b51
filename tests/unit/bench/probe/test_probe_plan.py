"""The probe's plan: what is read was written, nothing exceeds the size asked for, small sizes still work."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.probe.probe_run import (
    NUM_SMALL_OBJECTS,
    ProbeRequest,
    plan_groups,
    probe_locations,
)
from penstock.bench.probe.timed_streams import Mode, ProbeStep
from penstock.errors import UsageError

requests = st.builds(
    ProbeRequest,
    uri=st.just("mem://x"),
    size_bytes=st.integers(1, 2**40),
    streams=st.lists(st.integers(1, 64), min_size=1, max_size=3).map(tuple),
    block_bytes=st.lists(st.integers(1, 2**26), min_size=1, max_size=3).map(tuple),
)


def _sequential(groups: tuple[tuple[ProbeStep, ...], ...]) -> list[tuple[ProbeStep, ...]]:
    return [group for group in groups if group[0].op == "write"]


@given(requests, st.integers(1, 2000))
def test_a_group_writes_before_it_reads_and_reads_only_what_it_wrote(
    request: ProbeRequest, num_ranks: int
) -> None:
    for group in plan_groups(request, "direct", num_ranks=num_ranks):
        first, *others = group
        assert first.op in ("write", "small_write", "fsync")
        for step in others:
            assert "read" in step.op
            assert step.streams == first.streams
            assert step.size_bytes <= first.size_bytes


@given(requests, st.integers(1, 2000))
def test_sequential_steps_move_the_size_asked_for_up_to_one_block_a_stream(
    request: ProbeRequest, num_ranks: int
) -> None:
    for group in _sequential(plan_groups(request, "objects", num_ranks=num_ranks)):
        step = group[0]
        moved = step.size_bytes * num_ranks
        one_block_each = step.streams * step.block_bytes * num_ranks
        assert moved <= max(request.size_bytes, one_block_each)
        assert request.size_bytes - moved < one_block_each + num_ranks


@given(requests)
def test_every_combination_of_streams_and_blocks_is_measured(request: ProbeRequest) -> None:
    groups = _sequential(plan_groups(request, "buffered", num_ranks=1))
    seen = [(group[0].streams, group[0].block_bytes) for group in groups]
    assert seen == [(streams, block) for streams in request.streams for block in request.block_bytes]


def test_fsync_is_measured_on_file_systems_only() -> None:
    request = ProbeRequest(uri="mem://x")
    for mode in get_args(Mode):
        operations = [step.op for group in plan_groups(request, mode, num_ranks=1) for step in group]
        assert ("fsync" in operations) == (mode in ("buffered", "direct"))


def test_random_reads_and_small_objects_are_bounded_however_large_the_probe() -> None:
    request = ProbeRequest(uri="mem://x", size_bytes=2**50)
    steps = [step for group in plan_groups(request, "objects", num_ranks=1) for step in group]
    (random,) = [step for step in steps if step.op == "random_read"]
    assert random.size_bytes <= 512 << 20
    small = [step for step in steps if step.op.startswith("small")]
    assert all(step.streams * step.blocks_per_stream <= NUM_SMALL_OBJECTS for step in small)


def test_a_plain_path_is_measured_through_memory_and_past_it_but_a_uri_only_its_own_way() -> None:
    assert [place.scheme for place in probe_locations("/data")] == ["file", "direct"]
    assert [place.scheme for place in probe_locations("file:///data")] == ["file"]
    assert [place.scheme for place in probe_locations("direct:///data")] == ["direct"]


@pytest.mark.parametrize(
    "wrong", [{"size_bytes": 0}, {"streams": (0,)}, {"block_bytes": (1, -1)}, {"max_seconds": 0.0}]
)
def test_sizes_and_counts_that_are_not_positive_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="positive"):
        ProbeRequest(uri="mem://x", **wrong)  # type: ignore[arg-type]
