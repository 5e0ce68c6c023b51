from typing import Any

import pytest
from tests.integration.checkpoint.adapters.peers import Programs

DIRECTIONS = ["stock_loads_ours", "ours_loads_stock", "ours_loads_ours"]


@pytest.fixture(scope="module")
def seen(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return programs.seen_by("megatron_round_trips", tmp_path_factory.mktemp("megatron"), needs="megatron")


@pytest.fixture(params=["1", "2"])
def ranks(seen: Any, request: pytest.FixtureRequest) -> Any:
    """What each rank saw, of a job of one and of a job of two."""
    return seen[request.param]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_state_goes_through_megatrons_entries_and_comes_back(ranks: Any, direction: str) -> None:
    assert all(rank[direction] for rank in ranks)


def test_files_lie_beside_megatrons_own(ranks: Any) -> None:
    files = ranks[0]["files"]
    assert {".metadata", "common.pt", "metadata.json", "penstock.json"} <= set(files)
    assert {f"__{rank}_0.distcp" for rank in range(len(ranks))} <= set(files)


def test_separated_names_have_files_of_their_own(ranks: Any) -> None:
    assert {f"model.rows__{rank}_0.distcp" for rank in range(len(ranks))} <= set(ranks[0]["files"])
    assert all(rank["saved_over"] for rank in ranks)


def test_what_megatrons_forked_process_writes_are_the_values_of_the_moment(ranks: Any) -> None:
    assert all(rank["background_is_of_the_moment"] for rank in ranks)


def test_the_tracker_names_what_was_saved_last(ranks: Any) -> None:
    for rank in ranks:
        assert rank["found"] == [None, 12]
        assert rank["tracker"] == "12"
        assert rank["iteration_loaded"]


def test_a_save_that_fails_in_the_background_fails_on_all_ranks_and_leaves_the_tracker(ranks: Any) -> None:
    for rank in ranks:
        assert rank["failure"] == "CheckpointException"
        assert rank["tracker_after"] == "12"
        assert not rank["has_metadata_after"]


def test_a_truncated_tracker_is_damage(ranks: Any) -> None:
    assert "newest complete iter_* folder" in ranks[0]["empty_tracker"]
