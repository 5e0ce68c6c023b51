"""Trace files: which files of a folder are traces, of which dialect, and their bytes, decompressed.

    names, globs, folders -> `find_trace_files`
    a file -> `read_pieces`, past damaged gzip members -> `split_lines` -> whole lines, for a dialect's reader

In a folder, a file's name shows whether it is a trace. JSON and text may be anything, so a JSON or text file
counts only if its first bytes look like a trace. Invariants: memory is bounded whatever the file's size;
everything that can be decompressed is delivered, unless damage is everywhere, and the rest is reported.
"""

import glob
import json
import logging
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Final

from isal import igzip_lib

from penstock.errors import StorageError, UsageError, name_some

logger = logging.getLogger(__name__)


class Dialect(StrEnum):
    """The forms of traces that can be read."""

    JSON_LINES = "json lines"
    CHROME = "chrome"
    STRACE = "strace"
    DARSHAN = "darshan dxt"
    DARSHAN_LOG = "darshan log"


UTF8_MARK: Final = b"\xef\xbb\xbf"
"""The byte order mark that some editors put before UTF-8."""
LOG_MAGIC: Final = (6567223).to_bytes(8, "little"), (6567223).to_bytes(8, "big")
"""Follows the eight bytes of a Darshan log's version, in the byte order of the machine that wrote the log."""
_DARSHAN_TEXT: Final = re.compile(rb"#\s*(?:DXT,|darshan log version|Module\s+Rank\s+Wt/Rd)")
# A line of strace: whose it is (-f, with the program's name by -Y), and when (-ttt, in milli- to
# nanoseconds); the time since the last line (-r), the number of the call (-n), and where it was made (-i).
STRACE_BEGIN: Final = (
    r"\s*(?:\[pid\s+(\d+)(?:<[^>]*>)?\]\s+|(\d+)(?:<[^>]*>)?\s+)?(\d{%s})\.(\d{1,9})\s+"
    r"(?:\(\+\s*[\d.]+\)\s+)?(?:\[[\da-f\s?]+\]\s+)*"
)
STRACE_LINE: Final = re.compile((STRACE_BEGIN % "9,11" + r"(?:[a-z_]\w*\(|<\.\.\.|\+\+\+|---)").encode())
_DOCUMENT: Final = re.compile(
    rb'\s*\{(?:\s*(?:\n|"(?:schemaVersion|displayTimeUnit|otherData|deviceProperties|metadata)")'
    rb'|.*"traceEvents"\s*:)',
    re.DOTALL,
)
"""An object that is not a single line: it begins on a separate line, or has a key that no event has."""
_HEAD_BYTES: Final = 1 << 16

RECORDER: Final = (
    "a trace of Recorder, whose format is not read: convert it with Recorder's own recorder2timeline DIR, and"
    " query DIR/_chrome (calls and times, without files and bytes), or trace the program with penstock trace"
    " record"
)
_RECORD: Final = "trace the program with penstock trace record"
_RECORDER_FILE: Final = re.compile(r".*\.(?:mt|itf)|recorder\.(?:cfg|cst|ts)")
_CONTENTS: Final = tuple(
    (re.compile(beginning, re.DOTALL), content)
    for beginning, content in (
        (
            rb".{8}(?:%b)" % b"|".join(map(re.escape, LOG_MAGIC)),
            "a log of Darshan, damaged or too new for its library: query what its darshan-dxt-parser prints",
        ),
        (
            rb"\xff\xfe|\xfe\xff|(?:[\t\n\r -~]\0){8}|(?:\0[\t\n\r -~]){8}",
            "text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
        ),
        (rb"\x1f\x8b", "compressed twice: decompress it once"),
        (rb"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it"),
        (rb"BZh", "compressed by bzip2: decompress it"),
        (rb"\xfd7zXZ\0", "compressed by xz: decompress it"),
        (rb"PK\x03\x04", "a zip archive: unpack it"),
        (rb"PAR1", "a Parquet file that penstock trace load did not make"),
        (
            rb"SQLite format 3\0",
            f"an SQLite database, as Nsight Systems exports, without files and bytes of calls: {_RECORD}",
        ),
        (rb"\x89HDF", "an HDF5 file"),
        (rb"\x7fELF", "a program"),
        (rb"\x80\x04", "a Python pickle"),
        (rb"<", "HTML or XML"),
        (
            rb"\s*(?:\d+\s+)?(?:\d\d:\d\d:\d\d(?:\.\d{6})?|\d{1,8}\.\d{6})\s+[a-z_]\w*\(",
            "a listing of strace without the day of its calls: trace again with strace -f -ttt -T",
        ),
        (
            rb"\s*(?:\[pid +\d+\] |\d+ )?[\w.]+(?:(?:->|@)[\w.]+)?\([^\n]*\) += ",
            f"a listing of calls without times, as strace or ltrace print it: {_RECORD}",
        ),
        (
            rb"# darshan log version",
            "sums, as darshan-parser prints them: query the log, or what darshan-dxt-parser prints of it",
        ),
        (rb".{257}ustar", "a tar archive: unpack it"),
        (rb"\0*\Z", "zeros only"),
        (rb"[\t\n\r -~]+\Z", "text in no known dialect"),
        (
            rb"\n[^\n]{1,4}[\x08\x0a\x10\x1a\x22\x2a\x32\x40\x50\x52]",
            "a binary trace of Perfetto: convert it with traceconv json TRACE OUT.json",
        ),
        (rb"", "binary data"),
    )
)


