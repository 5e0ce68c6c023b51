"""The output of `strace -f -ttt -T`: system calls, with the files that their descriptors refer to.

Without -y, strace prints only the numbers of descriptors, so each process's table of descriptors is followed
through open, dup, close, fork and threads. A listing of `strace -ff` belongs to one thread, which its lines
do not name; `find_task` finds out which. A call that copies between files becomes a read of one file and a
write of the other. Invariant: a call that is interrupted by others in the listing (`<unfinished ...>`) is one
event, which starts at its first line.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

from penstock.trace.event_schema import (
    FileAccount,
    LineFate,
    ParsedLine,
    canonical,
    parse_int64,
    transfer_size,
)
from penstock.trace.reading.trace_files import STRACE_BEGIN, find_lines

HOST_MARK: Final = "@"
"""In the names of our own recordings, such as `trace@node7.strace.4711`, because a listing does not name its
host.
"""
_HOST: Final = re.compile(rf".*{HOST_MARK}([\w.-]+)\.strace(?:\.\d+)?(?:\.gz)?")
_FILE_NAME: Final = re.compile(r"(.+\.)(\d{1,10})(?:\.gz)?")
# The atomic groups keep a line with many such calls from being searched again from each.
_MADE_THREAD: Final = re.compile(rb"(?>.*?clone3?\()(?>.*?CLONE_THREAD).*= (\d{1,10})\b")
_MADE_TASK: Final = re.compile(rb"(?>.*?\b(?:clone3?|v?fork)\().*= (\d{1,10})\b")
_THREADLESS_LINE: Final = re.compile(rb"\s*\d{9,11}\.\d{6}\s")
_UNKNOWN: Final = (0, 0)
"""The thread and process of a listing in which neither the lines nor the file's name have numbers."""
_searching: Final = Lock()


def find_host(path: Path) -> str | None:
    """Return the host on which a file was recorded if the file's name contains it, otherwise None."""
    match = _HOST.fullmatch(path.name)
    return match[1] if match else None


def find_task(path: Path, head: bytes) -> tuple[int, int]:
    """Return the thread and process of a listing, by its name; zeros if each line names its own."""
    match = _FILE_NAME.fullmatch(path.name)
    if match is None or _THREADLESS_LINE.match(head) is None:
        return _UNKNOWN
    # Only one of the threads that read files searches. If a file appears meanwhile, it searches again.
    with _searching:
        makers = _find_makers(path.parent, match[1], path.parent.stat().st_mtime_ns)
    tid = pid = int(match[2])
    passed = {pid}
    while makers.get(pid, pid) not in passed:
        pid = makers[pid]
        passed.add(pid)
    return tid, pid


@lru_cache(maxsize=8)
def _find_makers(folder: Path, prefix: str, _mtime_ns: int) -> Mapping[int, int]:
    """Map each thread of the files with this prefix to the thread that created it."""
    listings: dict[Path, int] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None and match[1] == prefix and path.is_file():
            listings[path] = int(match[2])
    return find_makers(listings, _MADE_THREAD)


def find_makers(listings: Mapping[Path, int], made: re.Pattern[bytes] = _MADE_TASK) -> dict[int, int]:
    """Map each process or thread to its creator, whose listing has the call, matched by `made`."""
    makers: dict[int, int] = {}
    for path, tid in listings.items():
        for line in find_lines(path, b"clone", b"fork("):
            if call := made.match(line):
                makers[int(call[1])] = tid
    return makers


