"""The contract suite on every kind of file storage, on a real file system."""

from pathlib import Path
from typing import ClassVar

import pytest

from penstock.storage.protocol import Storage
from penstock.storage.uri import open_storage
from penstock.testing.storage_contract import StorageContract


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
