"""Commit by renaming folders: what is refused, what failures leave, what is swept and what is not."""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from tests.support.file_faults import Call, CallFault, CallLog, FailFileCall, NoSync, faulty_calls
from tests.support.known_steps import assert_known, files_below, save_known

from penstock.checkpoint.commit.checkpoints import _LeaseRenewer, begin_save, open_catalog, open_draft_store
from penstock.checkpoint.commit.protocol import LEASE_S, Draft, FolderDraftStore, Seal
from penstock.checkpoint.tools.inspection import CheckpointState, list_storage
from penstock.cluster.comm import SoloComm
from penstock.errors import AccessRefused, AlreadyThere, ObjectNotFound, PenstockError
from penstock.storage.files.file_storage import FileStorage
from penstock.storage.process_id import ProcessId, current_process
from penstock.storage.protocol import write_object

T = TypeVar("T")

NAME = "step-1"
SEAL = Seal(manifest=b"{}", metadata=b"m", sizes={})


def files(root: Path, *faults: CallFault) -> FileStorage:
    return files_below(root, faulty_calls(NoSync(), *faults))


def save(root: Path, generation: int, *faults: CallFault) -> None:
    save_known(files(root, *faults), NAME, generation, SoloComm())


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))  # noqa: PTH208 - names alone


def always(value: T) -> Callable[[], T]:
    return lambda: value


def start(root: Path, owner: ProcessId, save_id: str = "a" * 16) -> Draft:
    storage = files(root)
    draft = FolderDraftStore(storage, storage.tree, owner=always(owner)).start(NAME, save_id)
    write_object(storage, draft.key("__0_0.distcp"), [b"123"])
    return draft


def sweep(root: Path, now_s: float | None = None) -> list[str]:
    storage = files(root)
    clock = (lambda: (root / ".").stat().st_mtime) if now_s is None else always(now_s)
    return FolderDraftStore(storage, storage.tree, clock=clock).sweep()


def failure_of(work: Callable[[], object]) -> str:
    """What its error says, or nothing."""
    try:
        work()
    except PenstockError as error:
        return str(error)
    return ""


def test_a_commit_leaves_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 0)
    save(tmp_path, 1)
    assert names(tmp_path) == [NAME]
    assert assert_known(files(tmp_path)) == {NAME: 1}


def test_an_abandoned_save_leaves_nothing_and_may_be_abandoned_again(tmp_path: Path) -> None:
    place = begin_save(files(tmp_path), NAME, SoloComm())
    write_object(place.data_storage, place.draft.key("__0_0.distcp"), [b"x"])
    assert open_catalog(place.storage).names() == []
    place.abandon()
    place.abandon()
    assert names(tmp_path) == []


def test_a_seal_that_cannot_be_made_fails_the_commit_and_leaves_nothing(tmp_path: Path) -> None:
    def refuse() -> Seal:
        raise ValueError("no metadata today")

    place = begin_save(files(tmp_path), NAME, SoloComm())
    with pytest.raises(ValueError, match="no metadata today"):
        place.commit(refuse)
    assert names(tmp_path) == []


def test_files_that_rank_0_cannot_see_fail_the_commit(tmp_path: Path) -> None:
    place = begin_save(files(tmp_path), NAME, SoloComm())
    with pytest.raises(PenstockError, match="1 of 1 files"):
        place.commit(lambda: replace(SEAL, sizes={"__3_0.distcp": 5}))
    assert names(tmp_path) == []


@pytest.mark.parametrize("stranger", ["notes.txt", "folder/"])
def test_a_folder_that_is_not_a_checkpoint_is_never_replaced(tmp_path: Path, stranger: str) -> None:
    precious = tmp_path / NAME / stranger
    precious.parent.mkdir(parents=True, exist_ok=True)
    precious.mkdir() if stranger.endswith("/") else precious.write_text("precious")
    with pytest.raises(PenstockError, match=r"is not a checkpoint: .* would be lost"):
        save(tmp_path, 0)
    assert precious.exists()
    assert names(tmp_path) == [NAME]


def test_a_folder_that_stops_being_a_checkpoint_during_the_save_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path, 0)
    place = begin_save(files(tmp_path), NAME, SoloComm())
    (tmp_path / NAME / "notes.txt").write_text("precious")
    with pytest.raises(PenstockError, match=r"contains notes\.txt"):
        place.commit(lambda: SEAL)
    assert names(tmp_path) == [NAME]


