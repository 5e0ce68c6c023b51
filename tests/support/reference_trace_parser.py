"""A second opinion on traces: each dialect parsed line by line, and measured by the shortest code there is.

Written apart from the package, with the standard library alone, so that both do not share a mistake. It keeps
every event in memory, and knows whole files only: damage is tested elsewhere.
"""

import gzip
import json
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]


@dataclass(kw_only=True)
class Event:
    """One call, or one span."""

    name: str
    cat: str
    ts_us: int
    dur_us: int
    pid: int
    tid: int
    host: str | None = None
    path: str | None = None
    moved: int | None = None
    half: str = ""
    """Which half of a copy between files it is."""

    @property
    def is_compute(self) -> bool:
        return "compute" in self.name or self.cat in ("compute", "kernel", "cpu_op")

    @property
    def is_io(self) -> bool:
        # dftracer lists calls on processes as POSIX, too.
        is_process = self.name in ("fork", "vfork", "waitpid")
        return not self.is_compute and not is_process and self.cat in ("POSIX", "STDIO", "OBJECT")

    @property
    def direction(self) -> str:
        """`read`, `write`, or nothing."""
        match = re.fullmatch(r"(?:p|f)?(read|write)v?(?:64)?(?:v2)?", self.name)
        return match[1] if match else self.half


def read_text(path: Path) -> str:
    """The text of a file, compressed or not."""
    content = path.read_bytes()
    content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    return content.decode(errors="surrogateescape")


# What is asked of events.


def union_us(events: Iterable[Event]) -> int:
    """The time in which at least one of them was under way."""
    total, end = 0, -1
    for begin, until in sorted((event.ts_us, event.ts_us + event.dur_us) for event in events):
        total += max(0, until - max(begin, end))
        end = max(end, until)
    return total


