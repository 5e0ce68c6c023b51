"""File systems that are mounted read-only, where all that reads works and writes nothing, or that go away."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.mounted import run_mounted
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

from penstock.checkpoint.api import load, save
from penstock.checkpoint.manager.manager import Manager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOADS = """
import sys, torch
import torch.distributed.checkpoint as dcp
import penstock.checkpoint as pc
root = sys.argv[1]
expected = torch.arange(3000.0)
for name in ("ours", "stock", "plain.pt", "plain.safetensors", "managed/step-7"):
    state = {"w": torch.zeros(3000)}
    pc.load(state, f"{root}/{name}")
    assert torch.equal(state["w"], expected), name
    print("loaded", name)
for name in ("ours", "stock"):
    state = {"w": torch.zeros(3000)}
    dcp.load(state, storage_reader=pc.Reader(f"{root}/{name}"))
    assert torch.equal(state["w"], expected), name
    print("read", name)
with pc.Manager(f"{root}/managed") as manager:
    state = {"w": torch.zeros(3000)}
    assert manager.restore(state) == 7
    assert torch.equal(state["w"], expected)
    print("restored")
"""

SAVES = """
import sys, torch
import penstock.checkpoint as pc
from penstock.errors import AccessRefused
root = sys.argv[1]
def manage():
    with pc.Manager(f"{root}/managed") as manager:
        manager.save(8, {"w": torch.zeros(3)})
def save_new():
    pc.save({"w": torch.zeros(3)}, f"{root}/new")
for named, save in (("new", save_new), ("managed/step-8", manage)):
    try:
        save()
        print("saved", named)
    except AccessRefused as error:
        assert f"(file://{root}/{named})" in str(error), error
        assert "Read-only file system" in str(error), error
        assert "It is mounted read-only" in str(error), error
        print("refused", named)
"""

VERBS = """
import sys, tempfile
from penstock.cli.app import main
root = sys.argv[1]
with tempfile.TemporaryDirectory() as out:
    for arguments in (
        ["ls", f"{root}/managed"], ["show", f"{root}/ours"], ["verify", f"{root}/ours"],
        ["verify", f"{root}/stock"], ["diff", f"{root}/ours", f"{root}/stock"],
        ["convert", f"{root}/ours", f"{out}/ours.safetensors"],
        ["convert", f"{root}/plain.pt", f"{out}/ours"],
    ):
        try:
            main(["checkpoint", *arguments])
            code = 0
        except SystemExit as end:
            code = end.code or 0
        print(arguments[0], code)
        assert code == 0, arguments
"""


UNMOUNTED = 'mount -t tmpfs tmpfs "$1" && exec "$2" -c "$3" "$1"'

GOES_AWAY = """
import subprocess, sys, torch
import penstock.checkpoint as pc
from penstock.errors import StorageError
root = sys.argv[1]
state = {"w": torch.zeros(3)}
for folder in (root, f"{root}/run"):
    manager = pc.Manager(folder)
    manager.save(1, state)
    subprocess.run(["umount", "--lazy", root], check=True)
    for call in (
        lambda: manager.save(2, state),
        lambda: manager.save_async(3, state).result(),
        manager.steps,
        lambda: manager.restore(state),
    ):
        try:
            print("done", call())
        except StorageError as error:
            assert "is no longer mounted" in str(error), error
            print("refused")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    manager.save(4, state)
    print(manager.steps())
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"w": torch.arange(3000.0)}
    save(state, tmp_path / "ours")
    stock_save(state, storage_writer=FileSystemWriter(tmp_path / "stock"))
    torch.save(state, tmp_path / "plain.pt")
    save_file(state, tmp_path / "plain.safetensors")
    with Manager(tmp_path / "managed") as manager:
        manager.save(7, state)
    return tmp_path


def test_every_format_is_loaded_and_restored_from_a_read_only_mount(saved: Path) -> None:
    printed = run_mounted(saved, LOADS)
    assert printed.split("\n")[-2] == "restored"


def test_verbs_that_only_read_work_on_a_read_only_mount(saved: Path) -> None:
    run_mounted(saved, VERBS)


def test_saves_to_a_read_only_mount_name_the_checkpoint_that_was_asked_for(saved: Path) -> None:
    assert run_mounted(saved, SAVES) == "refused new\nrefused managed/step-8\n"


def test_loads_touch_no_folder(saved: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in [saved, *saved.rglob("*")] if path.is_dir()}
    load({"w": torch.zeros(3000)}, saved / "ours")
    with Manager(saved / "managed") as manager:
        manager.restore({"w": torch.zeros(3000)})
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_nothing_is_saved_below_a_mount_that_went_away(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    said = run_mounted(tmp_path / "mount", GOES_AWAY, UNMOUNTED).splitlines()
    assert said == [*["refused"] * 4, "[4]"] * 2
    assert {path.name for path in (tmp_path / "mount").iterdir()} <= {".penstock-writer.lease"}