def test_an_empty_folder_and_a_stock_checkpoint_are_replaced(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    save(tmp_path, 0)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        write_object(files(tmp_path), f"stock/{name}", [b"x"])
    assert sorted(open_catalog(files(tmp_path)).names()) == [NAME, "stock"]
    save_known(files(tmp_path), "stock", 1, SoloComm())
    assert assert_known(files(tmp_path)) == {NAME: 0, "stock": 1}


class _Private:
    """Folders that this user may not look into, which root always may."""

    def __init__(self, *folders: str) -> None:
        self._folders = folders

    def around(self, name: str, call: Call) -> Call:
        if name not in ("lstat", "open"):
            return call

        def refused(path: str, *rest: int) -> object:
            if Path(path).parent.name in self._folders:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return call(path, *rest)

        return refused


def test_folders_of_others_do_not_hide_the_steps_beside_them(tmp_path: Path) -> None:
    save(tmp_path, 0)
    for folder in ("lost+found", "step-2"):
        (tmp_path / folder).mkdir()
    storage = files(tmp_path, _Private("lost+found", "step-2"))
    assert sorted(open_catalog(storage).names()) == [NAME, "step-2"]
    with pytest.raises(AccessRefused, match=r"Permission denied .*step-2"):
        open_catalog(storage).find("step-2")
    mine, refused = list_storage(storage)
    assert (mine.name, mine.step) == (NAME, 1)
    assert (refused.step, refused.state) == (2, CheckpointState.REFUSED)
    assert "Permission denied" in refused.complaint


class _NoExchange:
    """A file system that renames but cannot exchange, as network file systems."""

    def around(self, name: str, call: Call) -> Call:
        def refuse(*_names: str) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        return refuse if name == "exchange" else call


def test_without_exchange_the_older_checkpoint_is_renamed_first(tmp_path: Path) -> None:
    save(tmp_path, 0)
    save(tmp_path, 1, _NoExchange())
    assert names(tmp_path) == [NAME]
    assert assert_known(files(tmp_path)) == {NAME: 1}


@pytest.mark.parametrize("when", ["before it is committed", "while it is", "without exchange"])
def test_a_save_that_another_one_has_overtaken_is_given_up_and_harms_nothing(
    tmp_path: Path, when: str
) -> None:
    class _Overtaking:
        """Another job commits at the last moment."""

        def around(self, name: str, call: Call) -> Call:
            def overtake(*arguments: object) -> object:
                save(tmp_path, 2)
                return call(*arguments)

            return overtake if name == "exchange" else call

    save(tmp_path, 0)
    faults: dict[str, list[CallFault]] = {"while it is": [_Overtaking()], "without exchange": [_NoExchange()]}
    place = begin_save(files(tmp_path, *faults.get(when, [])), NAME, SoloComm())
    write_object(place.data_storage, place.draft.key("__0_0.distcp"), [b"x"])
    if when != "while it is":
        save(tmp_path, 2)
    with pytest.raises(AlreadyThere, match="Another save committed step-1 first; this one was discarded"):
        place.commit(lambda: replace(SEAL, sizes={"__0_0.distcp": 1}))
    assert assert_known(files(tmp_path)) == {NAME: 2}
    assert names(tmp_path) == [NAME]


def test_without_exchange_every_failure_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "counted", 0)
    log = CallLog()
    save(tmp_path / "counted", 1, _NoExchange(), log)
    renames = [number for number, name in enumerate(log.names, 1) if name in ("rename", "exchange")]
    for number in renames:
        root = tmp_path / str(number)
        save(root, 0)
        fault = FailFileCall.and_all_after(None, number, errno.EIO)
        with suppress(PenstockError):
            save(root, 1, _NoExchange(), fault)
        # The last rename only clears up.
        left = {NAME: 1 if number == renames[-1] else 0}
        assert assert_known(files(root)) == left
        sweep(root)
        assert assert_known(files(root)) == left
        assert NAME in names(root)


