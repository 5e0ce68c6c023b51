"""A manager alone: steps, retention, saves in the background, and what it refuses."""

from __future__ import annotations

import copy
import errno
import logging
import math
import os
import pickle
import re
import shutil
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.file_faults import Call, CallLog, FailFileCall, faulty_calls
from tests.support.held_storage import HeldStorage
from tests.support.known_steps import files_below

import penstock.checkpoint as pc
from penstock.checkpoint.commit.checkpoints import CheckpointRef, StepCatalog, choose_surplus, step_dirname
from penstock.checkpoint.commit.protocol import FolderCatalog
from penstock.checkpoint.engine import SaveCancelled
from penstock.checkpoint.levels.options import Single
from penstock.checkpoint.manager import step_store
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.tools.inspection import CheckpointState, list_storage
from penstock.checkpoint.tools.verify import verify
from penstock.errors import (
    AccessRefused,
    OutOfSpace,
    RankFailed,
    StorageError,
    UsageError,
    WaitTimeout,
)
from penstock.progress import Progress
from penstock.storage.files.folders import FolderTree
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.uri import open_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

State = dict[str, torch.Tensor]


def state_of(step: int) -> State:
    return {"bytes": torch.full((5000,), step, dtype=torch.uint8)}


def is_of(state: State, step: int) -> bool:
    return torch.equal(state["bytes"], state_of(step)["bytes"])


def full() -> None:
    raise OutOfSpace("The disk is full", uri="file:///full", errno=errno.ENOSPC)


@contextmanager
def held_manager(root: Path, keep: int | None = None) -> Iterator[tuple[Manager, threading.Event]]:
    """A manager whose writes wait for the event."""
    go_on = threading.Event()
    with Manager(HeldStorage(open_here(root), hold=go_on), keep=keep) as manager:
        try:
            yield manager, go_on
        finally:
            go_on.set()


def test_a_run_is_saved_kept_and_resumed(tmp_path: Path) -> None:
    with Manager(tmp_path / "run", keep=2) as manager:
        assert manager.restore(state_of(0)) is None
        assert (manager.steps(), manager.latest()) == ([], None)
        for step in (1, 2, 10):
            report = manager.save(step, state_of(step))
            assert report.uri == f"file://{tmp_path}/run/step-{step}"
        assert (manager.steps(), manager.latest()) == ([2, 10], 10)
    assert (tmp_path / "run" / "latest").read_text() == "step-10\n"
    with Manager(tmp_path / "run") as resumed:
        state = state_of(0)
        assert resumed.restore(state) == 10
        assert is_of(state, 10)
        assert resumed.restore(state, step=2) == 2
        assert is_of(state, 2)


@pytest.mark.parametrize("storage", ["memory", "direct", "file"])
def test_a_manager_takes_an_open_storage_or_a_uri(tmp_path: Path, storage: str) -> None:
    durable = MemoryStorage() if storage == "memory" else f"{storage}://{tmp_path}/run"
    with Manager(durable, keep=1) as manager:
        for generation in (1, 2):
            manager.save(3, state_of(generation))
        manager.save(4, state_of(4))
        assert manager.steps() == [4]
        state = state_of(0)
        assert manager.restore(state) == 4
        assert is_of(state, 4)


def test_saves_in_the_background_are_committed_in_their_order(tmp_path: Path) -> None:
    with held_manager(tmp_path, keep=3) as (manager, go_on):
        handles = []
        for step in range(5):
            state = state_of(step)
            handles.append(manager.save_async(step, state))
            state["bytes"].zero_()
        assert manager.steps() == []
        assert [handle.done for handle in handles] == [False] * 5
        assert handles[0].stats is None
        go_on.set()
        reports = [handle.result(60) for handle in handles]
        assert [report.step for report in reports] == list(range(5))
        assert handles[-1].stats == reports[-1]
        assert "memory" in str(reports[-1].ranks[0])
        restored = state_of(9)
        assert manager.restore(restored) == 4
        assert is_of(restored, 4)
    assert StepCatalog(open_here(tmp_path)).committed() == [2, 3, 4]