_LINE: Final = re.compile(STRACE_BEGIN % "1,11" + r"(.*)", re.DOTALL)
# strace escapes < and > in names of files. Sockets (`-yy`) contain an arrow, devices a further pair of
# brackets.
_SHOWN: Final = r"<([A-Za-z0-9-]+:\[[^<>]*(?:->[^<>]*)?\]|[^<>]*(?:<[^<>]*>)?)>(?:\(deleted\))?"
_CALL: Final = re.compile(
    rf"(\w+)\((.*)\)\s*= (-?\w+|\?)(?:{_SHOWN})?(?:\s+([A-Z]\w+))?.*?(?:\s<(\d+)\.(\d{{1,9}})>)?", re.DOTALL
)
_RESUMED: Final = re.compile(r"<\.\.\. (\w+) resumed>\s?(.*)", re.DOTALL)
_MOST_UNFINISHED: Final = 1 << 16
_TOO_MANY: Final = "too many calls or tasks are unfinished"
_MOST_TASKS: Final = 1 << 18
_COPIED_PER_LINE: Final = 16
"""The open files that new processes may inherit per line of a listing: far more than in real listings."""
_UNFINISHED: Final = "<unfinished ...>"
_ENDS_TASK: Final = frozenset(("exit", "exit_group"))
"""Calls that never return."""
_REMARK: Final = re.compile(r"strace: Process \d+ .*|\[ Process PID=\d+ .*| > .*")
"""What strace reports about itself if its listing goes to the terminal, and lines of a stack (-k)."""
_SUMMARY: Final = "% time     seconds  usecs/call"
"""The beginning of the table that follows all calls (-C)."""
_UNREAD: Final = ("???(", "<... ??? resumed>")
"""The listing of a call whose number strace could not read, because the thread was ended while making it."""
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\.\.\.)?')
_DESCRIPTOR: Final = re.compile(rf"\s*(-?\d+)(?![\w.])(?:{_SHOWN})?")
_WORKING_FOLDER: Final = re.compile(rf"\s*AT_FDCWD(?:{_SHOWN})?")
_MAPPED: Final = re.compile(rf",\s*(-?\d+)(?:{_SHOWN})?,\s*(?:0x[0-9a-f]+|\d+)\s*$")
_BETWEEN: Final = r"(?:,\s*(NULL|\[[^\]]*\]))?"
_COPIED: Final = re.compile(_DESCRIPTOR.pattern + _BETWEEN + "," + _DESCRIPTOR.pattern + _BETWEEN)
"""Two descriptors, each followed by an offset, or by none."""
_COPIES: Final = frozenset(("sendfile", "copy_file_range", "splice"))
"""Calls that read one file and write another."""
_BELOW: Final = re.compile(r"at\d*$|^statx$|^openat2$|^faccessat2$|^renameat2$|^inotify_add_watch$")
"""Calls in which a name after a descriptor is a path below its folder, not bytes that are transferred."""
_MAKES_TASK: Final = re.compile(r"(?:clone3?|v?fork)\(")
"""Calls that create a thread or a process."""
_FLAGS: Final = re.compile(r"\b(O_\w+(?:\|\w+)*)")

_FILE_CALLS: Final = frozenset((
    "open", "close", "read", "pread", "readv", "preadv", "write", "pwrite", "writev", "pwritev", "lseek",
    "fsync", "fdatasync", "sync_file_range", "syncfs", "msync", "stat", "lstat", "fstat", "statfs", "fstatfs",
    "access", "mkdir", "rmdir", "rename", "link", "unlink", "symlink", "readlink", "mknod", "chmod", "fchmod",
    "chown", "fchown", "lchown", "utime", "truncate", "ftruncate", "fallocate", "fadvise", "getdents",
    "sendfile", "copy_file_range", "splice", "flock", "chdir", "fchdir", "fcntl", "dup", "dup2", "dup3",
    "getxattr", "fgetxattr", "setxattr", "fsetxattr", "ioctl", "umask",
))  # fmt: skip
_NAME_CALLS: Final = _FILE_CALLS | frozenset((
    "execve", "chroot", "mount", "umount", "umount2", "pivot_root", "swapon", "swapoff", "acct", "quotactl",
    "lgetxattr", "lsetxattr", "listxattr", "llistxattr", "removexattr", "lremovexattr",
))  # fmt: skip
"""Calls whose first text is a file's name; in other calls, such as getrandom, the text can be anything."""
_DESCRIPTOR_CALLS: Final = (_FILE_CALLS - {"umask"}) | frozenset((
    "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "bind", "listen", "accept", "accept4", "shutdown",
    "getsockopt", "setsockopt", "getsockname", "getpeername", "epoll_ctl", "epoll_wait", "epoll_pwait",
    "inotify_add_watch", "name_to_handle_at", "execveat", "flistxattr", "fremovexattr", "io_uring_enter",
))  # fmt: skip
"""Calls whose first number is a descriptor; in other calls, such as exit_group, it can be anything."""
_OFFSET_CALLS: Final = frozenset(("pread", "pwrite", "preadv", "pwritev"))


