"""The output of `strace -f -ttt -T`: system calls, with the files that their descriptors refer to.

Without -y, strace prints numbers of descriptors only, so each process's table of descriptors is followed
through open, dup, close, fork and threads. A listing of `strace -ff` is one thread's, and its lines do not
say whose: `strace_threads.py` finds that out. Invariant: a call that others interrupt in the listing
(`<unfinished ...>`) is one event, which starts at its first line.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

from penstock.trace.event_schema import canonical
from penstock.trace.reading.chunks import read_pieces, split_chunks
from penstock.trace.reading.event_batch import LineFate, ParsedLine, parse_int64, transfer_size

_FILE_NAME: Final = re.compile(r"(.+\.)(\d{1,10})(?:\.gz)?")
_MADE_THREAD: Final = re.compile(rb"clone3?\(.*CLONE_THREAD.*= (\d{1,10})\b")
_THREADLESS_LINE: Final = re.compile(rb"\s*\d{9,11}\.\d{6}\s")


HOST_MARK: Final = "@"
"""In names of our own recordings, as `trace@node7.strace.4711`: a listing itself does not name its host."""
_HOST: Final = re.compile(rf".*{HOST_MARK}([\w.-]+)\.strace(?:\.\d+)?(?:\.gz)?")


def find_host(path: Path) -> str | None:
    """The host on which a file was recorded, if its name has it."""
    match = _HOST.fullmatch(path.name)
    return match[1] if match else None


@dataclass(frozen=True, slots=True)
class Task:
    """A thread and its process."""

    tid: int
    pid: int


UNKNOWN_TASK: Final = Task(0, 0)
"""Whose the lines of a listing without numbers are, if its name has none either."""

_searching: Final = Lock()


def find_task(path: Path, head: bytes) -> Task:
    """The thread whose listing this file is, by its name; unknown if each line says whose it is."""
    match = _FILE_NAME.fullmatch(path.name)
    if match is None or _THREADLESS_LINE.match(head) is None:
        return UNKNOWN_TASK
    # Only one of the threads that read files searches; a file that appears meanwhile makes it search again.
    with _searching:
        makers = _find_makers(path.parent, match[1], path.parent.stat().st_mtime_ns)
    tid = pid = int(match[2])
    seen = {pid}
    while makers.get(pid, pid) not in seen:
        pid = makers[pid]
        seen.add(pid)
    return Task(tid, pid)


@lru_cache(maxsize=8)
def _find_makers(folder: Path, prefix: str, _mtime_ns: int) -> Mapping[int, int]:
    """Each thread of the files with this prefix, and the thread that made it."""
    makers: dict[int, int] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None and match[1] == prefix and path.is_file():
            makers |= dict.fromkeys(_find_threads(path), int(match[2]))
    return makers


def _find_threads(path: Path) -> list[int]:
    """The threads that a listing shows being made."""
    made: list[int] = []
    for chunk in split_chunks(read_pieces(path, lambda _: None, lambda _: None)):
        content = chunk.content[chunk.start : chunk.stop]
        if b"CLONE_THREAD" in content:
            made += map(int, _MADE_THREAD.findall(content))
    return made


# Whose line it is (-f, with the name of its program by -Y), and when (-ttt, or in milli- or nanoseconds).
_BEGIN: Final = r"\s*(?:\[pid\s+(\d+)(?:<[^>]*>)?\]\s+|(\d+)(?:<[^>]*>)?\s+)?(\d{%s})\.(\d{1,9})\s+"
# The time since the last line (-r), the number of the call (-n), and where it was made (-i).
_BESIDE: Final = r"(?:\(\+\s*[\d.]+\)\s+)?(?:\[[\da-f\s?]+\]\s+)*"
FIRST_LINE: Final = re.compile((_BEGIN % "9,11" + _BESIDE + r"(?:[a-z_]\w*\(|<\.\.\.|\+\+\+|---)").encode())
"""How a line of this dialect begins."""
OTHER_CLOCK: Final = re.compile(rb"\s*(?:\d+\s+)?(?:\d\d:\d\d:\d\d(?:\.\d{6})?|\d{1,8}\.\d{6})\s+[a-z_]\w*\(")
"""How a line of `strace -t`, `-tt` or `-r` begins: the day is not in it."""

_LINE: Final = re.compile(_BEGIN % "1,11" + _BESIDE + r"(.*?)\s*", re.DOTALL)
# Strace escapes < and > in names of files. Sockets (`-yy`) have an arrow, devices a pair of their own.
_SHOWN: Final = r"<([A-Za-z0-9-]+:\[[^<>]*(?:->[^<>]*)?\]|[^<>]*(?:<[^<>]*>)?)>(?:\(deleted\))?"
_CALL: Final = re.compile(
    rf"(\w+)\((.*)\)\s*= (-?\w+|\?)(?:{_SHOWN})?(?:\s+([A-Z]\w+))?.*?(?:\s<(\d+)\.(\d{{1,9}})>)?", re.DOTALL
)
_RESUMED: Final = re.compile(r"<\.\.\. (\w+) resumed>\s?(.*)", re.DOTALL)
_UNFINISHED: Final = "<unfinished ...>"
_ENDS_TASK: Final = frozenset(("exit", "exit_group"))
"""Calls that never return."""
_REMARK: Final = re.compile(r"strace: Process \d+ .*|\[ Process PID=\d+ .*| > .*")
"""What strace says about itself, where its listing goes to the terminal, and lines of a stack (-k)."""
_SUMMARY: Final = "% time     seconds  usecs/call"
"""How the table begins that stands behind all calls (-C)."""
_UNREAD: Final = ("???(", "<... ??? resumed>")
"""How strace lists a call whose number it could not read, because the thread was ended as it made it."""
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\.\.\.)?')
_DESCRIPTOR: Final = re.compile(rf"\s*(-?\d+)(?![\w.])(?:{_SHOWN})?")
_WORKING_FOLDER: Final = re.compile(rf"\s*AT_FDCWD(?:{_SHOWN})?")
_MAPPED: Final = re.compile(rf",\s*(-?\d+)(?:{_SHOWN})?,\s*(?:0x[0-9a-f]+|\d+)\s*$")
_BELOW: Final = re.compile(r"at\d*$|^statx$|^openat2$|^faccessat2$|^renameat2$|^inotify_add_watch$")
"""Calls in which a name behind a descriptor is one below its folder, not bytes that are moved."""
_MAKES_TASK: Final = re.compile(r"(?:clone3?|v?fork)\(")
"""Calls that make a thread or a process."""
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
"""Calls whose first text is a file's name; in the rest, such as getrandom, it is anything."""
_DESCRIPTOR_CALLS: Final = (_FILE_CALLS - {"umask"}) | frozenset((
    "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "bind", "listen", "accept", "accept4", "shutdown",
    "getsockopt", "setsockopt", "getsockname", "getpeername", "epoll_ctl", "epoll_wait", "epoll_pwait",
    "inotify_add_watch", "name_to_handle_at", "execveat", "flistxattr", "fremovexattr", "io_uring_enter",
))  # fmt: skip
"""Calls whose first number is a descriptor; in the rest, such as exit_group, it is anything."""
_OFFSET_CALLS: Final = frozenset(("pread", "pwrite", "preadv", "pwritev"))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call and its parts; `descriptor` is the one that its arguments begin with."""

    name: str
    op: str
    arguments: str
    strings: list[str]
    descriptor: re.Match[str] | None
    ret: int | None
    opened: str | None

    def names_below(self) -> bool:
        """Whether the text behind the descriptor is a name below its folder."""
        behind = self.arguments[self.descriptor.end() :] if self.descriptor else ""
        return behind.startswith(', "') and _BELOW.search(self.name) is not None

    def offset(self) -> int | None:
        """The offset that the call names: its last argument, or the one before the flags."""
        if self.op not in _OFFSET_CALLS:
            return None
        numbers = self.arguments.rsplit(",", 2)
        offset = parse_int64(numbers[-2 if self.name.endswith("v2") else -1].strip())
        # pwritev2 and preadv2 take -1 for the file's own position.
        return offset if offset is None or offset >= 0 else None

    def other_arguments(self) -> Mapping[str, Any]:
        """Arguments without a column: descriptor and flags."""
        others: dict[str, Any] = {"fd": int(self.descriptor[1])} if self.descriptor else {}
        flags = _FLAGS.search(self.arguments[-200:])
        return {**others, "flags": flags[1]} if flags else others


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
        return _unescape(descriptor[2]) if descriptor[2] else self.paths.get(int(descriptor[1]))

    def follow(self, call: _Call, path: str | None, ret: int) -> None:
        """Keep the table of descriptors as a successful call changes it."""
        is_copy = call.op in ("dup", "dup2", "dup3") or (call.op == "fcntl" and "F_DUPFD" in call.arguments)
        if (call.op == "open" or is_copy) and path is not None:
            self.paths[ret] = path
        elif call.op == "close" and call.descriptor is not None:
            self.paths.pop(int(call.descriptor[1]), None)
        elif call.op == "chdir" and path is not None:
            self.folder = path


@dataclass(slots=True)
class _EarlyTask:
    """A task listed before the call that made it has returned: who seems to have made it, and its rows."""

    maker: int
    rows: list[dict[str, Any]] = field(default_factory=list)


class Strace:
    """Reads the lines of one listing of `host`; those that do not say whose they are belong to `task`."""

    def __init__(self, task: Task = UNKNOWN_TASK, host: str | None = None) -> None:
        self._task = task
        self._host = host
        self._processes = {task.tid: _Process(task.pid)}
        self._unfinished: dict[int, tuple[int, str]] = {}
        self._begun: dict[int, tuple[int, str]] = {}
        self._num_lines = 0
        self._early: dict[int, _EarlyTask] = {}
        self._num_timeless = 0
        self._is_summary = False

    def parse(self, line: str) -> ParsedLine:
        """Parse a line: a call, a part of one, a signal or an exit, or damage."""
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
        tid = int(bracketed or plain or self._task.tid)
        ts_ns = _nanoseconds(seconds, fraction)
        if rest.startswith(("+++", "---", *_UNREAD)):
            return self._ended(tid) if rest.startswith("+++") else ParsedLine(LineFate.METADATA)
        if rest.endswith(_UNFINISHED):
            before = self._ended_within(tid)
            self._process_of(tid)
            self._unfinished[tid] = (ts_ns, rest.removesuffix(_UNFINISHED).rstrip())
            self._begun[tid] = (self._num_lines, line)
            return before
        return self._finished(tid, ts_ns, rest)

    def finish(self) -> Iterable[ParsedLine]:
        """Calls that never returned."""
        for tid in list(self._unfinished):
            yield self._ended_within(tid)

    def faults(self) -> Iterable[str]:
        """Whether durations are missing."""
        if self._num_timeless:
            yield f"{self._num_timeless} calls have no duration: run strace with -T"

    def _ended(self, tid: int) -> ParsedLine:
        """Forget a thread: the system may use its number again."""
        within = self._ended_within(tid)
        if tid != self._task.tid:
            self._processes.pop(tid, None)
        return within

    def _ended_within(self, tid: int) -> ParsedLine:
        """The call that a thread was in when it ended; metadata if it was in none."""
        if tid not in self._unfinished:
            return ParsedLine(LineFate.METADATA)
        ts_ns, text = self._unfinished.pop(tid)
        begun = self._begun.pop(tid)
        name = text.partition("(")[0]
        if not name.isidentifier():
            return ParsedLine(LineFate.DROPPED, reason="cut short", begun=begun)
        row = self._row(tid, ts_ns, _examine(name, text.partition("(")[2], None))
        if name in _ENDS_TASK:
            return ParsedLine(LineFate.EVENT, row=row)
        return ParsedLine(LineFate.SALVAGED, row=row, reason="never returned", begun=begun)

    def _finished(self, tid: int, ts_ns: int, text: str) -> ParsedLine:
        resumed = _RESUMED.fullmatch(text)
        if resumed is not None:
            if tid not in self._unfinished:
                return ParsedLine(LineFate.DROPPED, reason="resumes a call that never began")
            ts_ns, head = self._unfinished.pop(tid)
            text = head + resumed[2]
        call = _CALL.fullmatch(text)
        if call is None:
            return ParsedLine(LineFate.DROPPED, reason="cut short" if "(" in text else "not a call")
        name, arguments, ret, opened, error, seconds, fraction = call.groups()
        row = self._row(tid, ts_ns, _examine(name, arguments, _number(ret), opened))
        if seconds is not None:
            # Starts and ends are cut to microseconds, so that calls that follow one another still do.
            row["dur_us"] = (ts_ns + _nanoseconds(seconds, fraction)) // 1000 - row["ts_us"]
        elif ret != "?":
            self._num_timeless += 1
        if error and ret == "-1":
            row["args"] = json.dumps({**json.loads(row["args"]), "errno": error})
        return ParsedLine(LineFate.EVENT, row=row)

    def _row(self, tid: int, ts_ns: int, call: _Call) -> dict[str, Any]:
        process = self._process_of(tid)
        path = _find_path(process, call)
        cat = "POSIX" if call.op in _FILE_CALLS or (call.op == "mmap" and path is not None) else "SYSTEM"
        if call.ret is not None and call.ret >= 0:
            process.follow(call, path, call.ret)
        row = {
            "ts_us": ts_ns // 1000,
            "dur_us": 0,
            "op": call.op,
            "name": call.name,
            "cat": cat,
            "pid": process.pid,
            "tid": tid,
            "host": self._host,
            "path": path,
            "size_bytes": transfer_size(call.name, cat, {"ret": call.ret}),
            "offset": call.offset(),
            "ret": call.ret,
            "args": json.dumps(call.other_arguments(), separators=(",", ":")),
        }
        if tid in self._early:
            self._early[tid].rows.append(row)
        if call.ret is not None and call.ret > 0 and _MAKES_TASK.match(call.name + "("):
            self._add_task(tid, call.arguments, call.ret)
        return row

    def _process_of(self, tid: int) -> _Process:
        """The process of a thread; one not seen before may come from a call that has not returned yet."""
        if tid not in self._processes:
            making = [
                (maker, text) for maker, (_, text) in self._unfinished.items() if _MAKES_TASK.match(text)
            ]
            self._processes[tid] = _Process(tid)
            if making:
                maker, text = making[-1]
                self._processes[tid] = _make(self._processes[maker], text, tid)
                self._early[tid] = _EarlyTask(maker)
        return self._processes[tid]

    def _add_task(self, maker: int, arguments: str, tid: int) -> None:
        """Note the thread or process that a call has made."""
        process = _make(self._processes[maker], arguments, tid)
        early = self._early.pop(tid, None)
        for other, task in self._early.items():
            if task.maker == maker:
                self._correct(other, task, _Process(other))
        if early is None:
            self._processes[tid] = process
        elif self._processes.get(tid, process).pid != process.pid:
            self._correct(tid, early, process)

    def _correct(self, tid: int, task: _EarlyTask, process: _Process) -> None:
        """Give a task that was taken for another's its own process."""
        for row in task.rows:
            row["pid"] = process.pid
        self._processes[tid] = process


