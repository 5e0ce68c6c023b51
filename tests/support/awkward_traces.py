"""Traces of every dialect with what is awkward in each, from a seed: what readers may get wrong in silence.

Names with quotes, brackets and answers of calls in them, spans over one another, events without durations,
hashes that only another file explains, calls that others interrupt, threads and children that run before the
call that made them has returned.
"""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_US = 1_727_387_307_000_000
NAMES = (
    "plain.npz", 'na\u00efve name "q" \\ x.txt', "tab\tand\nline", "a) = 7 <0.000001>", "b <unfinished ...>",
    '{"ph":"M"}', "comma, space", "x->y", "O_RDONLY", "\u6570\u636e.pt", "trailing]", "--- SIG ---", "e],",
)  # fmt: skip
CALLS = ("read", "write", "pread64", "pwrite64", "preadv2", "pwritev2", "readv", "writev")


# DFTracer.


def write_dftracer(
    folder: Path, generation: int, *, seed: int, num_files: int = 3, num_events: int = 300
) -> None:
    """One file a process; the workers of the third generation do not repeat their parent's names."""
    for rank in range(num_files):
        lines = list(_DFTracerFile(generation, rank, random.Random(100 * seed + rank)).lines(num_events))
        text = "[\n" + "\n".join(lines) + "\n]\n" if rank % 2 else "\n".join(lines)
        name = f"trace-{rank}-of-{num_files}.pfw"
        if rank == 1:
            (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / name).write_text(text, encoding="utf-8")


class _DFTracerFile:
    """The lines of one process, which has two threads whose calls run over one another."""

    def __init__(self, generation: int, rank: int, draw: random.Random) -> None:
        self._generation = generation
        self._rank = rank
        self._draw = draw
        self._pid = 7 if generation == 3 else 40 + rank
        self._host = f"node{rank}"
        self._unit = ("US", "NS", "MS")[rank % 3] if generation == 3 else "US"
        self._hashes: dict[str, int | str] = {}

    def lines(self, num_events: int) -> Iterator[str]:
        if self._generation == 3:
            yield self._metadata("CM", "time_metric", self._unit)
        if self._generation > 1:
            yield self._metadata("HH", self._host, self._hash_of(self._host))
        now_us = START_US
        for number in range(num_events):
            now_us += self._draw.randrange(400)
            yield from self._event(number, now_us)

    def _event(self, number: int, ts_us: int) -> Iterator[str]:
        draw = self._draw
        layer = draw.choice(("POSIX", "POSIX", "STDIO", "reader", "compute", "app", "counter"))
        name = {
            "POSIX": draw.choice((*CALLS, "open64", "close", "__xstat64", "lseek64", "rename", "sendfile")),
            "STDIO": draw.choice(("fread", "fwrite", "fopen64", "ftell")),
            "reader": "NPZReader.next", "compute": "loop.iter", "app": "Model.compute", "counter": "memory",
        }[layer]  # fmt: skip
        args: dict[str, Any] = {"image_size": 150_000_000} if layer in ("reader", "app") else {}
        if layer in ("POSIX", "STDIO"):
            path = f"/d/{draw.choice(NAMES)}"
            yield from self._name_file(path, args)
            args |= self._returned(name)
        if self._generation == 1:
            args["hostname"] = self._host
        else:
            args["hhash"] = self._hash_of(self._host)
        event: dict[str, Any] = {"id": number, "name": name, "cat": layer, "pid": self._pid}
        event |= {"tid": self._pid + draw.randrange(2), "ts": self._ticks(ts_us)}
        if draw.random() < 0.9:
            event["dur"] = self._ticks(draw.choice((0, 1, 900, 7000, 100_000)))
        event["ph"] = ("C" if self._generation < 3 else 2) if layer == "counter" else self._complete()
        yield self._line({**event, "args": args})

    def _complete(self) -> str | int:
        return 1 if self._generation == 3 else "X"

    def _returned(self, name: str) -> dict[str, Any]:
        """What the call returned: bytes, items or an error."""
        draw = self._draw
        if name in ("fread", "fwrite"):
            return {"ret": draw.choice((0, 3, 1000)), "size": draw.choice((1, 8, 4096))}
        if name in CALLS or name == "sendfile":
            return {"ret": draw.choice((-1, 0, 17, 4096, 1 << 20)), "offset": draw.choice((0, 4096))}
        return {"ret": draw.choice((0, 18, -1))} if name != "rename" else {"ret": 0}

    def _name_file(self, path: str, args: dict[str, Any]) -> Iterator[str]:
        if self._generation == 1:
            args["fname"] = path
            return
        is_new = path not in self._hashes
        args["fhash"] = self._hash_of(path)
        # Workers of the third generation leave it to the first file to explain some of the names.
        if is_new and not (self._generation == 3 and self._rank and path.endswith(("npz", "t", "]"))):
            yield self._metadata("FH", path, args["fhash"])
        elif self._generation == 2 and self._draw.random() < 0.02:
            # Short hashes collide: from here on this one is another file.
            yield self._metadata("FH", f"{path}.other", args["fhash"])

    def _hash_of(self, text: str) -> int | str:
        if text not in self._hashes:
            number = NAMES.index(text[3:]) if text[3:] in NAMES else 999 + int(text[-1])
            self._hashes[text] = 33_000 + number if self._generation == 2 else f"{0xABC0 + number:016x}"
        return self._hashes[text]

    def _metadata(self, kind: str, name: str, value: int | str) -> str:
        phase = 4 if self._generation == 3 else "M"
        args = {"name": name, "value": value}
        return json.dumps(
            {"name": kind, "cat": "dftracer", "pid": self._pid, "tid": 1, "ph": phase, "args": args}
        )

    def _ticks(self, time_us: int) -> int:
        if self._unit == "MS":
            return time_us // 1000
        return time_us * 1000 + self._draw.randrange(1000) if self._unit == "NS" else time_us

    def _line(self, event: dict[str, Any]) -> str:
        if self._generation == 1:
            quoted = {key: str(value) if isinstance(value, int) else value for key, value in event.items()}
            ret = event["args"].get("ret")
            arguments = {**event["args"], **({"ret": str(ret)} if ret is not None else {})}
            return json.dumps({**quoted, "args": arguments}, separators=(",", ":"), ensure_ascii=False)
        # Of the earliest tracer: a comma behind the last argument.
        text = json.dumps(event, separators=(",", ":"))
        return text[:-2] + ",}}" if event["args"] and self._draw.random() < 0.01 else text


