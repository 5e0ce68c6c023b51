"""`penstock checkpoint ls`, `show`, `diff`, `verify`, `convert` and `rm`: output and exit codes."""

import shutil
from pathlib import Path

import pytest
import torch
from tests.support.command_line import CommandResult, run_command

from penstock.checkpoint.manager.manager import Manager


def checkpoint(*words: object) -> CommandResult:
    return run_command("checkpoint", *words)


def rows(text: str) -> list[list[str]]:
    """The cells of each line below a table's rule."""
    lines = text.split("──\n" if "──\n" in text else "── \n", 1)[-1].splitlines()
    return [line.split() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run: a tensor of six numbers, which are larger by one in step 2, and an epoch."""
    folder = tmp_path_factory.mktemp("tools") / "run"
    with Manager(folder) as manager:
        for step in (1, 2):
            weight = torch.arange(6.0).reshape(2, 3) + (step - 1)
            manager.save(step, {"weight": weight, "epoch": 3})
    return folder


def test_ls_lists_steps_with_state_and_size(saved: Path) -> None:
    first, second = rows(checkpoint("ls", saved).stdout)
    assert first[:3] == ["step-1", "1", "committed"]
    assert second[:3] == ["step-2", "2", "committed"]
    assert first[5:7] == ["4", "1"]
    document = checkpoint("ls", saved, "--json").document
    assert document["path"] == str(saved)
    assert [entry["num_tensors"] for entry in document["checkpoints"]] == [1, 1]


def test_ls_reports_a_damaged_checkpoint_on_stderr(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step-1", tmp_path / "step-1")
    next((tmp_path / "step-1").glob("*.distcp")).unlink()
    result = checkpoint("ls", tmp_path)
    assert "damaged" in result.stdout
    assert result.stderr.startswith("step-1: ")


def test_show_names_tensors_and_objects(saved: Path) -> None:
    text = checkpoint("show", saved / "step-1").stdout
    assert "on 1 rank, step 1, checksums" in text
    assert "1 tensor, 24 B" in text
    assert ["weight", "float32", "2", "x", "3", "24", "B", "1", "__0_0.distcp"] in rows(text)
    assert "besides tensors: 1" in text
    assert "epoch" in text


def test_show_selects_names_by_pattern(saved: Path) -> None:
    document = checkpoint("show", saved / "step-1", "--name", "w*", "--json").document
    assert [tensor["name"] for tensor in document["tensors"]] == ["weight"]
    assert document["objects"] == []
    assert "besides" not in checkpoint("show", saved / "step-1", "--name", "w*").stdout


def test_diff_of_equal_checkpoints_exits_with_0(saved: Path) -> None:
    result = checkpoint("diff", saved / "step-1", saved / "step-1")
    assert result.returncode == 0
    assert result.stdout == "2 of 2 parts are the same, 0 are not\n"


def test_diff_shows_what_differs_and_exits_with_1(saved: Path) -> None:
    result = checkpoint("diff", saved / "step-1", saved / "step-2")
    assert result.returncode == 1
    assert rows(result.stdout)[0][-2:] == ["6", "1"]
    assert "1 of 2 parts are the same, 1 are not" in result.stdout
    assert "epoch" not in result.stdout
    assert checkpoint("diff", saved / "step-1", saved / "step-2", "--only", "epoch").returncode == 0
    as_json = checkpoint("diff", saved / "step-1", saved / "step-2", "--json")
    assert '"are_same": false' in as_json.stdout


def test_verify_exits_with_1_for_damage_and_with_3_without_checksums(saved: Path, tmp_path: Path) -> None:
    whole = checkpoint("verify", saved / "step-1")
    assert whole.returncode == 0
    assert ": whole; 2 items in 4 files" in whole.stdout
    damaged = shutil.copytree(saved / "step-1", tmp_path / "damaged")
    file = next(damaged.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    result = checkpoint("verify", damaged)
    assert result.returncode == 1
    assert result.stdout.startswith("damaged: ")
    assert "damaged in 1 place;" in result.stdout
    target = tmp_path / "weight.safetensors"
    assert checkpoint("convert", saved / "step-1", target, "--tensors-only").returncode == 0
    unchecked = checkpoint("verify", target)
    assert unchecked.returncode == 3
    assert ": not checked;" in unchecked.stdout
    assert "no checksums" in unchecked.stderr


@pytest.mark.parametrize(
    ("name", "format_"), [("a.pt", "torch"), ("a.bin", "torch"), ("a.ckpt", "torch"), ("a", "dcp")]
)
def test_convert_chooses_the_format_by_the_ending(
    saved: Path, tmp_path: Path, name: str, format_: str
) -> None:
    document = checkpoint("convert", saved / "step-1", tmp_path / name, "--json").document
    assert document["format"] == format_
    assert (document["num_tensors"], document["num_objects"]) == (1, 1)
    again = checkpoint("convert", saved / "step-1", tmp_path / name)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_convert_lists_what_it_leaves_out(saved: Path, tmp_path: Path) -> None:
    words = ("convert", saved / "step-1", f"{tmp_path}/sharded/", "--to", "safetensors")
    assert checkpoint(*words).returncode == 2
    result = checkpoint(*words, "--tensors-only")
    assert result.stdout.startswith("left out: epoch\n")
    assert "safetensors, 1 tensor and 0 other values" in result.stdout
    back = checkpoint("convert", tmp_path / "sharded", tmp_path / "back")
    assert "left out" not in back.stdout
    assert "unverified" in back.stderr


def test_convert_verifies_its_source_unless_told_otherwise(saved: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(saved / "step-1", tmp_path / "damaged")
    file = next(damaged.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert checkpoint("convert", damaged, tmp_path / "a.pt").returncode == 1
    assert checkpoint("convert", damaged, tmp_path / "b.pt", "--no-verify").returncode == 0


def test_rm_keeps_the_last_complete_checkpoint(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    first = checkpoint("rm", run / "step-1")
    assert first.returncode == 0
    assert "4 files" in first.stdout
    assert first.stdout.endswith("; step-2 is complete and remains\n")
    refused = checkpoint("rm", run / "step-2")
    assert refused.returncode == 2
    assert "--even-last" in refused.stderr
    last = checkpoint("rm", run / "step-2", "--even-last")
    assert last.returncode == 0
    assert "remains" not in last.stdout
    assert not (run / "step-2").exists()


def test_after_rm_the_pointer_names_the_newest_step_that_is_left(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    pointer = run / "latest"
    pointer.write_text("step-2\n")
    assert checkpoint("rm", run / "step-2").returncode == 0
    assert pointer.read_text() == "step-1\n"
    assert checkpoint("rm", run / "step-1", "--even-last").returncode == 0
    assert not pointer.exists()
