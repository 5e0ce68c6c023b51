import gc
import multiprocessing
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

from penstock.checkpoint.adapters import async_writer
from penstock.checkpoint.adapters.async_writer import AsyncWriter
from penstock.checkpoint.tools.verify import verify
from penstock.errors import StorageError, UsageError


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

    def sent(self) -> bytes:
        """What another process is sent."""
        return pickle.dumps((self.function, self.preload, self.arguments))

    def write(self, sent: bytes | None = None) -> None:
        """As a process that was sent everything does it."""
        function, preload, arguments = pickle.loads(sent or self.sent())
        function(arguments[0], preload(), arguments[2])

    def fork(self, before: Callable[[], object]) -> None:
        """Write in a process that is forked, and that calls `before` first."""
        assert self.function is not None
        assert self.preload is not None
        function, arguments = self.function, [self.arguments[0], self.preload(), self.arguments[2]]

        def run() -> None:
            before()
            function(*arguments)

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        self.process = process

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


def test_tensors_may_change_once_a_save_was_sent_to_another_process(tmp_path: Path) -> None:
    state = state_of()
    save = Save(state, tmp_path / "one")
    sent = save.sent()
    state["rows"].fill_(9)
    save.write(sent)
    save.finish()
    assert torch.equal(loaded(tmp_path / "one")["rows"], state_of()["rows"])


def test_a_forked_process_writes_the_values_of_the_moment_of_shared_memory_too(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mapped", dtype=np.float32, mode="w+", shape=(700,))
    state = {
        "own": torch.zeros(700),
        "view": torch.zeros(900)[100:800],
        "shared": shared(torch.zeros(700)),
        "mapped": torch.from_numpy(mapped),
        "empty": shared(torch.zeros(0)),
    }
    for tensor in state.values():
        tensor.fill_(3)
    save = Save(state, tmp_path / "one")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    save.fork(receiver.recv)
    for tensor in state.values():
        tensor.fill_(9)
    sender.send("the training has gone on")
    save.process.join()
    save.finish()
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(found, checkpoint_id=str(tmp_path / "one"))
    assert all(tensor.eq(3).all() for tensor in found.values())


def shared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()  # type: ignore[no-any-return,no-untyped-call] # torch leaves it untyped


def run_out_of_memory(*_: object) -> None:
    raise MemoryError


def see_no_garbage_collector(*_: object) -> None:
    message = f"off: {not gc.isenabled()}"
    raise RuntimeError(message)


def kill_oneself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (kill_oneself, r"ended early, without a report[^$]*It was killed: look for .* in dmesg"),
        (run_out_of_memory, "MemoryError"),
        (see_no_garbage_collector, "off: True"),
    ],
)
def test_the_end_of_a_forked_writer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[..., None], cause: str
) -> None:
    save = Save(state_of(), tmp_path / "one")
    monkeypatch.setattr(async_writer, "_write_files", end)
    save.fork(lambda: None)
    save.process.join()
    failure, _ = save.writer.retrieve_write_results()
    assert isinstance(failure, StorageError)
    assert re.search(cause, str(failure))


def test_files_are_as_many_as_the_writers_and_transformed_and_the_log_has_the_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {f"{group}.{number}": torch.full((5000,), 4.0) for group in "ab" for number in range(9)}
    save = Save(state, tmp_path / "one", writers=4, separation_hint="a.", transforms=["stream.zstd/1"])
    with caplog.at_level("INFO"):
        save.write()
        save.finish()
    files = sorted(path.name for path in (tmp_path / "one").glob("*.distcp"))
    assert files == ["__0_0.distcp", "__0_1.distcp", "a.__0_0.distcp", "a.__0_1.distcp"]
    assert sum((tmp_path / "one" / name).stat().st_size for name in files) < 5000 * 4
    found = {name: torch.zeros(5000) for name in state}
    load(found, checkpoint_id=str(tmp_path / "one"))
    assert all(tensor.eq(4).all() for tensor in found.values())
    assert re.search(r"rank 0, .*/one: .*KiB; plan .* stage .* write .* sync .* memory", caplog.text)
    with pytest.raises(UsageError, match="at least 2 writers"):
        AsyncWriter(tmp_path / "two", writers=1, separation_hint="a.")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_it_is_a_writer_of_torch_and_saves_without_a_process_of_its_own(tmp_path: Path) -> None:
    writer = AsyncWriter(tmp_path / "one")
    assert isinstance(writer, FileSystemWriter)
    metadata = stock_save(state_of(), storage_writer=writer)
    assert metadata.storage_meta.save_id == writer.save_id
    assert loaded(tmp_path / "one")["step"] == 3


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


def test_nothing_that_others_may_write_to_holds_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    save = Save(state_of(), tmp_path / "one")
    save.fork(lambda: None)
    save.process.join()
    assert list((tmp_path / "temporary").iterdir()) == []
    save.finish()
    assert loaded(tmp_path / "one")["step"] == 3


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