# strace.


@dataclass
class _Task:
    """A thread, the files it has open, and the folder of its process."""

    tid: int
    pid: int
    now_us: int
    open_files: dict[int, str] = field(default_factory=dict)


@dataclass
class _Call:
    """A call: what strace prints when it begins and when it returns."""

    tid: int
    begin_us: int
    end_us: int
    head: str
    tail: str


class StraceProgram:
    """A program of threads and children, whose calls run side by side, as strace lists it.

    With `names` each descriptor has the name of its file (-y).
    """

    def __init__(self, seed: int, *, names: bool, num_calls: int = 400, is_single: bool = False) -> None:
        self._draw = random.Random(seed)
        self._names = names
        self._next_descriptor = 3
        self._next_tid = 4712
        self._tasks = [_Task(4711, 4711, START_US)]
        self.calls: list[_Call] = []
        self.remarks: list[tuple[int, int, str]] = []
        kinds = [self._open_and_use, self._by_name, self._no_file, self._copies, self._map]
        while len(self.calls) < num_calls:
            task = self._draw.choice(self._tasks)
            if not is_single and self._draw.random() < 0.05 and len(self._tasks) < 7:
                self._make_task(task)
            else:
                self._draw.choice(kinds)(task)

    def _add(self, task: _Task, head: str, tail: str) -> None:
        """`head` ends where strace stops until the call returns; `tail` is the rest."""
        begin = task.now_us + self._draw.choice((0, 3, 50, 700))
        end = begin + self._draw.choice((1, 20, 300, 5000))
        task.now_us = end + 1
        self.calls.append(_Call(task.tid, begin, end, head, tail))

    def _shown(self, number: int, path: str) -> str:
        return f"{number}<{escape(path, is_shown=True)}>" if self._names else str(number)

    def _folder(self) -> str:
        return "AT_FDCWD</work/dir>" if self._names else "AT_FDCWD"

    def _open_and_use(self, task: _Task) -> None:
        draw = self._draw
        path = draw.choice(("/d/", "/d/sub/../", "")) + draw.choice(NAMES)
        whole = path.replace("sub/../", "") if path.startswith("/") else f"/work/dir/{path}"
        number, self._next_descriptor = self._next_descriptor, self._next_descriptor + 1
        if draw.random() < 0.15:
            tail = " = -1 ENOENT (No such file or directory)"
            self._add(task, f'openat({self._folder()}, "{escape(path)}", O_RDONLY|O_CLOEXEC', f"){tail}")
            return
        flags = draw.choice(("O_RDONLY|O_CLOEXEC", "O_RDWR|O_CREAT, 0644"))
        # The kernel's name of a file has no dots in it; without -y a reader has the name as it was asked for.
        shown = whole if self._names else path
        self._add(
            task, f'openat({self._folder()}, "{escape(path)}", {flags}', f") = {self._shown(number, shown)}"
        )
        task.open_files[number] = shown
        for _ in range(draw.randrange(4)):
            self._transfer(task, number, shown)
        if draw.random() < 0.7:
            self._add(task, f"close({self._shown(number, shown)}", ") = 0")
            del task.open_files[number]

    def _transfer(self, task: _Task, number: int, path: str) -> None:
        draw, shown = self._draw, self._shown(number, path)
        moved = draw.choice((0, 1, 17, 4096))
        given = draw.choice(('"\\0\\1 = 5"...', '"a \\"b\\" ) = 3 <0.1>\\n"', '"\\377\\376, 0x1]"...'))
        vector = f"[{{iov_base={given}, iov_len=10}}, {{iov_base={given}, iov_len=7}}]"
        failed = " = -1 EAGAIN (Resource temporarily unavailable)"
        answer = failed if draw.random() < 0.1 else f" = {moved}"
        match draw.choice(CALLS):
            case "read":
                self._add(task, f"read({shown}, ", f"{given}, 4096){answer}")
            case "write":
                self._add(task, f"write({shown}, {given}, 4096", f"){answer}")
            case "pread64":
                self._add(task, f"pread64({shown}, ", f"{given}, 4096, 8192){answer}")
            case "pwrite64":
                self._add(task, f"pwrite64({shown}, {given}, 4096, 8192", f"){answer}")
            case "preadv2":
                self._add(task, f"preadv2({shown}, ", f"{vector}, 2, 10, RWF_NOWAIT){answer}")
            case "pwritev2":
                self._add(task, f"pwritev2({shown}, {vector}, 2, -1, 0", f"){answer}")
            case "readv":
                self._add(task, f"readv({shown}, ", f"{vector}, 2){answer}")
            case _:
                self._add(task, f"writev({shown}, {vector}, 2", f"){answer}")

    def _by_name(self, task: _Task) -> None:
        draw = self._draw
        name = escape(f"/d/{draw.choice(NAMES)}")
        found = draw.choice((") = 0", ") = -1 ENOENT (No such file or directory)"))
        stat = "{st_mode=S_IFREG|0644, st_size=150528, ...}"
        match draw.randrange(6):
            case 0:
                self._add(task, f'access("{name}", R_OK', found)
            case 1:
                self._add(task, f'newfstatat({self._folder()}, "{name}", ', f"{stat}, 0) = 0")
            case 2:
                self._add(task, f'rename("{name}", "/d/new name"', found)
            case 3:
                self._add(task, f'unlinkat({self._folder()}, "{name}", 0', found)
            case 4:
                self._add(
                    task,
                    f'statx({self._folder()}, "{name}", AT_STATX_SYNC_AS_STAT, STATX_ALL, ',
                    "{stx_mask=STATX_ALL, ...}) = 0",
                )
            case _:
                self._add(
                    task, f'newfstatat({self._shown(2, "/dev/null")}, "", ', f"{stat}, AT_EMPTY_PATH) = 0"
                )

    def _no_file(self, task: _Task) -> None:
        head, tail = self._draw.choice((
            ("munmap(0x7f4b3c000000, 135168", ") = 0"),
            ("futex(0x7f4b3c0008c8, FUTEX_WAIT_PRIVATE, 3, NULL", ") = -1 EAGAIN (Try again)"),
            ("getrandom(", '"\\xa7\\x3c /d/plain.npz", 24, GRND_NONBLOCK) = 24'),
            ("brk(NULL", ") = 0x55d5c8a7a000"),
            ("nanosleep({tv_sec=0, tv_nsec=1000}, ", "0x7ffd) = ? ERESTART_RESTARTBLOCK (Interrupted)"),
            ("rt_sigprocmask(SIG_BLOCK, [], ", "NULL, 8) = 0"),
            ("getpid(", ") = 3"),
        ))  # fmt: skip
        self._add(task, head, tail)

    def _copies(self, task: _Task) -> None:
        if not task.open_files:
            return
        number, path = self._draw.choice(list(task.open_files.items()))
        copy, self._next_descriptor = self._next_descriptor, self._next_descriptor + 1
        shown = self._shown(number, path)
        call = self._draw.choice((f"dup({shown}", f"fcntl({shown}, F_DUPFD_CLOEXEC, 3"))
        self._add(task, call, f") = {self._shown(copy, path)}")
        task.open_files[copy] = path
        self._transfer(task, copy, path)
        other_number, other_path = self._draw.choice(list(task.open_files.items()))
        other = self._shown(other_number, other_path)
        self._add(task, f"sendfile({other}, {self._shown(copy, path)}, NULL, 4096", ") = 100")
        self._add(task, f"copy_file_range({other}, [7], {shown}, NULL, 4096, 0", ") = 100")

    def _map(self, task: _Task) -> None:
        if task.open_files:
            number, path = self._draw.choice(list(task.open_files.items()))
            mapped = self._shown(number, path)
            self._add(task, f"mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, {mapped}, 0", ") = 0x7f4b3c000000")
        self._add(task, "mmap(NULL, 8192, PROT_READ, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0", ") = 0x7f4b3c100000")

    def _make_task(self, maker: _Task) -> None:
        tid, self._next_tid = self._next_tid, self._next_tid + 1
        is_thread = self._draw.random() < 0.5
        started = maker.now_us + 1
        if is_thread:
            flags = (
                "{flags=CLONE_VM|CLONE_FS|CLONE_FILES|CLONE_SIGHAND|CLONE_THREAD|CLONE_SYSVSEM, stack=0x7f}"
            )
            self._add(maker, f"clone3({flags}", f" => {{parent_tid=[{tid}]}}, 88) = {tid}")
            files = maker.open_files
        else:
            flags = "flags=CLONE_CHILD_CLEARTID|CLONE_CHILD_SETTID|SIGCHLD"
            self._add(maker, f"clone(child_stack=NULL, {flags}", f", child_tidptr=0x7f4b) = {tid}")
            files = dict(maker.open_files)
        # It may be listed before the call that made it has returned.
        begin = self.calls[-1].begin_us + self._draw.choice((1, 2, 6000))
        self._tasks.append(_Task(tid, maker.pid if is_thread else tid, max(started, begin), files))

    def listing(self, prefix: str = "{tid} ") -> str:
        """All threads in one listing (-f), or without their numbers (an empty `prefix`)."""
        moments = [(call.begin_us, number, "begin", call) for number, call in enumerate(self.calls)]
        moments += [(call.end_us, number, "end", call) for number, call in enumerate(self.calls)]
        moments.sort(key=lambda moment: (moment[0], moment[2] == "begin", moment[1]))
        lines, place = [], 0
        while place < len(moments):
            at_us, _, edge, call = moments[place]
            begin = prefix.format(tid=call.tid) + _time(at_us)
            took = f" <{_time(call.end_us - call.begin_us)}>"
            if edge == "begin" and place + 1 < len(moments) and moments[place + 1][3] is call:
                lines.append(f"{begin} {call.head}{call.tail}{took}")
                place += 1
            elif edge == "begin":
                lines.append(f"{begin} {call.head} <unfinished ...>")
            else:
                lines.append(f"{begin} <... {call.head.partition('(')[0]} resumed>{call.tail}{took}")
            place += 1
        last = prefix.format(tid=self.calls[0].tid) + _time(moments[-1][0] + 1)
        signal = "--- SIGCHLD {si_signo=SIGCHLD, si_code=CLD_EXITED, si_pid=4712, si_status=0} ---"
        return "\n".join([*lines, f"{last} {signal}", f"{last} +++ exited with 0 +++", ""])

    def write_one_file_a_thread(self, folder: Path) -> None:
        """As `strace -ff -o trace.strace` does."""
        for tid in dict.fromkeys(call.tid for call in self.calls):
            own = sorted((call for call in self.calls if call.tid == tid), key=lambda call: call.begin_us)
            text = "".join(
                f"{_time(call.begin_us)} {call.head}{call.tail} <{_time(call.end_us - call.begin_us)}>\n"
                for call in own
            )
            (folder / f"trace@node9.strace.{tid}").write_text(text)


