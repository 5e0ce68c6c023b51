"""Commit by records, as on object services, in memory: who wins, what is cleared up, what is refused."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
from tests.support.known_steps import assert_known, save_known

from penstock.checkpoint.commit import protocol
from penstock.checkpoint.commit.checkpoints import (
    StepCatalog,
    apply_retention,
    begin_save,
    open_catalog,
    open_draft_store,
)
from penstock.checkpoint.commit.protocol import (
    LEASE_ENDING,
    LEASE_S,
    RECORD_NAME,
    RecordCatalog,
    RecordDraftStore,
    Seal,
    lease_text,
)
from penstock.checkpoint.tools.inspection import CheckpointState as State
from penstock.checkpoint.tools.inspection import list_storage
from penstock.cluster.comm import SoloComm
from penstock.errors import (
    AlreadyThere,
    DataDamaged,
    ObjectNotFound,
    PenstockError,
    StorageError,
    Unavailable,
)
from penstock.storage.in_memory import MemorySource, MemoryStorage
from penstock.storage.process_id import ProcessId, current_process
from penstock.storage.protocol import ObjectInfo, WrappedStorage, write_object
from penstock.testing.faults import FailAtCall, Verb

T = TypeVar("T")

NAME = "step-1"
SEAL = Seal(manifest=b"{}", metadata=b"m", sizes={"__0_0.distcp": 3})


def keys(storage: MemoryStorage) -> list[str]:
    return sorted(info.key for info in storage.list())


def always(value: T) -> Callable[[], T]:
    return lambda: value


def someone_else() -> ProcessId:
    return replace(current_process(), kernel="another machine")


def test_a_commit_leaves_its_files_and_one_record() -> None:
    storage = MemoryStorage()
    committed = save_known(storage, NAME, 0, SoloComm())
    assert committed.folder.startswith(f"{NAME}/")
    assert f"{NAME}/{RECORD_NAME}" in keys(storage)
    assert not any(key.endswith(LEASE_ENDING) for key in keys(storage))
    assert assert_known(storage) == {NAME: 0}
    assert open_catalog(storage).find(NAME) == committed


def test_a_replaced_checkpoint_and_a_removed_one_leave_nothing() -> None:
    storage = MemoryStorage()
    save_known(storage, NAME, 0, SoloComm())
    save_known(storage, NAME, 1, SoloComm())
    assert assert_known(storage) == {NAME: 1}
    assert len(keys(storage)) == 5
    shelf = open_catalog(storage)
    shelf.hide(shelf.find(NAME))()
    assert keys(storage) == []


def test_of_two_saves_of_one_name_one_wins_whole_and_the_other_fails() -> None:
    storage = MemoryStorage()
    late = RecordDraftStore(storage, storage)
    draft = late.start(NAME, "0" * 16)
    write_object(storage, draft.key("__0_0.distcp"), [b"123"])

    class _Meanwhile(MemoryStorage):
        def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
            save_known(storage, NAME, 2, SoloComm())
            return storage.write_if(key, content, replaces=replaces)

    late._conditional = _Meanwhile()
    with pytest.raises(AlreadyThere, match="Another save committed step-1 first"):
        late.publish(draft, SEAL)
    late.drop(draft)
    assert assert_known(storage) == {NAME: 2}
    assert len(keys(storage)) == 5


def test_a_save_that_another_one_has_overtaken_is_given_up() -> None:
    storage = MemoryStorage()
    place = begin_save(storage, NAME, SoloComm())
    write_object(place.data_storage, place.draft.key("__0_0.distcp"), [b"123"])
    save_known(storage, NAME, 2, SoloComm())
    with pytest.raises(AlreadyThere, match="Another save committed step-1 first"):
        place.commit(lambda: SEAL)
    assert assert_known(storage) == {NAME: 2}


def test_a_record_whose_answer_was_lost_is_committed() -> None:
    storage = MemoryStorage()

    class _LosesAnswers(MemoryStorage):
        def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
            storage.write_if(key, content, replaces=replaces)
            return storage.write_if(key, content, replaces=replaces)

    place = begin_save(storage, NAME, SoloComm(), drafts=RecordDraftStore(storage, _LosesAnswers()))
    write_object(storage, place.draft.key("__0_0.distcp"), [b"123"])
    assert place.commit(lambda: SEAL).folder == place.draft.folder
    assert len(keys(storage)) == 4


class Answers(WrappedStorage):
    """A service that loses the answer to a conditional write, or refuses it, and may not answer reads."""

    has_conditions = True

    def __init__(self, inside: MemoryStorage, *, is_applied: bool, failed_reads: int = 0) -> None:
        super().__init__(inside)
        self._memory, self._is_applied, self._failed_reads = inside, is_applied, failed_reads
        self._is_out = False

    def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
        if self._is_applied:
            self._memory.write_if(key, content, replaces=replaces)
        self._is_out = True
        raise StorageError("The service failed: SlowDown", uri=key)

    def stat(self, key: str) -> ObjectInfo:
        if self._is_out and self._failed_reads > 0:
            self._failed_reads -= 1
            raise StorageError("The service failed: 503", uri=key)
        return super().stat(key)


def save_again(memory: MemoryStorage, service: Answers) -> RecordDraftStore:
    drafts = RecordDraftStore(service, service)
    place = begin_save(service, NAME, SoloComm(), drafts=drafts)
    write_object(memory, place.draft.key("__0_0.distcp"), [b"123"])
    place.commit(lambda: SEAL)
    return drafts


@pytest.mark.parametrize("failed_reads", [0, 2])
def test_a_record_is_read_back_after_any_failure(failed_reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "RETRY_PAUSES_S", (0.0, 0.0))
    storage = MemoryStorage()
    save_known(storage, NAME, 0, SoloComm())
    save_again(storage, Answers(storage, is_applied=True, failed_reads=failed_reads))
    assert [key for key in keys(storage) if key.endswith(".distcp")] == [
        RecordCatalog(storage).find(NAME).key("__0_0.distcp")
    ]


@pytest.mark.parametrize(
    ("is_applied", "failed_reads", "message"),
    [
        (False, 0, "^The service failed: SlowDown"),
        (False, 9, "It is unknown whether step-1 was committed: .*SlowDown; .*503"),
        (True, 9, "It is unknown whether step-1 was committed: .*SlowDown; .*503"),
    ],
)
def test_what_a_record_may_name_later_is_not_deleted(
    is_applied: bool,  # noqa: FBT001 - a case
    failed_reads: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "RETRY_PAUSES_S", (0.0,))
    storage = MemoryStorage()
    before = save_known(storage, NAME, 0, SoloComm())
    with pytest.raises(StorageError, match=message):
        save_again(storage, Answers(storage, is_applied=is_applied, failed_reads=failed_reads))
    data = [key for key in keys(storage) if key.endswith("__0_0.distcp")]
    assert before.key("__0_0.distcp") in data
    assert len(data) == 2
    assert not [key for key in keys(storage) if key.endswith(LEASE_ENDING)]
    # Once no request can be under way any more, a sweep deletes what no record names.
    RecordDraftStore(storage, storage, clock=lambda: time.time() + 2 * LEASE_S).sweep()
    data = [key for key in keys(storage) if key.endswith("__0_0.distcp")]
    assert data == [RecordCatalog(storage).find(NAME).key("__0_0.distcp")]
    assert (data != [before.key("__0_0.distcp")]) == is_applied


def test_objects_of_dead_saves_are_swept_and_those_of_living_ones_are_not() -> None:
    storage = MemoryStorage()
    for name, owner, seconds_later, is_swept in [
        ("step-1", current_process(), 10 * LEASE_S, False),
        ("step-2", replace(current_process(), started="1"), 0.0, True),
        ("step-3", someone_else(), 0.0, False),
        ("step-4", someone_else(), 2 * LEASE_S, True),
    ]:
        draft = RecordDraftStore(storage, storage, owner=always(owner)).start(name, "a" * 16)
        write_object(storage, draft.key("__0_0.distcp"), [b"123"])
        times = {info.key: info.modified_s for info in storage.list()}
        now_s = times[draft.folder + LEASE_ENDING] + seconds_later
        sweeper = RecordDraftStore(storage, storage, clock=always(now_s))
        assert (f"{name}/{'a' * 16}" in sweeper.sweep()) == is_swept
        assert any(key.startswith(name) for key in keys(storage)) != is_swept


def test_a_lease_that_outlived_its_commit_is_swept_alone() -> None:
    storage = MemoryStorage()
    committed = save_known(storage, NAME, 0, SoloComm())
    before = keys(storage)
    dead = replace(current_process(), started="1")
    write_object(storage, committed.folder + LEASE_ENDING, [lease_text(dead)])
    assert RecordDraftStore(storage, storage).sweep() == [committed.folder]
    assert keys(storage) == before


def test_old_committed_saves_and_foreign_objects_are_not_swept() -> None:
    storage = MemoryStorage()
    save_known(storage, NAME, 0, SoloComm())
    write_object(storage, "notes/of/mine", [b"x"])
    write_object(storage, f"{NAME}/{'b' * 16}/__0_0.distcp", [b"left, without a lease"])
    before = keys(storage)
    assert RecordDraftStore(storage, storage).sweep() == []
    assert RecordDraftStore(storage, storage, clock=lambda: 1e12).sweep() == [f"{NAME}/{'b' * 16}"]
    assert keys(storage) == [key for key in before if "b" * 16 not in key]


@pytest.mark.parametrize(
    "verb", ["create", "submit", "finish", "list", "stat", "open", "read_into", "delete"]
)
def test_any_failed_call_leaves_the_old_or_the_new_checkpoint_complete(verb: Verb) -> None:
    for number in range(1, 20):
        storage = MemoryStorage()
        save_known(storage, NAME, 0, SoloComm())
        try:
            save_known(FailAtCall(storage, verb, number), NAME, 1, SoloComm())
        except PenstockError:
            assert assert_known(storage) in ({NAME: 0}, {NAME: 1})
        else:
            assert assert_known(storage) == {NAME: 1}


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"save_id": 1}'])
def test_an_unparsable_record_is_an_error_that_names_it(text: bytes) -> None:
    storage = MemoryStorage()
    write_object(storage, f"{NAME}/{RECORD_NAME}", [text])
    with pytest.raises(StorageError, match=r"cannot be parsed.*step-1/penstock-commit.json"):
        open_catalog(storage).find(NAME)


@pytest.mark.parametrize(
    ("folder", "save_id"),
    [
        ("", "0123456789abcdef"),
        (".", "0123456789abcdef"),
        ("step-2", "0123456789abcdef"),
        ("step-1", "0123456789abcdef"),
        ("step-2/0123456789abcdef", "0123456789abcdef"),
        ("step-1/0123456789abcdef/", "0123456789abcdef"),
        ("step-1/fedcba9876543210", "0123456789abcdef"),
        ("step-1/0123456789ABCDEF", "0123456789ABCDEF"),
        ("step-1/../step-2", "../step-2"),
        ("step-1/", ""),
    ],
)
def test_a_record_that_names_a_folder_of_others_removes_nothing(folder: str, save_id: str) -> None:
    storage = MemoryStorage()
    save_known(storage, "step-2", 0, SoloComm())
    record = {"record_version": 1, "save_id": save_id, "folder": folder}
    write_object(storage, f"{NAME}/{RECORD_NAME}", [json.dumps(record).encode()])
    write_object(storage, "unrelated", [b"x"])
    before = keys(storage)
    match = r"names '.*', which is not its own folder.*step-1/penstock-commit.json"
    catalog = StepCatalog(storage)
    for act in (catalog.find, catalog.hide, lambda _: begin_save(storage, NAME, SoloComm())):
        with pytest.raises(DataDamaged, match=match):
            act(1)
    apply_retention(catalog, 2, keep=1)()
    open_draft_store(storage).sweep()
    assert set(keys(storage)) - {"latest"} == set(before)
    damaged, other = list_storage(storage)
    assert (damaged.name, damaged.state, other.name) == (NAME, State.DAMAGED, "step-2")
    assert "which is not its own" in damaged.complaint


def test_a_record_of_a_later_version_is_refused() -> None:
    storage = MemoryStorage()
    text = b'{"record_version": 2, "save_id": "a", "folder": "step-1/a"}'
    write_object(storage, f"{NAME}/{RECORD_NAME}", [text])
    with pytest.raises(StorageError, match="has version 2; this Penstock reads version 1"):
        open_catalog(storage).find(NAME)


def test_a_foreign_checkpoint_is_found_and_removed() -> None:
    storage = MemoryStorage()
    for name in (".metadata", "__0_0.distcp"):
        write_object(storage, f"plain/{name}", [b"x"])
    write_object(storage, "no/checkpoint", [b"x"])
    shelf = RecordCatalog(storage)
    assert shelf.names() == ["plain"]
    assert shelf.find("plain").folder == "plain"
    shelf.hide(shelf.find("plain"))()
    assert keys(storage) == ["no/checkpoint"]
    with pytest.raises(ObjectNotFound):
        shelf.find("plain")


def test_a_storage_without_rename_or_conditional_writes_is_refused() -> None:
    class _Plain(MemoryStorage):
        has_conditions = False

    storage = _Plain()
    with pytest.raises(Unavailable, match="neither folders that can be renamed nor conditional writes"):
        open_draft_store(WrappedStorage(storage))
    assert keys(storage) == []


def test_what_was_committed_is_not_dropped_with_its_draft() -> None:
    storage = MemoryStorage()
    drafts = RecordDraftStore(storage, storage)
    draft = drafts.start(NAME, "a" * 16)
    write_object(storage, draft.key("__0_0.distcp"), [b"123"])
    drafts.publish(draft, SEAL)
    drafts.drop(draft)
    assert len(keys(storage)) == 4


def test_an_abandoned_save_is_removed_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = MemoryStorage()
    place = begin_save(storage, NAME, SoloComm())
    write_object(place.data_storage, place.draft.key("__0_0.distcp"), [b"123"])
    place.abandon()
    assert keys(storage) == []
    stuck = FailAtCall(storage, "delete", 1)
    place = begin_save(stuck, NAME, SoloComm())
    place.abandon()
    assert f"Could not remove the unfinished checkpoint {place.draft.folder}" in caplog.text


def test_remains_that_cannot_be_swept_do_not_fail_a_save() -> None:
    storage = MemoryStorage()
    dead = RecordDraftStore(storage, storage, owner=always(replace(current_process(), started="1")))
    write_object(storage, dead.start("step-9", "a" * 16).key("__0_0.distcp"), [b"123"])
    save_known(FailAtCall(storage, "delete", 1), NAME, 0, SoloComm())
    assert any(key.startswith("step-9/") for key in keys(storage))
    assert assert_known(storage) == {NAME: 0}


def test_a_lease_that_ends_during_a_sweep_keeps_its_save() -> None:
    class _Ending(MemoryStorage):
        def open(self, key: str) -> MemorySource:
            if key.endswith(LEASE_ENDING):
                self.delete(key)
            return super().open(key)

    storage = _Ending()
    dead = RecordDraftStore(storage, storage, owner=always(replace(current_process(), started="1")))
    write_object(storage, dead.start(NAME, "a" * 16).key("__0_0.distcp"), [b"123"])
    assert RecordDraftStore(storage, storage).sweep() == []
    assert len(keys(storage)) == 1


def test_an_interrupted_removal_is_finished_by_the_next_one() -> None:
    storage = MemoryStorage()
    save_known(storage, NAME, 0, SoloComm())
    stuck = RecordCatalog(FailAtCall(storage, "delete", 2))
    with pytest.raises(StorageError):
        stuck.hide(stuck.find(NAME))()
    left = keys(storage)
    assert left
    assert sorted(info.key for info in RecordCatalog(storage).finish_hiding(NAME)) == left
    assert keys(storage) == []
    assert RecordCatalog(storage).finish_hiding(NAME) == []


def test_finishing_a_removal_spares_what_is_committed_and_what_is_being_saved() -> None:
    storage = MemoryStorage()
    save_known(storage, NAME, 0, SoloComm())
    save_known(storage, f"{NAME}0", 1, SoloComm())
    draft = RecordDraftStore(storage, storage, owner=someone_else).start(NAME, "a" * 16)
    write_object(storage, draft.key("__0_0.distcp"), [b"123"])
    before = keys(storage)
    assert RecordCatalog(storage).finish_hiding(NAME) == []
    assert keys(storage) == before


def test_finishing_a_removal_spares_a_save_whose_lease_a_listing_has_missed() -> None:
    class _Slow(MemoryStorage):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            return (info for info in super().list(prefix) if not info.key.endswith(LEASE_ENDING))

    storage = _Slow()
    draft = RecordDraftStore(storage, storage).start(NAME, "a" * 16)
    write_object(storage, draft.key("__0_0.distcp"), [b"123"])
    assert RecordCatalog(storage).finish_hiding(NAME) == []
    assert len(keys(storage)) == 1
