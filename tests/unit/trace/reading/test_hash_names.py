"""Names of hashes from the files beside one that does not explain them."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.trace.reading.json_lines import find_name_in_siblings

HASH, OTHER_HASH = "6131be361c9b6234", "fe1090480b848aa1"


def _line(name: str, value: str | int, *, kind: str = "FH") -> bytes:
    args: dict[str, Any] = {"hhash": OTHER_HASH, "name": name, "value": value}
    return json.dumps({"name": kind, "cat": "dftracer", "pid": 1, "ph": 4, "args": args}).encode() + b"\n"


def _find(folder: Path, value: str = HASH, kind: str = "fhash") -> str | None:
    return find_name_in_siblings(folder / "worker.pfw.gz", kind, value)


def test_name_is_found_in_any_file_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "parent.pfw.gz").write_bytes(gzip.compress(b"[\n" + _line("/d/a", HASH)))
    (tmp_path / "other.pfw").write_bytes(_line("node7", OTHER_HASH, kind="HH") + _line("/d/a", HASH))
    assert _find(tmp_path) == "/d/a"
    assert _find(tmp_path, OTHER_HASH, "hhash") == "node7"
    assert _find(tmp_path, OTHER_HASH) is None


def test_files_that_disagree_explain_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.pfw").write_bytes(_line("/d/a", HASH))
    (tmp_path / "b.pfw").write_bytes(_line("/d/b", HASH))
    assert _find(tmp_path) is None


@pytest.mark.parametrize("value", ["33084", "6131be361c9b623", "6131BE361C9B6234"])
def test_hash_of_one_process_is_looked_up_nowhere(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.pfw").write_bytes(_line("/d/a", value))
    assert _find(tmp_path, value) is None


def test_pipes_and_folders_in_the_folder_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.pfw").mkdir()
    os.mkfifo(tmp_path / "b.pfw")
    (tmp_path / "c.pfw").symlink_to("/dev/zero")
    (tmp_path / "d.pfw").write_bytes(_line("/d/a", HASH))
    assert _find(tmp_path) == "/d/a"


def test_damaged_lines_and_mentions_are_passed_over(tmp_path: Path) -> None:
    mention = {"name": "read", "args": {"name": "FH", "value": HASH}, "cat": "FH"}
    lines = [
        b'{"name":"FH","args":{"na\n',
        json.dumps(mention).encode() + b"\n",
        b'{"name":"FH","args":null}\n',
        b'"FH"\n',
        b"  " + _line("/d/a", HASH).rstrip() + b" ,\r\n",
    ]
    (tmp_path / "a.pfw").write_bytes(b"".join(lines))
    assert _find(tmp_path) == "/d/a"


def test_file_that_appears_later_is_searched(tmp_path: Path) -> None:
    (tmp_path / "a.pfw").write_bytes(b"[\n")
    assert _find(tmp_path) is None
    (tmp_path / "b.pfw").write_bytes(_line("/d/a", HASH))
    assert _find(tmp_path) == "/d/a"
