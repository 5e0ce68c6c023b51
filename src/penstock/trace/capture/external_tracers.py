"""Traces of any program, through the dftracer package's preload library or through strace.

Planning is pure; then the program runs, with its own output and exit code. Invariant: the program runs with
its own arguments, traced or not at all.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from penstock.errors import Unavailable, UsageError
from penstock.trace.reading.strace import HOST_MARK

WATCHED_CALLS = "trace=%file,%desc,?clone,?clone3,?fork,?vfork"
"""Calls that take a file name or a descriptor: all I/O, but not memory, signals or time; and those that make
threads and processes, so that each file is known to be one's or the other's."""

BLIND_SPOTS: Mapping[str, str] = {
    "dftracer": (
        "dftracer does not see I/O inside libc (numpy's np.save and np.load, std::fstream), mapped files,"
        " vectored reads at offsets, and what forked workers do with files that were open before;"
        " --tracer strace does, except for what is read through a mapping"
    ),
    "strace": "strace does not see what is read or written through a mapped file (mmap), nor io_uring",
}
"""I/O that each tracer misses, for those who wonder where their bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPlan:
    """A program's command line and environment under its tracer."""

    tracer: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables added to the caller's."""


def plan_recording(
    command: Sequence[str], folder: Path, *, tracer: str = "auto", data: Sequence[str] = ()
) -> RecordingPlan:
    """Plan to run `command` with its trace in `folder`; `data` limits dftracer to some folders."""
    if not command:
        raise UsageError(
            "There is no command to record", fix="Write it after --: penstock trace record -- python train.py"
        )
    preload = None if tracer == "strace" else dftracer_preload()
    if preload is not None:
        return RecordingPlan(
            tracer="dftracer",
            argv=tuple(command),
            environment={
                "LD_PRELOAD": str(preload),
                "DFTRACER_ENABLE": "1",
                # Without it events have no paths, no bytes and no hosts.
                "DFTRACER_INC_METADATA": "1",
                "DFTRACER_INIT": "PRELOAD",
                "DFTRACER_LOG_FILE": str(folder / "trace"),
                "DFTRACER_DATA_DIR": ":".join(data) or "all",
            },
        )
    strace = shutil.which("strace")
    if tracer == "dftracer" or strace is None:
        missing = "dftracer" if tracer == "dftracer" else "strace"
        raise Unavailable(
            f"{missing} is not installed, so other programs cannot be traced",
            fix="Run pip install dftracer, or apt-get install strace.",
        )
    # A listing does not name its host. Without it, two nodes would write the same files of a shared folder.
    name = f"trace{HOST_MARK}{socket.gethostname()}.strace"
    # One file per thread (-ff), so that none waits for another, and descriptors with their paths (-y).
    options = ["-ff", "-ttt", "-T", "-y", "-s", "0", "-e", WATCHED_CALLS, "-o", str(folder / name)]
    # Since 5.3 strace can leave calls that are not watched at full speed.
    described = subprocess.run([strace, "--help"], capture_output=True, text=True, check=False, timeout=60)
    if "--seccomp-bpf" in described.stdout:
        options.insert(0, "--seccomp-bpf")
    return RecordingPlan(tracer="strace", argv=(strace, *options, "--", *command), environment={})


def dftracer_preload() -> Path | None:
    """The library that the dftracer package preloads into programs; None if it is not installed."""
    package = find_spec("dftracer")
    for folder in package.submodule_search_locations or () if package is not None else ():
        for library in sorted(Path(folder).rglob("libdftracer_preload*.so")):
            return library
    return None


def record(recording: RecordingPlan, folder: Path) -> int:
    """Run the program to its end; returns its exit code, or 128 + the signal that ended it, as shells do."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **recording.environment}
    # Ctrl-C reaches the program, too: it must end in its own way, so that its trace is complete.
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        completed = subprocess.run(
            recording.argv,
            env=environment,
            check=False,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    except FileNotFoundError:
        raise UsageError(
            f"The program {recording.argv[0]} does not exist", fix="Check its name, or give its path."
        ) from None
    finally:
        signal.signal(signal.SIGINT, usual)
    return completed.returncode if completed.returncode >= 0 else 128 - completed.returncode
