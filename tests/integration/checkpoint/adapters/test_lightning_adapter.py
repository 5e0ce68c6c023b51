from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.checkpoint.tools.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.checkpoint.adapters.peers import Programs


@pytest.fixture(scope="module")
def seen(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root: Path = tmp_path_factory.mktemp("lightning")
    return {**programs.seen_by("lightning_resumes", root, needs="lightning"), "root": root}


@pytest.mark.parametrize("plugin", ["blocking", "background"])
def test_a_resumed_fit_reaches_the_weights_of_an_uninterrupted_one(seen: Any, plugin: str) -> None:
    assert seen[f"{plugin}_epochs"] == 4
    assert seen[f"{plugin}_same"]


@pytest.mark.parametrize("plugin", ["blocking", "background", "own"])
def test_load_from_checkpoint_loads_folders_and_files(seen: Any, plugin: str) -> None:
    assert seen[f"{plugin}_module_same"]


@pytest.mark.parametrize("plugin", ["blocking", "background"])
def test_what_a_trainer_saves_after_its_fit_can_be_loaded_at_once(seen: Any, plugin: str) -> None:
    assert seen[f"{plugin}_by_hand_same"]


@pytest.mark.parametrize("plugin", ["blocking", "background"])
def test_lightning_keeps_as_many_checkpoints_as_it_was_told(seen: Any, plugin: str) -> None:
    assert seen[f"{plugin}_kept"] == [seen[f"{plugin}_saved"]]


def test_a_file_of_lightnings_own_plugin_is_resumed_from(seen: Any) -> None:
    assert seen["own_file_same"]


def test_an_older_checkpoint_stays_if_the_newer_one_fails(seen: Any) -> None:
    assert seen["failure"]
    assert "newer was not saved: " in seen["logged"]
    assert seen["kept"] == [1.0, 1.0, 1.0]


def test_a_folder_takes_the_place_of_a_file(seen: Any) -> None:
    assert seen["left"] == ["epoch=1-step=8.ckpt"]
    assert seen["epoch"] == 3


def test_one_rank_of_a_job_saves_and_all_of_them_load(seen: Any) -> None:
    assert seen["by_rank"] == [[1.0, 1.0, 1.0]] * 2


def test_a_save_that_nobody_waits_for_is_committed_before_the_program_ends(seen: Any) -> None:
    found = verify(seen["root"] / "last")
    assert found.is_checked
    assert not found.damage
