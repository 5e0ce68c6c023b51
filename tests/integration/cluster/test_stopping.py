"""One rank of four ends, the others wait: all must end, with one message that gives the cause."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.integration.cluster.conftest import Jobs

BIN = Path(sys.executable).parent


def test_ranks_that_finish_leave_rank_0s_words_and_nothing_else(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("barrier", "barrier", 2, "workers"))
    assert job.end() == 0
    assert json.loads(job.stdout)["size"] == 4
    assert job.stderr.count("noise of rank") == 3
    assert job.leftovers() == []


def test_an_exit_code_after_the_work_is_a_verdict_of_rank_0(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("barrier", "barrier", 2, "verdict"))
    assert job.end() == 5
    assert "failed" not in job.stderr


@pytest.mark.parametrize("others", ["barrier", "sleep", "write"])
def test_a_rank_that_is_killed_ends_all(jobs: Jobs, others: str) -> None:
    job = jobs.launch(*jobs.rank("kill", others, 2, "workers"))
    assert job.end() == 1
    assert "failed: its process was killed by SIGKILL (signal 9)" in job.stderr
    assert "Rank 2 on " in job.stderr
    assert "BAD TERMINATION" not in job.stdout + job.stderr
    assert job.leftovers() == []


@pytest.mark.parametrize("role", ["rank", "supervisor", "relay"])
def test_whichever_process_of_a_rank_is_killed_from_outside_all_ends(jobs: Jobs, role: str) -> None:
    job = jobs.launch(*jobs.rank("sleep", "sleep", 2, "workers"))
    supervisor = job.pid_of("2.supervisor")
    job.pid_of("2.worker")
    victims = {
        "rank": job.pid_of("2.rank"),
        "supervisor": supervisor,
        "relay": psutil.Process(supervisor).ppid(),
    }
    os.kill(victims[role], signal.SIGKILL)
    assert job.end() == 1
    assert "Rank 2 on " in job.stderr
    assert "killed" in job.stderr
    assert job.leftovers() == []


def test_a_rank_deaf_to_python_signals_is_killed_after_its_grace(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("kill", "compute", 2, "workers"))
    assert job.end() == 1
    assert "Rank 2 on " in job.stderr
    assert job.leftovers() == []


def test_ranks_that_are_stopped_clean_up_first(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("kill", "cleanup", 2))
    assert job.end() == 1
    assert list(jobs.directory.glob("*.partial")) == []
    assert job.leftovers() == []


def test_an_error_of_one_rank_is_printed_once_with_rank_host_and_cause(jobs: Jobs) -> None:
    jobs.environment["PENSTOCK_HOST"] = "pump-house"
    job = jobs.launch(*jobs.rank("raise", "barrier", 2, "workers"))
    assert job.end() == 1
    assert job.stderr.count("Rank 2 on pump-house failed: ValueError: the tank is empty") == 1
    assert "Traceback" not in job.stderr
    assert job.leftovers() == []


def test_the_traceback_of_a_foreign_error_travels_for_who_asks(jobs: Jobs) -> None:
    jobs.environment["PENSTOCK_SHOW_NOTES"] = "1"
    job = jobs.launch(*jobs.rank("raise"))
    assert job.end() == 1
    assert "Traceback" in job.stderr
    assert "in raise_error" in job.stderr


def test_a_step_that_fails_on_one_rank_fails_on_all_in_its_name(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("collect"))
    assert job.end() == 1
    assert "Rank 2 on " in job.stderr
    assert "the tank is empty" in job.stderr


@pytest.mark.parametrize(
    ("scene", "code", "said"),
    [
        ("exit3", 1, "it left with exit code 3"),
        ("usage", 2, "Nobody asks like that. Ask otherwise."),
        ("unavailable", 3, "No tank here"),
        ("interrupt", 130, ""),
    ],
)
def test_how_a_rank_ends_decides_the_jobs_exit_code(jobs: Jobs, scene: str, code: int, said: str) -> None:
    job = jobs.launch(*jobs.rank(scene))
    assert job.end() == code
    assert said in job.stderr
    assert job.leftovers() == []


def test_a_timeout_names_what_was_awaited_and_who_did_not_come(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("timeout"))
    assert job.end() == 1
    assert "Rank 2 on " in job.stderr
    assert "did not arrive" in job.stderr
    assert "Timed out after 1 s waiting for all ranks to drink" in job.stderr
    assert job.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_launching_process_ends_all_with_130(jobs: Jobs, number: signal.Signals) -> None:
    job = jobs.launch(*jobs.rank("sleep", "cleanup", 2, "workers"))
    for rank in range(4):
        job.pid_of(f"{rank}.detached")
    job.process.send_signal(number)
    assert job.end() == 130
    assert job.leftovers() == []
    assert list(jobs.directory.glob("*.partial")) == []


def test_killing_the_launching_process_leaves_no_orphan(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("sleep", "barrier", 2, "workers"))
    for rank in range(4):
        job.pid_of(f"{rank}.detached")
    job.process.kill()
    job.end()
    assert job.leftovers() == []


@pytest.mark.parametrize("name", ["mpiexec", "hydra_pmi_proxy"])
def test_killing_a_part_of_the_launcher_ends_all(jobs: Jobs, name: str) -> None:
    job = jobs.launch(*jobs.rank("sleep", "sleep", 2, "workers"))
    for rank in range(4):
        job.pid_of(f"{rank}.detached")
    family = psutil.Process(job.process.pid).children(recursive=True)
    (part,) = [process for process in family if process.name() == name]
    part.kill()
    assert job.end() == 1
    assert "was killed" in job.stderr
    assert job.leftovers() == []


def test_a_signal_to_one_rank_from_its_launcher_interrupts_all(jobs: Jobs) -> None:
    job = jobs.launch(*jobs.rank("sleep", "sleep"))
    front = psutil.Process(job.pid_of("1.supervisor")).ppid()
    os.kill(front, signal.SIGTERM)
    assert job.end() == 130
    assert job.leftovers() == []


def test_two_simulated_hosts_are_named_in_messages(jobs: Jobs) -> None:
    job = jobs.launch(
        *jobs.rank("raise", "barrier", 1),
        ranks=None,
        hosts="127.0.0.2:1,127.0.0.3:1",
        launcher_args=["-launcher", "fork"],
    )
    assert job.end() == 1
    assert "Rank 1 on 127.0.0.3 failed: ValueError" in job.stderr
    assert job.leftovers() == []


def test_a_host_file_places_ranks(jobs: Jobs, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two of them\n127.0.0.2:1\n127.0.0.3:1\n")
    job = jobs.launch(
        *jobs.rank("barrier"), ranks=2, hostfile=str(hostfile), launcher_args=["-launcher", "fork"]
    )
    assert job.end() == 0, job.stderr
    assert json.loads(job.stdout) == {"size": 2, "host": "127.0.0.2"}


def test_settings_reach_all_ranks_and_no_command_line(jobs: Jobs) -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-of-aws",
        "PENSTOCK_HOST": "s3cr3t-host",
        "MINE": "s3cr3t-mine",
    }
    jobs.environment.update(secrets)
    job = jobs.launch(
        *jobs.rank("sleep", "sleep"),
        env_names=["MINE"],
        hosts="127.0.0.2:2,127.0.0.3:2",
        launcher_args=["-launcher", "fork"],
    )
    ranks = [psutil.Process(job.pid_of(f"{rank}.rank")) for rank in range(4)]
    family = psutil.Process(job.process.pid).children(recursive=True)
    assert len(family) > 8
    assert all(secrets.items() <= rank.environ().items() for rank in ranks)
    token = ranks[0].environ()["PENSTOCK_CONTROL_TOKEN"]
    shown = " ".join(" ".join(process.cmdline()) for process in family)
    assert not [secret for secret in (*secrets.values(), token) if secret in shown]
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130


def test_a_program_that_cannot_start_shows_the_launchers_message(jobs: Jobs) -> None:
    job = jobs.launch(program="no_such_program.py")
    assert job.end() == 1
    assert "before any rank had started" in job.stderr
    assert "can't open file" in job.stderr


def test_under_another_launcher_rank_0_prints_the_error_and_nothing_is_left(jobs: Jobs) -> None:
    program = str(Path(__file__).parent / "programs" / "rank.py")
    job = jobs.run(
        program, *jobs.rank("kill", "sleep", 2, "workers"), launcher=(str(BIN / "mpiexec"), "-n", "3")
    )
    assert job.end() != 0
    assert job.stderr.count("Rank 2 on ") == 1
    assert job.leftovers() == []


def test_under_a_foreign_mpiexec_the_loss_of_rank_0s_guard_ends_all(jobs: Jobs) -> None:
    program = str(Path(__file__).parent / "programs" / "rank.py")
    argv = jobs.rank("kill-supervisor", "sleep", 0, "workers")
    job = jobs.run(program, *argv, launcher=(str(BIN / "mpiexec"), "-n", "3"))
    assert job.end() != 0
    # A supervisor that was still joining reports for itself.
    assert 1 <= job.stderr.count("the control server of the job is gone") <= 2
    assert job.leftovers() == []


def test_a_supervisor_that_cannot_reach_the_launching_process_prints_the_error(jobs: Jobs) -> None:
    jobs.environment |= {"PENSTOCK_CONTROL_ADDRESS": "127.0.0.1:1", "PENSTOCK_CONTROL_TOKEN": "hush"}
    program = str(Path(__file__).parent / "programs" / "rank.py")
    job = jobs.run(program, *jobs.rank("sleep"), launcher=(str(BIN / "mpiexec"), "-n", "1"))
    assert job.end() == 1
    assert "Rank 0 on " in job.stderr
    assert "cannot reach the process that launched it" in job.stderr


def test_a_guard_that_crashes_shows_where_and_leaves_nothing(jobs: Jobs) -> None:
    program = str(Path(__file__).parent / "programs" / "speechless.py")
    job = jobs.run(program, str(jobs.directory), launcher=(str(BIN / "mpiexec"), "-n", "1"))
    assert job.end() == 1
    assert "nobody listens" in job.stderr
    assert job.leftovers() == []


def test_under_torchrun_ranks_join_and_end_together(jobs: Jobs) -> None:
    program = str(Path(__file__).parent / "programs" / "rank.py")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", program)
    job = jobs.run(*torchrun, *jobs.rank("raise", "barrier", 1, "workers"))
    assert job.end() != 0
    assert "Rank 1 on " in job.stderr
    assert "ValueError: the tank is empty" in job.stderr
    assert job.leftovers() == []
