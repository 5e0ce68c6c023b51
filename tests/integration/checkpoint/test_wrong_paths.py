"""What somebody reads who gives a wrong path, a part of a checkpoint, or the checkpoint of something else."""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import penstock.checkpoint as pc
from penstock.checkpoint.tools.inspection import remove
from penstock.checkpoint.tools.verify import verify
from penstock.errors import DataDamaged, PenstockError, StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


def weights(width: int = 4) -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(width, 4), "bias": torch.zeros(width)}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints as they are found in the morning."""
    root = tmp_path_factory.mktemp("places")
    pc.save({"model": weights()}, root / "ours")
    torch.save(weights(), root / "model.pt")
    (root / "empty.pt").touch()
    (root / "notes.txt").write_text("To do: save more often.")
    (root / "bare.pt").write_bytes(pickle.dumps([1, 2]))
    for name, missing in (("data", "__0_0.distcp"), ("hidden", ".metadata")):
        shutil.copytree(root / "ours", root / f"without-{name}")
        (root / f"without-{name}" / missing).unlink()
    shutil.copytree(root / "ours", root / "short")
    (root / "short/__0_0.distcp").write_bytes(b"cut")
    return root


LISTS_MORE = r"The checkpoint lists more than is there: copy it again"


def test_a_manager_that_verifies_takes_the_newest_step_whose_checksums_hold(tmp_path: Path) -> None:
    state = {"model": weights()}
    with pc.Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": weights(), "other": torch.rand(1000)})
        for data in (tmp_path / "step-2").glob("*.distcp"):
            content = bytearray(data.read_bytes())
            content[-100] ^= 1
            data.write_bytes(content)
        (tmp_path / "step-3/penstock.json").unlink()
        assert manager.restore(state) == 3
        assert manager.restore(state, verify=True) == 1
        third, second = manager.skipped_steps
    assert "no checksums" in third.reason
    assert "distcp" in second.reason


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("without-data", rf"without-data/__0_0\.distcp\)\. {LISTS_MORE}"),
        ("short", rf"short/__0_0\.distcp\)\. {LISTS_MORE}"),
        ("without-hidden", r"has no \.metadata.*/without-hidden\)\. Copy it again with its hidden files"),
        ("ours/__0_0.distcp", r"one file of a checkpoint .*Give the folder: file://.*/ours\."),
        ("ours/.metadata", r"one file of a checkpoint .*Give the folder: file://.*/ours\."),
        ("bare.pt", r"bare pickle.*/bare\.pt\)\. If you trust its source, write it again"),
        ("empty.pt", r"The file is empty .*/empty\.pt\)"),
        ("notes.txt", r"neither an archive of torch\.save nor safetensors .*/notes\.txt\)"),
        ("model.pt", r"'model\.weight' and 1 more \(.*/model\.pt\)\. .*rename=\{'model\.\*': ''\} finds it"),
    ],
)
def test_a_load_of_what_is_no_whole_checkpoint_says_what_it_is_and_what_to_do(
    places: Path, name: str, told: str
) -> None:
    with pytest.raises(PenstockError, match=told):
        pc.load({"model": weights()}, places / name)


@pytest.mark.parametrize(("name", "missing"), [("data", "__0_0.distcp"), ("hidden", ".metadata")])
def test_files_that_are_not_there_do_not_count_as_checked(places: Path, name: str, missing: str) -> None:
    found = verify(places / f"without-{name}")
    lost = (places / "ours" / missing).stat().st_size
    assert found.checked_bytes == found.size_bytes - lost


def test_the_advice_about_a_missing_prefix_helps(tmp_path: Path) -> None:
    saved = {name: torch.rand_like(tensor) for name, tensor in weights().items()}
    torch.save(saved, tmp_path / "model.pt")
    found = weights()
    pc.load({"model": found}, tmp_path / "model.pt", rename={"model.*": ""})
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_the_advice_about_names_that_lie_deeper_helps(places: Path) -> None:
    found = weights()
    with pytest.raises(PenstockError, match=r"below 'model': rename=\{'\*': 'model\.\*'\} finds it"):
        pc.load(found, places / "ours")
    assert len(pc.load(found, places / "ours", rename={"*": "model.*"}).loaded) == len(found)


def test_a_copy_without_the_checksums_is_told_and_can_be_refused(
    places: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"model": weights()}
    pc.load(state, places / "ours", verify=True)
    assert not caplog.records
    shutil.copytree(places / "ours", tmp_path / "copy")
    (tmp_path / "copy/penstock.json").unlink()
    pc.load(state, tmp_path / "copy")
    assert re.search(r"file:.*/copy has no penstock\.json: .* not compared with checksums", caplog.text)
    with pytest.raises(UsageError, match=r"not all of it has checksums \(file:.*/copy\)"):
        pc.load(state, tmp_path / "copy", verify=True)
    report = verify(tmp_path / "copy")
    assert (report.is_whole, report.is_checked) == (True, False)


@pytest.mark.parametrize(
    "put_there",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/nowhere")],
    ids=["folder", "pipe", "dangling link"],
)
def test_anything_else_in_place_of_the_manifest_is_damage(tmp_path: Path, put_there: Any) -> None:
    state = {"model": weights()}
    with pc.Manager(tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, state)
        manifest = tmp_path / "step-2/penstock.json"
        manifest.unlink()
        put_there(manifest)
        with pytest.raises(DataDamaged, match=r"penstock\.json is not a file"):
            pc.load(state, tmp_path / "step-2")
        assert manager.restore(state) == 1
    assert "penstock.json is not a file" in manager.skipped_steps[0].reason
    assert not verify(tmp_path / "step-2").is_whole


def test_a_load_that_verifies_refuses_damage_in_what_it_does_not_want(tmp_path: Path) -> None:
    pc.save({"model": weights(), "other": torch.rand(1000)}, tmp_path / "ours")
    for data in (tmp_path / "ours").glob("*.distcp"):
        content = bytearray(data.read_bytes())
        if len(content) > 4000:
            content[-2000] ^= 1
            data.write_bytes(content)
    pc.load({"model": weights()}, tmp_path / "ours")
    with pytest.raises(DataDamaged, match=r"damaged: .*/ours, __0_[01]\.distcp, bytes "):
        pc.load({"model": weights()}, tmp_path / "ours", verify=True)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"model": weights(5)}, r"is \[5, 4\] in the state and \[4, 4\] in the checkpoint \(file:.*/ours\)"),
        ({"model": {"weight": torch.zeros(4, 4).half()}}, r"is float16 in the state .*\(file:.*/ours\)"),
        ({"encoder": weights()}, r"does not hold 'encoder\.weight' and 1 more \(file:.*/ours\)"),
    ],
)
def test_a_state_that_does_not_fit_is_told_which_checkpoint_it_was(
    places: Path, state: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        pc.load(state, places / "ours")


@pytest.mark.parametrize("call", [pc.save, pc.load])
def test_swapped_arguments_are_told_their_order(call: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="The state comes first"):
        call(tmp_path / "step", weights())


def test_a_manager_does_not_take_a_wrong_folder_for_the_beginning_of_a_run(
    places: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pc.Manager(places / "ours") as manager:
        with pytest.raises(UsageError, match=r"a checkpoint, not the folder of a run \(.*/ours\)\. Give"):
            manager.restore({"model": weights()})
        with pytest.raises(UsageError, match="Invalid step '5'"):
            manager.save("5", {"model": weights()})  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING), pc.Manager(places) as manager:
        assert manager.restore({"model": weights()}) is None
    assert "has no step-NUMBER, but other checkpoints: ours" in caplog.text
    with pytest.raises(UsageError, match="The path of the manager is None"):
        pc.Manager(None)  # type: ignore[arg-type]


def test_advice_about_missing_files_keeps_the_kind_of_the_error(places: Path) -> None:
    """So that a restore goes on with the step before."""
    with pytest.raises(StorageError):
        pc.load({"model": weights()}, places / "short")


def test_a_checkpoint_that_does_not_exist_is_told_with_those_beside_it(places: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"This checkpoint does not exist .*Did you mean ours\?"):
        pc.load({"model": weights()}, places / "our")
    with pytest.raises(StorageError, match=r"does not exist .*No checkpoint is next to it either"):
        pc.load({"model": weights()}, tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"There is no checkpoint here: neither .metadata nor safetensors"):
        pc.load({"model": weights()}, tmp_path / "empty")


def test_links_that_lead_nowhere_and_pipes_are_called_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "again").symlink_to("again")
    os.mkfifo(tmp_path / "pipe.pt")
    told = {
        "link": r"a link to nothing \(nowhere does not exist\)",
        "again": "Too many levels of symbolic links .* a link that leads back to itself",
        "pipe.pt": "this is a device, a pipe or a socket",
    }
    for name, words in told.items():
        with pytest.raises(StorageError, match=words):
            pc.load({"model": weights()}, tmp_path / name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_planner_refuses_names_that_nothing_has(places: Path) -> None:
    for reader in (pc.Reader(places / "ours"), FileSystemReader(places / "ours")):
        with pytest.raises(CheckpointException, match=r"No part of the state matches only='modle\.\*'"):
            stock_load({"model": weights()}, storage_reader=reader, planner=pc.LoadPlanner(only="modle.*"))
        stock_load({"model": weights()}, storage_reader=reader, planner=pc.LoadPlanner(only="model.*"))


def use_folders_of_their_own(rank: int, root: Path) -> list[str]:
    own = root / f"of-rank-{rank}"
    said = []
    for call in (
        lambda: pc.save({"model": weights()}, own / f"new-{rank}"),
        lambda: pc.load({"model": weights()}, own / "ours"),
        lambda: pc.Manager(own).save(1, {"model": weights()}),
        lambda: pc.Manager(own).restore({"model": weights()}),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        said.append(str(caught.value))
    assert [path.name for path in own.iterdir()] == ["ours"]
    return said


def test_ranks_that_give_different_folders_are_told_which(places: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(places / "ours", tmp_path / f"of-rank-{rank}" / "ours")
    said = on_gloo_ranks(2, use_folders_of_their_own, tmp_path)
    assert said[0] == said[1]
    for what in said[0]:
        assert re.search(r"rank 0:? .*of-rank-0.*rank 1:? .*of-rank-1", what), what


@pytest.mark.parametrize("folder", ["why?", "lr=1e-3?bs=8", "run?fsync=false"])
def test_a_question_mark_in_a_path_is_part_of_it(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    pc.save(weights(), tmp_path / folder.partition("?")[0] / "saved")
    pc.save({"weight": torch.ones(4, 4)}, str(tmp_path / folder / "saved"))
    state = {"weight": torch.zeros(4, 4)}
    pc.load(state, tmp_path / folder / "saved")
    assert state["weight"].all()
    assert verify(tmp_path / folder / "saved").is_whole
    pc.save(weights(), tmp_path / folder / "newer")
    assert remove(tmp_path / folder / "saved").stays == "newer"
    assert not (tmp_path / folder / "saved").exists()
    with pytest.raises(CheckpointException, match="Rename the folder"):
        stock_save(
            weights(), storage_writer=pc.Writer(tmp_path / folder / "other", fsync=False), no_dist=True
        )
