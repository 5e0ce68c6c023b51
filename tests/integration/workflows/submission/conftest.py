"""One whole result of our own runs, which all tests of it share and none changes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.workflows.submission.small_result import SmallResult


@pytest.fixture(scope="session")
def apart() -> Iterator[Path]:
    """A folder on another file system than that of temporary files, where this machine has one."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, apart: Path) -> SmallResult:
    small = SmallResult(root=tmp_path_factory.mktemp("made") / "tree", data=apart / "data")
    small.describe()
    sequence, said = small.whole()
    assert len(sequence.counted) == 6
    assert said[-2] == "run 6 of 6"
    assert said[-1].startswith("run 6 of 6: AU ")
    return small
