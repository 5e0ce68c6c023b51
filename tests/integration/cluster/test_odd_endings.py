"""Unusual endings of jobs: crashes, many failures at once, early exits, stubborn workers, much output."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.integration.cluster.conftest import Jobs

BIN = Path(sys.executable).parent
RANK = str(Path(__file__).parent / "programs" / "rank.py")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_forked_workers_that_ignore_signals_end_with_their_rank(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("kill", "sleep", 2, "workers", "forked"))
    assert job.end() == 1
    assert "Rank 2 on " in job.stderr
    assert job.leftovers() == []


def test_workers_that_a_finished_rank_forgot_do_not_hold_the_job(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("barrier", "barrier", 0, "workers"), ranks=2)
    assert job.end() == 0
    assert job.leftovers() == []
    assert job.namesakes() == []


def test_a_segmentation_fault_is_named(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("crash"))
    assert job.end() == 1
    assert "failed: its process was killed by SIGSEGV (signal 11)" in job.stderr
    assert job.leftovers() == []


def test_rank_0_may_be_the_one_that_dies(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("kill", "barrier", 0))
    assert job.end() == 1
    assert "Rank 0 on " in job.stderr
    assert job.leftovers() == []


def test_when_all_ranks_fail_at_once_one_error_is_printed(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("raise-everywhere", "raise-everywhere"))
    assert job.end() == 1
    assert job.stderr.count(" failed: ValueError: the tank of rank ") == 1
    assert job.leftovers() == []


def test_a_value_that_cannot_travel_is_blamed_on_its_rank(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("unsendable", "unsendable"), ranks=2)
    assert job.end() == 1
    assert "Rank 0 on " in job.stderr
    assert "cannot send a lock to other ranks" in job.stderr


def test_a_rank_that_leaves_early_without_complaint_is_missed_at_the_next_step(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("leave", "timeout", 1), ranks=2, program="leaver.py")
    assert job.end() == 1
    assert "Rank 1 on " in job.stderr
    assert "did not arrive" in job.stderr
    assert job.namesakes() == []


def test_a_long_document_of_rank_0_arrives_whole_and_alone(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("much", "much"), ranks=2)
    assert job.end() == 0
    place, much = job.stdout.splitlines()
    assert json.loads(place)["size"] == 2
    assert len(json.loads(much)["much"]) == 20_000


def test_what_was_written_before_the_split_is_written_once(jobs: Jobs) -> None:
    job = jobs.launch(str(jobs.directory), program="early.py", ranks=2)
    assert job.end() == 0
    assert job.stdout.splitlines().count("before") == 2
    assert job.stdout.splitlines().count("after") == 1


def test_one_rank_can_be_launched_too(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("kill", "sleep", 0, "workers"), ranks=1)
    assert job.end() == 1
    assert "Rank 0 on " in job.stderr
    assert job.leftovers() == []


def test_more_ranks_than_cores_end_together_as_well(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("kill", "barrier", 7), ranks=12)
    assert job.end() == 1
    assert "Rank 7 on " in job.stderr
    assert job.namesakes() == []


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.4])
def test_an_interrupt_at_any_moment_of_the_start_ends_all(jobs: Jobs, after_s: float) -> None:
    job = jobs.launch(*jobs.rank("sleep", "sleep"))
    wait_until(lambda: bool(psutil.Process(job.process.pid).children()))
    time.sleep(after_s)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert job.namesakes() == []


def test_a_guard_that_comes_too_late_to_watch_its_launcher_ends_its_rank() -> None:
    program = Path(__file__).parent / "programs" / "orphaned.py"
    supervisor = subprocess.run(
        [sys.executable, str(program)], check=False, stdout=subprocess.PIPE, text=True, timeout=30
    )
    assert supervisor.returncode == 1
    assert not psutil.pid_exists(int(supervisor.stdout))


def test_a_second_interrupt_does_not_leave_anything_behind(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("kill-nobody", "compute", 9, "workers"))
    for rank in range(4):
        job.pid_of(f"{rank}.detached")
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGINT)
    assert job.end() in (1, 130, -signal.SIGINT)
    assert job.leftovers() == []
    assert job.namesakes() == []


def test_a_stopped_rank_is_killed_all_the_same(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("sleep", "sleep", 2, "workers"))
    stopped = job.pid_of("1.rank")
    job.pid_of("2.detached")
    os.kill(stopped, signal.SIGSTOP)
    os.kill(job.pid_of("2.rank"), signal.SIGKILL)
    assert job.end() == 1
    assert "Rank 2 on " in job.stderr
    assert job.leftovers() == []


def test_the_whole_family_is_known_by_one_rank_number(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("sleep", "sleep"))
    rank = psutil.Process(job.pid_of("2.rank"))
    supervisor = psutil.Process(job.pid_of("2.supervisor"))
    front = psutil.Process(supervisor.ppid())
    assert [each.environ()["PMI_RANK"] for each in (front, supervisor, rank)] == ["2"] * 3
    assert len({os.getpgid(each.pid) for each in (front, supervisor, rank)}) == 3
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 130


def test_ctrl_c_under_another_launcher_ends_all_ranks_without_an_error(jobs: Jobs) -> None:
    job = jobs.run(
        RANK, *jobs.rank("interrupt", "sleep", 1, "workers"), launcher=(str(BIN / "mpiexec"), "-n", "2")
    )
    assert job.end() != 0
    assert "interrupted" in job.stderr
    assert job.leftovers() == []


def test_a_verdict_in_a_foreign_job_is_the_launchers_exit_code(jobs: Jobs) -> None:
    launcher = (str(BIN / "mpiexec"), "-n", "2")
    job = jobs.run(RANK, *jobs.rank("barrier", "barrier", 1, "verdict"), launcher=launcher)
    assert job.end() == 5
    assert json.loads(job.stdout)["size"] == 2


def test_every_rank_refuses_a_size_that_contradicts_the_launcher(jobs: Jobs) -> None:
    program = (
        "from penstock.cluster.supervision import join_job\n"
        "from penstock.environment import process_environment\n"
        "with join_job(process_environment(), ranks=4): raise AssertionError\n"
    )
    job = jobs.run("-c", program, launcher=(str(BIN / "mpiexec"), "-n", "2"))
    assert job.end() != 0
    assert "--ranks is 4, but mpiexec started 2" in job.stderr
