"""A command that is started twice on one folder: the second learns of the first, and leaves it alone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)

CHECKPOINTS = ("--scale", "0.00005", "--chunk", "1MiB", "--buffer-memory", "8MiB")
NO_LIMITS = [word for gate in ("limits", "ipc", "cluster") for word in ("--skip-gate", gate)]
TO = ("--to", "to", "--results", "runs")
COMMANDS = {
    "checkpoint run": (
        [
            *("checkpoint", "run", "llama3-8b", *CHECKPOINTS, *TO),
            "--interval",
            "2s",
            "--writes",
            "2",
            "--reads",
            "1",
        ],
        "to/penstock-checkpoints.json",
    ),
    "kvcache run": (
        ["kvcache", "run", *TO, "--scale", "1/1000", "--requests", "60", "--speedup", "3"],
        "to/**/*.kv",
    ),
    "kvcache run mlperf-v3": (
        [
            *("kvcache", "run", "mlperf-v3", *TO, "--scale", "1/1000"),
            *("--options", "1", "--duration", "5s", "--trials", "1"),
        ],
        "to/**/*.kv",
    ),
    "submission rehearse": (
        [
            *("submission", "rehearse", "retinanet", "to", "--scale", "0.000001"),
            *("--set", "reader.read_threads=0", *NO_LIMITS),
        ],
        "to/.mlps/under-way/**/run.json",
    ),
    "demo": (["demo", "--out", "to"], "to/*"),
}

ENDS_SOON = ("checkpoint run", "kvcache run mlperf-v3")


def penstock(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--json"],
        cwd=folder,
        env=os.environ | {"COLUMNS": "500"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def listed(folder: Path) -> dict[Path, tuple[int, int]]:
    """The size and time of all files of a folder."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}


def is_there(folder: Path, pattern: str) -> bool:
    try:
        return any(folder.glob(pattern))
    except FileNotFoundError:  # a folder went while it was searched
        return False


def states_of_group(group: int) -> list[str]:
    """The states of all threads in a process group, as letters of proc(5); zombies count as stopped."""
    states = []
    for path in Path("/proc").glob("[0-9]*/task/*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[2]) == group:
            states.append("T" if words[0] in "tZ" else words[0])
    return states


@contextmanager
def under_way(folder: Path, words: list[str], pattern: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is stopped, for as long as the block runs, once a file of this name exists."""
    process, deadline_s = penstock(folder, words), time.monotonic() + 240
    try:
        while not is_there(folder, pattern):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGSTOP)
        # A thread stops when its system call ends, which may still make a file.
        while any(state != "T" for state in states_of_group(process.pid)):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, []) for name in COMMANDS), ("checkpoint run", ["--ranks", "2"])],
    ids=[*COMMANDS, "checkpoint run on ranks"],
)
def test_a_second_start_is_refused_and_changes_nothing(tmp_path: Path, name: str, more: list[str]) -> None:
    words, pattern = COMMANDS[name]
    with under_way(tmp_path, words, pattern) as first:
        before = listed(tmp_path / "to")
        second = penstock(tmp_path, [*words, *more])
        out, said = second.communicate(timeout=240)
        told = f"Process {first.pid} (python) is using this folder ({tmp_path}/to). Wait until it ends, or"
        assert told in said, out + said
        assert second.returncode == 2
        assert listed(tmp_path / "to") == before
        if name in ENDS_SOON and not more:
            os.killpg(first.pid, signal.SIGCONT)
            out, said = first.communicate(timeout=400)
            assert first.returncode == 0, out + said
            assert json.loads(out)