def detect_dialect(head: bytes) -> Dialect:
    """Return the dialect of a file that begins with `head`.

    Unknown content counts as JSON lines, which are then dropped one by one.
    """
    head = head[:_HEAD_BYTES]
    if head[8:16] in LOG_MAGIC:
        return Dialect.DARSHAN_LOG
    if STRACE_LINE.match(head):
        return Dialect.STRACE
    if _DARSHAN_TEXT.search(head[:4096]):
        return Dialect.DARSHAN
    bare = head.lstrip()
    line = bare[1:].lstrip().partition(b"\n")[0].rstrip(b", \r]")
    if bare.startswith(b"[") and line.startswith(b"{"):
        # An array in which a line does not hold one event, but several, or part of one.
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            is_part = b'"' not in line or line.endswith((b"{", b'"', b":"))
            return Dialect.CHROME if is_part or re.search(rb"\}, ?\{", line) else Dialect.JSON_LINES
    return Dialect.CHROME if _DOCUMENT.match(head) else Dialect.JSON_LINES


def guess_content(name: str, head: bytes) -> str:
    """Name the content of a file without events by its name and its first bytes, decompressed."""
    if is_of_recorder(name):
        return RECORDER
    return next(content for pattern, content in _CONTENTS if pattern.match(head[:4096]))


def is_of_recorder(name: str) -> bool:
    """Return whether a file of this name belongs to a trace that Recorder wrote."""
    return _RECORDER_FILE.fullmatch(name) is not None


_NAMED: Final = re.compile(r".*\.(?:pfw(?:\.gz)?|strace(?:\.[0-9].*)?|darshan)", re.DOTALL)
"""The files of tracers, including strace's listings of whole programs and of single threads."""
_EXAMINED: Final = re.compile(r".*\.(?:json|txt)(?:\.gz)?", re.DOTALL)
_EVENT: Final = re.compile(rb'"ph"\s*:\s*"?[A-Za-z0-9]"?\s*[,}]|"traceEvents"')
EXPORT_HEAD: Final = '{"displayTimeUnit":"ms","traceEvents":[\n'
"""The beginning of our own exports, whose events are those of other files and would count twice."""
COUNT_SUFFIX: Final = ".count"
"""The ending of the file next to an unfinished trace that holds the number of its events."""
_FIX: Final = "Name trace files, a folder of them, a quoted glob, or an event table."


def find_trace_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that names, globs and folders match, each only once, in the order of the patterns."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        try:
            found = _find_in_folder(Path(pattern)) if Path(pattern).is_dir() else _find_matches(pattern)
        except OSError as error:
            raise explain_unreadable(error, Path(pattern)) from error
        paths.update(dict.fromkeys(found))
    return list(paths)


def _find_matches(pattern: str) -> list[Path]:
    matches = [Path(pattern)]
    if not matches[0].exists():
        paths = map(Path, sorted(glob.glob(pattern, recursive=True)))  # noqa: PTH207 - absolute globs, too
        matches = [path for path in paths if not (path.name.endswith(COUNT_SUFFIX) or path.is_dir())]
    for match in matches:
        # Reading a pipe would wait for its writer, and it cannot be read twice.
        if not stat.S_ISREG(match.stat().st_mode):
            raise UsageError(
                "Only regular files are traces", where=str(match), fix="Write the trace to a file first."
            )
    if not matches:
        raise UsageError("No such file", where=pattern, fix=_FIX)
    return matches


