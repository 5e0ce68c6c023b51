"""Files that are read out of mappings, or ahead: the same bytes, and errors where there are none."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ShortTransfer
from penstock.storage import open_storage, residency
from penstock.storage.aligned import aligned_buffer
from penstock.storage.capabilities import (
    SupportsViews,
    offers,
    prefer_direct_access,
    uses_page_cache,
)
from penstock.storage.files.files_in_memory import LEAST_STEP_BYTES, MappedSource, MappedStorage, ReadAhead
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import Storage, read_object, write_object
from penstock.storage.residency import are_resident, evict_file

if TYPE_CHECKING:
    from collections.abc import Callable
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
        assert isinstance(source, SupportsViews)
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


@pytest.mark.parametrize(("cached_share", "expected"), [(1.0, True), (0.9, False)])
def test_of_a_large_file_the_kernel_looks_at_pieces_up_to_the_end(
    files: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_share: float, *, expected: bool
) -> None:
    size_bytes = 1 << 40
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(size_bytes)
    asked = []

    def count(_descriptor: int, length: int, offset: int = 0) -> residency.PageCounts:
        asked.append(length)
        return residency.PageCounts(length // 4096 if offset + length <= cached_share * size_bytes else 0, 0)

    monkeypatch.setattr(residency, "count_by_cachestat", count)
    assert are_resident(files, ["huge"]) is expected
    assert sum(asked) == 64 << 20


ROOM_BYTES = LEAST_STEP_BYTES + 4 * len(CONTENT) // 4096 * 4096
LARGE = os.urandom(2 * LEAST_STEP_BYTES + 5)


@pytest.fixture
def cold_files(files: Storage, tmp_path: Path) -> Storage:
    """Two files that are not in the page cache, on a file system with direct I/O."""
    write_object(files, "small", [CONTENT])
    write_object(files, "large", [LARGE])
    for name in ("small", "large"):
        evict_file(str(tmp_path / name))
    if uses_page_cache(prefer_direct_access(files, reads="small")):
        pytest.skip("no direct I/O here")
    return files


def _ahead(files: Storage, *keys: str, is_likely: Callable[[], bool] = lambda: True) -> ReadAhead:
    return ReadAhead(files, keys, lambda: aligned_buffer(ROOM_BYTES), is_likely)


def _read_all(ahead: ReadAhead) -> None:
    ahead.begin()
    if ahead._thread.ident is not None:
        ahead._thread.join()


def _view(ahead: ReadAhead, key: str, offset: int, size_bytes: int) -> bytes | None:
    source = ahead.open(key)
    found = source.view(offset, size_bytes) if offers(source, SupportsViews) else None
    return None if found is None else bytes(found)


def test_what_was_read_ahead_is_in_memory_and_the_rest_is_read_once(cold_files: Storage) -> None:
    direct = prefer_direct_access(cold_files)
    with closing(_ahead(cold_files, "small", "large")) as ahead:
        _read_all(ahead)
        for key, content in (("small", CONTENT), ("large", LARGE)):
            assert _view(ahead, key, 4096, 8192) == content[4096:12288]
        before = direct.counters.read_bytes
        assert _view(ahead, "large", ROOM_BYTES - 4096, 8192) is None
        source, whole = ahead.open("large"), aligned_buffer(len(LARGE))
        assert source is not None
        source.read_into(0, whole)
        assert whole == LARGE
        assert len(LARGE) - ROOM_BYTES <= direct.counters.read_bytes - before < len(LARGE) - LEAST_STEP_BYTES


def test_a_file_that_was_replaced_since_it_was_read_ahead_is_opened_anew(
    cold_files: Storage, tmp_path: Path
) -> None:
    with closing(_ahead(cold_files, "small")) as ahead:
        _read_all(ahead)
        assert ahead.open("small") is not None
        (tmp_path / "large").replace(tmp_path / "small")
        assert ahead.open("small") is None


def test_nothing_is_read_ahead_that_is_unlikely_missing_or_cached(cold_files: Storage) -> None:
    write_object(cold_files, "cached", [CONTENT])
    for keys, is_likely in (("small",), False), (("missing", "small"), True), (("cached", "small"), True):
        with closing(_ahead(cold_files, *keys, is_likely=partial(bool, is_likely))) as ahead:
            _read_all(ahead)
            assert all(ahead.open(key) is None for key in keys)


def test_what_was_not_read_when_a_load_began_is_read_by_the_load(cold_files: Storage) -> None:
    with closing(_ahead(cold_files, "small", "large")) as ahead:
        ahead.stop()
        _read_all(ahead)
        for key, content in (("small", CONTENT), ("large", LARGE)):
            assert _view(ahead, key, 4096, 8192) is None
            source, whole = ahead.open(key), aligned_buffer(len(content))
            assert source is not None
            source.read_into(0, whole)
            assert whole == content
