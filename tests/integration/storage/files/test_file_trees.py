"""Whole folders: created, listed, renamed, exchanged and removed, never outside the root."""

import errno
import math
from pathlib import Path

import pytest
from tests.support.file_faults import CallLog, FailFileCall, faulty_calls
from tests.support.known_steps import files_below
from tests.support.rate_limit import RateLimitedStorage

from penstock.errors import AccessRefused, AlreadyThere, ObjectNotFound, StorageError, Unavailable
from penstock.storage.capabilities import (
    Deferred,
    defer_sync,
    find_folder_tree,
    prefer_direct_access,
    sync_names,
    unwrap,
)
from penstock.storage.files.file_storage import DirectOptions, FileStorage
from penstock.storage.files.system_calls import REAL_CALLS
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedStorage, read_object, write_object
from penstock.storage.uri import open_here, open_storage


def names_in(storage: FileStorage, folder: str = "", prefix: str = "") -> list[str]:
    return sorted(entry.name for entry in storage.tree.entries(folder, prefix=prefix))


def test_a_folder_is_made_with_all_above_it_durably_and_only_once(tmp_path: Path) -> None:
    log = CallLog()
    tree = files_below(tmp_path / "root", faulty_calls(log)).tree
    tree.make("a/b")
    assert (tmp_path / "root" / "a" / "b").is_dir()
    assert log.names.count("mkdir") == log.names.count("fsync") == 3
    with pytest.raises(AlreadyThere, match="the name is taken") as caught:
        tree.make("a/b")
    assert isinstance(caught.value, FileExistsError)


def test_a_listing_has_kinds_and_sizes_and_a_missing_folder_is_empty(tmp_path: Path) -> None:
    storage = files_below(tmp_path, REAL_CALLS)
    write_object(storage, "folder/file", [b"12345"])
    (tmp_path / "link").symlink_to("folder")
    found = {entry.name: entry for entry in storage.tree.entries()}
    assert found["folder"].is_folder
    assert not found["folder"].is_plain
    assert not found["link"].is_folder
    assert not found["link"].is_plain
    (file,) = storage.tree.entries("folder")
    assert (file.name, file.is_plain, file.size_bytes) == ("file", True, 5)
    assert file.modified_s == (tmp_path / "folder" / "file").stat().st_mtime
    assert names_in(storage, "absent") == names_in(storage, "absent/deeper") == []
    assert names_in(storage, prefix="li") == ["link"]


def test_a_rename_replaces_an_empty_folder_and_nothing_else(tmp_path: Path) -> None:
    storage = files_below(tmp_path, REAL_CALLS)
    write_object(storage, "new/file", [b"new"])
    write_object(storage, "full/file", [b"old"])
    write_object(storage, "plain", [b"old"])
    (tmp_path / "empty").mkdir()
    for taken in ("full", "plain"):
        with pytest.raises(AlreadyThere):
            storage.tree.move("new", taken)
    storage.tree.move("new", "empty")
    assert read_object(storage, "empty/file") == b"new"
    assert names_in(storage) == ["empty", "full", "plain"]
    with pytest.raises(ObjectNotFound):
        storage.tree.move("new", "elsewhere")


def test_two_folders_change_names_at_once(tmp_path: Path) -> None:
    storage = files_below(tmp_path, REAL_CALLS)
    write_object(storage, "one/file", [b"1"])
    write_object(storage, "deep/other/file", [b"2"])
    storage.tree.exchange("one", "deep/other")
    assert read_object(storage, "one/file") == b"2"
    assert read_object(storage, "deep/other/file") == b"1"
    with pytest.raises(ObjectNotFound):
        storage.tree.exchange("one", "absent")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_exchange_is_an_error(tmp_path: Path, number: int) -> None:
    storage = files_below(tmp_path, faulty_calls(FailFileCall("exchange", 1, number)))
    write_object(storage, "one/file", [b"1"])
    write_object(storage, "other/file", [b"2"])
    with pytest.raises(Unavailable, match="cannot exchange two folders"):
        storage.tree.exchange("one", "other")
    assert read_object(storage, "one/file") == b"1"


