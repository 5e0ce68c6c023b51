"""A draft that several processes share: whoever ends it, whenever, the step is committed whole and once."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.file_faults import Call, CallLog, NoSync, faulty_calls
from tests.support.known_steps import assert_known, files_below, known_bytes, save_known

from penstock.checkpoint.commit.protocol import LEASE_S, MANIFEST_NAME, METADATA_NAME, FolderDraftStore, Seal
from penstock.checkpoint.commit.shared_draft import SharedDraft
from penstock.checkpoint.commit.transaction import begin_save
from penstock.cluster.comm import SoloComm
from penstock.errors import StorageError, UsageError
from penstock.storage.capabilities import find_folder_tree
from penstock.storage.files.system_calls import FileCalls
from penstock.storage.protocol import write_object

NAME, SAVE_ID = "step-1", "0123456789abcdef"
FILES = ("__0_0.distcp", "__0_1.distcp")
UNSYNCED = faulty_calls(NoSync())


class AtCall:
    """Does something just before the `number`-th call of all."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act

    def around(self, name: str, call: Call) -> Call:
        def acting(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._act()
            return call(*arguments)

        return acting


class Killed(BaseException):
    """Stands for the end of a process: nothing after it reaches the disk."""


class DieAtCall:
    """No call from the `number`-th on is made, not even by whoever clears up."""

    def __init__(self, number: int) -> None:
        self._left = number

    def around(self, name: str, call: Call) -> Call:
        def deadly(*arguments: Any) -> Any:
            self._left -= 1
            if self._left <= 0:
                raise Killed
            return call(*arguments)

        return deadly


def seal_of(generation: int) -> Seal:
    return Seal(
        manifest=known_bytes(NAME, generation, MANIFEST_NAME),
        metadata=known_bytes(NAME, generation, METADATA_NAME),
        sizes={name: len(known_bytes(NAME, generation, name)) for name in FILES},
    )


def shared(root: Path, calls: FileCalls = UNSYNCED, node: int = 0) -> SharedDraft:
    storage = files_below(root, calls)
    tree = find_folder_tree(storage)
    assert tree is not None
    return SharedDraft(storage, tree, NAME, SAVE_ID, node=node)


def copied(root: Path, *, over: bool) -> SharedDraft:
    """A draft with all its files and marks; of an older step of the name, if that is to be replaced."""
    storage = files_below(root, UNSYNCED)
    if over:
        for name in FILES:
            write_object(storage, f"{NAME}/{name}", [known_bytes(NAME, 0, name)])
        write_object(storage, f"{NAME}/{MANIFEST_NAME}", [known_bytes(NAME, 0, MANIFEST_NAME)])
        write_object(storage, f"{NAME}/{METADATA_NAME}", [known_bytes(NAME, 0, METADATA_NAME)])
    for node, name in enumerate(FILES):
        one = shared(root, node=node)
        one.join()
        one.mark("copying")
        write_object(storage, one.draft.key(name), [known_bytes(NAME, 1, name)])
        one.mark("done")
    return shared(root)


def require_committed(root: Path) -> None:
    assert assert_known(files_below(root, UNSYNCED)) == {NAME: 1}
    assert shared(root).is_committed(seal_of(1).manifest)


def num_calls(root: Path, *, over: bool) -> int:
    copied(root, over=over)
    log = CallLog()
    shared(root, faulty_calls(NoSync(), log)).publish(seal_of(1))
    return len(log.names)


def test_all_nodes_see_the_progress_of_the_others(tmp_path: Path) -> None:
    one, other = shared(tmp_path, node=0), shared(tmp_path, node=1)
    one.join()
    other.join()
    one.mark("done")
    other.mark("copying")
    assert {node: mark.progress for node, (mark, _) in one.marks().items()} == {0: "done", 1: "copying"}
    other.retract_marks([0])
    assert set(one.marks()) == {1}


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an older one"])
def test_publishing_leaves_the_checkpoint_and_nothing_else(tmp_path: Path, over: bool) -> None:  # noqa: FBT001
    copied(tmp_path, over=over).publish(seal_of(1))
    require_committed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    shared(tmp_path, node=1).publish(seal_of(1))
    require_committed(tmp_path)


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an older one"])
def test_killed_at_any_call_another_one_publishes(tmp_path: Path, over: bool) -> None:  # noqa: FBT001
    for number in range(1, num_calls(tmp_path / "counted", over=over) + 1):
        root = tmp_path / str(number)
        copied(root, over=over)
        with pytest.raises(Killed):
            shared(root, faulty_calls(NoSync(), DieAtCall(number))).publish(seal_of(1))
        found = assert_known(files_below(root, UNSYNCED))
        assert found in ({}, {NAME: 1}) if not over else found in ({NAME: 0}, {NAME: 1})
        shared(root, node=1).publish(seal_of(1))
        require_committed(root)
        # The next save of anybody clears up what the dead left.
        save_known(files_below(root, UNSYNCED), "step-2", 2, SoloComm())
        assert assert_known(files_below(root, UNSYNCED)) == {NAME: 1, "step-2": 2}


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over an older one"])
def test_two_publish_at_once_and_the_step_is_committed_whatever_comes_first(
    tmp_path: Path,
    over: bool,  # noqa: FBT001
) -> None:
    for number in range(1, num_calls(tmp_path / "counted", over=over) + 1):
        root = tmp_path / str(number)
        copied(root, over=over)
        rival = shared(root, node=1)
        act = AtCall(number, lambda rival=rival: rival.publish(seal_of(1)))  # type: ignore[misc]
        try:
            shared(root, faulty_calls(NoSync(), act)).publish(seal_of(1))
        except StorageError:
            # It may see that something is going on; then it tries again.
            shared(root).publish(seal_of(1))
        require_committed(root)


def test_missing_files_are_named_and_nothing_is_published(tmp_path: Path) -> None:
    draft = copied(tmp_path, over=True)
    (tmp_path / draft.draft.folder / FILES[1]).unlink()
    with pytest.raises(StorageError, match="1 of 4 files"):
        draft.publish(seal_of(1))
    assert draft.missing(seal_of(1)) == [FILES[1]]
    assert assert_known(files_below(tmp_path, UNSYNCED)) == {NAME: 0}


def test_a_folder_that_is_not_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    draft = copied(tmp_path, over=False)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        draft.publish(seal_of(1))
    assert (tmp_path / NAME / "notes.txt").read_text() == "mine"


def test_a_draft_survives_the_death_of_its_first_process(tmp_path: Path) -> None:
    draft = copied(tmp_path, over=False)
    begin_save(files_below(tmp_path, UNSYNCED), "step-9", SoloComm()).abandon()
    draft.publish(seal_of(1))
    require_committed(tmp_path)


def test_many_threads_publish_one_draft(tmp_path: Path) -> None:
    copied(tmp_path, over=True)
    failures: list[BaseException] = []

    def publish(node: int) -> None:
        try:
            shared(tmp_path, node=node).publish(seal_of(1))
        except StorageError as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(node,)) for node in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared(tmp_path).publish(seal_of(1))
    require_committed(tmp_path)


def test_an_abandoned_shared_draft_is_swept_once_its_lease_expires(tmp_path: Path) -> None:
    copied(tmp_path, over=False)
    storage = files_below(tmp_path, UNSYNCED)
    tree = find_folder_tree(storage)
    assert tree is not None

    def left_after(seconds: float) -> list[str]:
        FolderDraftStore(storage, tree, clock=lambda: time.time() + seconds).sweep()
        return sorted(path.name for path in tmp_path.iterdir())

    everything = [f".penstock-{kind}-{SAVE_ID}-{NAME}" for kind in ("flush", "save")]
    assert left_after(LEASE_S / 2) == [*everything, f"{everything[1]}.lease"]
    left_after(2 * LEASE_S)
    assert left_after(2 * LEASE_S) == []
