import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import AccessRefused, DataDamaged, ObjectNotFound
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import exists, read_if_any, read_object, write_object
from penstock.storage.uri import open_here


def test_an_object_is_its_buffers_in_order() -> None:
    storage = MemoryStorage()
    info = write_object(storage, "key", [b"one ", bytearray(b"two "), memoryview(b"three")])
    assert info.size_bytes == 13
    assert read_object(storage, "key") == b"one two three"


def test_buffers_may_be_made_while_they_are_written() -> None:
    storage = MemoryStorage()
    write_object(storage, "key", (bytes([number]) for number in range(5)), size_bytes=5)
    assert read_object(storage, "key") == b"\x00\x01\x02\x03\x04"


def test_an_object_of_no_buffers_is_empty() -> None:
    storage = MemoryStorage()
    assert write_object(storage, "key", []).size_bytes == 0
    assert read_object(storage, "key") == b""


def test_a_write_whose_buffers_run_into_an_error_leaves_nothing() -> None:
    storage = MemoryStorage()

    def interrupted() -> Iterator[bytes]:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_object(storage, "key", interrupted())
    assert not exists(storage, "key")


def test_reading_a_missing_object_names_it() -> None:
    with pytest.raises(ObjectNotFound, match="absent"):
        read_object(MemoryStorage(), "absent")


def test_a_sparse_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "note").touch()
    os.truncate(tmp_path / "note", 1 << 42)
    storage = open_here(tmp_path)
    with pytest.raises(DataDamaged, match="more than the 67,108,864 that are read at once"):
        read_object(storage, "note")
    with pytest.raises(DataDamaged, match="more than the 10 that"):
        read_if_any(storage, "note", at_most=10)


def test_existence_is_absence_of_not_found_and_nothing_else() -> None:
    storage = MemoryStorage()
    write_object(storage, "key", [b"x"])
    assert exists(storage, "key")
    assert not exists(storage, "other")
    with pytest.raises(AccessRefused):
        exists(storage, "../other")