@dataclass(slots=True)
class _Process:
    """A process, as far as its calls show it; `folder` is the last working directory that it changed to."""

    pid: int
    paths: dict[int, str] = field(default_factory=dict)
    folder: str = ""

    def path_of(self, descriptor: re.Match[str], group: int = 1) -> str | None:
        """Return the file of the descriptor in a group, as `strace -y` or earlier calls name it, or None."""
        shown = descriptor[group + 1]
        return _unescape(shown) if shown else self.paths.get(int(descriptor[group]))

    def find_path(  # noqa: PLR0917 - the parts of a call
        self,
        name: str,
        op: str,
        arguments: str,
        text: str,
        descriptor: re.Match[str] | None,
        opened: str | None,
    ) -> str | None:
        """Return the file of a call: by name, by descriptor, or by a name below a descriptor's folder."""
        named = _unescape(text)
        folder = _WORKING_FOLDER.match(arguments)
        if folder is not None:
            self.folder = _unescape(folder[1]) if folder[1] else self.folder
        if opened and op == "open":
            return _unescape(opened)
        if op == "mmap":
            mapped = _MAPPED.search(arguments)
            return self.path_of(mapped) if mapped else None
        if folder is not None:
            return _join(self.folder, named) if named else self.folder or None
        if descriptor is not None:
            base = self.path_of(descriptor)
            is_below = _BELOW.search(name) and arguments.startswith(', "', descriptor.end())
            return _join(base or "", named) if named and is_below else base
        if named and arguments.lstrip().startswith('"') and op in _NAME_CALLS:
            return _join(self.folder, named)
        return None