@pytest.mark.parametrize("name", ["rename", "fsync", "pwrite", "open", "mkdir", "fallocate"])
@pytest.mark.parametrize(
    ("number", "for_good"),
    [
        (errno.EIO, False),
        pytest.param(errno.EIO, True, marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, False, marks=pytest.mark.slow),
        (errno.ENOSPC, True),
    ],
)
def test_a_call_that_fails_fails_the_save_loudly_and_harms_nothing(
    tmp_path: Path, name: str, number: int, *, for_good: bool
) -> None:
    make_fault = FailFileCall.and_all_after if for_good else FailFileCall
    save(tmp_path / "counted", 0)
    log = CallLog()
    save(tmp_path / "counted", 1, log)
    num_failed = 0
    for turn in range(1, log.names.count(name) + 1):
        root = tmp_path / str(turn)
        save(root, 0)
        cause = failure_of(lambda: save(root, 1, make_fault(name, turn, number)))  # noqa: B023 - at once
        if cause:
            num_failed += 1
            assert os.strerror(number) in cause
            assert assert_known(files(root)) in ({NAME: 0}, {NAME: 1})
        else:
            # What fails after the commit is logged: there is nothing wrong with the checkpoint.
            assert assert_known(files(root)) == {NAME: 1}
        save(root, 2)
        assert assert_known(files(root)) == {NAME: 2}
    assert num_failed >= log.names.count(name) - 4


def test_a_commit_whose_name_is_not_known_durable_fails_and_loses_neither_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 0)
    log = CallLog()
    save(tmp_path / "counted", 0)
    save(tmp_path / "counted", 1, log)
    after_exchange = log.names.index("exchange")
    number = log.names[: after_exchange + 1].count("fsync") + 1
    with pytest.raises(PenstockError, match="Syncing failed"):
        save(tmp_path, 1, FailFileCall("fsync", number, errno.EIO))
    assert assert_known(files(tmp_path)) == {NAME: 1}
    (older,) = (name for name in names(tmp_path) if name.startswith(".penstock-save"))
    assert (tmp_path / older / ".metadata").exists()
    assert sweep(tmp_path, now_s=(tmp_path / older).stat().st_mtime + LEASE_S + 1) == [older]


def test_drafts_of_dead_saves_are_swept_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    me = current_process()
    elsewhere = replace(me, kernel="another machine")
    living = start(tmp_path, me, "a" * 16)
    dead = start(tmp_path, replace(me, started="1"), "b" * 16)
    far = start(tmp_path, elsewhere, "c" * 16)
    now_s = (tmp_path / f"{far.folder}.lease").stat().st_mtime
    assert sweep(tmp_path, now_s=now_s) == [dead.folder]
    assert sweep(tmp_path, now_s=now_s + LEASE_S * 2) == [far.folder]
    assert names(tmp_path) == sorted([living.folder, f"{living.folder}.lease"])


def test_a_draft_whose_lease_is_lost_is_swept_when_it_is_old(tmp_path: Path) -> None:
    draft = start(tmp_path, current_process())
    (tmp_path / f"{draft.folder}.lease").unlink()
    now_s = (tmp_path / draft.folder).stat().st_mtime
    assert sweep(tmp_path, now_s=now_s + LEASE_S - 1) == []
    assert sweep(tmp_path, now_s=now_s + LEASE_S + 1) == [draft.folder]


def test_leftovers_of_killed_writes_and_removals_are_swept(tmp_path: Path) -> None:
    hidden = tmp_path / f".penstock-{'0' * 16}.unfinished"
    hidden.write_text("x")
    (tmp_path / f".penstock-gone-{'0' * 16}" / "below").mkdir(parents=True)
    lease = tmp_path / f".penstock-save-{'a' * 16}-{NAME}.lease"
    lease.write_text("no json")
    strangers = [".penstock-notes", ".penstock-save-x", ".hidden"]
    for name in strangers:
        (tmp_path / name).mkdir()
    (tmp_path / ".penstock-link").symlink_to(tmp_path)
    assert sweep(tmp_path) == [f".penstock-gone-{'0' * 16}"]
    now_s = hidden.stat().st_mtime + LEASE_S + 1
    assert sorted(sweep(tmp_path, now_s=now_s)) == sorted([hidden.name, lease.name])
    assert names(tmp_path) == sorted([*strangers, ".penstock-link"])


def test_remains_that_cannot_be_swept_do_not_fail_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = start(tmp_path, replace(current_process(), started="1"))
    log = CallLog()
    files(tmp_path, log)
    with caplog.at_level(logging.DEBUG, logger="penstock.checkpoint.commit.protocol"):
        save(tmp_path, 0, FailFileCall("rename", 1, errno.EACCES))
    assert f"Could not sweep {dead.folder}" in caplog.text
    assert assert_known(files(tmp_path)) == {NAME: 0}