def by_function(events: Iterable[Event]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Number, summed time and bytes, by category and name."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for event in events:
        for place, value in enumerate((1, event.dur_us, event.moved or 0)):
            sums[event.cat, event.name][place] += value
    return {function: (number, took, moved) for function, (number, took, moved) in sums.items()}


def by_file(events: Iterable[Event]) -> dict[str, tuple[int, int, int, int]]:
    """Number, union, bytes read and bytes written, by path."""
    grouped: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        # Calls of MPI-IO stand above those of POSIX.
        if event.path is not None and event.cat != "MPIIO":
            grouped[event.path].append(event)
    return {
        path: (len(own), union_us(own), _moved(own, "read"), _moved(own, "write"))
        for path, own in grouped.items()
    }


def _moved(events: Iterable[Event], direction: str) -> int:
    return sum(event.moved or 0 for event in events if event.direction == direction)


def by_process(events: Iterable[Event]) -> dict[tuple[str | None, int], tuple[int, int, int, int, int]]:
    """I/O calls, their union and sum, the union of computation, and the overlap of both, by host and pid.

    Processes that do neither are left out.
    """
    grouped: dict[tuple[str | None, int], list[Event]] = defaultdict(list)
    for event in events:
        grouped[event.host, event.pid].append(event)
    measured = {}
    for process, own in grouped.items():
        io, compute = [e for e in own if e.is_io], [e for e in own if e.is_compute]
        both = union_us(io) + union_us(compute) - union_us([*io, *compute])
        if io or compute:
            sum_us = sum(event.dur_us for event in io)
            measured[process] = (len(io), union_us(io), sum_us, union_us(compute), both)
    return measured


# DFTracer, all generations.


def read_dftracer(paths: Sequence[Path]) -> list[Event]:
    """The events of the files of one folder."""
    documents = {path: list(_json_lines(path)) for path in paths}
    explained: dict[tuple[str, str], set[str]] = defaultdict(set)
    for lines in documents.values():
        for document in filter(_is_metadata, lines):
            named = document.get("args", {})
            if len(str(named.get("value"))) == 16:
                explained[document["name"], str(named["value"])].add(str(named.get("name")))
    agreed = {hashed: names.pop() for hashed, names in explained.items() if len(names) == 1}
    return [event for lines in documents.values() for event in _dftracer_file(lines, agreed)]


def _json_lines(path: Path) -> Iterator[JsonObject]:
    for line in read_text(path).splitlines():
        bare = line.strip().removeprefix("[").removesuffix("]").strip().removesuffix(",")
        if bare:
            # The earliest tracer wrote a comma behind the last argument.
            yield json.loads(re.sub(r",(?=})", "", bare))


def _is_metadata(document: JsonObject) -> bool:
    return str(document.get("ph")) in ("M", "4")


def _dftracer_file(lines: Sequence[JsonObject], agreed: Mapping[tuple[str, str], str]) -> Iterator[Event]:
    later: dict[tuple[str, str], str] = {}
    for document in filter(_is_metadata, lines):
        arguments = document.get("args", {})
        later.setdefault((document["name"], str(arguments.get("value"))), str(arguments.get("name")))
    now: dict[tuple[str, str], str] = {}
    ns_per_tick = 1000
    for document in lines:
        arguments = document.get("args", {})
        if _is_metadata(document):
            now[document["name"], str(arguments.get("value"))] = str(arguments.get("name"))
            if arguments.get("name") == "time_metric":
                ns_per_tick = {"NS": 1, "US": 1000, "MS": 10**6, "SEC": 10**9}[arguments["value"]]
            continue
        if str(document.get("ph", "X")) not in ("X", "1"):
            continue

        def named(kind: str, value: Any) -> str:
            hashed = kind, str(value)
            return now.get(hashed) or later.get(hashed) or agreed.get(hashed) or f"hash:{value}"

        path, host = arguments.get("fname"), arguments.get("hostname")
        if path is None and "fhash" in arguments:
            path = named("FH", arguments["fhash"])
        if host is None and "hhash" in arguments:
            host = named("HH", arguments["hhash"])
        event = Event(
            name=document["name"],
            cat=document.get("cat", ""),
            ts_us=int(document["ts"]) * ns_per_tick // 1000,
            dur_us=(int(document["ts"]) + int(document.get("dur", 0))) * ns_per_tick // 1000
            - int(document["ts"]) * ns_per_tick // 1000,
            pid=int(document["pid"]),
            tid=int(document["tid"]),
            host=host,
            path=path,
        )
        event.moved = _moved_by(event, arguments.get("ret"), arguments.get("size"))
        yield event


def _moved_by(event: Event, ret: Any, item_bytes: Any = None) -> int | None:
    """Bytes of a call that returns how much it moved: a number of bytes, or of items."""
    if ret is None or int(ret) < 0 or not (event.direction or event.name in _BETWEEN_FILES):
        return None
    if event.cat == "POSIX" and not event.name.startswith("f"):
        return int(ret)
    is_items = event.cat == "STDIO" and event.name in ("fread", "fwrite") and item_bytes is not None
    return int(ret) * int(item_bytes) if is_items else None


_BETWEEN_FILES = ("sendfile", "sendfile64", "copy_file_range", "splice")


# strace.


def read_strace(paths: Sequence[Path]) -> list[Event]:
    """The events of a listing of all threads, or of one file for each of them (-ff)."""
    listings = {path: read_text(path).split("\n")[:-1] for path in paths}
    made: dict[int, tuple[int, bool]] = {}
    for path, lines in listings.items():
        made |= _made_tasks(path, lines)
    return [event for path, lines in listings.items() for event in _Listing(path, made).read(lines)]


def _task_of_file(path: Path) -> int:
    return int(path.suffix[1:]) if path.suffix[1:].isdigit() else 0


def _made_tasks(path: Path, lines: Sequence[str]) -> dict[int, tuple[int, bool]]:
    """Who made each thread or process, and whether it is a thread."""
    made, begun = {}, {}
    for line in lines:
        tid, _, text = _split_line(line, _task_of_file(path))
        if text.startswith(("clone", "fork", "vfork")):
            begun[tid] = text
        elif not re.match(r"<\.\.\. (clone3?|v?fork) resumed>", text):
            continue
        answer = re.search(r" = (\d+)(?: <|$)", text)
        if answer:
            made[int(answer[1])] = tid, "CLONE_THREAD" in begun[tid]
    return made


def _split_line(line: str, task: int) -> tuple[int, int, str]:
    """Thread, time in microseconds, and the rest."""
    match = re.match(r"(?:\[pid +(\d+)\] |(\d+) +)?(\d+)\.(\d{6}) (.*)", line)
    assert match, line
    tid = int(match[1] or match[2] or task)
    return tid, int(match[3]) * 10**6 + int(match[4]), match[5]


@dataclass
class _Process:
    pid: int
    names: dict[int, str] = field(default_factory=dict)
    folder: str = ""


class _Listing:
    """Follows the descriptors of each process down a listing."""

    def __init__(self, path: Path, made: Mapping[int, tuple[int, bool]]) -> None:
        self._task = _task_of_file(path)
        self._made = made
        self._processes: dict[int, _Process] = {}
        self._begun: dict[int, tuple[int, str]] = {}
        self._host = re.search(r"@([\w.-]+)\.strace", path.name)

    def read(self, lines: Sequence[str]) -> Iterator[Event]:
        for line in lines:
            tid, ts_us, text = _split_line(line, self._task)
            process = self._process_of(tid)
            if text.startswith("+++") and tid in self._begun:
                # The thread ended within a call.
                ts_us, head = self._begun.pop(tid)
                yield from self._call(process, tid, ts_us, head + ")")
            if text.startswith(("+++", "---")) or "???" in text[:8]:
                # Exits, signals, and calls of a thread that ended before strace could read them.
                continue
            if text.endswith("<unfinished ...>"):
                self._begun[tid] = ts_us, text.removesuffix("<unfinished ...>").rstrip()
                continue
            if text.startswith("<... "):
                ts_us, head = self._begun.pop(tid)
                text = head + text[text.index(" resumed>") + len(" resumed>") :]
            yield from self._call(process, tid, ts_us, text)

    def _process_of(self, tid: int) -> _Process:
        if tid not in self._processes:
            maker, is_thread = self._made.get(tid, (0, False))
            if is_thread and maker in self._processes:
                self._processes[tid] = self._processes[maker]
            elif is_thread:
                self._processes[tid] = _Process(self._first_thread(tid))
            else:
                parent = self._processes.get(maker, _Process(0))
                self._processes[tid] = _Process(tid, dict(parent.names), parent.folder)
        return self._processes[tid]

    def _first_thread(self, tid: int) -> int:
        while self._made.get(tid, (0, False))[1]:
            tid = self._made[tid][0]
        return tid

    def _call(self, process: _Process, tid: int, ts_us: int, text: str) -> Iterator[Event]:
        name, _, rest = text.partition("(")
        arguments, answer = _split_arguments(rest)
        took = re.search(r" <(\d+)\.(\d{6})>$", answer)
        returned = re.match(r" *= (-?(?:0x[0-9a-f]+|\d+))(?![\w.])", answer)
        ret = int(returned[1], 0) if returned else None
        path = _path_of(process, name, arguments)
        shown = _shown(answer[returned.end() :]) if returned else None
        if name.startswith(("open", "creat")) and shown:
            path = shown
        if ret is not None and ret >= 0:
            _follow(process, name, arguments, path, ret)
            if name in ("clone", "clone3", "fork", "vfork"):
                self._process_of(ret)
        is_call_on_file = name in _ON_FILES or (name == "mmap" and path is not None)
        event = Event(
            name=name, cat="POSIX" if is_call_on_file else "SYSTEM", ts_us=ts_us,
            dur_us=int(took[1]) * 10**6 + int(took[2]) if took else 0, pid=process.pid, tid=tid,
            host=self._host[1] if self._host else None, path=path,
        )  # fmt: skip
        event.moved = _moved_by(event, ret)
        if event.moved and name in _BETWEEN_FILES:
            places = (1, 0) if name == "sendfile" else (0, 2)
            source, target = (_name_of(process, arguments[place]) for place in places)
            took_us = event.dur_us // 2
            yield replace(event, path=source, half="read", dur_us=took_us)
            event = replace(event, path=target, half="write", dur_us=event.dur_us - took_us)
            event.ts_us += took_us
        yield event


_ON_FILES = frozenset((
    "open", "openat", "creat", "close", "read", "pread64", "readv", "preadv", "preadv2", "write", "pwrite64",
    "writev", "pwritev", "pwritev2", "lseek", "fsync", "fdatasync", "stat", "lstat", "fstat", "newfstatat",
    "statx", "access", "faccessat", "faccessat2", "mkdir", "mkdirat", "unlink", "unlinkat", "rename",
    "renameat", "renameat2", "readlink", "getdents64", "ftruncate", "truncate", "fallocate", "fadvise64",
    "fcntl", "dup", "dup2", "dup3", "chdir", "sendfile", "copy_file_range", "ioctl", "statfs", "fstatfs",
    "umask", "rmdir", "chmod", "flock",
))  # fmt: skip
_BY_DESCRIPTOR = _ON_FILES - {"umask"}
_BY_NAME = (_ON_FILES - {"umask"}) | {"execve"}


def _split_arguments(text: str) -> tuple[list[str], str]:
    """The arguments of a call, and what stands behind its closing bracket, letter by letter."""
    arguments, begin, depth, place = [], 0, 0, 0
    while place < len(text):
        letter = text[place]
        if letter == '"':
            place += 1
            while text[place] != '"':
                place += 2 if text[place] == "\\" else 1
        elif letter == "<" and text[place - 1 : place].isalnum():
            place = _end_of_shown(text, place)
        elif letter in "([{":
            depth += 1
        elif letter in "}])" and depth:
            depth -= 1
        elif depth == 0 and letter in ",)":
            arguments.append(text[begin:place].strip())
            begin = place + 1
            if letter == ")":
                return [one for one in arguments if one], text[begin:]
        place += 1
    raise AssertionError(f"a call without an end: {text}")


def _end_of_shown(text: str, place: int) -> int:
    """Where a shown name ends: angle brackets in names are escaped; devices have a pair, sockets an arrow."""
    if re.match(r"<[A-Z]\w*:\[", text[place:]):
        return text.index("]>", place) + 1
    depth = 0
    for at in range(place, len(text)):
        if text[at] == "<":
            depth += 1
        elif text[at] == ">":
            depth -= 1
            if depth == 0:
                return at
    raise AssertionError(f"a name without an end: {text}")


def _shown(argument: str) -> str | None:
    """The name that `3</d/a>` shows."""
    begin = argument.find("<")
    if begin != 0 and not re.fullmatch(r"-?\w+", argument[:begin] if begin > 0 else ""):
        return None
    if argument[begin + 1 : begin + 2].isdigit() and argument.endswith(">"):
        return None
    return _unescape(argument[begin + 1 : _end_of_shown(argument, begin)])


def _path_of(process: _Process, name: str, arguments: Sequence[str]) -> str | None:
    if name == "mmap":
        return _name_of(process, arguments[4]) if len(arguments) > 4 else None
    if not arguments:
        return None
    first = arguments[0]
    second = arguments[1] if len(arguments) > 1 else ""
    if first.startswith("AT_FDCWD"):
        process.folder = _shown(first) or process.folder
        below = _quoted(second)
        return _join(process.folder, below) if below else process.folder or None
    if re.match(r"-?\d+(?![\w.])", first) and ("<" in first or name in _BY_DESCRIPTOR):
        folder, below = _name_of(process, first), _quoted(second)
        takes_name = name.endswith(("at", "at2")) or name == "statx"
        return _join(folder or "", below) if takes_name and below else folder
    quoted = _quoted(first)
    return _join(process.folder, quoted) if quoted and name in _BY_NAME else None


def _name_of(process: _Process, argument: str) -> str | None:
    number = re.match(r"-?\d+", argument)
    return (_shown(argument) or process.names.get(int(number[0]))) if number else None


def _quoted(argument: str) -> str:
    return _unescape(argument[1 : argument.rindex('"')]) if argument.startswith('"') else ""


def _join(folder: str, name: str) -> str:
    return posixpath.normpath(f"{folder}/{name}" if name[:1] != "/" else name) if folder else name


def _unescape(text: str) -> str:
    """Letter by letter, because a backslash may stand for a backslash."""
    letters = {"n": "\n", "t": "\t", "r": "\r", "v": "\v", "f": "\f"}
    made, place = bytearray(), 0
    while place < len(text):
        if text[place] != "\\":
            made += text[place].encode(errors="surrogateescape")
            place += 1
        elif digits := re.match(r"[0-7]{1,3}", text[place + 1 : place + 4]):
            made.append(int(digits[0], 8))
            place += 1 + len(digits[0])
        else:
            made += letters.get(text[place + 1], text[place + 1]).encode()
            place += 2
    return made.decode(errors="backslashreplace")


def _follow(process: _Process, name: str, arguments: Sequence[str], path: str | None, ret: int) -> None:
    is_copy = name.startswith("dup") or (name == "fcntl" and arguments[1].startswith("F_DUPFD"))
    if path is not None and (is_copy or name.startswith(("open", "creat"))):
        process.names[ret] = path
    elif name == "close":
        number = re.match(r"\d+", arguments[0])
        process.names.pop(int(number[0]) if number else -1, None)
    elif name == "chdir" and path is not None:
        process.folder = path


# Darshan's text, and PyTorch's profiler.


def read_dxt(path: Path) -> list[Event]:
    """The segments of `darshan-dxt-parser`."""
    events, start_us, file, host = [], 0, None, None
    for line in read_text(path).splitlines():
        words = line.split()
        if line.startswith("# start_time:"):
            start_us = int(words[2]) * 10**6
        elif line.startswith("# DXT, file_id:"):
            file = line.partition("file_name: ")[2].strip()
        elif line.startswith("# DXT, rank:"):
            host = words[-1]
        elif words and words[0].startswith("X_"):
            module, rank, verb, _, _, length, begin, end = words[:8]
            thread = words[-1] if len(words) > 8 and words[-1].isdigit() else rank
            begin_us, end_us = round(float(begin) * 1e6), round(float(end) * 1e6)
            events.append(
                Event(
                    name=verb, cat=module.removeprefix("X_"), ts_us=start_us + begin_us,
                    dur_us=end_us - begin_us, pid=int(rank), tid=int(thread), host=host, path=file,
                    moved=int(length),
                )
            )  # fmt: skip
    return events


def read_kineto(path: Path) -> list[Event]:
    """The complete events of a profile. Devices are processes in it; their work is that of the only one."""
    document = json.loads(read_text(path))
    base_ns = document.get("baseTimeNanoseconds", 0)
    labelled = [
        event["pid"]
        for event in document["traceEvents"]
        if event.get("name") == "process_labels" and event["args"]["labels"] == "CPU"
    ]
    events = []
    for event in document["traceEvents"]:
        if event.get("ph") != "X" or event.get("pid") == "Spans":
            continue
        is_on_device = event.get("cat", "") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        pid = labelled[-1] if is_on_device and labelled else event["pid"]
        tid = event["tid"]
        # Profiles write at most three digits behind the point, which doubles of their size hold.
        begin_ns, length_ns = (round(Decimal(str(event.get(key, 0))) * 1000) for key in ("ts", "dur"))
        begin_us = (begin_ns + base_ns) // 1000
        events.append(
            Event(
                name=event["name"], cat=event.get("cat", ""), ts_us=begin_us,
                dur_us=(begin_ns + base_ns + length_ns) // 1000 - begin_us,
                host=document.get("host_name"),
                pid=pid if isinstance(pid, int) else 0, tid=tid if isinstance(tid, int) else pid,
            )
        )  # fmt: skip
    return events


READERS: Mapping[str, Callable[[Sequence[Path]], list[Event]]] = {
    "dftracer": read_dftracer,
    "strace": read_strace,
    "dxt": lambda paths: [event for path in paths for event in read_dxt(path)],
    "kineto": lambda paths: [event for path in paths for event in read_kineto(path)],
}


def count_paths(events: Iterable[Event]) -> Counter[str]:
    """How many events each file has."""
    return Counter(event.path for event in events if event.path is not None)
