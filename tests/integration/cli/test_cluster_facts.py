"""Cluster facts through the command line: this machine, hosts under a launcher, and hosts that are broken."""

import json
import os
from pathlib import Path
from socket import gethostname

import psutil
import pytest
from tests.support.command_line import CommandResult, run_command

from penstock.cli import main
from penstock.cluster.facts.collect_facts import query_hosts

FORKED = ("--launcher-arg=-launcher", "--launcher-arg=fork")


def _cluster(*words: str, **environment: str) -> CommandResult:
    return run_command("cluster", *words, **environment)


def test_this_machine_is_collected_and_equals_itself(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    collected = _cluster("collect", "-o", str(file), "--json", AWS_SECRET_ACCESS_KEY="hush-hush")
    assert collected.returncode == 0, collected.stderr
    document = json.loads(collected.stdout)
    assert document == json.loads(file.read_text())
    (host,) = document["present"]
    assert host["report"]["memory_bytes"] == psutil.virtual_memory().total
    assert host["report"]["cpu"]["num_logical"] == psutil.cpu_count()
    assert host["report"]["environment"]["AWS_SECRET_ACCESS_KEY"] == "***"
    assert "hush-hush" not in collected.stdout
    checked = _cluster("check", str(file), "--json")
    assert json.loads(checked.stdout)["is_partial"] is False


def test_a_directory_that_does_not_exist_is_refused_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "collect", "-o", str(tmp_path / "missing" / "cluster.json")]) == 2
    assert "No such directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_has_the_same_exit_code_on_several_ranks(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    alone = _cluster("check", str(tmp_path / "missing.json"))
    several = _cluster("check", str(tmp_path / "missing.json"), "--ranks", "2")
    assert (several.returncode, alone.returncode) == (2, 2)
    assert alone.stderr.removeprefix("penstock: ") in several.stderr


def test_hosts_that_are_one_machine_are_detected(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    file = tmp_path / "cluster.json"
    collected = _cluster("collect", "--hosts", "127.0.0.2,127.0.0.3", *FORKED, "-o", str(file))
    assert collected.returncode == 0, collected.stderr
    checked = _cluster("check", str(file))
    assert checked.returncode == 1, checked.stderr
    assert "127.0.0.2, 127.0.0.3 are one machine" in checked.stdout


@pytest.mark.parametrize("partial", [(), ("--allow-partial",)])
def test_failing_host_is_an_error_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], partial: tuple[str, ...]
) -> None:
    words = ("--python", "/bin/false", "-o", str(tmp_path / "x"), *partial)
    assert main(["cluster", "collect", *words]) == 1
    assert f"1 of 1 hosts did not report: {gethostname()}: exit code 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--via", "mpi"), "Give --hosts"),
        (("--via", "local", "--hosts", "a,b"), "Leave --via out"),
        (("--via", "ssh"), "--hostfile FILE"),
        (("--via", "slurm"), "No hosts are named"),
        (("--via", "pigeon"), "Choose from: local, ssh, slurm, mpi"),
        (("--via", "ranks"), "Choose from: local, ssh, slurm, mpi"),
        (("--hosts", "a", "--hostfile", "b"), "mutually exclusive"),
        (("--hostfile", "/no/such/file"), "one host per line"),
        (("--via", "ssh", "--hosts", "a", "--launcher", "srun"), "Leave one of them out"),
        (("--hosts", "a,,b"), "node1:4,node2:4"),
        (("--timeout", "soon"), "--timeout"),
    ],
)
def test_wrong_usage_says_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["cluster", "collect", "-o", str(tmp_path / "x"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_file_with_other_content_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.json").write_text("{}")
    assert main(["cluster", "check", str(tmp_path / "cluster.json")]) == 1
    assert "cannot read these facts" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["collect", "check"])
def test_help_shows_examples_and_offers_json(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main(["cluster", verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert "Examples:" in said
    assert f"penstock cluster {verb}" in said
    assert "--json" in said


SRUN = """#!/bin/sh
case "$*" in
    *--nodelist=dead*) echo "srun: node is down" >&2; exit 255 ;;
    *--nodelist=hung*) sleep 1000 ;;
    *--nodelist=odd*) echo "Welcome!"; exit 0 ;;
esac
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A launcher that reaches some hosts, and fails, hangs or babbles at others."""
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return ("cluster", "collect", "--launcher", "srun", "-o", str(tmp_path / "cluster.json"))


def test_broken_hosts_are_named_beside_those_that_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], srun: tuple[str, ...]
) -> None:
    assert main([*srun, "--hosts", "good,dead,odd"]) == 1
    said = capsys.readouterr().err
    assert "2 of 3 hosts did not report" in said
    assert "dead: exit code 255, with the output: srun: node is down" in said
    assert "odd: no facts in its output: 'Welcome!'" in said
    assert "reported: good" in said
    assert not (tmp_path / "cluster.json").exists()


def test_partial_facts_are_marked_and_never_pass_all_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], srun: tuple[str, ...]
) -> None:
    assert main([*srun, "--hosts", "good,dead", "--allow-partial"]) == 0
    seen = capsys.readouterr()
    assert "dead is missing: exit code 255" in seen.err
    assert "PARTIAL: 1 missing, memory of all unknown" in seen.out
    assert json.loads((tmp_path / "cluster.json").read_text())["absent"][0]["host"] == "dead"
    assert main(["cluster", "check", str(tmp_path / "cluster.json")]) == 3