class Strace:
    """Reads the lines of one listing of `host`.

    `task` is the thread and process to which a line belongs if it does not name its own.
    """

    def __init__(self, task: tuple[int, int] = _UNKNOWN, host: str | None = None) -> None:
        self._tid = task[0]
        self._host = host
        self._processes = {self._tid: _Process(task[1])}
        # By thread, its interrupted call: the start, the beginning of the text, and the line on which it
        # began.
        self._unfinished: dict[int, tuple[int, str, tuple[int, str]]] = {}
        # The interrupted calls that create a task.
        self._making: dict[int, str] = {}
        # Tasks that are listed before the call that created them has returned: the task that seems to have
        # created them, and their rows.
        self._early: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._num_lines = self._num_timeless = self._num_copied = 0
        self._is_summary = False

    def parse(self, line: str) -> ParsedLine:  # noqa: PLR0911 - kinds of lines
        """Parse a line: a call or a part of one, a signal, an exit, or damage."""
        self._num_lines += 1
        if not line.strip():
            return ParsedLine(LineFate.BLANK)
        self._is_summary |= line.startswith(_SUMMARY)
        if self._is_summary or _REMARK.match(line):
            return ParsedLine(LineFate.METADATA)
        match = _LINE.fullmatch(line)
        if match is None:
            return ParsedLine(LineFate.DROPPED, reason="not a line of strace")
        bracketed, plain, seconds, fraction, rest = match.groups()
        rest = rest.rstrip()
        tid = int(bracketed or plain or self._tid)
        if len(self._processes) > _MOST_TASKS and tid not in self._processes:
            return ParsedLine(LineFate.DROPPED, reason=_TOO_MANY)
        ts_ns = _nanoseconds(seconds, fraction)
        if rest.startswith(("---", *_UNREAD)):
            return ParsedLine(LineFate.METADATA)
        if rest.startswith("+++"):
            ended = self._end_call(tid)
            if tid != self._tid:
                # The system may reuse the thread's number.
                self._processes.pop(tid, None)
            return ended
        if rest.endswith(_UNFINISHED):
            ended = self._end_call(tid)
            if len(self._unfinished) == _MOST_UNFINISHED:
                return ParsedLine(LineFate.DROPPED, reason=_TOO_MANY)
            self._process_of(tid)
            text = rest.removesuffix(_UNFINISHED).rstrip()
            self._unfinished[tid] = (ts_ns, text, (self._num_lines, line))
            if _MAKES_TASK.match(text):
                self._making[tid] = text
            return ended
        resumed = _RESUMED.fullmatch(rest)
        if resumed is not None:
            if tid not in self._unfinished:
                return ParsedLine(LineFate.DROPPED, reason="resumes a call that never began")
            ts_ns, begun, _ = self._unfinished.pop(tid)
            self._making.pop(tid, None)
            rest = begun + resumed[2]
        call = _CALL.fullmatch(rest)
        if call is None:
            return ParsedLine(LineFate.DROPPED, reason="cut short" if "(" in rest else "not a call")
        name, arguments, ret, opened, error, seconds, fraction = call.groups()
        row = self._build_row(tid, ts_ns, name, arguments, _number(ret), opened, error if ret == "-1" else "")
        if seconds is not None:
            # Starts and ends are truncated to the microsecond, so that consecutive calls remain consecutive.
            row["dur_us"] = (ts_ns + _nanoseconds(seconds, fraction)) // 1000 - row["ts_us"]
        elif ret != "?":
            self._num_timeless += 1
        written = self._split_copy(row, arguments) if row["op"] in _COPIES and row["size_bytes"] else None
        return ParsedLine(LineFate.EVENT, row=row, written=written)

    def finish(self) -> Iterable[ParsedLine]:
        """Yield calls that never returned, whose lines were counted as metadata."""
        return [self._end_call(tid) for tid in list(self._unfinished)]

    def faults(self) -> Iterable[str]:
        """Yield the faults of the file as a whole: missing durations."""
        if self._num_timeless:
            yield f"{self._num_timeless} calls have no duration: run strace with -T"

    def _end_call(self, tid: int) -> ParsedLine:
        """Return the call in which a thread was when it ended; metadata if there was none."""
        if tid not in self._unfinished:
            return ParsedLine(LineFate.METADATA)
        ts_ns, text, begun = self._unfinished.pop(tid)
        self._making.pop(tid, None)
        name, _, arguments = text.partition("(")
        if not name.isidentifier():
            return ParsedLine(LineFate.DROPPED, reason="cut short", begun=begun)
        row = self._build_row(tid, ts_ns, name, arguments)
        if name in _ENDS_TASK:
            return ParsedLine(LineFate.EVENT, row=row)
        return ParsedLine(LineFate.SALVAGED, row=row, reason="never returned", begun=begun)

    def _build_row(  # noqa: PLR0917 - the parts of a call
        self,
        tid: int,
        ts_ns: int,
        name: str,
        arguments: str,
        ret: int | None = None,
        opened: str | None = None,
        error: str | None = None,
    ) -> dict[str, Any]:
        """Build an event's row, and update the process's table of descriptors as the call does."""
        process = self._process_of(tid)
        strings = _STRING.findall(arguments[:8192])
        op = "stat" if name == "newfstatat" and strings and strings[0] else canonical(name)
        descriptor = _DESCRIPTOR.match(arguments)
        if descriptor is not None and not (descriptor[2] or op in _DESCRIPTOR_CALLS):
            descriptor = None
        path = process.find_path(name, op, arguments, strings[0] if strings else "", descriptor, opened)
        if ret is not None and ret >= 0:
            is_copy = op in ("dup", "dup2", "dup3") or (op == "fcntl" and "F_DUPFD" in arguments)
            if (op == "open" or is_copy) and path is not None:
                process.paths[ret] = path
            elif op == "close" and descriptor is not None:
                process.paths.pop(int(descriptor[1]), None)
            elif op == "chdir" and path is not None:
                process.folder = path
        offset = None
        if op in _OFFSET_CALLS:
            # The offset is the last argument, or the one before the flags; -1 means the file's own position.
            numbers = arguments.rsplit(",", 2)
            offset = parse_int64(numbers[-2 if name.endswith("v2") else -1].strip())
        others: dict[str, Any] = {"fd": int(descriptor[1])} if descriptor else {}
        if flags := _FLAGS.search(arguments[-200:]):
            others["flags"] = flags[1]
        if error:
            others["errno"] = error
        cat = "POSIX" if op in _FILE_CALLS or (op == "mmap" and path is not None) else "SYSTEM"
        row = {
            "ts_us": ts_ns // 1000,
            "dur_us": 0,
            "op": op,
            "name": name,
            "cat": cat,
            "pid": process.pid,
            "tid": tid,
            "host": self._host,
            "path": path,
            "size_bytes": transfer_size(name, cat, {"ret": ret}),
            "offset": None if offset is None or offset < 0 else offset,
            "ret": ret,
            "args": json.dumps(others, separators=(",", ":")),
        }
        if tid in self._early:
            self._early[tid][1].append(row)
        if ret is not None and ret > 0 and _MAKES_TASK.match(name + "("):
            self._add_task(tid, arguments, ret)
        return row

    def _split_copy(self, row: dict[str, Any], arguments: str) -> dict[str, Any] | None:
        """Turn a copy's row into that of its read; return the row of its write, which takes half of the time.

        Returns None if the call does not name its files.
        """
        match = _COPIED.match(arguments)
        if match is None:
            return None
        source, target = (4, 1) if row["op"] == "sendfile" else (1, 4)
        process = self._process_of(row["tid"])
        halves = []
        for op, group in (("read", source), ("write", target)):
            offset = parse_int64((match[group + 2] or "")[1:].partition("]")[0])
            args = json.dumps({"fd": int(match[group])}, separators=(",", ":"))
            halves.append({"op": op, "path": process.path_of(match, group), "offset": offset, "args": args})
        until_us = row["ts_us"] + row["dur_us"]
        row |= {**halves[0], "dur_us": row["dur_us"] // 2}
        middle_us = row["ts_us"] + row["dur_us"]
        written = {**row, **halves[1], "ts_us": middle_us, "dur_us": until_us - middle_us}
        if row["tid"] in self._early:
            self._early[row["tid"]][1].append(written)
        return written

    def _process_of(self, tid: int) -> _Process:
        """Return the process of a thread. A new thread may come from a call that has not returned yet."""
        if tid not in self._processes:
            self._processes[tid] = _Process(tid)
            if self._making:
                maker, text = next(reversed(self._making.items()))
                self._processes[tid] = self._make(maker, text, tid)
                self._early[tid] = (maker, [])
        return self._processes[tid]

    def _make(self, maker: int, flags: str, tid: int) -> _Process:
        """Return the process of a new task: a thread shares its creator's, a child gets a copy of it."""
        process = self._processes[maker]
        if "CLONE_THREAD" in flags:
            return process
        self._num_copied += len(process.paths)
        # Without a limit, a process that has many open files and forks often would take gigabytes.
        is_usual = self._num_copied <= _MOST_TASKS + _COPIED_PER_LINE * self._num_lines
        return _Process(tid, dict(process.paths) if is_usual else {}, process.folder)

    def _add_task(self, maker: int, arguments: str, tid: int) -> None:
        """Record the task that a call created, and correct tasks that seemed to be created by this call."""
        process = self._make(maker, arguments, tid)
        corrected = {}
        early = self._early.pop(tid, None)
        if early is None:
            self._processes[tid] = process
        elif self._processes.get(tid, process).pid != process.pid:
            corrected[tid] = (process, early[1])
        for other, (its_maker, rows) in self._early.items():
            if its_maker == maker:
                corrected[other] = (_Process(other), rows)
        for other, (own, rows) in corrected.items():
            self._processes[other] = own
            for row in rows:
                row["pid"] = own.pid


def read_strace(
    path: Path, head: bytes, chunks: Iterable[bytes], account: FileAccount
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a listing that begins with `head`."""
    listing = Strace(find_task(path, head), find_host(path))
    for chunk in chunks:
        if account.dropped_reasons.get(_TOO_MANY, 0) > _MOST_UNFINISHED:
            # No real listing has more unfinished calls, and parsing a forged one would take minutes.
            num_lines = chunk.count(b"\n")
            account.lines += num_lines
            account.dropped += num_lines
            account.dropped_reasons[_TOO_MANY] += num_lines
            continue
        for line in chunk.split(b"\n")[:-1]:
            parsed = listing.parse(line.decode(errors="backslashreplace"))
            account.lines += 1
            account.count(parsed, line)
            if parsed.row is not None:
                yield parsed.row
            if parsed.written is not None:
                yield parsed.written
    for parsed in listing.finish():
        account.metadata -= 1
        account.count(parsed)
        if parsed.row is not None:
            yield parsed.row
    account.faults.extend(listing.faults())


def _nanoseconds(seconds: str, fraction: str) -> int:
    return int(seconds + fraction.ljust(9, "0"))


def _number(text: str) -> int | None:
    try:
        number = int(text, 0)
    except ValueError:
        return None
    return number if abs(number) < 1 << 63 else None


def _join(folder: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(folder, name)) if folder else name


_ESCAPE: Final = re.compile(rb"\\([0-7]{1,3}|x[0-9a-f]{2}|.)", re.DOTALL)
_LETTERS: Final = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f"}


def _unescape(text: str) -> str:
    """Undo strace's escapes in a name; bytes that are not UTF-8 stay escaped."""

    def decode(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        if code.isdigit():
            return bytes([int(code, 8) & 0xFF])
        if code.startswith(b"x") and len(code) == 3:
            return bytes.fromhex(code[1:].decode())
        return _LETTERS.get(code, code)

    return _ESCAPE.sub(decode, text.encode()).decode(errors="backslashreplace")