def _time(time_us: int) -> str:
    return f"{time_us // 10**6}.{time_us % 10**6:06d}"


def escape(name: str, *, is_shown: bool = False) -> str:
    """A name as strace prints it; angle brackets are escaped in the names of descriptors."""
    special = {0x22: '\\"', 0x5C: "\\\\", 0x0A: "\\n", 0x09: "\\t"}
    octal = {
        byte: f"\\{byte:o}" for byte in range(256) if not 32 <= byte < 127 or (is_shown and byte in b"<>")
    }
    content, letters = name.encode(), []
    for byte, following in zip(content, [*content[1:], 0], strict=True):
        is_before_digit = chr(following).isdigit()
        code = f"\\{byte:03o}" if is_before_digit and byte in octal else octal.get(byte, chr(byte))
        letters.append(special.get(byte, code))
    return "".join(letters)


# Darshan's text, and PyTorch's profiler.


def write_dxt(path: Path, *, seed: int, has_threads: bool, num_files: int = 12) -> None:
    """Segments of POSIX and MPI-IO, some with the stripes of Lustre behind them."""
    draw = random.Random(seed)
    lines = ["# darshan log version: 3.41", "# start_time: 1727387307", "# nprocs: 4", ""]
    heading = "# Module    Rank  Wt/Rd  Segment          Offset          Length    Start(s)      End(s)"
    for number in range(num_files):
        rank, module = draw.randrange(4), draw.choice(("POSIX", "POSIX", "MPIIO"))
        lines += [
            f"# DXT, file_id: {number + 1}, file_name: /d/{number} {draw.choice(NAMES[6:9])}",
            f"# DXT, rank: {rank}, hostname: node{rank // 2}",
            f"# DXT, write_count: 1, read_count: 0\n{heading}{'   Pthread-ID' if has_threads else ''}",
        ]
        for segment in range(draw.randrange(1, 30)):
            begin, took = draw.randrange(10**6) / 10**4, draw.randrange(3000) / 10**4
            verb, length = draw.choice(("read", "write")), draw.choice((0, 47, 1 << 20, 5 << 32))
            stripes = draw.choice(("", "  [ 12]", "  [  3] [ 14]"))
            thread = (
                draw.choice(("   N/A", f"   {140_234_567_890 + draw.randrange(3)}")) if has_threads else ""
            )
            lines.append(
                f" X_{module:<8} {rank:>4} {verb:>6} {segment:>8} {segment * 4096:>15} {length:>15}"
                f" {begin:>11.4f} {begin + took:>11.4f}{stripes}{thread}"
            )
        lines.append("")
    path.write_text("\n".join(lines))


