"""Managers on two ranks: failures that reach both, groups that work side by side, ranks that are left out."""

import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.child_processes import LIMIT_S
from tests.support.file_faults import FailFileCall, NoSync, faulty_calls
from tests.support.flush_daemons import wait_until
from tests.support.gloo_ranks import on_gloo_ranks
from tests.support.held_storage import HeldStorage
from tests.support.known_states import restored, save_state
from tests.support.known_steps import files_below

from penstock.checkpoint.commit import checkpoints
from penstock.checkpoint.manager import step_store
from penstock.checkpoint.manager.manager import Manager
from penstock.errors import (
    OutOfSpace,
    PenstockError,
    RankError,
    RankFailed,
    StorageError,
    UsageError,
    WaitTimeout,
)
from penstock.progress import Progress
from penstock.storage.uri import open_here

SIZE = 1000


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {f"bytes_{rank}": torch.tensor([rank, step] * (SIZE // 2), dtype=torch.uint8)}


def is_of(state: dict[str, torch.Tensor], rank: int, step: int) -> bool:
    return all(torch.equal(state[name], value) for name, value in state_of(rank, step).items())


def error_of(work: Callable[[], object]) -> PenstockError:
    try:
        work()
    except PenstockError as error:
        return error
    raise AssertionError("an error was due")


def full() -> None:
    raise OutOfSpace("The disk is full", uri="file:///full", errno=errno.ENOSPC)


def restore_what_is_left(rank: int, root: Path) -> list[int]:
    with Manager(root) as manager, patch.object(step_store, "RETRY_PAUSES_S", ()):
        for step in (1, 2):
            manager.save(step, state_of(rank, step))
        if rank == 0:
            shutil.rmtree(root / "step-2")
            shutil.copytree(root / "step-1", root / "step-2")
        dist.barrier()
        found = state_of(rank, 0)
        assert manager.restore(found) == 1
        assert is_of(found, rank, 1)
        skipped = [each.step for each in manager.skipped_steps]
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root / "step-1")
            shutil.rmtree(root / "step-2")
        dist.barrier()
        assert "this job saved step 2" in str(error_of(lambda: manager.restore(found)))
    with Manager(root) as another, patch.object(step_store, "RETRY_PAUSES_S", ()):
        assert "latest names step-2" in str(error_of(lambda: another.restore(found)))
    return skipped


def test_all_ranks_skip_a_copy_of_another_step_and_miss_steps_that_are_gone(tmp_path: Path) -> None:
    assert on_gloo_ranks(2, restore_what_is_left, tmp_path) == [[2], [2]]


def save_and_restore(rank: int, root: Path) -> None:
    with Manager(root, keep=2) as manager:
        assert manager.restore(state_of(rank, 0)) is None
        for step in range(4):
            manager.save_async(step, state_of(rank, step))
        report = manager.save(4, state_of(rank, 4))
        assert [each.rank for each in report.ranks] == [0, 1]
        assert report.payload_bytes == 2 * SIZE
        found = state_of(rank, 0)
        assert manager.restore(found) == 4
        assert is_of(found, rank, 4)


def test_what_all_ranks_saved_all_ranks_get_back(tmp_path: Path) -> None:
    on_gloo_ranks(2, save_and_restore, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3", "step-4"]


def fail_in_the_background(rank: int, root: Path) -> list[str]:
    told, storage = [], HeldStorage(open_here(root))
    with Manager(storage) as manager:
        manager.save(1, state_of(rank, 1))
        storage.spoil = full if rank == 1 else None
        manager.save_async(2, state_of(rank, 2))
        manager.save_async(3, state_of(rank, 3)).wait_staged()
        told.append(error_of(lambda: manager.restore(state_of(rank, 0))))
        storage.spoil = None
        # Both failures were told by the one error: whoever goes on hears of them no more.
        assert manager.restore(state_of(rank, 0)) == 1
        storage.spoil = full if rank == 0 else None
        handle = manager.save_async(4, state_of(rank, 4))
        told.append(error_of(handle.result))
        storage.spoil = None
        manager.save(5, state_of(rank, 5))
        storage.spoil = full if rank == 1 else None
        manager.save_async(6, state_of(rank, 6))
        told.append(error_of(manager.close))
    assert all(type(error) is RankFailed for error in told)
    return [str(error) for error in told]


def test_a_background_failure_of_one_rank_is_raised_once_on_all(tmp_path: Path) -> None:
    first, second = on_gloo_ranks(2, fail_in_the_background, tmp_path)
    assert first == second
    assert "Rank 1 on" in first[0]
    assert "saving step 2 in the background: The disk is full" in first[0]
    assert "Rank 0 on" in first[1]
    assert "saving step 6 in the background" in first[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-5"]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[SIZE // 2] ^= 1
    path.write_bytes(content)


def fall_back(rank: int, root: Path) -> tuple[Any, ...]:
    with Manager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(rank, step))
        if rank == 1:
            damage(root / "step-3" / "__1_0.distcp")
        dist.barrier()
        found = state_of(rank, 0)
        restored = manager.restore(found)
        assert is_of(found, rank, 2)
        wanted = error_of(lambda: manager.restore(found, step=3))
        passed = manager.skipped_steps
        absent = error_of(lambda: manager.restore(found, step=7))
        assert manager.skipped_steps == ()
        if rank == 1:
            damage(root / "step-1" / "__1_0.distcp")
            damage(root / "step-2" / "__1_0.distcp")
        dist.barrier()
        none = error_of(lambda: manager.restore(found))
        assert isinstance(wanted, StorageError)
        assert isinstance(none, StorageError)
        return restored, str(wanted), str(none), [each.reason for each in passed], str(absent)


def test_a_step_that_one_rank_finds_damaged_is_skipped_by_all(tmp_path: Path) -> None:
    one, other = on_gloo_ranks(2, fall_back, tmp_path)
    assert one == other
    restored, wanted, none, passed, absent = one
    assert restored == 2
    assert wanted.startswith("Step 3 cannot be restored: ")
    assert none.startswith("Step 3 cannot be restored: ")
    assert "; Step 2 cannot be restored: " in none
    assert "; Step 1 cannot be restored: " in none
    assert len(passed) == 1
    assert "Step 7 is not committed" in absent
    assert "1, 2, 3" in absent


class _Broken(Progress):
    """A progress bar that fails."""

    def begin(self, phase: str, total: float) -> None:
        raise ValueError(f"no bar for {phase} of {total}")

    def advance(self, amount: float) -> None:
        """Is never called."""


def restore_with_an_error_of_its_own(rank: int, root: Path) -> str:
    with Manager(root) as manager:
        for step in (1, 2):
            manager.save(step, {"step": step, "bytes": torch.full((SIZE,), float(step))})
        failed = error_of(
            lambda: manager.restore({"bytes": torch.zeros(SIZE)}, progress=None if rank else _Broken())
        )
        assert isinstance(failed, RankFailed)
        assert manager.skipped_steps == ()
        assert manager.restore({"bytes": torch.zeros(SIZE)}) == 2
    return str(failed)


def test_an_error_of_a_rank_s_own_does_not_restore_an_older_step(tmp_path: Path) -> None:
    one, other = on_gloo_ranks(2, restore_with_an_error_of_its_own, tmp_path)
    assert one == other
    assert "Rank 0" in one
    assert "ValueError: no bar for loading" in one


def save_without_a_thread_for_the_lease(rank: int, root: Path) -> str:
    with Manager(root) as manager:
        manager.save(1, {"rank": rank})
        with ExitStack() as undo:
            if rank == 0:
                undo.enter_context(patch.object(checkpoints, "_LeaseRenewer", refuse_a_thread))
            failed = error_of(lambda: manager.save(2, {"rank": rank}))
        if rank == 0:
            assert list(root.glob(".penstock-save-*")) == []
        manager.save(3, {"rank": rank})
    return str(failed)


def refuse_a_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_save_that_cannot_keep_its_lease_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    one, other = on_gloo_ranks(2, save_without_a_thread_for_the_lease, tmp_path)
    assert one == other
    assert "Rank 0" in one
    assert "RuntimeError: can't start new thread" in one


def misuse(rank: int, root: Path) -> None:
    with Manager(root) as manager:
        unlike = error_of(lambda: manager.save(rank, state_of(rank, 0)))
        assert isinstance(unlike, UsageError)
        assert "rank 0: saving step-0, rank 1: saving step-1" in str(unlike)
        manager.save(1, state_of(rank, 1))
        state = state_of(rank, 0) if rank == 0 else {"bytes_1": torch.zeros(3, dtype=torch.uint8)}
        unfit = error_of(lambda: manager.restore(state))
        assert "bytes_1" in str(unfit)
        assert isinstance(unfit, RankFailed | UsageError)
        handle = manager.save_async(2, state_of(rank, 2))
        handle.result()
        handle.cancel()
    closed = error_of(lambda: manager.save(3, state_of(rank, 3)))
    assert "This manager was closed" in str(closed)
    manager.close()


def test_ranks_that_disagree_or_a_state_that_does_not_fit_fail_on_all(tmp_path: Path) -> None:
    on_gloo_ranks(2, misuse, tmp_path)


def save_in_groups(rank: int, root: Path) -> str:
    groups = [dist.new_group([0]), dist.new_group([1])]
    own, other = groups[rank], groups[1 - rank]
    outside = error_of(lambda: Manager(root, process_group=other))
    with Manager(root / str(rank), process_group=own) as manager:
        for step in range(3 + rank):
            manager.save(step, state_of(rank, step))
        assert manager.steps() == list(range(3 + rank))
        found = state_of(rank, 9)
        assert manager.restore(found) == 2 + rank
        assert is_of(found, rank, 2 + rank)
    assert isinstance(outside, UsageError)
    return str(outside)


def test_disjoint_groups_save_at_once_and_other_ranks_are_refused(tmp_path: Path) -> None:
    messages = on_gloo_ranks(2, save_in_groups, tmp_path)
    assert [f"Rank {rank} is not in the process group" in text for rank, text in enumerate(messages)] == [
        True,
        True,
    ]


def cancel_on_one_rank(rank: int, root: Path) -> str:
    import threading

    go_on = threading.Event()
    with Manager(HeldStorage(open_here(root), hold=go_on)) as manager:
        handle = manager.save_async(1, state_of(rank, 1))
        if rank == 0:
            handle.cancel()
        go_on.set()
        error = error_of(handle.result)
        manager.save(2, state_of(rank, 2))
    return str(error)


def test_a_save_that_one_rank_cancels_is_cancelled_on_all(tmp_path: Path) -> None:
    one, other = on_gloo_ranks(2, cancel_on_one_rank, tmp_path)
    assert one == other
    assert "was cancelled" in one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]


def stay_away(rank: int, root: Path) -> str:
    manager = Manager(root, timeout_s=0.5)
    told = ""
    if rank == 0:
        late = error_of(lambda: manager.save(1, state_of(rank, 1)))
        assert isinstance(late, WaitTimeout)
        after = error_of(lambda: manager.restore(state_of(rank, 1)))
        assert isinstance(after, RankError)
        told = f"{late} | {after}"
    # The other rank stays until the first has given up: it was slow, and is not dead.
    dist.barrier()
    manager.__exit__(RankError, None, None)
    return told


def test_a_missing_rank_is_a_timeout_that_names_it(tmp_path: Path) -> None:
    told, _ = on_gloo_ranks(2, stay_away, tmp_path)
    assert "Timed out after 0.5 s waiting for all ranks to begin saving step-1" in told
    assert "out of step with the others" in told
    assert list(tmp_path.iterdir()) == []


def fail_one_write(rank: int, root: Path, name: str, number: int) -> list[str]:
    faults = [NoSync(), FailFileCall(name, number, errno.EIO)] if rank == 1 else [NoSync()]
    sound, told = files_below(root, faulty_calls(NoSync())), []
    save_state(sound, 1, 0, rank)
    told.append(str(error_of(lambda: save_state(files_below(root, faulty_calls(*faults)), 1, 1, rank))))
    assert restored(sound, rank) == (1, 0)
    save_state(sound, 1, 2, rank)
    assert restored(sound, rank) == (1, 2)
    return told


@pytest.mark.parametrize(("name", "number"), [("pwrite", 1), ("fsync", 2)])
def test_a_write_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path, name: str, number: int) -> None:
    one, other = on_gloo_ranks(2, fail_one_write, tmp_path / "run", name, number)
    assert one == other
    assert one[0].startswith("Rank 1 on")
    assert os.strerror(errno.EIO) in one[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-1"]


class Interrupted(Exception):
    """Raised by a signal handler, as KeyboardInterrupt is."""


def make_alone(rank: int, root: Path) -> tuple[str, float]:
    """Rank 1 comes late to the first manager, and not at all while rank 0 is interrupted."""
    took_s, text = 0.0, ""
    if rank == 0:
        text = str(error_of(lambda: Manager(root, timeout_s=0.5)))

        def interrupt(*_: object) -> None:
            raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began_s = time.monotonic()
        with pytest.raises(Interrupted):
            Manager(root, timeout_s=60)
        took_s = time.monotonic() - began_s
    dist.barrier()
    return text, took_s


def test_a_manager_that_one_rank_never_makes_is_a_timeout_and_hears_signals(tmp_path: Path) -> None:
    (text, took_s), _ = on_gloo_ranks(2, make_alone, tmp_path)
    assert text.startswith("Timed out after 0.5 s waiting for all ranks to make a group (absent: ranks 1).")
    assert took_s < 30


def leave_before_the_last(rank: int, root: Path) -> list[tuple[str, float]]:
    """Rank 1 leaves, first by Ctrl-C and then by its time limit, before rank 2 comes. What each raised."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main_thread = threading.main_thread().ident or 0

    def is_waiting() -> bool:
        frames = [sys._current_frames()[main_thread]]
        while (outer := frames[-1].f_back) is not None:
            frames.append(outer)
        return any(frame.f_code.co_name == "_await_all" for frame in frames)

    def interrupt() -> None:
        wait_until(is_waiting, "the rank waits for others")
        # So that it has arrived. If it has not, it must not leave the others waiting either.
        time.sleep(0.5)
        signal.pthread_kill(main_thread, signal.SIGINT)

    found = []
    for number, limit_s in enumerate((LIMIT_S, 0.5)):
        has_left = root / f"{number} has left"
        if rank == 1 and number == 0:
            threading.Thread(target=interrupt).start()
        if rank == 2:
            wait_until(has_left.exists, "rank 1 has left")
        began_s = time.monotonic()
        with pytest.raises((KeyboardInterrupt, RankError)) as caught:
            Manager(root / "run", timeout_s=limit_s if rank == 1 else LIMIT_S)
        found.append((f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began_s))
        if rank == 1:
            has_left.touch()
    # The same ranks can meet again.
    Manager(root / "run", timeout_s=LIMIT_S).close()
    return found


def test_a_rank_that_leaves_before_the_last_comes_is_named_on_all_others(tmp_path: Path) -> None:
    first, second, third = on_gloo_ranks(3, leave_before_the_last, tmp_path)
    assert [text.partition(":")[0] for text, _ in second] == ["KeyboardInterrupt", "WaitTimeout"]
    for (text, took_s), cause in zip(
        first + third, ("KeyboardInterrupt", "Timed out after 0.5 s") * 2, strict=True
    ):
        assert text.startswith("RankFailed: Rank 1 on "), text
        assert f"it left while the ranks made a group: {cause}" in text
        assert took_s < LIMIT_S / 2
