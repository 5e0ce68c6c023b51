"""What a file without a single event seems to be, for the sentence that says that it is no trace."""

import re
from typing import Final

from penstock.trace.reading.strace import OTHER_CLOCK

LOG_MAGIC: Final = (6567223).to_bytes(8, "little"), (6567223).to_bytes(8, "big")
"""Behind the eight bytes of the version, in the order of bytes of the machine that wrote the log."""

UTF8_MARK: Final = b"\xef\xbb\xbf"
"""The byte order mark that some editors put before UTF-8."""

_BEGINNINGS: Final = (
    (b"\xff\xfe", "text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\x1f\x8b", "compressed twice: decompress it once"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it"),
    (b"BZh", "compressed by bzip2: decompress it"),
    (b"\xfd7zXZ\0", "compressed by xz: decompress it"),
    (b"PK\x03\x04", "a zip archive: unpack it"),
    (b"PAR1", "a Parquet file: penstock trace load makes those that it can read"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "a program"),
    (b"\x80\x04", "a Python pickle"),
    (b"<", "HTML or XML"),
)
_RECORDER_FILE: Final = re.compile(r".*\.(?:mt|itf)|recorder\.(?:cfg|cst|ts)")
RECORDER: Final = (
    "a trace of Recorder, whose format is not read: convert it with Recorder's own recorder2timeline DIR, and"
    " ask DIR/_chrome (calls and times, without files and bytes), or trace the program with penstock trace"
    " record"
)
"""What a trace of Recorder is, and what to do with it."""
_WORDS: Final = re.compile(rb"[\t\n\r -~]+")
_UTF16: Final = re.compile(rb"(?:[\t\n\r -~]\0){8}|(?:\0[\t\n\r -~]){8}")
_PATTERNS: Final = (
    (_UTF16, _BEGINNINGS[0][1]),
    (OTHER_CLOCK, "a listing of strace without the day of its calls: trace again with strace -f -ttt -T"),
)


def is_darshan_log(head: bytes) -> bool:
    """Whether a file that begins like this is a log of Darshan, of whatever version."""
    return head[8:16] in LOG_MAGIC


def is_of_recorder(name: str) -> bool:
    """Whether a file of this name is a part of a trace that Recorder wrote."""
    return _RECORDER_FILE.fullmatch(name) is not None


def guess_content(head: bytes) -> str:
    """What a file that begins with these bytes, decompressed, seems to be."""
    if is_darshan_log(head):
        return "a log of Darshan that its library cannot read: damaged, or of another version"
    for beginning, content in _BEGINNINGS:
        if head.startswith(beginning):
            return content
    for pattern, content in _PATTERNS:
        if pattern.match(head):
            return content
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it"
    sample = head[:4096]
    if not sample.strip(b"\0"):
        return "zeros only"
    return "text of no dialect that is known" if _WORDS.fullmatch(sample) else "binary data"