def write_kineto(path: Path, *, seed: int, num_events: int = 300) -> None:
    """A profile with kernels on a device, operators over one another, notes, flows and awkward names."""
    draw = random.Random(seed)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_labels", "pid": 4711, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler",
         "ts": 1.0, "dur": 9e9},
    ]  # fmt: skip
    for _ in range(num_events):
        cat = draw.choice(("cpu_op", "kernel", "gpu_memcpy", "user_annotation", "python_function", "ac2g"))
        is_flow, is_on_device = cat == "ac2g", cat in ("kernel", "gpu_memcpy")
        event: dict[str, Any] = {
            "ph": draw.choice("sf") if is_flow else "X", "cat": cat,
            "name": draw.choice(("aten::copy_", "void k<float, 4>(T*, int)", *NAMES)),
            "pid": 0 if is_on_device else 4711, "tid": draw.choice((7, 20) if is_on_device else (4711, 4712)),
            "ts": 4_487_896_841_000 + draw.randrange(10**7) / 1000, "args": {"External id": 3, "stream": 7},
        }  # fmt: skip
        if not is_flow and draw.random() < 0.95:
            event["dur"] = draw.choice((0, 0.4, 12.25, 900.75, 4000))
        events.append(event)
    head = {
        "schemaVersion": 1, "host_name": "node5", "baseTimeNanoseconds": 1_790_857_026_000_000_750,
        "displayTimeUnit": "ms", "distributedInfo": {"backend": "gloo", "rank": 3, "world_size": 4},
    }  # fmt: skip
    path.write_text(json.dumps({**head, "traceEvents": events}, indent=draw.choice((None, 1))))
