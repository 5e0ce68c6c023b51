"""Verbs on several ranks: launched by us, joined under somebody else's launcher, killed, interrupted."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import psutil
import pytest

pytest.importorskip("mpi4py")

QUICK = ("--size", "4MiB", "--streams", "2", "--blocks", "1MiB", "--json")
LONG = ("--size", "16GiB", "--json")


def _probe(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "storage", "probe", f"direct://{folder}", *words]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_probe_on_ranks_adds_up_all_ranks(tmp_path: Path) -> None:
    result = _run(_probe(tmp_path, *QUICK, "--ranks", "4"))
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["ranks"] == 4
    (write,) = [seen for seen in document["measurements"] if seen["op"] == "write"]
    assert write["ranks"] == 4
    assert write["moved_bytes"] == 4 * 2 * (1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_two_hosts_on_loopback_are_launched_without_a_remote_shell(tmp_path: Path) -> None:
    hosts = ("--hosts", "127.0.0.2:1,127.0.0.3:1", "--launcher-arg=-launcher", "--launcher-arg=fork")
    result = _run(_probe(tmp_path, *QUICK, *hosts))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ranks"] == 2


def test_command_joins_the_job_of_mpiexec(tmp_path: Path) -> None:
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    result = _run([mpiexec, "-n", "2", *_probe(tmp_path, *QUICK)])
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ranks"] == 2


def test_command_joins_the_job_of_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = _run([*torchrun, "-m", *_probe(tmp_path, *QUICK)[2:]])
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ranks"] == 2


def test_wrong_usage_on_ranks_is_reported_once_with_its_exit_code(tmp_path: Path) -> None:
    result = _run(_probe(tmp_path, "-O", "fsink=no", "--ranks", "2"))
    assert result.returncode == 2
    assert result.stderr.count("Did you mean 'fsync'?") == 1


def test_progress_of_ranks_is_drawn_on_the_launching_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = _probe(tmp_path, *QUICK, "--ranks", "2")
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as terminal:  # noqa: PTH123 - a descriptor has no path
        drawn = b"".join(iter(lambda: _piece(terminal), b"")).decode(errors="replace")
    assert running.wait(timeout=60) == 0
    assert "direct random_read" in drawn
    assert "100%" in drawn


def _piece(terminal: FileIO) -> bytes:
    try:
        return terminal.read(4096) or b""
    except OSError:  # the other end has closed
        return b""


def test_invalid_timeout_names_its_option(tmp_path: Path) -> None:
    result = _run(_probe(tmp_path, *QUICK, "--timeout", "soon"))
    assert result.returncode == 2
    assert "--timeout" in result.stderr


@contextmanager
def _running(folder: Path, ranks: int) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A long probe, once all its ranks have written something; and every process that belongs to it."""
    command = _probe(folder, *LONG, "--ranks", str(ranks))
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.rglob(".penstock-*.unfinished"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        yield running, psutil.Process(running.pid).children(recursive=True)
    finally:
        running.kill()
        running.wait()


def _processes_of_rank(rank: int, family: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in family if one.environ().get("PMI_RANK") == str(rank)]


def _still_alive(family: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(family, timeout=10)
    return alive


@pytest.mark.parametrize("generation", ["first", "last"])
def test_killing_rank_2_ends_all_within_seconds_and_names_it(tmp_path: Path, generation: str) -> None:
    with _running(tmp_path, 4) as (running, family):
        victims = _processes_of_rank(2, family)
        began = time.monotonic()
        os.kill(victims[0 if generation == "first" else -1].pid, signal.SIGKILL)
        _, said = running.communicate(timeout=30)
        assert time.monotonic() - began < 10
        assert running.returncode == 1
        assert "Rank 2" in said
        assert _still_alive(family) == []
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    with _running(tmp_path, 2) as (running, family):
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
        assert running.returncode == 130
        assert "Traceback" not in said
        assert _still_alive(family) == []
    assert list(tmp_path.iterdir()) == []
