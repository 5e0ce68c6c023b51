"""Trees of the whole folder share one store of files, in memory where the machine has such a file system."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.submission.tree_store import TreeStore

from penstock.submission import parsed_file

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def store() -> Iterator[TreeStore]:
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(parsed_file, "_parse", _parse_once(folder))
        yield TreeStore(Path(folder))


def _parse_once(folder: str) -> Any:
    """Parse a file of the store once, however many trees link to it; files elsewhere are parsed each time."""
    parse = parsed_file._parse
    contents: dict[tuple[int, int, int], Any] = {}

    def parse_once(path: str, tree: str) -> Any:
        if not path.startswith(folder):
            return parse(path, tree)
        status = os.stat(path)  # noqa: PTH116 - thousands of files
        # A file that replaces another may get its inode, but not its time.
        key = (status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in contents:
            contents[key] = parse(path, tree)
        return contents[key]

    return parse_once
