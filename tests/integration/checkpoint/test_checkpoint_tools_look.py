"""`ls`, `show` and `verify` on the command line: tables, JSON and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli import main
from penstock.errors import DataDamaged

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.state_dict_saver import save as stock_save  # noqa: E402 - torch may be missing

from penstock.checkpoint.api import save  # noqa: E402 - needs torch
from penstock.checkpoint.formats.checkpoint_source import open_checkpoint  # noqa: E402 - as above

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Asked = Callable[..., tuple[int, Any]]


def state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(4, 6), "b": torch.zeros(4, dtype=torch.bfloat16)}, "steps": 7}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(state(), tmp_path / "run" / "step-5")
    save(state(), tmp_path / "run" / "step-10")
    stock_save(state(), checkpoint_id=tmp_path / "run" / "stock", no_dist=True)
    return tmp_path / "run"


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Asked:
    """Exit code and JSON of a command line."""

    def ask(*words: object) -> tuple[int, Any]:
        code = main(["checkpoint", *map(str, words), "--json"])
        text = capsys.readouterr().out
        return code, json.loads(text) if text else None

    return ask


def test_a_run_is_listed_by_step_with_the_state_of_each(run: Path, asked: Asked) -> None:
    (run / "step-10" / "__0_0.distcp").write_bytes(b"cut")
    code, document = asked("ls", run)
    assert code == 0
    assert [(one["name"], one["step"], one["state"]) for one in document["checkpoints"]] == [
        ("step-5", 5, "committed"),
        ("step-10", 10, "damaged"),
        ("stock", None, "no sums"),
    ]
    assert "has 3 bytes" in document["checkpoints"][1]["complaint"]
    assert document["checkpoints"][0]["num_tensors"] == 2


def test_one_checkpoint_can_be_listed_alone_and_none_is_an_error(
    run: Path, asked: Asked, tmp_path: Path
) -> None:
    code, document = asked("ls", run / "step-5")
    assert (code, [one["name"] for one in document["checkpoints"]]) == (0, ["step-5"])
    assert asked("ls", tmp_path / "nothing") == (2, None)


def test_ls_says_why_there_is_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "stock" / ".metadata").rename(run / "stock" / "penstock.json")
    reasons = {"stock": "has no .metadata", "step-7": "does not exist", "step-5/.metadata": "one file of"}
    for name, reason in reasons.items():
        assert main(["checkpoint", "ls", str(run / name)]) == 2
        assert reason in capsys.readouterr().err


def test_ls_lists_a_step_without_its_hidden_files_as_damaged(run: Path, asked: Asked) -> None:
    (run / "step-5" / ".metadata").unlink()
    code, document = asked("ls", run / "step-5")
    assert (code, document["checkpoints"][0]["state"]) == (0, "damaged")
    assert "has no .metadata" in document["checkpoints"][0]["complaint"]


def test_ls_names_the_verb_for_checkpoints_that_it_does_not_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    (tmp_path / "hub").mkdir()
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"w": torch.ones(2)}, tmp_path / "hub" / "model.safetensors")
    for name, kind in {"hub": "a checkpoint of safetensors", "x.pt": "an archive of torch.save"}.items():
        assert main(["checkpoint", "ls", str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert f"This is {kind}" in told
        assert "`penstock checkpoint show` describes it" in told


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_save_of_another_program_over_ours_is_told_how_to_open(run: Path) -> None:
    stock_save({"w": torch.ones(2)}, checkpoint_id=run / "step-5", no_dist=True)
    with pytest.raises(DataDamaged, match=r"or remove penstock\.json if another program has saved here"):
        open_checkpoint(run / "step-5")
    (run / "step-5" / "penstock.json").unlink()
    assert [facts.name for facts in open_checkpoint(run / "step-5").index.tensors] == ["w"]


@pytest.mark.parametrize("name", ["step-5", "stock"])
def test_a_file_that_is_gone_is_no_equal_one(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name / "__0_0.distcp").unlink()
    for pair in ((run / name, run / "step-10"), (run / "step-10", run / name)):
        assert main(["checkpoint", "diff", *map(str, pair)]) == 2
        told = capsys.readouterr().err
        assert "__0_0.distcp is missing" in told
        assert "penstock checkpoint verify" in told


def test_a_stock_file_that_is_too_short_is_damaged(run: Path, asked: Asked) -> None:
    path = run / "stock" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    _, document = asked("ls", run / "stock")
    assert document["checkpoints"][0]["state"] == "damaged"


def test_tensors_are_shown_without_loading_them(run: Path, asked: Asked) -> None:
    for name, has_sums in (("step-5", True), ("stock", False)):
        code, document = asked("show", run / name)
        assert code == 0
        tensors = {
            one["name"]: (one["dtype"], one["shape"], one["size_bytes"]) for one in document["tensors"]
        }
        assert tensors == {"model.w": ("float32", [4, 6], 96), "model.b": ("bfloat16", [4], 8)}
        assert [(one["name"], one["value"]) for one in document["objects"]] == [("steps", "7")]
        assert (document["has_sums"], document["size_bytes"]) == (has_sums, 104)


def test_names_can_be_chosen(run: Path, asked: Asked) -> None:
    _, document = asked("show", run / "step-5", "--name", "*.w")
    assert [one["name"] for one in document["tensors"]] == ["model.w"]
    assert document["objects"] == []


def test_single_files_are_shown_too(tmp_path: Path, asked: Asked) -> None:
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    torch.save({"x": torch.ones(3, 4).t(), "args": __import__("argparse").Namespace(a=1)}, tmp_path / "x.pt")
    _, document = asked("show", tmp_path / "x.safetensors")
    assert (document["format"], document["tensors"][0]["shape"]) == ("safetensors", [3])
    _, document = asked("show", tmp_path / "x.pt")
    assert document["tensors"][0]["note"] == "strided: read whole"
    assert document["objects"][0]["value"] == "<Namespace>"


def test_tables_for_people_name_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(run)]) == 0
    assert main(["checkpoint", "show", str(run / "step-5")]) == 0
    assert main(["checkpoint", "verify", str(run / "step-5")]) == 0
    text = capsys.readouterr().out
    for word in ("step-10", "committed", "model.w", "4 x 6", "bfloat16", "whole; 3 items in 4 files"):
        assert word in text


def test_verify_exits_by_what_it_found(run: Path, asked: Asked, tmp_path: Path) -> None:
    code, document = asked("verify", run / "step-5")
    assert (code, document["is_whole"], document["damage"]) == (0, True, [])
    path = next((run / "step-5").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, document = asked("verify", run / "step-5")
    assert (code, document["is_whole"]) == (1, False)
    assert document["damage"][0]["file"] == path.name
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    assert asked("verify", tmp_path / "x.safetensors")[0] == 3
    assert asked("verify", tmp_path / "none") == (2, None)


def test_damage_is_listed_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "step-5" / ".metadata").write_bytes(b"")
    assert main(["checkpoint", "verify", str(run / "step-5")]) == 1
    text = capsys.readouterr().out
    assert "damaged: .metadata, bytes 0 to" in text
    assert "damaged in 1 place;" in text
