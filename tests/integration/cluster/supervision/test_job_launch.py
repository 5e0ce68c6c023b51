"""The launching process against launchers that misbehave, each a real program."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.cluster.launcher_command import LaunchPlan
from penstock.cluster.launcher_env import Launcher
from penstock.cluster.supervision import launch_job
from penstock.cluster.supervision.supervisor import describe_exit
from penstock.environment import process_environment
from penstock.errors import RankError, RankFailed, Unavailable

CONNECT = """
import sys
from penstock.cluster.supervision.control_protocol import connect_to_server
from penstock.environment import process_environment
environment = process_environment()
address, token = environment["PENSTOCK_CONTROL_ADDRESS"], environment["PENSTOCK_CONTROL_TOKEN"]
channel = connect_to_server(address, token, rank=0, host="here", pid=1)
"""


def plan(*argv: str, ranks: int = 1, is_local: bool = True) -> LaunchPlan:
    environment = process_environment()
    return LaunchPlan(
        argv=argv, environment=environment, ranks=ranks, launcher=Launcher.HYDRA, is_local=is_local
    )


def python_plan(program: str, *, ranks: int = 1, is_local: bool = True) -> LaunchPlan:
    return plan(sys.executable, "-c", CONNECT + program, ranks=ranks, is_local=is_local)


def test_a_launcher_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="cannot be started"):
        launch_job(plan("/no/such/mpiexec"))


def test_a_launcher_that_ends_before_any_rank_keeps_its_words(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    with pytest.raises(RankError, match="ended with exit code 255 before any rank had started"):
        launch_job(plan("sh", "-c", "echo ssh: no route to host >&2; exit 255"))
    assert b"no route to host" in capfdbinary.readouterr().err


def test_ranks_that_never_start_end_the_wait_by_name(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with pytest.raises(
        RankFailed, match=r"Timed out after 0\.5 s waiting for 2 of 2 ranks to start \(0, 1\)"
    ):
        launch_job(plan("sleep", "60", ranks=2), start_timeout_s=0.5)


def test_a_launcher_that_ignores_sigterm_is_killed(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RankFailed, match="ranks to start"):
        launch_job(plan("sh", "-c", "trap '' TERM; sleep 60 & wait; sleep 60"), start_timeout_s=0.2)
    assert psutil.Process().children(recursive=True) == before


def test_ranks_that_never_reported_are_counted(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with pytest.raises(RankFailed, match="its launcher ended with exit code 7"):
        launch_job(python_plan("channel.send('finished', rank=0, exit_code=0); sys.exit(7)", ranks=2))


def test_the_exit_code_is_rank_0s(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    program = "print('{}'); channel.send('finished', rank=0, exit_code=4); channel.receive()"
    assert launch_job(python_plan(program)) == 4
    assert capfdbinary.readouterr().out == b"{}\n"


def test_ranks_on_other_machines_are_reached_on_all_interfaces(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    program = "print(address); channel.send('finished', rank=0, exit_code=0); channel.receive()"
    assert launch_job(python_plan(program, is_local=False)) == 0
    assert capfdbinary.readouterr().out.count(b",") >= 1


def test_output_after_a_failure_is_kept_as_a_note(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    program = (
        "channel.send('failed', rank=0, host='here', cause='no water', ending='failed'); channel.receive();"
        "print('=   BAD TERMINATION'); print('noise', file=sys.stderr)"
    )
    with pytest.raises(RankFailed, match="Rank 0 on here failed: no water") as caught:
        launch_job(python_plan(program))
    out, err = capfdbinary.readouterr()
    assert b"BAD TERMINATION" not in out + err
    assert "Output after the failure:" in caught.value.__notes__[0]
    assert "noise" in caught.value.__notes__[0]


def test_the_handler_of_sigterm_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Unavailable):
        launch_job(plan("/no/such/mpiexec"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_output_that_cannot_be_written_fails_the_job(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = Path(__file__).parents[1] / "programs" / "launch.py"
    argv = [sys.executable, str(program), '{"ranks": 2}', "rank.py", str(tmp_path), "sleep", "sleep", "1"]
    process = psutil.Popen(argv, stdout=writing, stderr=-1, text=True)
    os.close(writing)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "its output cannot be written" in said


def test_the_end_of_a_process_is_described_by_exit_code_or_signal() -> None:
    assert describe_exit(3) == "its process ended early, with exit code 3"
    assert describe_exit(-11) == "its process was killed by SIGSEGV (signal 11)"
    full = ", most often for want of space in /dev/shm (in a container: --shm-size)"
    assert describe_exit(-7) == f"its process was killed by SIGBUS (signal 7){full}"


def test_ending_processes_that_have_ended_is_no_error() -> None:
    # In a process of its own: whoever calls it loses all its children.
    program = (
        "import psutil; from penstock.cluster.supervision.supervisor import end_processes\n"
        "ended, _other = psutil.Popen(['true']), psutil.Popen(['sleep', '60'])\n"
        "ended.wait(timeout=10); end_processes([ended])\n"
        "assert not psutil.Process().children()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