def open_strace(path: Path, head: bytes) -> Strace:
    """A reader of this file, which begins with `head`."""
    return Strace(find_task(path, head), find_host(path))


def _make(maker: _Process, arguments: str, tid: int) -> _Process:
    """The process of a new task: a thread shares everything with its maker, a child begins with a copy."""
    return maker if "CLONE_THREAD" in arguments else maker.fork(tid)


def _examine(name: str, arguments: str, ret: int | None, opened: str | None = None) -> _Call:
    """Take a call apart. `opened` is the file that strace -y names beside the descriptor it returned."""
    strings = _STRING.findall(arguments[:8192])
    op = "stat" if name == "newfstatat" and strings and strings[0] else canonical(name)
    descriptor = _DESCRIPTOR.match(arguments)
    if descriptor is not None and not (descriptor[2] or op in _DESCRIPTOR_CALLS):
        descriptor = None
    return _Call(name, op, arguments, strings, descriptor, ret, opened if op == "open" else None)


def _find_path(process: _Process, call: _Call) -> str | None:
    """The file that a call works on: by name, by descriptor, or by a name below a descriptor's folder."""
    named = _unescape(call.strings[0]) if call.strings else ""
    folder = _WORKING_FOLDER.match(call.arguments)
    if folder is not None:
        process.folder = _unescape(folder[1]) if folder[1] else process.folder
    if call.opened:
        return _unescape(call.opened)
    if call.op == "mmap":
        mapped = _MAPPED.search(call.arguments)
        return process.path_of(mapped) if mapped else None
    if folder is not None:
        return _join(process.folder, named) if named else process.folder or None
    if call.descriptor is not None:
        base = process.path_of(call.descriptor)
        return _join(base or "", named) if named and call.names_below() else base
    if named and call.arguments.lstrip().startswith('"') and call.op in _NAME_CALLS:
        return _join(process.folder, named)
    return None


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
