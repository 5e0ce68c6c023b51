"""Rounds, shifts, markers, and what a look at the progress says: all pure."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.checkpoint.checkpoint_result import CheckpointRound
from penstock.bench.checkpoint.checkpoint_rounds import (
    ProgressBoard,
    StateContent,
    name_last_rank,
    plan_objects,
    plan_rounds,
    rank_shift,
)
from penstock.bench.page_cache_eviction import CacheEviction
from penstock.bench.state_layout import plan_layout
from penstock.errors import UsageError
from penstock.transfer.pipeline import PlannedObject
from penstock.workload.load_workload import load_model


@given(st.integers(0, 12), st.sets(st.integers(1, 12)), st.data())
def test_every_round_reads_only_what_is_there_by_then(
    num_writes: int, there: set[int], data: st.DataObject
) -> None:
    readable = there | set(range(1, num_writes + 1))
    num_reads = data.draw(st.integers(0, len(readable)))
    rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, kept_steps=sorted(there))
    writes = [each.step for each in rounds if each.direction == "write"]
    reads = [each.step for each in rounds if each.direction == "read"]
    assert [each.direction for each in rounds] == ["write"] * len(writes) + ["read"] * len(reads)
    assert writes == sorted(set(range(1, num_writes + 1)) - there)
    assert reads == sorted(readable)[:num_reads]


def test_more_reads_than_checkpoints_are_refused_with_both_ways_out() -> None:
    with pytest.raises(UsageError, match=r"only 3 will exist.*at most 3.*--writes 5"):
        plan_rounds(num_writes=1, num_reads=5, kept_steps=(1, 2, 3))


def test_checkpoints_lie_in_dlios_folders() -> None:
    layout = plan_layout(load_model("llama3-8b"), scale=Fraction(1, 1000))
    assert CheckpointRound(direction="write", number=3, step=3).folder == "global_epoch1_step3"
    assert [each.key for each in plan_objects(layout, 2, 3)] == [
        "global_epoch1_step3/zero_pp_rank_2_mp_rank_0_model_states.pt",
        "global_epoch1_step3/zero_pp_rank_2_mp_rank_0_optim_states.pt",
    ]
    assert sum(each.size_bytes for each in plan_objects(layout, 2, 3)) == layout.bytes_of_processes()[2]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_with_a_shift_every_rank_reads_what_another_host_wrote_and_all_is_read(sizes: list[int]) -> None:
    hosts = [f"host{number}" for number, size in enumerate(sizes) for _ in range(size)]
    shift = rank_shift(hosts)
    read = [(rank + shift) % len(hosts) for rank in range(len(hosts))]
    assert sorted(read) == list(range(len(hosts)))
    if len(sizes) == 1:
        assert shift == 0
    elif len(set(sizes)) == 1:
        assert all(hosts[rank] != hosts[source] for rank, source in enumerate(read))


def test_content_is_unlike_from_file_to_file_and_from_checkpoint_to_checkpoint() -> None:
    planned = [PlannedObject(f"global_epoch1_step{step}/{name}", 64) for step in (1, 2) for name in "ab"]
    content = StateContent(7, planned)
    seen = []
    for each in planned:
        buffer = bytearray(64)
        content.fill(each, 0, memoryview(buffer))
        assert content.verify(each, 0, memoryview(buffer)) is None
        seen.append(bytes(buffer))
    assert len(set(seen)) == 4
    damaged = bytearray(seen[0])
    damaged[17] ^= 1
    assert content.verify(planned[0], 0, memoryview(damaged)) == 17
    assert StateContent(8, planned).verify(planned[0], 0, memoryview(bytearray(seen[0]))) is not None


def test_a_read_is_cold_up_to_a_hundredth_in_memory() -> None:
    assert CacheEviction(path="page cache dropped", resident_bytes=10, total_bytes=1000).is_cold
    assert not CacheEviction(path="page cache dropped", resident_bytes=11, total_bytes=1000).is_cold
    assert CacheEviction(path="past the page cache").is_cold


def test_the_rank_that_is_last_is_named_unless_all_are_alike() -> None:
    assert name_last_rank([512, 256, 0], [1024, 1024, 0]) == "rank 1 is last with 25%"
    assert name_last_rank([512, 512], [1024, 1024]) == ""
    assert name_last_rank([512], [1024]) == ""


def test_a_board_holds_every_ranks_number_and_misses_none(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    boards = [ProgressBoard(path, rank=rank, num_ranks=3) for rank in range(3)]
    assert boards[0].read() == [0, 0, 0]
    boards[2].note(7)
    boards[0].note(1 << 40)
    assert boards[0].read() == [1 << 40, 0, 7]
    boards[0].remove()
    boards[0].remove()
    assert ProgressBoard(tmp_path / "absent" / "progress", rank=0, num_ranks=1).read() == [0]
