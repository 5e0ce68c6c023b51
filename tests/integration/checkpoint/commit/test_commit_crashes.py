"""Saves that are killed at a call of storage, or whose machine loses power: what is left is whole."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.support.crash import Program, count_calls, sweep
from tests.support.file_faults import NoSync, faulty_calls
from tests.support.known_steps import assert_known, files_below, save_known, save_known_alone
from tests.support.power_cut import Disk, Kind, OperationLog

from penstock.cluster.comm import SoloComm
from penstock.storage.files.system_calls import REAL_CALLS

UNSYNCED = faulty_calls(NoSync())
FRESH, OVER = "step-2", "step-1"


def prepare(root: Path) -> None:
    """A run with one committed step, of generation 0."""
    save_known(files_below(root, UNSYNCED), "step-1", 0, SoloComm())


def programs(root: Path, name: str, number: int) -> Sequence[Program]:
    place = root / str(number)
    prepare(place)
    return [partial(save_known_alone, root=place, name=name, generation=1)]


def check(root: Path, name: str, number: int) -> None:
    """Step 1 stands whole, whichever of its generations; the next save works and clears up."""
    place = root / str(number)
    found = assert_known(files_below(place, UNSYNCED))
    if name == FRESH:
        assert found in ({"step-1": 0}, {"step-1": 0, "step-2": 1})
    else:
        assert found in ({"step-1": 0}, {"step-1": 1})
    save_known(files_below(place, UNSYNCED), "step-3", 2, SoloComm())
    after = assert_known(files_below(place, UNSYNCED))
    assert after == {**found, "step-3": 2}
    left = [path.name for path in place.iterdir() if not path.name.endswith(".unfinished")]
    assert sorted(left) == sorted(after)


def num_calls(root: Path, name: str) -> int:
    prepare(root / "counted")
    return count_calls(partial(save_known_alone, root=root / "counted", name=name, generation=1))


@pytest.mark.parametrize("name", [FRESH, OVER])
def test_killed_at_a_sample_of_calls_every_committed_step_is_whole(tmp_path: Path, name: str) -> None:
    most = num_calls(tmp_path, name)
    # The commit itself is at the end: every third of its last calls, and some before.
    numbers = sorted({*range(1, most, 13), *range(most - 12, most + 1, 3)})
    assert sweep(partial(programs, tmp_path, name), partial(check, tmp_path, name), numbers) == len(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", [FRESH, OVER])
def test_killed_at_any_call_every_committed_step_is_whole(tmp_path: Path, name: str) -> None:
    most = num_calls(tmp_path, name)
    assert most > 40
    numbers = range(1, most + 2)
    assert sweep(partial(programs, tmp_path, name), partial(check, tmp_path, name), numbers) == most


SURVIVAL: dict[str, Callable[[Kind, random.Random], bool]] = {
    "only what was synced": lambda _kind, _chance: False,
    "names without their bytes": lambda kind, _chance: kind == "folder",
    "bytes without their names": lambda kind, _chance: kind == "file",
    "anything": lambda _kind, chance: chance.random() < 0.5,
}
"""What of the unsynced a cut may leave."""


def recorded(root: Path, name: str) -> tuple[Disk, OperationLog]:
    prepare(root)
    disk, log = Disk(root), OperationLog()
    save_known(files_below(root, faulty_calls(NoSync(), log)), name, 1, SoloComm())
    return disk, log


@pytest.mark.parametrize("name", [FRESH, OVER])
@pytest.mark.parametrize("survives", SURVIVAL)
def test_after_a_power_cut_at_any_moment_every_committed_step_is_whole(
    tmp_path: Path, name: str, survives: str
) -> None:
    disk, log = recorded(tmp_path / "run", name)
    chance = random.Random(7)
    for number in range(len(log.operations) + 1):
        target = tmp_path / f"cut-{number}"
        disk.write_survivors(target, lambda kind: SURVIVAL[survives](kind, chance))
        found = assert_known(files_below(target, REAL_CALLS))
        assert "step-1" in found
        if number == len(log.operations):
            assert found == ({"step-1": 0, "step-2": 1} if name == FRESH else {"step-1": 1})
        else:
            disk.apply(log.operations[number])


def test_a_commit_that_syncs_nothing_is_caught_by_the_power_cut(tmp_path: Path) -> None:
    disk, log = recorded(tmp_path / "run", OVER)
    for operation in log.operations:
        if operation.name != "fsync":
            disk.apply(operation)
    disk.write_survivors(tmp_path / "cut", lambda kind: kind == "folder")
    with pytest.raises(AssertionError, match="no generation"):
        assert_known(files_below(tmp_path / "cut", REAL_CALLS))


def test_a_program_that_fails_before_the_kill_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    broken = partial(save_known_alone, root=tmp_path / "file", name="step-1", generation=1)
    with pytest.raises(
        AssertionError, match=r"Part of this path is a file: give a folder|A file and a folder cannot"
    ):
        count_calls(broken)
    with pytest.raises(AssertionError, match="failed by itself"):
        sweep(lambda _number: [broken], lambda _number: None, [10_000])
