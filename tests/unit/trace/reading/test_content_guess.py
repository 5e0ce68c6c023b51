"""What a file without events seems to be."""

import gzip

import pytest

from penstock.trace.reading.trace_files import guess_content, is_of_recorder


@pytest.mark.parametrize(
    ("head", "content"),
    [
        ("text".encode("utf-16"), "text in UTF-16"),
        ("a longer text".encode("utf-16-le"), "text in UTF-16"),
        (gzip.compress(b"x", mtime=0), "compressed twice"),
        (b"PAR1\0\0", "a Parquet file"),
        (b"3.99\0\0\0\0" + (6567223).to_bytes(8, "little"), "a log of Darshan"),
        (b"noise\n", "text in no known dialect"),
        (bytes(5000), "zeros only"),
        (b"\x07\x99\xfe", "binary data"),
        (bytes(257) + b"ustar", "a tar archive"),
        (b"SQLite format 3\0", "an SQLite database, as Nsight Systems exports"),
        (b'main->puts("hello") = 6\n', "a listing of calls without times"),
        (b'[pid  71] openat(AT_FDCWD, "/d/a", O_RDONLY) = 3\n', "a listing of calls without times"),
        (b"# darshan log version: 3.41\n# nprocs: 8\nPOSIX\t-1\t9\n", "sums, as darshan-parser prints them"),
        (b"\n\x1b\x40\x88\x93\xbf\x50\x01" + bytes(range(256)), "a binary trace of Perfetto"),
    ],
)
def test_content_is_named_by_how_it_begins(head: bytes, content: str) -> None:
    assert guess_content("x", head).startswith(content)


@pytest.mark.parametrize(
    ("name", "is_part"), [("recorder.mt", True), ("0.itf", True), ("recorder.cfg", True), ("job.cfg", False)]
)
def test_a_file_of_recorder_is_known_by_its_name(name: str, *, is_part: bool) -> None:
    assert is_of_recorder(name) == is_part
