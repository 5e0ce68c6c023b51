"""Files that are read out of mappings, or ahead: the same bytes, and errors where there are none."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ShortTransfer
from penstock.storage import open_storage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import Storage, read_object, write_object
from penstock.storage.residency import MappedSource, MappedStorage, are_resident

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = bytes(range(256)) * 100


@pytest.fixture
def files(tmp_path: Path) -> Storage:
    return open_storage(f"file://{tmp_path}", {})


def test_any_range_of_a_mapped_file_is_read_and_counted(files: Storage) -> None:
    write_object(files, "some", [CONTENT])
    assert are_resident(files, ["some"] * 40)
    with closing(MappedStorage(files).open("some")) as source:
        assert isinstance(source, MappedSource)
        for begin, size in ((0, 25600), (4095, 2), (8192, 4096), (25599, 1), (7, 0)):
            buffer = bytearray(size)
            source.read_into(begin, memoryview(buffer))
            assert buffer == CONTENT[begin : begin + size]
    assert files.counters.read_bytes == 25600 + 2 + 4096 + 1


def test_a_file_that_cannot_be_mapped_is_read(files: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    write_object(files, "some", [CONTENT])
    monkeypatch.setattr("mmap.mmap", refuse)
    assert read_object(MappedStorage(files), "some") == CONTENT


def test_a_file_that_was_cut_is_an_error_and_not_the_end_of_the_process(
    files: Storage, tmp_path: Path
) -> None:
    write_object(files, "some", [CONTENT])
    with closing(MappedStorage(files).open("some")) as source:
        with (tmp_path / "some").open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(ShortTransfer):
            source.read_into(8192, memoryview(bytearray(4096)))
        with pytest.raises(ShortTransfer):
            source.read_into(4096, memoryview(bytearray(4096)))
        with pytest.raises(ShortTransfer):
            source.read_into(25000, memoryview(bytearray(4096)))


def test_a_view_shows_bytes_without_a_copy_and_outlives_its_file(files: Storage) -> None:
    write_object(files, "some", [CONTENT])
    with closing(MappedStorage(files).open("some")) as source:
        assert isinstance(source, MappedSource)
        found = source.view(4095, 5000)
        assert source.view(25000, 601) is None
    assert found is not None
    assert found.readonly
    assert found == CONTENT[4095:9095]


def test_what_cannot_be_mapped_is_read_as_before(files: Storage) -> None:
    write_object(files, "empty", [])
    assert read_object(MappedStorage(files), "empty") == b""
    memory = MemoryStorage()
    write_object(memory, "some", [CONTENT])
    assert read_object(MappedStorage(memory), "some") == CONTENT
    assert not are_resident(memory, ["some"])
    assert not are_resident(files, ["missing"])
    assert not are_resident(files, [])
