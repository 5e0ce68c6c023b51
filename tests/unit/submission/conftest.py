"""Trees of the whole folder share one store of files, in memory where the machine has such a file system."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.submission.tree_store import TreeStore

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def store() -> Iterator[TreeStore]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield TreeStore(Path(folder))