def _find_in_folder(folder: Path) -> list[Path]:
    """List the traces below a folder, in order; log the JSON or text files that turned out not to be traces.

    Raises `OSError` if there are no traces and a folder cannot be read. If there are traces, an unreadable
    folder is left out.
    """
    traces: list[Path] = []
    left_out: list[Path] = []
    closed: list[OSError] = []
    has_recorder = False
    for parent, _, names in os.walk(folder, onerror=closed.append):
        for name in names:
            path, is_named = Path(parent, name), _NAMED.fullmatch(name)
            has_recorder |= is_of_recorder(name)
            if (is_named or _EXAMINED.fullmatch(name)) and path.is_file():
                (traces if is_named or _begins_as_trace(path) else left_out).append(path)
    left_out.sort(key=attrgetter("parts"))
    if not traces:
        if closed:
            raise closed[0]
        why = f"; {name_some([path.name for path in left_out])} hold no events of a trace" if left_out else ""
        content = f"This folder has {RECORDER}" if has_recorder else f"No trace files in this folder{why}"
        raise UsageError(content, where=str(folder), fix=_FIX)
    for error in closed:
        logger.warning("%s: left out, because it cannot be read: %s", error.filename, error.strerror)
    if left_out:
        logger.warning(
            "%s: left out, because they are not traces: %s",
            folder,
            name_some([path.name for path in left_out]),
        )
    return sorted(traces, key=attrgetter("parts"))


def is_export(path: Path) -> bool:
    """Return whether `penstock trace export` wrote a file."""
    return _read_head(path).startswith(EXPORT_HEAD.encode())


def _begins_as_trace(path: Path) -> bool:
    head = _read_head(path)
    if head.startswith(EXPORT_HEAD.encode()):
        return False
    is_json = ".json" in path.suffixes[-2:]
    return detect_dialect(head) in (Dialect.STRACE, Dialect.DARSHAN) or (
        is_json and _EVENT.search(head) is not None
    )


def _read_head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed; empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except (OSError, zlib.error):
        return b""
    return head.removeprefix(UTF8_MARK)


def explain_unreadable(error: OSError, path: Path) -> StorageError:
    """Turn the system's refusal to read a trace into an error that names the file."""
    return StorageError(
        f"Cannot read the trace: {error.strerror}", uri=str(error.filename or path), errno=error.errno
    )


_PIECE_BYTES: Final = 1 << 20
"""The bytes decompressed at a time: few enough to be still in a cache when they are read next."""
_READ_BYTES: Final = 1 << 17
_LINE_LIMIT_BYTES: Final = 8 << 20
"""A longer line is not an event of a trace. Only its beginning is kept, so that memory stays bounded."""
_KEPT_BYTES: Final = 1 << 16
"""The bytes that are kept of an overlong line: enough to salvage an event."""
LARGEST_RATIO: Final = 100
UNPACKED_BYTES: Final = 16 << 20
"""A file that unpacks to more than this, and to more than `LARGEST_RATIO` times its size, is not a trace: a
trace's times differ from event to event.
"""
_RESCUED_BYTES: Final = 1 << 14
_REREAD_BYTES: Final = 64 << 20
"""The most bytes that are read again to find gzip members after damage; for large files, 4 times the size."""
_GZIP_MAGIC: Final = b"\x1f\x8b\x08"
_BAD_GZIP: Any = igzip_lib.IsalError


_MOST_COUNTED: Final = 1 << 20
"""The most bytes that are read of a file of counts, which is more than any process needs."""


