"""What a save never replaces, and what a load says of a checkpoint that is replaced while it is read."""

import threading
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.api import load, save
from penstock.checkpoint.formats import checkpoint_source
from penstock.checkpoint.formats.checkpoint_source import CheckpointReplaced, open_checkpoint
from penstock.errors import UsageError

SIZE = 4096


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {f"part{number}": torch.full((SIZE,), value) for number in range(8)}


def test_a_file_is_never_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis.pdf").write_bytes(b"years of work")
    with pytest.raises(UsageError, match=r"thesis\.pdf is a file, which would be lost"):
        save(state_of(1), tmp_path / "thesis.pdf")
    assert (tmp_path / "thesis.pdf").read_bytes() == b"years of work"


def test_a_link_is_never_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(UsageError, match="link is a link or device"):
        save(state_of(1), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


def test_a_folder_of_safetensors_alone_is_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"somebody's weights")
    with pytest.raises(UsageError, match=r"it contains model\.safetensors, which would be lost"):
        save(state_of(1), folder)
    assert (folder / "model.safetensors").read_bytes() == b"somebody's weights"


def test_loads_beside_replacing_saves_find_one_whole_save(tmp_path: Path) -> None:
    save(state_of(0), tmp_path / "name")
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            save(state_of(number), tmp_path / "name")

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(25):
            found = state_of(-1)
            try:
                load(found, tmp_path / "name")
            except CheckpointReplaced:
                continue
            values = {value for tensor in found.values() for value in tensor.tolist()}
            assert len(values) == 1
    finally:
        stop.set()
        writer.join()


def test_load_reads_again_when_the_checkpoint_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state_of(1), tmp_path / "name")
    opened: list[int] = []
    open_as_is = checkpoint_source.open_folder

    def open_and_replace(*arguments: object) -> checkpoint_source.CheckpointSource:
        checkpoint = open_as_is(*arguments)  # type: ignore[arg-type] # passed on as it came
        opened.append(len(opened))
        if len(opened) == 1:
            save(state_of(2), tmp_path / "name")
        return checkpoint

    monkeypatch.setattr(checkpoint_source, "open_folder", open_and_replace)
    found = state_of(0)
    load(found, tmp_path / "name")
    assert len(opened) == 2
    assert all(torch.equal(found[name], tensor) for name, tensor in state_of(2).items())


def test_replaced_checkpoint_is_not_called_damaged(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "name")
    checkpoint = open_checkpoint(tmp_path / "name")
    checkpoint.require_current()
    save(state_of(2), tmp_path / "name")
    with pytest.raises(CheckpointReplaced, match="Another save replaced this checkpoint"):
        checkpoint.require_current()
