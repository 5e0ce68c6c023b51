from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.checkpoint.adapters.async_writer import AsyncWriter
from penstock.checkpoint.tools.verify import verify
from penstock.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path


class Save:
    """One save of one process, in the steps that frameworks call."""

    def __init__(self, state: dict[str, Any], folder: Path, **options: Any) -> None:
        self.writer = AsyncWriter(folder, **options)
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        self.writer.set_up_storage_writer(is_coordinator=True)
        plan = self.writer.prepare_local_plan(planner.create_local_plan())
        plans, self.metadata = planner.create_global_plan([plan])
        (plan,) = self.writer.prepare_global_plan(plans)
        self.writer.prepare_write_data(planner.finish_plan(plan), planner)
        self.function, self.preload, self.arguments = self.writer.get_save_function_and_args()

    def write(self) -> None:
        """As a process that was sent everything does it."""
        assert self.function is not None
        assert self.preload is not None
        function, preload, arguments = pickle.loads(
            pickle.dumps((self.function, self.preload, self.arguments))
        )
        function(arguments[0], preload(), arguments[2])

    def finish(self) -> None:
        self.writer.finish(self.metadata, [self.writer.retrieve_write_results()])


def state_of(fill: float = 0.0) -> dict[str, Any]:
    return {"rows": torch.arange(40.0).reshape(8, 5).t() + fill, "step": 3, "note": b"text"}


def loaded(folder: Path) -> dict[str, Any]:
    found = {"rows": torch.zeros(5, 8), "step": 0, "note": b""}
    load(found, checkpoint_id=str(folder))
    return found


def test_stock_torch_reads_what_was_written_elsewhere(tmp_path: Path) -> None:
    save = Save(state_of(), tmp_path / "one")
    save.write()
    save.finish()
    found = loaded(tmp_path / "one")
    assert torch.equal(found["rows"], state_of()["rows"])
    assert (found["step"], found["note"]) == (3, b"text")
    assert not verify(tmp_path / "one").damage


def test_files_of_the_framework_may_be_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "common.pt").write_bytes(b"theirs")
    save = Save(state_of(), tmp_path / "one")
    save.write()
    save.finish()
    assert (tmp_path / "one" / "common.pt").read_bytes() == b"theirs"
    assert not verify(tmp_path / "one").damage
    assert loaded(tmp_path / "one")["step"] == 3


def test_with_snapshots_tensors_may_change_before_anything_is_written(tmp_path: Path) -> None:
    state = state_of()
    save = Save(state, tmp_path / "one", snapshots=True)
    state["rows"].fill_(9)
    save.write()
    save.finish()
    assert torch.equal(loaded(tmp_path / "one")["rows"], state_of()["rows"])


def test_nothing_is_a_checkpoint_before_it_is_finished(tmp_path: Path) -> None:
    first = Save(state_of(), tmp_path / "one")
    first.write()
    first.finish()
    Save(state_of(1.0), tmp_path / "one").write()
    assert not (tmp_path / "one" / ".metadata").exists()
    assert not (tmp_path / "one" / "penstock.json").exists()


def test_a_writer_process_that_ended_early_is_a_failure_of_its_rank(tmp_path: Path) -> None:
    failure, _ = Save(state_of(), tmp_path / "one").writer.retrieve_write_results()
    assert isinstance(failure, StorageError)
    assert "ended early" in str(failure)


def test_a_failure_in_the_writer_process_is_returned(tmp_path: Path) -> None:
    save = Save(state_of(), tmp_path / "one")
    (tmp_path / "one" / "__0_0.distcp" / "in the way").mkdir(parents=True)
    save.write()
    failure, _ = save.writer.retrieve_write_results()
    assert isinstance(failure, StorageError)
    assert "__0_0.distcp" in str(failure)


def test_a_file_that_vanished_is_noticed_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    save = Save(state_of(), tmp_path / "one")
    save.write()
    next((tmp_path / "one").glob("*.distcp")).unlink()
    with pytest.raises(StorageError, match="are missing"):
        save.finish()
    assert not (tmp_path / "one" / ".metadata").exists()


def test_a_rank_without_items_has_nothing_to_call(tmp_path: Path) -> None:
    save = Save({}, tmp_path / "one")
    assert (save.function, save.preload, save.arguments) == (None, None, [])
    assert save.writer.retrieve_write_results() == []
