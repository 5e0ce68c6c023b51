"""Symbolic links below a root: followed inside it, refused out of it, and never looped through."""

import errno
import logging
import os
from pathlib import Path

import pytest

from penstock.errors import AccessRefused, ObjectNotFound, StorageError
from penstock.storage.files.file_storage import FileStorage
from penstock.storage.files.folders import NUM_REMEMBERED
from penstock.storage.protocol import exists, read_object, write_object
from penstock.storage.uri import open_storage

VERBS_ON_KEYS = ["create", "open", "stat", "delete", "local_path"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root beside a folder with a secret."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture(params=["file", "direct"])
def storage(root: Path, request: pytest.FixtureRequest) -> FileStorage:
    opened = open_storage(f"{request.param}://{root}", {})
    assert isinstance(opened, FileStorage)
    return opened


@pytest.mark.parametrize("verb", VERBS_ON_KEYS)
@pytest.mark.parametrize("target", ["../outside", "absolute"])
def test_a_linked_folder_outside_the_root_is_refused_with_a_fix(
    root: Path, storage: FileStorage, verb: str, target: str
) -> None:
    (root / "door").symlink_to(root.parent / "outside" if target == "absolute" else target)
    with pytest.raises(AccessRefused, match="leads out of the root") as caught:
        getattr(storage, verb)("door/secret")
    assert str(root.parent / "outside") in str(caught.value)
    assert "separate root" in caught.value.fix
    assert (root.parent / "outside" / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize("verb", ["create", "open", "list", "sync"])
def test_a_folder_below_a_linked_one_that_leads_out_is_refused(
    root: Path, storage: FileStorage, verb: str
) -> None:
    (root.parent / "outside" / "deeper").mkdir()
    (root / "door").symlink_to("../outside")
    with pytest.raises(AccessRefused, match="leads out"):
        list(getattr(storage, verb)("door/deeper" if verb in ("list", "sync") else "door/deeper/x"))
    assert os.listdir(root.parent / "outside" / "deeper") == []  # noqa: PTH208 - names only


def test_nothing_is_made_outside_through_a_link(root: Path, storage: FileStorage) -> None:
    (root / "door").symlink_to("../outside")
    with pytest.raises(AccessRefused):
        storage.create("door/new/folder/key")
    assert not (root.parent / "outside" / "new").exists()


@pytest.mark.parametrize("verb", ["open", "stat"])
def test_a_linked_object_that_leads_out_is_refused(root: Path, storage: FileStorage, verb: str) -> None:
    (root / "window").symlink_to("../outside/secret")
    with pytest.raises(AccessRefused, match="leads out of the root"):
        getattr(storage, verb)("window")


def test_a_neighbour_whose_name_begins_like_the_root_is_outside(root: Path, storage: FileStorage) -> None:
    (root.parent / "root2").mkdir()
    (root.parent / "root2" / "x").write_bytes(b"x")
    (root / "door").symlink_to("../root2")
    with pytest.raises(AccessRefused):
        storage.open("door/x")


def test_a_link_inside_the_root_is_followed(root: Path, storage: FileStorage) -> None:
    write_object(storage, "real/object", [b"content"])
    (root / "folder").symlink_to("real")
    (root / "object").symlink_to("folder/object")
    assert read_object(storage, "folder/object") == b"content"
    assert read_object(storage, "object") == b"content"
    assert storage.stat("object").size_bytes == 7
    write_object(storage, "folder/other", [b"other"])
    assert read_object(storage, "real/other") == b"other"


def test_writing_replaces_a_link_but_not_its_target(root: Path, storage: FileStorage) -> None:
    (root / "window").symlink_to("../outside/secret")
    write_object(storage, "window", [b"mine"])
    assert read_object(storage, "window") == b"mine"
    assert (root.parent / "outside" / "secret").read_bytes() == b"secret"


def test_deleting_a_link_keeps_its_target(root: Path, storage: FileStorage) -> None:
    (root / "window").symlink_to("../outside/secret")
    storage.delete("window")
    assert (root.parent / "outside" / "secret").read_bytes() == b"secret"
    assert not (root / "window").is_symlink()


def test_writing_in_place_never_writes_through_a_link_that_leads_out(root: Path) -> None:
    storage = open_storage(f"file://{root}?publish=in_place", {})
    (root / "window").symlink_to("../outside/secret")
    with pytest.raises(AccessRefused, match="leads out"):
        storage.create("window")
    assert (root.parent / "outside" / "secret").read_bytes() == b"secret"


def test_writing_in_place_follows_a_link_inside_the_root(root: Path) -> None:
    storage = open_storage(f"file://{root}?publish=in_place", {})
    write_object(storage, "real", [b"old"])
    (root / "link").symlink_to("real")
    write_object(storage, "link", [b"new"])
    assert read_object(storage, "real") == b"new"


def test_links_that_lead_nowhere_or_in_circles_are_absent_or_refused(
    root: Path, storage: FileStorage
) -> None:
    (root / "dangling").symlink_to("nothing")
    (root / "circle").symlink_to("circle")
    with pytest.raises(ObjectNotFound):
        storage.open("dangling")
    with pytest.raises(ObjectNotFound):
        storage.stat("dangling")
    assert not exists(storage, "dangling")
    with pytest.raises(AccessRefused) as caught:
        storage.open("circle")
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(StorageError):
        storage.open("circle/below")


def test_a_root_may_itself_be_a_link(root: Path) -> None:
    (root.parent / "alias").symlink_to("root")
    storage = open_storage(str(root.parent / "alias"), {})
    write_object(storage, "a/b", [b"x"])
    assert [info.key for info in storage.list()] == ["a/b"]
    assert (root / "a" / "b").read_bytes() == b"x"


def test_a_listing_has_each_object_once_and_counts_links_that_lead_out(
    root: Path, storage: FileStorage, caplog: pytest.LogCaptureFixture
) -> None:
    write_object(storage, "real/object", [b"content"])
    (root / "to-folder").symlink_to("real")
    (root / "to-object").symlink_to("real/object")
    (root / "real" / "up").symlink_to("..")
    (root / "door").symlink_to("../outside")
    (root / "window").symlink_to("../outside/secret")
    (root / "dangling").symlink_to("nothing")
    with caplog.at_level(logging.WARNING):
        listed = {info.key: info.size_bytes for info in storage.list()}
    assert listed == {"real/object": 7, "to-object": 7}
    assert "2 symbolic links" in caplog.text


def test_a_link_in_circles_is_not_listed(root: Path, storage: FileStorage) -> None:
    (root / "circle").symlink_to("circle")
    assert list(storage.list()) == []


def test_a_linked_folder_inside_can_be_listed_by_its_name(root: Path, storage: FileStorage) -> None:
    write_object(storage, "real/deep/object", [b"x"])
    (root / "link").symlink_to("real")
    assert [info.key for info in storage.list("link")] == ["link/deep/object"]


def test_pipes_and_folders_are_not_objects_and_opening_them_does_not_block(
    root: Path, storage: FileStorage
) -> None:
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    for key in ("pipe", "folder"):
        with pytest.raises(ObjectNotFound):
            storage.stat(key)
        with pytest.raises(ObjectNotFound, match="not an object"):
            storage.open(key)
    assert list(storage.list()) == []


def test_the_error_for_a_pipe_names_its_type(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(ObjectNotFound, match="a device, a pipe or a socket"):
        open_storage(str(root), {}).open("pipe")


def test_remembered_folders_are_bounded(root: Path) -> None:
    storage = open_storage(f"file://{root}?fsync=no", {})
    assert isinstance(storage, FileStorage)
    for number in range(NUM_REMEMBERED + 10):
        (root / str(number)).mkdir()
        storage.local_path(f"{number}/key")
    remembered = storage._folders._known
    assert len(remembered) == NUM_REMEMBERED
    assert str(root / "0") not in remembered
    assert str(root / str(NUM_REMEMBERED)) in remembered
    assert storage.local_path("0/key") == str(root / "0" / "key")
