"""The whole engine, killed at storage calls, cut off from power, or refused: restores load a known step."""

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.crash import Program, count_calls, killed_at, sweep
from tests.support.file_faults import CallLog, FailFileCall, NoSync, faulty_calls
from tests.support.known_states import (
    blank_state,
    known_state,
    restored,
    same_state,
    save_several_alone,
    save_state,
    save_state_alone,
    save_state_as_rank,
)
from tests.support.known_steps import files_below
from tests.support.power_cut import Choice, Disk, OperationLog

from penstock.checkpoint.commit.checkpoints import StepCatalog
from penstock.checkpoint.formats.description import ManifestFile, read_manifest
from penstock.checkpoint.manager.manager import Manager
from penstock.errors import PenstockError

UNSYNCED = faulty_calls(NoSync())
FRESH, OVER = 2, 1
"""The step that is saved when step 1 is committed."""


def prepare(root: Path) -> None:
    save_state(files_below(root, UNSYNCED), 1, 0)


def programs(root: Path, step: int, number: int) -> list[Program]:
    prepare(root / str(number))
    return [partial(save_state_alone, root=root / str(number), step=step, generation=1)]


def check(root: Path, step: int, number: int) -> None:
    place = root / str(number)
    assert restored(place) in ({(1, 0), (2, 1)} if step == FRESH else {(1, 0), (1, 1)})
    save_state(files_below(place, UNSYNCED), 3, 2)
    assert restored(place) == (3, 2)
    hidden = [path.name for path in place.iterdir() if path.name.startswith(".penstock-")]
    assert all(name.endswith(".unfinished") for name in hidden)


def num_calls(root: Path, step: int) -> int:
    prepare(root / "counted")
    return count_calls(partial(save_state_alone, root=root / "counted", step=step, generation=1))