def test_a_late_result_is_a_timeout_that_names_the_step(tmp_path: Path) -> None:
    with held_manager(tmp_path) as (manager, go_on):
        handle = manager.save_async(7, state_of(7), staging="background")
        handle.wait_staged(60)
        with pytest.raises(WaitTimeout, match="step 7 to be committed"):
            handle.result(0.01)
        with pytest.raises(WaitTimeout, match="step 7 to be committed"):
            handle.wait_done(0.01)
        go_on.set()
        assert handle.result().step == 7


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    storage = HeldStorage(open_here(tmp_path))
    with Manager(storage) as manager:
        manager.save(1, state_of(1))
        storage.spoil = full
        handle = manager.save_async(2, state_of(2))
        handle.wait_done(60)
        storage.spoil = None
        with pytest.raises(RankFailed, match="saving step 2 in the background: The disk is full") as caught:
            manager.save(3, state_of(3))
        assert caught.value.rank == 0
        assert manager.save(3, state_of(3)).step == 3
        with pytest.raises(OutOfSpace, match="The disk is full"):
            handle.result()
    assert StepCatalog(open_here(tmp_path)).committed() == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


def test_a_save_that_fails_leaves_the_older_checkpoint_of_its_step(tmp_path: Path) -> None:
    storage = HeldStorage(open_here(tmp_path))
    with Manager(storage) as manager:
        manager.save(1, state_of(1))
        storage.spoil = full
        with pytest.raises(OutOfSpace, match="The disk is full"):
            manager.save(1, state_of(2))
        state = state_of(0)
        assert manager.restore(state) == 1
        assert is_of(state, 1)


def test_a_cancelled_save_does_not_fail_the_next_call(tmp_path: Path) -> None:
    with held_manager(tmp_path) as (manager, go_on):
        handle = manager.save_async(1, state_of(1))
        handle.cancel()
        go_on.set()
        handle.wait_done(60)
        manager.save(2, state_of(2))
        with pytest.raises(SaveCancelled, match="was cancelled before it was committed"):
            handle.result()
        assert manager.steps() == [2]


