"""Listings of large, deep and changing trees: a stream in bounded memory."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.open_files import open_below

from penstock.storage.protocol import write_object
from penstock.storage.uri import open_storage

# Not ru_maxrss: a child that is started by vfork inherits its parent's.
LISTER = """
import json, re, sys
from pathlib import Path
from penstock.storage.uri import open_storage
def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
storage = open_storage(sys.argv[1], {})
before = peak_kib()
num_keys = num_bytes = 0
for info in storage.list():
    num_keys += 1
    num_bytes += info.size_bytes
after = peak_kib()
print(json.dumps({"keys": num_keys, "bytes": num_bytes, "grown_kib": after - before, "peak_kib": after}))
"""


@pytest.fixture
def light_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on tmpfs where there is one: hundreds of thousands of names are no work for a disk there."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent, prefix="penstock-test-") as folder:
        yield Path(folder)


def plant(root: Path, num_keys: int, num_folders: int) -> None:
    """Empty files in nested folders: cheap to make, and as many names as any others."""
    for number in range(num_folders):
        folder = root / f"{number % 3}" / f"folder-{number}"
        folder.mkdir(parents=True)
        for member in range(num_keys // num_folders):
            (folder / f"a-file-name-of-ordinary-length-{member:08}").touch()


def listed_elsewhere(root: Path) -> dict[str, int]:
    command = [sys.executable, "-c", LISTER, str(root)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout
    figures: dict[str, int] = json.loads(answer)
    return figures


def test_thirty_thousand_keys_are_listed_in_little_memory(light_folder: Path) -> None:
    plant(light_folder, 30_000, 6)
    figures = listed_elsewhere(light_folder)
    assert figures["keys"] == 30_000
    assert figures["grown_kib"] < 4 * 1024
    assert figures["peak_kib"] < 150 * 1024


@pytest.mark.slow
def test_three_hundred_thousand_keys_are_listed_in_little_memory(light_folder: Path) -> None:
    plant(light_folder, 300_000, 12)
    figures = listed_elsewhere(light_folder)
    assert figures["keys"] == 300_000
    assert figures["grown_kib"] < 4 * 1024
    assert figures["peak_kib"] < 150 * 1024


def test_what_vanishes_while_it_is_listed_is_left_out(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path), {}, options={"fsync": "no"})
    for number in range(200):
        write_object(storage, f"{number % 4}/{number}", [b"x"])
    listing = storage.list()
    seen = [next(listing).key]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()
    for folder in tmp_path.iterdir():
        folder.rmdir()
    seen += [info.key for info in listing]
    assert len(seen) < 200
    assert list(storage.list()) == []


def test_a_deep_tree_needs_no_recursion(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path), {}, options={"fsync": "no"})
    key = "/".join(["d"] * 200) + "/object"
    write_object(storage, key, [b"x"])
    assert [info.key for info in storage.list()] == [key]


def test_a_listing_left_early_closes_its_folders(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path), {}, options={"fsync": "no"})
    for number in range(5):
        write_object(storage, f"a/b/c/{number}", [b"x"])
    listing = storage.list()
    next(listing)
    assert open_below(tmp_path)
    del listing
    assert open_below(tmp_path) == []


def test_names_that_are_not_utf8_are_listed_and_read(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    (tmp_path / name).write_bytes(b"x")
    storage = open_storage(str(tmp_path), {})
    assert [info.key for info in storage.list()] == [name]
    assert storage.stat(name).size_bytes == 1
