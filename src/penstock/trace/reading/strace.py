"""The output of `strace -f -ttt -T`: system calls, with the files that their descriptors refer to.

Without -y, strace prints numbers of descriptors only, so each process's table of descriptors is followed
through open, dup, close, fork and threads. Invariant: a call that others interrupt in the listing
(`<unfinished ...>`) is one event, which starts at its first line.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.trace.event_schema import canonical
from penstock.trace.reading.event_batch import LineFate, ParsedLine, parse_int64, transfer_size

FIRST_LINE: Final = re.compile(
    rb"\s*(?:\[pid\s+\d+\]\s+|\d+\s+)?\d{9,11}\.\d{6}\s+(?:[a-z_]\w*\(|<\.\.\.|\+\+\+|---)"
)
"""How a line of this dialect begins."""

_LINE: Final = re.compile(r"\s*(?:\[pid\s+(\d+)\]\s+|(\d+)\s+)?(\d{1,11})\.(\d{6})\s+(.*?)\s*", re.DOTALL)
_CALL: Final = re.compile(
    r"(\w+)\((.*)\)\s*= (-?\w+|\?)(?:<[^>]*>)?(?:\s+([A-Z]\w+))?.*?(?:\s<(\d+)\.(\d{6})>)?", re.DOTALL
)
_RESUMED: Final = re.compile(r"<\.\.\. (\w+) resumed>\s?(.*)", re.DOTALL)
_UNFINISHED: Final = "<unfinished ...>"
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\.\.\.)?')
_DESCRIPTOR: Final = re.compile(r"(-?\d+)(?:<([^>]*)>)?")
_FLAGS: Final = re.compile(r"\b(O_\w+(?:\|\w+)*)")

_FILE_CALLS: Final = frozenset((
    "open", "close", "read", "pread", "readv", "preadv", "write", "pwrite", "writev", "pwritev", "lseek",
    "fsync", "fdatasync", "sync_file_range", "syncfs", "msync", "stat", "lstat", "fstat", "statfs", "fstatfs",
    "access", "mkdir", "rmdir", "rename", "link", "unlink", "symlink", "readlink", "mknod", "chmod", "fchmod",
    "chown", "fchown", "lchown", "utime", "truncate", "ftruncate", "fallocate", "fadvise", "getdents",
    "sendfile", "copy_file_range", "splice", "flock", "chdir", "fchdir", "fcntl", "dup", "dup2", "dup3",
    "getxattr", "fgetxattr", "setxattr", "fsetxattr", "ioctl", "umask",
))  # fmt: skip
_OFFSET_CALLS: Final = frozenset(("pread", "pwrite", "preadv", "pwritev"))


@dataclass(slots=True)
class _Process:
    """A process as far as its calls show it; `folder` is its working directory once it has changed it."""

    pid: int
    paths: dict[int, str] = field(default_factory=dict)
    folder: str = ""

    def fork(self, pid: int) -> _Process:
        return _Process(pid, dict(self.paths), self.folder)

    def path_of(self, descriptor: re.Match[str]) -> str | None:
        """The file of a descriptor: strace -y names it, otherwise the calls so far have."""
        return descriptor[2] or self.paths.get(int(descriptor[1]))

    def follow(self, op: str, number: int | None, arguments: str, path: str | None, ret: int) -> None:
        """Keep the table of descriptors as a successful call changes it."""
        is_copy = op in ("dup", "dup2", "dup3") or (op == "fcntl" and "F_DUPFD" in arguments)
        if (op == "open" or is_copy) and path is not None:
            self.paths[ret] = path
        elif op == "close" and number is not None:
            self.paths.pop(number, None)
        elif op == "chdir" and path is not None:
            self.folder = path


class Strace:
    """Reads the lines of one listing."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._unfinished: dict[int, tuple[int, str]] = {}
        self._num_timeless = 0

    def parse(self, line: str) -> ParsedLine:
        """Parse a line: a call, a part of one, a signal or an exit, or damage."""
        if not line.strip():
            return ParsedLine(LineFate.BLANK)
        match = _LINE.fullmatch(line)
        if match is None:
            return ParsedLine(LineFate.DROPPED, reason="not a line of strace")
        bracketed, plain, seconds, fraction, rest = match.groups()
        tid = int(bracketed or plain or 0)
        ts_us = int(seconds) * 1_000_000 + int(fraction)
        if rest.startswith(("+++", "---")):
            return ParsedLine(LineFate.METADATA)
        if rest.endswith(_UNFINISHED):
            self._unfinished[tid] = (ts_us, rest.removesuffix(_UNFINISHED).rstrip())
            return ParsedLine(LineFate.METADATA)
        return self._finished(tid, ts_us, rest)

    def finish(self) -> Iterable[ParsedLine]:
        """Calls that never returned."""
        for tid, (ts_us, text) in self._unfinished.items():
            name = text.partition("(")[0]
            if name.isidentifier():
                row = self._row(tid, ts_us, name, text.partition("(")[2], None)
                yield ParsedLine(LineFate.SALVAGED, row=row, reason="never returned")
            else:
                yield ParsedLine(LineFate.DROPPED, reason="cut short")

    def faults(self) -> Iterable[str]:
        """Whether durations are missing."""
        if self._num_timeless:
            yield f"{self._num_timeless} calls have no duration: run strace with -T"

    def _finished(self, tid: int, ts_us: int, text: str) -> ParsedLine:
        resumed = _RESUMED.fullmatch(text)
        if resumed is not None:
            if tid not in self._unfinished:
                return ParsedLine(LineFate.DROPPED, reason="resumes a call that never began")
            ts_us, head = self._unfinished.pop(tid)
            text = head + resumed[2]
        call = _CALL.fullmatch(text)
        if call is None:
            return ParsedLine(LineFate.DROPPED, reason="cut short" if "(" in text else "not a call")
        name, arguments, ret, error, seconds, fraction = call.groups()
        row = self._row(tid, ts_us, name, arguments, _number(ret))
        if seconds is not None:
            row["dur_us"] = int(seconds) * 1_000_000 + int(fraction)
        elif ret != "?":
            self._num_timeless += 1
        if error and ret == "-1":
            row["args"] = json.dumps({**json.loads(row["args"]), "errno": error})
        return ParsedLine(LineFate.EVENT, row=row)

    def _row(self, tid: int, ts_us: int, name: str, arguments: str, ret: int | None) -> dict[str, Any]:
        process = self._processes.setdefault(tid, _Process(tid))
        strings = _STRING.findall(arguments[:8192])
        descriptor = _DESCRIPTOR.match(arguments)
        number = int(descriptor[1]) if descriptor else None
        op = "stat" if name == "newfstatat" and strings and strings[0] else canonical(name)
        path = _find_path(process, arguments, strings, descriptor)
        cat = "POSIX" if op in _FILE_CALLS or (op == "mmap" and path is not None) else "SYSTEM"
        if ret is not None and ret >= 0:
            process.follow(op, number, arguments, path, ret)
        if name.startswith(("clone", "fork", "vfork")) and ret:
            # A thread shares everything with its process, a child begins with a copy.
            self._processes[ret] = process if "CLONE_THREAD" in arguments else process.fork(ret)
        return {
            "ts_us": ts_us,
            "dur_us": 0,
            "op": op,
            "name": name,
            "cat": cat,
            "pid": process.pid,
            "tid": tid,
            "path": path,
            "size_bytes": transfer_size(name, cat, {"ret": ret}),
            "offset": parse_int64(arguments.rpartition(",")[2].strip()) if op in _OFFSET_CALLS else None,
            "ret": ret,
            "args": json.dumps(_other_arguments(number, arguments), separators=(",", ":")),
        }