def test_a_folder_goes_with_all_in_it_and_links_lead_nowhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    storage = files_below(root, REAL_CALLS)
    write_object(storage, "gone/a/b/file", [b"x"])
    write_object(storage, "gone/file", [b"x"])
    outside.mkdir()
    (outside / "kept").write_text("x")
    (root / "gone" / "out").symlink_to(outside)
    storage.tree.remove("gone")
    storage.tree.remove("gone")
    storage.tree.remove("gone/deeper")
    assert names_in(storage) == []
    assert (outside / "kept").exists()
    write_object(storage, "file", [b"x"])
    storage.tree.remove("file")
    assert names_in(storage) == []


def test_failing_folder_operations_have_the_systems_errno(tmp_path: Path) -> None:
    for call, doing in (("rename", "move"), ("exchange", "exchange")):
        storage = files_below(tmp_path / call, faulty_calls(FailFileCall(call, 3, errno.EIO)))
        write_object(storage, "one/file", [b"1"])
        write_object(storage, "other/file", [b"1"])
        if call == "exchange":
            storage.tree.exchange("one", "other")
            storage.tree.exchange("one", "other")
        with pytest.raises(StorageError) as caught:
            getattr(storage.tree, doing)("one", "new" if doing == "move" else "other")
        assert caught.value.errno == errno.EIO
    storage = files_below(tmp_path / "rm", faulty_calls(FailFileCall("rmdir", 1, errno.EACCES)))
    storage.tree.make("one")
    with pytest.raises(AccessRefused, match="Removing failed"):
        storage.tree.remove("one")


def test_no_name_leaves_the_root(tmp_path: Path) -> None:
    tree = files_below(tmp_path, REAL_CALLS).tree
    for name in ("../up", "/abs", "a//b", ""):
        with pytest.raises(AccessRefused):
            tree.make(name)
        with pytest.raises(AccessRefused):
            tree.remove(name)


def test_folders_are_found_inside_wrappers_and_not_in_memory(tmp_path: Path) -> None:
    storage = open_here(tmp_path)
    assert find_folder_tree(WrappedStorage(WrappedStorage(storage))) is find_folder_tree(storage)
    assert unwrap(WrappedStorage(storage)) is storage
    memory = MemoryStorage()
    assert find_folder_tree(memory) is None
    assert prefer_direct_access(memory) is memory


@pytest.mark.parametrize("scheme", ["file", "direct"])
def test_large_files_go_past_the_page_cache_and_in_place(tmp_path: Path, scheme: str) -> None:
    storage = open_storage(f"{scheme}://{tmp_path}/root", {}, options={"writes_in_flight": "2"})
    large = prefer_direct_access(storage)
    assert (large.options["access"], large.options["publish"]) == ("direct", "in_place")
    assert large.options["writes_in_flight"] == 2
    write_object(large, "key", [b"x" * 5000])
    assert read_object(storage, "key") == b"x" * 5000


@pytest.mark.parametrize(("what", "num_syncs"), [("names", 1), ("all", 0)])
def test_what_is_deferred_is_synced_by_the_caller_alone(
    tmp_path: Path, what: Deferred, num_syncs: int
) -> None:
    log = CallLog()
    files = files_below(tmp_path, faulty_calls(log))
    storage = RateLimitedStorage(files, math.inf)
    files.tree.make("folder", keep_name=False)
    write_object(defer_sync(storage, what), "folder/file", [b"12345"])
    assert log.names.count("fsync") == num_syncs
    assert read_object(storage, "folder/file") == b"12345"
    sync_names(storage, "folder")
    assert log.names.count("fsync") == num_syncs + 1


def test_direct_access_is_tried_once_and_leaves_names_to_the_caller(tmp_path: Path) -> None:
    log = CallLog()
    storage = files_below(tmp_path, faulty_calls(log))
    large = storage.past_cache()
    write_object(large, "folder/file", [b"x" * 5000])
    assert log.names.count("fsync") == 1
    if large.options["access"] == "direct":
        assert storage.past_cache("folder/file") is large
    # A folder that was removed behind its back is made again.
    storage.tree.remove("folder")
    write_object(large, "folder/file", [b"y" * 5000])
    assert read_object(storage, "folder/file") == b"y" * 5000


def test_where_direct_access_is_missing_large_files_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_here(tmp_path)
    assert isinstance(storage, FileStorage)
    monkeypatch.setattr(FileStorage, "_takes_direct_access", lambda _self, _reads: False)
    assert prefer_direct_access(storage).options["access"] == "buffered"
    direct = open_storage(f"direct://{tmp_path}", {})
    assert isinstance(direct, FileStorage)
    assert isinstance(direct.past_cache()._options, DirectOptions)
