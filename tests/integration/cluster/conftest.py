"""Jobs of real ranks, started as a user would, with a hard time limit and a search for leftover processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 40.0
ROLES = {".rank", ".supervisor", ".worker", ".child", ".detached"}


@dataclass
class Job:
    """A running job; `directory` is where its ranks write their process ids."""

    process: subprocess.Popen[str]
    directory: Path
    stdout: str = ""
    stderr: str = ""

    def end(self) -> int:
        self.stdout, self.stderr = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode

    def pid_of(self, name: str) -> int:
        """The process that rank and role `name`, for instance `2.supervisor`; waits until it is written."""
        path = self.directory / name
        wait_until(path.exists)
        return int(path.read_text())

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.directory.glob("?.*") if path.suffix in ROLES]

    def leftovers(self) -> list[str]:
        """What still runs of all that ranks wrote down, after a moment to end."""
        pids = self.pids()
        assert pids, "no rank wrote down its processes"
        wait_until(lambda: not any(is_running(pid) for pid in pids), or_go_on=True)
        return [" ".join(psutil.Process(pid).cmdline()) for pid in pids if is_running(pid)]

    def namesakes(self) -> list[str]:
        """What still runs with this job's directory on its command line, written down or not."""
        wait_until(lambda: not self._namesakes(), or_go_on=True)
        return self._namesakes()

    def _namesakes(self) -> list[str]:
        lines = (" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
        return [line for line in lines if str(self.directory) in line]


@dataclass
class Jobs:
    """Starts jobs; whatever is left of them when a test ends is killed, and was asserted on before."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    started: list[Job] = field(default_factory=list)

    def launch(self, *arguments: str, program: str = "rank.py", **request: object) -> Job:
        """The way of the command line: a launching process of ours, which starts the ranks."""
        options = json.dumps({"ranks": 4} | request)
        return self.run(str(PROGRAMS / "launch.py"), options, program, *arguments)

    def run(self, *argv: str, launcher: tuple[str, ...] = ()) -> Job:
        process = subprocess.Popen(
            [*launcher, sys.executable, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
        )
        self.started.append(Job(process, self.directory))
        return self.started[-1]

    def rank(self, scene: str, others: str = "barrier", actor: int = 2, *more: str) -> tuple[str, ...]:
        return (str(self.directory), scene, others, str(actor), *more)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], *, limit_s: float = 15.0, or_go_on: bool = False) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            assert or_go_on, f"not so after {limit_s:g} s: {condition}"
            return
        time.sleep(0.02)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    directory = tmp_path / "ranks"
    directory.mkdir()
    jobs = Jobs(directory)
    yield jobs
    for job in jobs.started:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate(timeout=LIMIT_S)
    for pid in {pid for job in jobs.started for pid in job.pids()}:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