def _find_path(
    process: _Process, arguments: str, strings: list[str], descriptor: re.Match[str] | None
) -> str | None:
    """The file that a call works on: by name, by descriptor, or by a name below a descriptor's folder."""
    first = arguments.lstrip()
    if first.startswith(('"', "AT_FDCWD")):
        return _join(process.folder, _unescape(strings[0])) if strings else None
    if first.startswith("NULL"):
        return _find_mapped(process, first)
    if descriptor is None:
        return None
    base = process.path_of(descriptor)
    below = arguments[descriptor.end() :].lstrip(", ")
    if below.startswith('"') and strings and _takes_name(arguments):
        return _join(base or "", _unescape(strings[0])) if strings[0] else base
    return base


def _find_mapped(process: _Process, arguments: str) -> str | None:
    """The file of an mmap, whose descriptor is the fifth of six arguments."""
    mapped = arguments.split(",")
    if len(mapped) != 6 or "MAP_" not in arguments:
        return None
    descriptor = _DESCRIPTOR.match(mapped[4].strip())
    return None if descriptor is None else process.path_of(descriptor)


_NAMED_BELOW: Final = re.compile(r'-?\d+(?:<[^>]*>)?,\s*"(?:[^"\\]|\\.)*"(?:,\s*(?:[A-Z0-9{_|]|0x)|\s*$)')


def _takes_name(arguments: str) -> bool:
    """Whether the string after a descriptor is a name below its folder, not bytes read or written."""
    return _NAMED_BELOW.match(arguments) is not None and not re.search(
        r'"(?:\.\.\.)?,\s*\d+(?:,\s*\d+)?$', arguments
    )


def _other_arguments(number: int | None, arguments: str) -> Mapping[str, Any]:
    """Arguments without a column: descriptor and flags."""
    others: dict[str, Any] = {} if number is None else {"fd": number}
    flags = _FLAGS.search(arguments[-200:])
    return {**others, "flags": flags[1]} if flags else others


def _number(text: str) -> int | None:
    try:
        number = int(text, 0)
    except ValueError:
        return None
    return number if abs(number) < 1 << 63 else None


def _join(folder: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(folder, name)) if folder else name


_ESCAPE: Final = re.compile(r"\\([0-7]{1,3}|x[0-9a-f]{2}|.)")
_LETTERS: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "v": b"\v", "f": b"\f"}


def _unescape(text: str) -> str:
    """Undo strace's escapes of a name; bytes that are not UTF-8 stay escaped."""
    if "\\" not in text:
        return text
    parts: list[bytes] = []
    end = 0
    for escape in _ESCAPE.finditer(text):
        parts += [text[end : escape.start()].encode(), _decode_escape(escape[1])]
        end = escape.end()
    return b"".join([*parts, text[end:].encode()]).decode(errors="backslashreplace")


def _decode_escape(code: str) -> bytes:
    if code[0].isdigit():
        return bytes([int(code, 8) & 0xFF])
    if code[0] == "x" and len(code) == 3:
        return bytes.fromhex(code[1:])
    return _LETTERS.get(code, code.encode())