@pytest.mark.parametrize("step", [FRESH, OVER])
def test_killed_at_a_sample_of_calls_a_known_step_restores(tmp_path: Path, step: int) -> None:
    most = num_calls(tmp_path, step)
    numbers = sorted({*range(2, most, most // 4), *range(most - 16, most, 5)})
    num_killed = sweep(partial(programs, tmp_path, step), partial(check, tmp_path, step), numbers)
    # How often a writer's threads meet is not the same in each run, so the last kill may come too late.
    assert num_killed >= len(numbers) - 1


@pytest.mark.slow
@pytest.mark.parametrize("step", [FRESH, OVER])
def test_killed_at_any_call_a_known_step_restores(tmp_path: Path, step: int) -> None:
    most = num_calls(tmp_path, step)
    assert most > 50
    num_killed = sweep(partial(programs, tmp_path, step), partial(check, tmp_path, step), range(1, most + 1))
    assert num_killed >= most - 3


LATER = (2, 3, 4)
"""Steps that are saved in the background when step 1 is committed; two are kept."""


def several_programs(root: Path, number: int) -> list[Program]:
    prepare(root / str(number))
    return [partial(save_several_alone, root=root / str(number), steps=LATER)]


def check_several(root: Path, number: int) -> None:
    place = root / str(number)
    newest = restored(place)
    assert newest in {(1, 0), *((step, 1) for step in LATER)}
    for step in StepCatalog(files_below(place, UNSYNCED)).committed():
        state = blank_state(0)
        with Manager(place) as manager:
            manager.restore(state, step=step)
        assert same_state(state, known_state(step, state["generation"], 0))


@pytest.mark.parametrize("every", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_amid_background_saves_and_removals_every_step_that_is_left_is_whole(
    tmp_path: Path, every: int
) -> None:
    prepare(tmp_path / "counted")
    most = count_calls(partial(save_several_alone, root=tmp_path / "counted", steps=LATER))
    assert StepCatalog(files_below(tmp_path / "counted", UNSYNCED)).committed() == [3, 4]
    numbers = range(most - 5, 0, -every)
    num_killed = sweep(partial(several_programs, tmp_path), partial(check_several, tmp_path), numbers)
    assert num_killed >= len(numbers) - 3


RANKS = 2


def rank_programs(root: Path, step: int, number: int) -> list[Program]:
    place = root / str(number)
    prepare_ranks(place)
    return [
        partial(save_state_as_rank, root=place, step=step, generation=1, rank=rank, size=RANKS)
        for rank in range(RANKS)
    ]


def prepare_ranks(root: Path) -> None:
    programs = [
        partial(save_state_as_rank, root=root, step=1, generation=0, rank=rank, size=RANKS)
        for rank in range(RANKS)
    ]
    assert killed_at(programs, 10**9) == [0, 0]
    root.with_suffix(".meeting").unlink(missing_ok=True)


def check_ranks(root: Path, step: int, number: int) -> None:
    place = root / str(number)
    found = {restored_alone(place, rank) for rank in range(RANKS)}
    assert len(found) == 1
    assert found <= ({(1, 0), (2, 1)} if step == FRESH else {(1, 0), (1, 1)})


def restored_alone(root: Path, rank: int) -> tuple[int, int] | None:
    """What one process alone restores of what this rank had."""
    return restored(root, rank)


@pytest.mark.parametrize(("step", "victim", "number"), [(OVER, 0, 25), (FRESH, 1, 5)])
def test_when_one_of_two_ranks_is_killed_the_other_ends_and_a_known_step_restores(
    tmp_path: Path, step: int, victim: int, number: int
) -> None:
    make, look = partial(rank_programs, tmp_path, step), partial(check_ranks, tmp_path, step)
    assert sweep(make, look, [number], victim=victim) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", [FRESH, OVER])
def test_whenever_one_of_two_ranks_is_killed_a_known_step_restores(
    tmp_path: Path, step: int, victim: int
) -> None:
    number, num_killed = 0, 1
    while num_killed:
        number += 1
        num_killed = sweep(
            partial(rank_programs, tmp_path, step),
            partial(check_ranks, tmp_path, step),
            [number],
            victim=victim,
        )
    assert number > (50 if victim == 0 else 10)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [FRESH, OVER])
def test_after_a_power_cut_at_any_moment_a_known_step_restores(tmp_path: Path, step: int, every: int) -> None:
    root = tmp_path / "run"
    prepare(root)
    disk, log = Disk(root), OperationLog()
    save_state(files_below(root, faulty_calls(NoSync(), log)), step, 1)
    chance = random.Random(11)
    # A third of the cuts lose all that was not synced, a third keep names alone, a third anything.
    kinds: list[Choice] = [
        lambda _kind: False,
        lambda kind: kind == "folder",
        lambda _kind: chance.random() < 0.5,
    ]
    for number, operation in enumerate([*log.operations, None]):
        if number % every == 0 or operation is None:
            target = tmp_path / f"cut-{number}"
            disk.write_survivors(target, kinds[number % 3])
            found = restored(files_below(target, UNSYNCED))
            assert found in ({(1, 0), (2, 1)} if step == FRESH else {(1, 0), (1, 1)})
            assert operation is not None or found == (step, 1)
            shutil.rmtree(target)
        if operation is not None:
            disk.apply(operation)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("pwrite", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("fallocate", errno.ENOSPC),
        *(
            pytest.param(name, number, marks=pytest.mark.slow)
            for name in ("pwrite", "fsync", "fallocate", "open", "rename")
            for number in (errno.ENOSPC, errno.EIO)
        ),
    ],
)
def test_a_write_or_sync_that_fails_in_any_thread_fails_the_save_and_harms_nothing(
    tmp_path: Path, name: str, number: int
) -> None:
    prepare(tmp_path / "counted")
    log = CallLog()
    save_state(files_below(tmp_path / "counted", faulty_calls(NoSync(), log)), OVER, 1)
    most = log.names.count(name)
    num_failed = 0
    for turn in range(1, most + 1):
        root = tmp_path / str(turn)
        prepare(root)
        calls = faulty_calls(NoSync(), FailFileCall(name, turn, number))
        cause = failure_of(partial(save_state, files_below(root, calls), OVER, 1))
        if cause:
            num_failed += 1
            assert os.strerror(number) in cause
        # What fails after the commit fails nothing: removing the older checkpoint, and the pointer.
        assert restored(files_below(root, UNSYNCED)) in ({(1, 0), (1, 1)} if cause else {(1, 1)})
    assert num_failed >= max(1, most - 4)


def test_a_close_that_always_fails_is_an_error_of_a_save_and_none_of_a_load(tmp_path: Path) -> None:
    prepare(tmp_path)
    calls = faulty_calls(NoSync(), FailFileCall.and_all_after("close", 1, errno.EIO))
    assert restored(files_below(tmp_path, calls)) == (1, 0)
    assert os.strerror(errno.EIO) in failure_of(partial(save_state, files_below(tmp_path, calls), OVER, 1))
    assert restored(files_below(tmp_path, UNSYNCED)) == (1, 0)


def failure_of(work: Callable[[], object]) -> str:
    """What its error says, or nothing."""
    try:
        work()
    except PenstockError as error:
        return str(error)
    return ""


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("file_name", ["__0_0.distcp", "__0_1.distcp", ".metadata", "penstock.json"])
def test_a_flipped_byte_anywhere_lets_the_step_before_be_restored_and_says_why(
    tmp_path: Path, file_name: str
) -> None:
    prepare(tmp_path)
    save_state(files_below(tmp_path, UNSYNCED), 2, 1)
    path = tmp_path / "step-2" / file_name
    size_bytes = path.stat().st_size
    whole = path.read_bytes()
    items = read_manifest((tmp_path / "step-2" / "penstock.json").read_bytes(), "step-2").files
    for offset in range(size_bytes // 4, size_bytes, size_bytes // 4):
        flip(path, offset)
        if any(in_gap(file, offset) for file in items if file.name == file_name):
            assert restored(tmp_path) == (2, 1)
        else:
            assert restored(tmp_path) == (1, 0), f"a flip at {offset} of {file_name} was not noticed"
        path.write_bytes(whole)
    assert restored(tmp_path) == (2, 1)


def in_gap(file: ManifestFile, offset: int) -> bool:
    """Whether a byte belongs to no item: it is checked by `verify` alone, and nobody loads it."""
    begins, ends = file.item_offset, file.item_offset + file.item_bytes
    return not bool(((begins <= offset) & (offset < ends)).any())


@pytest.mark.slow
def test_beside_stock_saves_no_kill_of_ours_leaves_what_no_save_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = Path(__file__).parents[3]
    program = [sys.executable, "-m", "benchmarks.checkpoint_crashes", "3"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=3000, cwd=root)
    with capsys.disabled():
        sys.stdout.write(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dcp.save") == 2
