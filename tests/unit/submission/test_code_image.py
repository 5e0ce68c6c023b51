"""The digest of a program, and its image in the pool."""

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.errors import DataDamaged
from penstock.submission.code_image import (
    DIGEST_FILE,
    POOL,
    POOL_MARK,
    Program,
    capture,
    image_name,
    parse_pointer,
    pointer_text,
    tree_digest,
)
from penstock.submission.parsed_file import MissingFact, ParsedFile

NOW = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)


def program_at(folder: Path) -> Program:
    for name, text in {"main.py": "print()", "rooms/b.py": "b", "rooms/a.py": "a"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Program(folder=folder, version="1.0")


def test_a_digest_covers_names_and_bytes_in_the_order_of_names(tmp_path: Path) -> None:
    program_at(tmp_path)
    expected = hashlib.md5(b"main.py" + b"print()" + b"rooms/a.py" + b"a" + b"rooms/b.py" + b"b")
    assert tree_digest(tmp_path) == expected.hexdigest()


def test_hidden_built_and_linked_entries_and_tests_do_not_count(tmp_path: Path) -> None:
    program_at(tmp_path)
    before = tree_digest(tmp_path)
    for name in (
        ".git/x",
        "tests/t.py",
        "rooms/test/t.py",
        "__pycache__/a",
        "a.pyc",
        "p.egg-info/x",
        ".hidden",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("noise")
    (tmp_path / "link.py").symlink_to("main.py")
    os.utime(tmp_path / "main.py", (1, 1))
    assert tree_digest(tmp_path) == before


@pytest.mark.parametrize("change", ["bytes", "name", "new"])
def test_every_change_of_a_file_changes_the_digest(tmp_path: Path, change: str) -> None:
    program_at(tmp_path)
    before = tree_digest(tmp_path)
    if change == "bytes":
        (tmp_path / "rooms/a.py").write_text("c")
    elif change == "name":
        (tmp_path / "rooms/a.py").rename(tmp_path / "rooms/c.py")
    else:
        (tmp_path / "rooms/c.py").write_text("c")
    assert tree_digest(tmp_path) != before


def test_image_is_stored_in_the_pool_under_its_digest(tmp_path: Path) -> None:
    program = program_at(tmp_path / "program")
    digest = capture(program, tmp_path / "root", now=NOW)
    image = tmp_path / "root" / POOL / image_name(digest)
    assert tree_digest(image) == digest == json.loads((image / DIGEST_FILE).read_text())["hash"]
    assert (tmp_path / "root" / POOL / POOL_MARK).is_file()
    assert capture(program, tmp_path / "root", now=NOW) == digest
    assert [path.name for path in (tmp_path / "root" / POOL).glob("*code-*")] == [image.name]


def test_an_image_that_was_changed_is_refused(tmp_path: Path) -> None:
    program = program_at(tmp_path / "program")
    digest = capture(program, tmp_path / "root", now=NOW)
    image = tmp_path / "root" / POOL / image_name(digest)
    (image / "main.py").write_text("edited")
    with pytest.raises(DataDamaged, match="damaged"):
        capture(program, tmp_path / "root", now=NOW)


def test_another_state_of_the_program_has_an_image_of_its_own(tmp_path: Path) -> None:
    program = program_at(tmp_path / "program")
    first = capture(program, tmp_path / "root", now=NOW)
    (tmp_path / "program/main.py").write_text("pass")
    assert capture(program, tmp_path / "root", now=NOW) != first
    assert len(list((tmp_path / "root" / POOL).glob("code-*"))) == 2


def test_a_pointer_is_read_as_it_was_written(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 2
    assert parse_pointer(ParsedFile(file="leaf", content=pointer_text(digest))) == digest


@pytest.mark.parametrize("text", ["", "md5-tree-v1:" + "0" * 32, "md5-tree-v2:" + "0" * 31, "0" * 32])
def test_malformed_pointer_is_refused(text: str) -> None:
    with pytest.raises(MissingFact, match="does not point to a code image"):
        parse_pointer(ParsedFile(file="leaf", content=text))
