"""The contract suite on every kind of file storage, on a real file system."""

from pathlib import Path
from typing import ClassVar

import pytest
from tests.support.open_files import open_below

from penstock.errors import ObjectNotFound
from penstock.storage.aligned import aligned_buffer
from penstock.storage.protocol import Storage, SupportsReadsAtOnce, write_object
from penstock.storage.uri import open_storage
from penstock.testing.storage_contract import StorageContract, arbitrary_bytes


class TestBufferedFiles(StorageContract):
    expected_options: ClassVar = {
        "access": "buffered",
        "fsync": True,
        "publish": "rename",
        "writes_in_flight": 1,
    }

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"file://{tmp_path}", {})


class TestBufferedFilesInThreads(StorageContract):
    expected_options: ClassVar = {"writes_in_flight": 3, "fsync": False, "preallocate": False}

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        options = {"writes_in_flight": "3", "fsync": "no", "preallocate": "no"}
        return open_storage(str(tmp_path), {}, options=options)


class TestDirectFiles(StorageContract):
    expected_options: ClassVar = {"access": "direct", "alignment_bytes": 4096, "bounce_bytes": 4 * 2**20}

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"direct://{tmp_path}", {})


class TestDirectFilesInThreadsWithSmallBounces(StorageContract):
    expected_options: ClassVar = {"writes_in_flight": 4, "alignment_bytes": 512, "bounce_bytes": 8192}

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        uri = f"direct://{tmp_path}?writes_in_flight=4&alignment_bytes=512&bounce_bytes=8KiB&fsync=no"
        return open_storage(uri, {})


@pytest.mark.parametrize("scheme", ["file", "direct"])
def test_a_file_is_read_at_once_where_it_fits_by_as_few_calls_as_that_takes(
    scheme: str, tmp_path: Path
) -> None:
    storage = open_storage(f"{scheme}://{tmp_path}", {})
    content = arbitrary_bytes(100_003, seed=3)
    write_object(storage, "read/me", [content])
    (tmp_path / "read" / "link").symlink_to("me")
    (tmp_path / "read" / "folder").mkdir()
    assert isinstance(storage, SupportsReadsAtOnce)
    room = aligned_buffer(128 << 10)
    for key in ("read/me", "read/link"):
        room[:] = bytes(len(room))
        before = storage.counters.snapshot()
        assert storage.read_at_once(key, room) == len(content)
        assert bytes(room[: len(content)]) == content
        assert storage.counters.read_bytes - before.read_bytes == len(content)
    assert storage.read_at_once("read/me", room[:4096]) == len(content)
    assert bytes(room[:4096]) == content[:4096]  # too small: nothing is read
    for key, what in (("read/absent", "absent"), ("read/folder", "folder"), ("nowhere/me", "does not exist")):
        with pytest.raises(ObjectNotFound, match=what):
            storage.read_at_once(key, room)
    assert open_below(tmp_path) == []
