import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import AccessRefused, UsageError
from penstock.storage.protocol import check_key, check_prefix
from penstock.storage.uri import Location, parse_uri


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/set", Location("file", "/data/set")),
        ("file:///data/set", Location("file", "/data/set")),
        ("file:///data/../set/", Location("file", "/set")),
        ("direct:///data?fsync=no", Location("direct", "/data", {"fsync": "no"})),
        ("s3://bucket", Location("s3", "bucket")),
        ("s3://bucket/a/b/", Location("s3", "bucket/a/b")),
        (
            "s3://b?client=minio&part_bytes=16MiB",
            Location("s3", "b", {"client": "minio", "part_bytes": "16MiB"}),
        ),
        ("mem://x?a=b=c", Location("mem", "x", {"a": "b=c"})),
        ("other://some/where", Location("other", "some/where")),
    ],
)
def test_a_uri_names_scheme_root_and_options(text: str, expected: Location) -> None:
    assert parse_uri(text) == expected


def test_a_plain_path_is_a_file_root_and_takes_no_options() -> None:
    assert parse_uri("some/folder?x=1") == Location("file", str(Path.cwd() / "some/folder?x=1"))


def test_two_slashes_are_one_in_a_path_but_not_in_a_bucket_where_they_end() -> None:
    assert parse_uri("file:///a//b") == Location("file", "/a/b")
    assert parse_uri("s3://b/a//") == Location("s3", "b/a")


def test_percent_signs_are_taken_literally() -> None:
    assert parse_uri("s3://bucket/a%20b").root == "bucket/a%20b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "URI is empty"),
        ("no-scheme://x", "is not a URI"),
        ("://x", "is not a URI"),
        ("file://relative/path", "has no absolute path"),
        ("direct://", "has no absolute path"),
        ("s3://", "has no bucket"),
        ("/data/a\0b", "NUL"),
        ("s3:///", "has no bucket"),
        ("s3://b/a//b", r"empty name between two slashes.* s3://b/a/b\."),
        ("mem://b//a", "empty name between two slashes"),
        ("s3://b?client", "sets nothing"),
    ],
)
def test_what_names_no_place_is_refused_with_a_fix(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_uri(text)
    assert caught.value.fix


def test_location_uri_leaves_out_options() -> None:
    assert parse_uri("s3://bucket/x?client=minio").uri == "s3://bucket/x"
    assert parse_uri("/data").uri == "file:///data"


@pytest.mark.parametrize("key", ["a", "a/b.c", ".hidden", "..a", "a..", "...", "ä/ö ü", "a\\b", "a%2fb"])
def test_plain_keys_pass_unchanged(key: str) -> None:
    assert check_key(key, "mem://x") == key


@pytest.mark.parametrize("key", ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\0"])
def test_keys_that_are_not_plain_paths_are_refused(key: str) -> None:
    with pytest.raises(AccessRefused) as caught:
        check_key(key, "mem://x")
    assert "mem://x" in str(caught.value)


@given(st.text(alphabet="ab./\0", max_size=12))
def test_no_key_that_passes_leaves_its_root(key: str) -> None:
    try:
        check_key(key, "file:///root")
    except AccessRefused:
        return
    path = os.path.normpath(f"/root/{key}")
    assert path == f"/root/{key}"


@pytest.mark.parametrize(
    ("prefix", "folder"), [("", ""), ("a", "a"), ("a/", "a"), ("a/b/", "a/b"), ("/", "")]
)
def test_a_prefix_is_a_folder_with_or_without_its_slash(prefix: str, folder: str) -> None:
    assert check_prefix(prefix, "mem://x") == folder


@pytest.mark.parametrize("prefix", ["..", "../", "a/../b", "//", "/a", "a//"])
def test_a_prefix_that_leaves_the_root_is_refused(prefix: str) -> None:
    with pytest.raises(AccessRefused):
        check_prefix(prefix, "mem://x")


def test_a_relative_path_in_a_folder_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="current folder, which was removed"):
        parse_uri("run")
