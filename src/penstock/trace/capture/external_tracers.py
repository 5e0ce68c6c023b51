"""Traces of any program, through the dftracer package's preload library or through strace.

    plan -> the program runs, with its own output and exit code; ranks are noted from outside
         -> files are named by rank -> the bytes that the system counted go into the trace

Invariants: the program runs with its own arguments, whether or not it can be traced; of its processes'
environments, only the ranks are kept.
"""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Final

from penstock.cluster.launcher_env import Launcher, LauncherRank, detect_rank
from penstock.environment import Environment, process_environment
from penstock.errors import PenstockError, Unavailable, UsageError
from penstock.trace.capture.trace_writer import LineFormatter, TraceFileWriter, span_kind
from penstock.trace.event_schema import RECORDING
from penstock.trace.reading.strace import HOST_MARK, find_makers
from penstock.trace.reading.trace_files import find_lines

logger = logging.getLogger(__name__)

WATCHED_CALLS = "trace=%file,%desc,?clone,?clone3,?fork,?vfork"
"""Calls that take a file name or a descriptor, which cover all I/O, but not memory, signals or time. Calls
that create threads and processes are included, so that each file is known to belong to a thread or a process.
"""

BLIND_SPOTS: Mapping[str, str] = {
    "dftracer": (
        "dftracer does not see I/O inside libc (numpy's np.save and np.load, std::fstream), mapped files,"
        " vectored reads at offsets, or what forked workers do with files opened before the fork;"
        " --tracer strace does, except for what is read through a mapping"
    ),
    "strace": "strace does not see what is read or written through a mapped file (mmap), nor io_uring",
}
"""The I/O that each tracer misses, for readers who look for missing bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPlan:
    """A program's command line and environment under its tracer, which writes into `folder`."""

    tracer: str
    folder: Path
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables added to the caller's environment."""
    is_whole: bool = True
    """True if all files are traced, not only the files in some folders."""


def plan_recording(
    command: Sequence[str], folder: Path, *, tracer: str = "auto", data: Sequence[str] = ()
) -> RecordingPlan:
    """Plan to run `command` with its trace in `folder`; `data` limits dftracer to some folders.

    Until the ranks are known, the files are in a separate folder, away from those of other recordings.
    """
    if not command:
        raise UsageError(
            "There is no command to record", fix="Write it after --: penstock trace record -- python train.py"
        )
    preload = None if tracer == "strace" else dftracer_preload()
    own = folder / f"recording-{socket.gethostname()}-{os.getpid()}"
    if preload is not None:
        return RecordingPlan(
            tracer="dftracer",
            folder=own,
            argv=tuple(command),
            environment={
                "LD_PRELOAD": str(preload),
                "DFTRACER_ENABLE": "1",
                # Without this variable, events have no paths, bytes or hosts.
                "DFTRACER_INC_METADATA": "1",
                "DFTRACER_INIT": "PRELOAD",
                "DFTRACER_LOG_FILE": str(own / "trace"),
                "DFTRACER_DATA_DIR": ":".join(data) or "all",
            },
            is_whole=not data,
        )
    strace = shutil.which("strace")
    if tracer == "dftracer" or strace is None:
        missing = "dftracer" if tracer == "dftracer" else "strace"
        raise Unavailable(
            f"{missing} is not installed, so other programs cannot be traced",
            fix="Run pip install dftracer, or apt-get install strace.",
        )
    # A listing does not name its host. Without the host in the file name, two nodes would write the same
    # files in a shared folder.
    name = f"trace{HOST_MARK}{socket.gethostname()}.strace"
    # One file per thread (-ff), so that no thread waits for another, and descriptors with their paths (-y).
    options = ["-ff", "-ttt", "-T", "-y", "-s", "0", "-e", WATCHED_CALLS, "-o", str(own / name)]
    # Since version 5.3, strace can leave unwatched calls at full speed.
    described = subprocess.run([strace, "--help"], capture_output=True, text=True, check=False, timeout=60)
    if "--seccomp-bpf" in described.stdout:
        options.insert(0, "--seccomp-bpf")
    argv = (strace, *options, "--", *command)
    return RecordingPlan(tracer="strace", folder=own, argv=argv, environment={})


def dftracer_preload() -> Path | None:
    """Return the library that the dftracer package preloads into programs, or None if it is not installed."""
    package = find_spec("dftracer")
    for folder in package.submodule_search_locations or () if package is not None else ():
        for library in sorted(Path(folder).rglob("libdftracer_preload*.so")):
            return library
    return None


_MARK: Final = "PENSTOCK_RECORDING"
"""The environment variable that distinguishes a recording's processes from all others of the machine."""
_PAUSE_S: Final = 0.1
"""The time between two scans of the machine's processes; each takes about a millisecond."""
_STARTED: Final = re.compile(rb'"name":"start".*?"pid":(\d{1,10}),.*?"ppid":(\d{1,10})')
"""The first event of each process in dftracer's files."""