def read_event_count(trace: Path) -> int | None:
    """Return how many events the process of an unfinished trace has recorded; None for a finished trace."""
    path = trace.with_name(trace.name + COUNT_SUFFIX)
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_COUNTED)
    except FileNotFoundError:
        return None
    return sum(memoryview(content[: len(content) // 8 * 8]).cast("q"))


def find_lines(path: Path, *marks: bytes) -> Iterator[bytes]:
    """Yield the lines of a file that contain one of the marks. Damage is not reported, nor are pipes read."""
    if not path.is_file():
        return
    for chunk in split_lines(read_pieces(path, lambda _: None, lambda _: None)):
        if any(mark in chunk for mark in marks):
            yield from (line for line in chunk.split(b"\n") if any(mark in line for mark in marks))


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Split the pieces of a file so that each ends after a newline; a last line without newline gets one."""
    carry = bytearray()
    for piece in pieces:
        stop = piece.rfind(b"\n") + 1
        is_too_long = len(carry) >= _LINE_LIMIT_BYTES
        if stop:
            start = piece.find(b"\n") if is_too_long else 0
            yield bytes(carry[:_KEPT_BYTES] if is_too_long else carry) + piece[start:stop]
            carry = bytearray(piece[stop:])
        elif not is_too_long:
            carry += piece
    if carry:
        yield bytes(carry if len(carry) < _LINE_LIMIT_BYTES else carry[:_KEPT_BYTES]) + b"\n"


def read_pieces(
    path: Path, report_fault: Callable[[str], None], advance: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the file's bytes, decompressed, in pieces of bounded size; of damaged members, what is readable.

    Calls `report_fault` with each fault of the file, and `advance` with the number of bytes read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            if file.read(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
                file.seek(0)
                while piece := file.read(_PIECE_BYTES):
                    advance(len(piece))
                    yield piece
                return
            size_bytes, num_unpacked = os.fstat(file.fileno()).st_size, 0
            for piece in _read_members(file, size_bytes, report_fault, advance):
                num_unpacked += len(piece)
                if num_unpacked > max(UNPACKED_BYTES, LARGEST_RATIO * size_bytes):
                    report_fault(f"unpacks to over {LARGEST_RATIO} times its size: the rest was not read")
                    return
                yield piece
    except OSError as error:
        raise explain_unreadable(error, path) from error


def _read_members(
    file: BinaryIO, size_bytes: int, report_fault: Callable[[str], None], advance: Callable[[int], None]
) -> Iterator[bytes]:
    num_read, at = 0, 0

    def count(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes
        advance(num_bytes)

    while (after := (yield from _read_member(file, at, report_fault, count))) is not None:
        at = after
        # Each damaged member starts a new search for the next one, so bytes are read again.
        if num_read - at > max(_REREAD_BYTES, 4 * size_bytes):
            report_fault(f"too many gzip members are damaged: nothing from byte {at} on was read")
            return


def _read_member(
    file: BinaryIO, at: int, report_fault: Callable[[str], None], advance: Callable[[int], None]
) -> Generator[bytes, None, int | None]:
    """Yield the gzip member that begins at `at`; return the position of the next one, or None."""
    file.seek(at)
    decompressor = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    num_delivered = 0
    try:
        while not decompressor.eof:
            read = file.read(_READ_BYTES) if decompressor.needs_input else b""
            advance(len(read))
            if decompressor.needs_input and not read:
                report_fault(f"ends inside the gzip member at byte {at}: it was cut short")
                return None
            piece = decompressor.decompress(read, _PIECE_BYTES)
            num_delivered += len(piece)
            if piece:
                yield piece
    except _BAD_GZIP as error:
        yield from _rescue(file, at, num_delivered)
        report_fault(f"gzip member at byte {at} is damaged: {error}")
        return _find_member(file, at + 1)
    end = file.tell() - len(decompressor.unused_data)
    file.seek(end)
    rest = file.read(len(_GZIP_MAGIC))
    if rest == _GZIP_MAGIC:
        advance(-len(decompressor.unused_data))
        return end
    rest += file.read(_READ_BYTES)
    if not rest.strip(b"\0") and len(rest) < _READ_BYTES:
        return None
    report_fault(f"bytes from {end} onward are not a gzip member")
    return _find_member(file, end)


def _rescue(file: BinaryIO, at: int, num_delivered: int) -> Iterator[bytes]:
    """Yield the rest of the damaged member at `at` that can still be decoded."""
    file.seek(at)
    decompressor, step = zlib.decompressobj(wbits=31), _RESCUED_BYTES
    # zlib returns nothing of a damaged piece, so the pieces before the damage become smaller and smaller.
    while step and not decompressor.eof and (read := file.read(step)):
        before = decompressor.copy()
        try:
            piece = decompressor.decompress(read)
        except zlib.error:
            file.seek(-len(read), os.SEEK_CUR)
            decompressor, step = before, step // 2
            continue
        if len(piece) > num_delivered:
            yield piece[num_delivered:]
        num_delivered = max(0, num_delivered - len(piece))


def _find_member(file: BinaryIO, at: int) -> int | None:
    """Return the first position at or after `at` at which a gzip member begins."""
    file.seek(at)
    overlap = b""
    while read := file.read(_READ_BYTES):
        window = overlap + read
        found = window.find(_GZIP_MAGIC)
        if found >= 0:
            return file.tell() - len(window) + found
        overlap = window[-len(_GZIP_MAGIC) + 1 :]
    return None
