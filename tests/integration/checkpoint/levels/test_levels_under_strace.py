"""What caches cost in system calls, as strace counts them on each data file."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import penstock.trace

SAVES = """
import sys
from pathlib import Path
import penstock.checkpoint as pc
import torch
torch.set_num_threads(1)
state = {f"weight_{number}": torch.ones(1 << 16) for number in range(4)}
root = Path(sys.argv[1])
with pc.Manager(root / "plain") as manager:
    manager.save(1, state)
with pc.Manager(root / "durable", cache=root / "cache", flush=None) as manager:
    manager.save(1, state)
flush = pc.Flush(by="trainer")
with pc.Manager(root / "later", cache=root / "flushed", flush=flush) as manager:
    manager.save(1, state)
"""
MORE_CALLS = 2


def calls_by_file(trace: Path, root: Path) -> dict[str, Counter[str]]:
    """For each folder below `root`: its system calls by name, a data file."""
    found: dict[str, Counter[str]] = {}
    files: dict[str, set[str]] = {}
    with penstock.trace.load(trace, where="path LIKE '%.distcp'") as run:
        for path, name in run.sql("SELECT path, name FROM events").fetchall():
            place = Path(path).relative_to(root).parts[0]
            found.setdefault(place, Counter())[name] += 1
            files.setdefault(place, set()).add(Path(path).name)
    return {
        place: Counter({name: number // len(files[place]) for name, number in counted.items()})
        for place, counted in found.items()
    }


def test_a_cached_save_costs_at_most_two_system_calls_a_file_more_than_a_plain_one(
    tmp_path: Path,
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "calls.strace"
    command = ["strace", "-f", "--seccomp-bpf", "-qq", "-ttt", "-T", "-y", "-o", str(trace)]
    command += ["-e", "trace=%file,%desc", sys.executable, "-c", SAVES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    if "ptrace" in done.stderr or "seccomp" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    calls = calls_by_file(trace, tmp_path)
    assert calls["plain"]["fsync"] >= 1
    assert sum(calls["cache"].values()) <= sum(calls["plain"].values()) + MORE_CALLS
    # What is flushed is opened once more, looked at, read and closed: a cache file's bytes have to be read.
    read = calls["flushed"]["pread64"] + calls["flushed"]["preadv2"]
    assert sum(calls["flushed"].values()) - read <= sum(calls["plain"].values()) + MORE_CALLS + 1