def record(recording: RecordingPlan) -> int:
    """Run the program under its tracer to the end, then name its trace files by rank.

    Returns its exit code, or, as shells do, 128 + the number of the signal that ended it.
    """
    folder = recording.folder
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**process_environment(), **recording.environment, _MARK: str(os.getpid())}
    # Ctrl-C reaches the program too, which must end in its own way, so that its trace is complete.
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program = subprocess.Popen(
            recording.argv,
            env=environment,
            # Launchers hand an open connection to their ranks, without which MPI cannot start.
            close_fds=False,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no thread yet
        )
        with program, _watching_ranks(environment) as ranks:
            os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
            counted = _read_counted_bytes(program.pid)
    except FileNotFoundError:
        folder.rmdir()
        raise UsageError(
            f"The program {recording.argv[0]} does not exist", fix="Check its name, or give its path."
        ) from None
    finally:
        signal.signal(signal.SIGINT, usual)
    made = list(folder.iterdir())
    if counted and made and recording.is_whole:
        # The tracer's own writes are not I/O of the program.
        counted["written_bytes"] -= sum(path.stat().st_size for path in made)
        is_strace = recording.tracer == "strace"
        pid = int(min(made, key=_read_start).suffix[1:]) if is_strace else program.pid
        try:
            made.append(_note_counted_bytes(folder, pid, {"tracer": recording.tracer, **counted}))
        except PenstockError as error:
            logger.warning("Cannot record whether the trace is complete: %s", error)
    names = _name_by_rank(made, ranks, detect_rank(environment))
    # An earlier recording may have had the same process IDs, as in containers: both are then kept apart.
    if not any((folder.parent / name).exists() for name in names.values()):
        for path, name in names.items():
            path.rename(folder.parent / name)
        folder.rmdir()
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


@contextmanager
def _watching_ranks(environment: Environment) -> Iterator[dict[int, LauncherRank]]:
    """Record the rank of each process that has the mark of `environment`, as long as the block runs."""
    ranks: dict[int, LauncherRank] = {}
    is_over = Event()
    mark = f"{_MARK}={environment[_MARK]}".encode()
    watcher = Thread(target=_watch_ranks, args=(mark, ranks, is_over), daemon=True)
    watcher.start()
    try:
        yield ranks
    finally:
        is_over.set()
        watcher.join()


def _watch_ranks(mark: bytes, ranks: dict[int, LauncherRank], is_over: Event) -> None:
    others: set[int] = set()
    while not is_over.wait(_PAUSE_S):
        running = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 - names
        others &= running
        for pid in running - others - ranks.keys():
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                variables = []
            if mark not in variables:
                others.add(pid)
                continue
            pairs = (os.fsdecode(variable).partition("=") for variable in variables)
            with suppress(UsageError):
                if place := detect_rank({name: value for name, _, value in pairs}):
                    ranks[pid] = place


def _read_counted_bytes(pid: int) -> dict[str, int]:
    """Return the bytes that the system counted for an ended process and the descendants that were waited for.

    Empty if the system does not count bytes, or does not reveal them.
    """
    try:
        counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:
        return {}
    return {"read_bytes": int(counters["rchar"]), "written_bytes": int(counters["wchar"])}


def _read_start(listing: Path) -> bytes:
    """Return the timestamp at which a listing begins, as a sort key that puts listings without calls last."""
    with listing.open("rb") as file:
        return file.read(20) or b"~"


def _note_counted_bytes(folder: Path, pid: int, counted: Mapping[str, int | str]) -> Path:
    """Write a trace whose only event holds the bytes that the system counted; return its path."""
    now_ns = time.time_ns()
    lines = LineFormatter(socket.gethostname(), pid, 0)
    writer = TraceFileWriter(folder, f"trace-{socket.gethostname()}-{pid}")
    event = (span_kind("recorded", RECORDING), now_ns, now_ns, None, None, None, None, counted)
    writer.append(lines.opening(rank=None) + lines.events(pid, [event]) + lines.ending(now_ns))
    writer.close(complete=True)
    return writer.path


def _name_by_rank(
    made: Sequence[Path], ranks: Mapping[int, LauncherRank], own: LauncherRank | None
) -> dict[Path, str]:
    """Add to each file's name the rank of its process, or else of the process that created it, or `own`.

    If launchers run inside launchers, only the ranks of the innermost one count.
    """
    places = [*ranks.values(), *([own] if own else [])]
    innermost = min((place.launcher for place in places), key=list(Launcher).index, default=None)
    ranks = {pid: place for pid, place in ranks.items() if place.launcher is innermost}
    usual = own if own and own.launcher is innermost else None
    tasks, makers = _find_tasks(made) if {usual, *ranks.values()} != {usual} else ({}, {})
    names = {}
    for path in made:
        task, passed = tasks.get(path, 0), set[int]()
        while task not in ranks and task in makers and task not in passed:
            passed.add(task)
            task = makers[task]
        place = ranks.get(task, usual)
        ranked = f"trace-{place.rank}-of-{place.size}" if place else "trace"
        names[path] = path.name.replace("trace", ranked, 1)
    return names


def _find_tasks(made: Sequence[Path]) -> tuple[dict[Path, int], dict[int, int]]:
    """Return the process or thread of each file and, for each process or thread, its creator."""
    listings = {path: int(path.suffix[1:]) for path in made if path.suffix[1:].isdecimal()}
    tasks, makers = dict(listings), find_makers(listings)
    for path in made:
        if path not in listings:
            for line in find_lines(path, b'"start"', b'"recorded"'):
                if found := _STARTED.search(line):
                    tasks[path] = int(found[1])
                    makers[int(found[1])] = int(found[2])
                    break
    return tasks, makers