def test_an_error_in_the_block_lets_saves_finish_and_comes_out_alone(tmp_path: Path) -> None:
    storage = HeldStorage(open_here(tmp_path))

    def train() -> None:
        with Manager(storage) as manager:
            manager.save_async(1, state_of(1))
            manager.save(2, state_of(2))
            storage.spoil = full
            manager.save_async(3, state_of(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert StepCatalog(open_here(tmp_path)).committed() == [1, 2]


def test_an_interrupt_cancels_what_is_under_way(tmp_path: Path) -> None:
    go_on = threading.Event()

    def train() -> None:
        with Manager(HeldStorage(open_here(tmp_path), hold=go_on)) as manager:
            manager.save_async(1, state_of(1)).wait_staged()
            threading.Timer(0.2, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert StepCatalog(open_here(tmp_path)).committed() == []


def test_a_fork_cannot_use_the_manager_and_leaves_its_saves_alone(tmp_path: Path) -> None:
    with held_manager(tmp_path) as (manager, go_on):
        handle = manager.save_async(1, state_of(1))
        if not (child := os.fork()):
            signal.alarm(20)
            with suppress(BaseException), manager:
                for call in (lambda: manager.save(2, state_of(2)), lambda: manager.restore(state_of(0))):
                    with pytest.raises(UsageError, match=r"belongs to process \d+, not to its fork, so"):
                        call()
                manager.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        assert handle.result().step == 1
        assert manager.save(2, state_of(2)).step == 2


def test_a_damaged_newest_step_is_skipped_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        for step in (2, 3):
            victim = tmp_path / f"step-{step}" / "__0_0.distcp"
            victim.write_bytes(bytes(victim.stat().st_size))
        state = state_of(0)
        with caplog.at_level(logging.WARNING):
            assert manager.restore(state) == 1
        assert is_of(state, 1)
        assert [each.step for each in manager.skipped_steps] == [3, 2]
        assert "Skipping step 3: " in caplog.text
        assert manager.restore(state, step=1) == 1
        assert manager.skipped_steps == ()


def test_retention_keeps_the_last_whole_step_if_the_newest_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Manager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    steps = StepCatalog(open_here(tmp_path))

    def surplus(keep: int) -> list[int]:
        return choose_surplus(steps.committed(), keep, lambda step: steps.find(step).is_whole())

    (tmp_path / "step-3" / "__0_0.distcp").write_bytes(bytes(3))
    assert not steps.find(3).is_whole()
    assert surplus(1) == [1]
    (tmp_path / "step-2" / ".metadata").write_bytes(b"other")
    assert not steps.find(2).is_whole()
    assert surplus(1) == [2]
    assert surplus(2) == []


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_is_not_copied(tmp_path: Path, duplicate: Callable[[Manager], object]) -> None:
    with (
        Manager(tmp_path) as manager,
        pytest.raises(UsageError, match="cannot be copied or pickled"),
    ):
        duplicate(manager)


def test_retention_does_not_read_what_was_just_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(checkpoint: CheckpointRef) -> bool:
        raise AssertionError(f"{checkpoint.uri} was read")

    monkeypatch.setattr(CheckpointRef, "is_whole", refuse)
    with Manager(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        assert manager.steps() == [2]


def test_files_of_old_steps_are_removed_when_nobody_waits_and_before_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, remove = threading.Event(), FolderTree.remove

    def hold(tree: FolderTree, name: str) -> None:
        if name.startswith(".penstock-gone-"):
            assert go_on.wait(60)
        remove(tree, name)

    monkeypatch.setattr(FolderTree, "remove", hold)
    with Manager(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        assert (manager.steps(), len([*tmp_path.glob(".penstock-gone-*")])) == ([2], 1)
        handle = manager.save_async(3, state_of(3))
        with pytest.raises(WaitTimeout):
            handle.result(timeout=0.2)
        go_on.set()
        handle.result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3"]


def test_the_pointer_to_a_step_is_durable_before_it_is_shown(tmp_path: Path) -> None:
    calls = CallLog()
    catalog = StepCatalog(files_below(tmp_path, faulty_calls(calls)))
    catalog.set_latest(1)
    catalog.set_latest(3)
    assert calls.names[-3:] == ["fsync", "close", "rename"]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["step-3\n"]


def test_steps_are_removed_though_nothing_can_point_to_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    with Manager(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        assert manager.steps() == [2]
    assert "Step 2 is committed, but 'latest' does not name it" in caplog.text


def test_a_job_that_begins_anew_keeps_its_steps_and_is_told_of_newer_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(tmp_path, keep=2) as manager:
        for step in (900, 1000):
            manager.save(step, state_of(9))
    with caplog.at_level(logging.WARNING), Manager(tmp_path, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
            assert step in manager.steps()
        assert manager.steps() == [2, 3, 900, 1000]
    assert caplog.text.count("Saving step 1 to") == 1
    assert caplog.text.count("newer steps (900, 1000)") == 1


def test_a_run_is_not_empty_when_its_step_is_replaced_by_a_newer_one_as_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = FolderCatalog._may_be_checkpoint
    with Manager(tmp_path, keep=1) as manager:
        manager.save(1, state_of(1))

        def save_meanwhile(catalog: FolderCatalog, folder: str) -> bool:
            monkeypatch.setattr(FolderCatalog, "_may_be_checkpoint", look)
            manager.save(2, state_of(2))
            return look(catalog, folder)

        monkeypatch.setattr(FolderCatalog, "_may_be_checkpoint", save_meanwhile)
        assert StepCatalog(open_here(tmp_path)).committed() == [2]


def test_an_old_step_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide = StepCatalog.hide

    def refuse_first(catalog: StepCatalog, step: int) -> Callable[[], None]:
        if step == 1:
            raise AccessRefused("Renaming failed: Operation not permitted", uri="step-1")
        return hide(catalog, step)

    monkeypatch.setattr(StepCatalog, "hide", refuse_first)
    with Manager(tmp_path, keep=1) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step))
        assert manager.steps() == [1, 4]
    assert caplog.text.count("not all old steps could be removed: Renaming failed") == 3


def test_a_step_is_committed_even_if_old_ones_cannot_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(tmp_path) as manager:
        manager.save(1, state_of(1))
    calls = faulty_calls(FailFileCall.and_all_after("unlink", 2, errno.EACCES))
    with Manager(files_below(tmp_path, calls), keep=1) as manager:
        assert manager.save(2, state_of(2)).step == 2
        assert manager.steps() == [2]
    assert "not all old steps could be removed" in caplog.text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"keep": 0}, "keep must be a whole number from 1 or None, not 0"),
        ({"keep": "3"}, "keep must be a whole number from 1 or None, not '3'"),
        ({"keep_cached": 1.5}, "keep_cached must be a whole number from 1 or None, not 1.5"),
        ({"redundancy": Single()}, "redundancy= and flush= apply to caches, but cache= is not given"),
        ({"save_policy": 3}, "Invalid save_policy=3"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        Manager(tmp_path, **options)


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        with pytest.raises(UsageError, match="Invalid staging='fast'"):
            manager.save_async(1, state_of(1), staging="fast")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="Invalid step"):
            manager.save(-1, state_of(1))
        with pytest.raises(UsageError, match="No part of the state matches only='x'"):
            manager.save(1, state_of(1), only="x")
        with pytest.raises(StorageError, match="Step 5 is not committed"):
            manager.restore(state_of(0), step=5)
        assert manager.save(1, state_of(1)).step == 1


def test_an_unreadable_folder_is_an_error_and_not_an_empty_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", ())
    calls = faulty_calls(FailFileCall.and_all_after("scandir", 1, errno.EACCES))
    with (
        Manager(files_below(tmp_path, calls)) as manager,
        pytest.raises(AccessRefused, match="Listing failed"),
    ):
        manager.restore(state_of(0))


def test_progress_is_passed_on(tmp_path: Path) -> None:
    class Seen(Progress):
        phases: tuple[str, float] = ("", 0.0)
        done = 0.0

        def begin(self, phase: str, total: float) -> None:
            self.phases = phase, total

        def advance(self, amount: float) -> None:
            self.done += amount

    seen = Seen()
    with Manager(tmp_path) as manager:
        manager.save_async(1, state_of(1), progress=seen).result(60)
    assert seen.phases == ("writing", seen.done)
    assert seen.done >= 5000


def test_steps_are_folders_in_the_root_of_the_run(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        manager.save(12, state_of(1))
    assert (tmp_path / step_dirname(12) / ".metadata").exists()


class FailOfStep:
    """A system call on the files of one step fails."""

    def __init__(self, call: str, step: int, error_number: int, times: float = math.inf) -> None:
        self._call, self._name, self._number, self._left = call, step_dirname(step), error_number, times

    def around(self, name: str, call: Call) -> Call:
        def failing(*arguments: Any) -> Any:
            target = arguments[0]
            path = target if isinstance(target, str) else str(Path(f"/proc/self/fd/{target}").readlink())
            if f"/{self._name}/" in path and self._left > 0:
                self._left -= 1
                raise OSError(self._number, os.strerror(self._number))
            return call(*arguments)

        return failing if name == self._call else call


PASSING_FAULTS = (
    errno.EIO,
    errno.ETIMEDOUT,
    errno.ESTALE,
    errno.EACCES,
    errno.EINTR,
    errno.ECONNRESET,
    errno.EMFILE,
    errno.ENOMEM,
)


def two_steps(root: Path) -> None:
    with Manager(root) as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))


@pytest.mark.parametrize(
    ("call", "number"),
    [*(("open", number) for number in PASSING_FAULTS), ("pread_into", errno.EIO), ("lstat", errno.ESTALE)],
)
def test_a_step_is_tried_again_after_a_failure_that_passes(
    call: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", (0.0, 0.0))
    two_steps(tmp_path)
    with Manager(files_below(tmp_path, faulty_calls(FailOfStep(call, 2, number, times=2)))) as manager:
        state = state_of(0)
        assert manager.restore(state) == 2
        assert is_of(state, 2)
        assert manager.skipped_steps == ()
    if call != "lstat":
        assert "Step 2 could not be read; trying again in 0 s: " in caplog.text
        assert os.strerror(number) in caplog.text


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EACCES, errno.EMFILE])
def test_no_older_step_is_restored_because_a_storage_fails(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", (0.0, 0.0))
    two_steps(tmp_path)
    with Manager(files_below(tmp_path, faulty_calls(FailOfStep("open", 2, number)))) as manager:
        with pytest.raises(StorageError) as caught:
            manager.restore(state_of(0))
        text = str(caught.value)
        assert text.startswith("Step 2 could not be read, but may be intact: ")
        assert os.strerror(number) in text
        assert text.endswith(
            "Repair the storage, and start again; or give up step 2 on purpose: restore(step=1)."
        )
        with pytest.raises(StorageError, match="Step 2 could not be read"):
            manager.restore(state_of(0), verify=True)
        assert manager.restore(state_of(0), step=1) == 1


def test_no_older_step_is_verified_because_data_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", (0.0,))
    two_steps(tmp_path)
    unreadable = files_below(tmp_path, faulty_calls(FailOfStep("pread_into", 2, errno.EIO)))
    with Manager(unreadable) as manager, pytest.raises(StorageError, match="Step 2 could not be read"):
        manager.restore(state_of(0), verify=True)


def test_user_files_of_an_older_step_are_not_taken_because_a_storage_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", (0.0,))
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            with manager.output(step) as out:
                out.path("w").write_bytes(bytes(5000))
    victim = tmp_path / "step-2" / "w"
    unreadable = files_below(tmp_path, faulty_calls(FailOfStep("pread_into", 2, errno.EIO)))
    with Manager(unreadable) as manager, pytest.raises(StorageError, match="Step 2 could not be read"):
        manager.restart()
    victim.write_bytes(bytes(4999))
    with Manager(tmp_path) as manager, manager.restart() as found:
        assert found.step == 1


@pytest.mark.parametrize("harm", ["cut", "gone", "unsealed", "emptied"])
def test_a_step_that_is_proven_incomplete_is_skipped_at_once(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two_steps(tmp_path)
    victim = tmp_path / "step-2" / "__0_0.distcp"
    match harm:
        case "cut":
            os.truncate(victim, 100)
        case "gone":
            victim.unlink()
        case "unsealed":
            os.truncate(victim.parent / "penstock.json", 100)
        case _:
            for file in victim.parent.iterdir():
                os.truncate(file, 0)
    with Manager(tmp_path) as manager:
        assert manager.restore(state_of(0)) == 1
        assert [each.step for each in manager.skipped_steps] == [2]
    assert "trying again" not in caplog.text


class ReplaceStep:
    """Each time a reader opens a file of the newest step, a job with keep=1 saves the next one first."""

    def __init__(self, root: Path, times: int) -> None:
        self._writer = Manager(root, keep=1)
        self._step = 1
        self._last = 1 + times
        self._writer.save(1, state_of(1))

    def around(self, name: str, call: Call) -> Call:
        def replacing(*arguments: Any) -> Any:
            if f"/{step_dirname(self._step)}/" in str(arguments[0]) and self._step < self._last:
                self._step += 1
                self._writer.save(self._step, state_of(self._step))
            return call(*arguments)

        return replacing if name == "open" else call


def test_a_step_that_is_removed_as_it_is_restored_gives_way_to_the_newest(tmp_path: Path) -> None:
    reader = files_below(tmp_path, faulty_calls(ReplaceStep(tmp_path, times=3)))
    with Manager(reader) as manager:
        state = state_of(0)
        assert manager.restore(state) == 4
        assert is_of(state, 4)
        assert manager.skipped_steps == ()


def test_a_restore_ends_if_every_step_is_removed_as_it_is_read(tmp_path: Path) -> None:
    reader = files_below(tmp_path, faulty_calls(ReplaceStep(tmp_path, times=1000)))
    with Manager(reader) as manager, pytest.raises(StorageError, match="cannot be restored: "):
        manager.restore(state_of(0))


def test_a_run_is_listed_again_after_a_failure_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", (0.0,))
    two_steps(tmp_path)
    with Manager(files_below(tmp_path, faulty_calls(FailFileCall("scandir", 1, errno.ESTALE)))) as manager:
        assert manager.restore(state_of(0)) == 2
    assert "could not be listed; trying again" in caplog.text


def test_a_step_that_is_a_link_is_restored_and_never_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    two_steps(run)
    archive.mkdir()
    for step in (1, 2):
        (run / f"step-{step}").rename(archive / f"old-{step}")
        (run / f"step-{step}").symlink_to(archive / f"old-{step}")
    found = state_of(0)
    assert pc.load(found, run / "step-2").loaded
    assert is_of(found, 2)
    assert verify(run / "step-2").is_whole
    assert [(each.name, each.state) for each in list_storage(open_here(run))] == [
        ("step-1", CheckpointState.COMMITTED),
        ("step-2", CheckpointState.COMMITTED),
    ]
    with Manager(run, keep=1) as manager:
        assert manager.steps() == [1, 2]
        assert manager.restore(found, step=1) == 1
        assert manager.restore(found) == 2
        assert is_of(found, 2)
        with pytest.raises(UsageError, match="step-2 is a link"):
            manager.save(2, found)
        manager.save(3, state_of(3))
        assert manager.steps() == [1, 2, 3]
    assert "not all old steps could be removed" in caplog.text
    assert verify(archive / "old-1").is_whole


def test_a_link_to_a_file_system_that_is_not_mounted_does_not_lead_to_an_older_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", ())
    two_steps(tmp_path)
    (tmp_path / "step-2").rename(tmp_path / "gone")
    (tmp_path / "step-2").symlink_to("/nowhere/step-2")
    with (
        Manager(tmp_path) as manager,
        pytest.raises(StorageError, match=r"Step 2 could not be read.*a link to nothing .*/nowhere/step-2"),
    ):
        manager.restore(state_of(0))


@pytest.mark.parametrize("harm", ["copied", "linked", "renamed"])
def test_a_folder_that_holds_another_step_is_skipped_and_its_step_is_named(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two_steps(tmp_path)
    other, victim = tmp_path / "step-1", tmp_path / "step-2"
    shutil.rmtree(victim)
    match harm:
        case "copied":
            shutil.copytree(other, victim)
        case "linked":
            victim.symlink_to(other)
        case _:
            other.rename(victim)
    assert "holds step 1, not step 2" in verify(victim).damage[0].what
    listed = list_storage(open_here(tmp_path))[-1]
    assert (listed.name, listed.state) == ("step-2", CheckpointState.DAMAGED)
    assert "holds step 1" in listed.complaint
    assert not StepCatalog(open_here(tmp_path)).find(2).is_whole()
    with Manager(tmp_path) as manager:
        for verified in (False, True):
            state = state_of(0)
            if harm == "renamed":
                with pytest.raises(StorageError, match=r"Step 2 cannot be restored: .* holds step 1"):
                    manager.restore(state, verify=verified)
                continue
            assert manager.restore(state, verify=verified) == 1
            assert is_of(state, 1)
            assert [each.step for each in manager.skipped_steps] == [2]
            assert "Skipping step 2: The folder holds step 1" in caplog.text
        with pytest.raises(StorageError, match="holds step 1"):
            manager.restore(state_of(0), step=2)


def test_a_step_copied_without_its_hidden_files_is_skipped_and_named(tmp_path: Path) -> None:
    two_steps(tmp_path)
    (tmp_path / "step-2" / ".metadata").unlink()
    listed = list_storage(open_here(tmp_path))[-1]
    assert (listed.name, listed.state) == ("step-2", CheckpointState.DAMAGED)
    assert "has no .metadata" in listed.complaint
    with Manager(tmp_path) as manager:
        assert manager.restore(state_of(0)) == 1
        assert [each.step for each in manager.skipped_steps] == [2]
        assert "with its hidden files" in manager.skipped_steps[0].reason


def test_a_run_copied_without_hidden_files_is_not_a_new_one(tmp_path: Path) -> None:
    two_steps(tmp_path)
    for path in (*tmp_path.glob("step-*/.metadata"), tmp_path / "latest"):
        path.unlink()
    with Manager(tmp_path) as manager, pytest.raises(StorageError, match="with its hidden files"):
        manager.restore(state_of(0))


def test_user_files_of_another_step_are_not_returned(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            with manager.output(step) as out:
                out.path("w").write_bytes(bytes(step))
        shutil.rmtree(tmp_path / "step-2")
        shutil.copytree(tmp_path / "step-1", tmp_path / "step-2")
        with manager.restart() as found:
            assert found.step == 1
        assert "holds step 1" in manager.skipped_steps[0].reason


def test_a_run_whose_steps_are_gone_is_not_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", ())
    with Manager(tmp_path, has_pointer=False) as manager:
        assert manager.restore(state_of(0)) is None
        for step in (1, 2):
            manager.save(step, state_of(step))
        shutil.rmtree(tmp_path / "step-2")
        assert manager.restore(state_of(0)) == 1
        assert "Step 2, which this job saved, is gone; the newest that is left is step 1" in caplog.text
        shutil.rmtree(tmp_path / "step-1")
        for find in (lambda: manager.restore(state_of(0)), manager.restart):
            with pytest.raises(StorageError, match="No step is here, although this job saved step 2"):
                find()


def test_a_pointer_without_its_steps_shows_that_a_run_has_lost_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_store, "RETRY_PAUSES_S", ())
    two_steps(tmp_path)
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"step-{step}")
    for cache in (None, tmp_path / "cache"):
        with (
            Manager(tmp_path, cache=cache) as manager,
            pytest.raises(StorageError, match="No step is here, although latest names step-2"),
        ):
            manager.restore(state_of(0))
    (tmp_path / "latest").unlink()
    with Manager(tmp_path) as manager:
        assert manager.restore(state_of(0)) is None
    pc.save(state_of(1), tmp_path / "latest")
    with Manager(tmp_path) as manager:
        assert manager.restore(state_of(0)) is None