def test_a_sweep_that_takes_a_paused_save_away_fails_that_save_alone(tmp_path: Path) -> None:
    save(tmp_path, 0)
    place = begin_save(files(tmp_path), NAME, SoloComm())
    write_object(place.data_storage, place.draft.key("__0_0.distcp"), [b"123"])
    lease = tmp_path / f"{place.draft.folder}.lease"
    lease.write_text("no json")
    assert sweep(tmp_path, now_s=lease.stat().st_mtime + LEASE_S + 1) == [place.draft.folder]
    with pytest.raises(PenstockError, match="are missing"):
        place.commit(lambda: replace(SEAL, sizes={"__0_0.distcp": 3}))
    assert assert_known(files(tmp_path)) == {NAME: 0}


def test_a_replacement_killed_between_two_renames_is_rolled_back(tmp_path: Path) -> None:
    save(tmp_path, 0)
    aside = f".penstock-old-{'0' * 16}-{NAME}"
    (tmp_path / NAME).rename(tmp_path / aside)
    storage = files(tmp_path)
    assert open_catalog(storage).find(NAME).folder == aside
    assert assert_known(storage) == {NAME: 0}
    assert sweep(tmp_path) == [aside]
    assert names(tmp_path) == [NAME]
    (tmp_path / aside).mkdir()
    assert sweep(tmp_path) == [aside]
    assert names(tmp_path) == [NAME]


def test_a_lease_is_renewed_as_long_as_the_save_lives(tmp_path: Path) -> None:
    storage = files(tmp_path)
    drafts = open_draft_store(storage)
    draft = drafts.start(NAME, "a" * 16)
    lease = tmp_path / f"{draft.folder}.lease"
    lease.unlink()
    keeper = _LeaseRenewer(drafts, draft, every_s=0.001)
    while not lease.exists():
        assert keeper._thread.is_alive()
    keeper.stop()
    keeper._thread.join(60)
    assert not keeper._thread.is_alive()


def test_a_lease_that_cannot_be_renewed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = files(tmp_path, FailFileCall.and_all_after("pwrite", 2, errno.EIO))
    draft = open_draft_store(storage).start(NAME, "a" * 16)
    keeper = _LeaseRenewer(open_draft_store(storage), draft, every_s=0.001)
    while "Could not renew the lease" not in caplog.text:
        assert keeper._thread.is_alive()
    keeper.stop()
    keeper._thread.join(60)


def test_a_save_that_nobody_ends_lets_its_lease_run_out(tmp_path: Path) -> None:
    transaction = begin_save(files(tmp_path), NAME, SoloComm())
    keeper = transaction._lease
    assert keeper is not None
    assert keeper._thread.is_alive()
    del transaction
    keeper._thread.join(60)
    assert not keeper._thread.is_alive()


def test_a_checkpoint_is_removed_by_name_first(tmp_path: Path) -> None:
    save(tmp_path, 0)
    storage = files(tmp_path, FailFileCall.and_all_after("unlink", 1, errno.EIO))
    shelf = open_catalog(storage)
    with pytest.raises(PenstockError, match="Removing failed"):
        shelf.hide(shelf.find(NAME))()
    assert open_catalog(files(tmp_path)).names() == []
    (left,) = sweep(tmp_path)
    assert left.startswith(".penstock-gone-")
    assert names(tmp_path) == []
    with pytest.raises(ObjectNotFound, match="No checkpoint is called step-1"):
        shelf.find(NAME)


class LoseAnswer:
    """A rename or an exchange is carried out and then fails, as where a repeated request finds it done."""

    def __init__(self, error_number: int) -> None:
        self._number = error_number

    def around(self, name: str, call: Call) -> Call:
        def lost(one: str, other: str) -> None:
            call(one, other)
            if Path(one).name.startswith(".penstock-save-") and Path(other).name == NAME:
                raise OSError(self._number, os.strerror(self._number))

        return lost if name in ("rename", "exchange") else call


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST, errno.EIO])
def test_a_rename_whose_answer_is_lost_is_a_commit(number: int, tmp_path: Path) -> None:
    for generation in (0, 1):
        save(tmp_path, generation, LoseAnswer(number))
        assert assert_known(files(tmp_path)) == {NAME: generation}
        assert names(tmp_path) == [NAME]
    save(tmp_path, 2, FailFileCall("exchange", 1, errno.ENOSYS), LoseAnswer(number))
    assert assert_known(files(tmp_path)) == {NAME: 2}