def test_hanging_host_is_named_after_its_timeout(
    capsys: pytest.CaptureFixture[str], srun: tuple[str, ...]
) -> None:
    assert main([*srun, "--hosts", "hung", "--timeout", "200ms"]) == 1
    assert "hung: no response within 0.2 s" in capsys.readouterr().err


def test_slurm_allocation_names_its_hosts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    srun: tuple[str, ...],
) -> None:
    words = ["cluster", "collect", "--via", "slurm", "-o", str(tmp_path / "cluster.json"), "--json"]
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames good[1-2]" ] && printf "good1\\ngood2\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "bad")
    assert main(words) == 3
    assert "hosts of this Slurm job cannot be listed" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NODELIST", "good[1-2]")
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["via"], document["asked"]) == ("slurm", ["good1", "good2"])


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_hanging_process_is_killed_at_its_limit_even_if_it_ignores_signals() -> None:
    before = _children()
    deaf = ("sh", "-c", "trap '' TERM; echo began; while :; do sleep 100; done")
    (answer,) = query_hosts(["b"], lambda _host: deaf, os.environ, timeout_s=0.2)
    assert answer.exit_code is None
    assert _children() <= before


def test_many_unresponsive_hosts_are_all_ended() -> None:
    before = _children()
    deaf = ("sh", "-c", "trap '' TERM; while :; do sleep 100; done")
    answers = list(query_hosts([f"h{n}" for n in range(8)], lambda _host: deaf, os.environ, timeout_s=0.5))
    assert {answer.exit_code for answer in answers} == {None}
    assert _children() <= before


def test_leaving_early_ends_all_started_processes() -> None:
    before = _children()
    answers = query_hosts(
        ["a", "b", "c"],
        lambda host: ("sh", "-c", f"test {host} = a || exec sleep 100"),
        os.environ,
        timeout_s=60,
    )
    assert next(answers).host == "a"
    answers.close()
    assert _children() <= before


def test_each_host_has_its_own_exit_code_and_output() -> None:
    queried = query_hosts(
        ["3", "4", "5"],
        lambda host: ("sh", "-c", f"echo {host}; echo no >&2; exit {host}"),
        os.environ,
        timeout_s=60,
        at_once=2,
    )
    answers = {answer.host: answer for answer in queried}
    assert {host: answer.exit_code for host, answer in answers.items()} == {"3": 3, "4": 4, "5": 5}
    assert all(answer.stdout == f"{host}\n" for host, answer in answers.items())
    assert {answer.stderr for answer in answers.values()} == {"no\n"}


def test_missing_program_is_reported_as_an_answer() -> None:
    (answer,) = query_hosts(["a"], lambda _host: ("/no/such/program",), os.environ, timeout_s=60)
    assert answer.exit_code == 127
    assert "/no/such/program" in answer.stderr
