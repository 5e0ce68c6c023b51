import os
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.launcher_command import (
    LaunchPlan,
    find_launcher,
    parse_version,
    plan_launch,
)
from penstock.cluster.launcher_env import Launcher
from penstock.errors import Unavailable, UsageError

PROGRAM = ("python", "-m", "penstock", "storage", "probe")
SECRETS = {"AWS_SECRET_ACCESS_KEY": "hush", "PENSTOCK_HOST": "rack7", "HOME": "/home/me", "MINE": "quiet"}


def plan(flavour: Launcher, **asked: Any) -> LaunchPlan:
    return plan_launch(PROGRAM, SECRETS, launcher=("/opt/launcher", flavour), **asked)


def options(flavour: Launcher, **asked: Any) -> str:
    argv = plan(flavour, **asked).argv
    assert argv[0] == "/opt/launcher"
    assert argv[-len(PROGRAM) :] == PROGRAM
    return " ".join(argv[1 : -len(PROGRAM)])


GOLDEN = {
    Launcher.HYDRA: {
        "ranks": "-genvall -disable-auto-cleanup -n 4",
        "hosts": "-genvall -disable-auto-cleanup -hosts a:2,b:2 -n 4",
        "hostfile": "-genvall -disable-auto-cleanup -f rack7.txt -n 4",
    },
    Launcher.OPEN_MPI: {
        "ranks": "--map-by :OVERSUBSCRIBE --bind-to none -x AWS_SECRET_ACCESS_KEY -x MINE "
        "-x PENSTOCK_CONTROL_ADDRESS -x PENSTOCK_CONTROL_TOKEN -x PENSTOCK_HOST -n 4",
        "hosts": "--map-by :OVERSUBSCRIBE --bind-to none --host a:2,b:2 -x AWS_SECRET_ACCESS_KEY -x MINE "
        "-x PENSTOCK_CONTROL_ADDRESS -x PENSTOCK_CONTROL_TOKEN -n 4",
        "hostfile": "--map-by :OVERSUBSCRIBE --bind-to none --hostfile rack7.txt -x AWS_SECRET_ACCESS_KEY "
        "-x MINE -x PENSTOCK_CONTROL_ADDRESS -x PENSTOCK_CONTROL_TOKEN -n 4",
    },
    Launcher.SRUN: {
        "ranks": "--export=ALL --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --ntasks=4",
        "hosts": "--export=ALL --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --nodes=2 --nodelist=a,b "
        "--ntasks-per-node=2 --ntasks=4",
        "hostfile": "--export=ALL --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --nodes=2 "
        "--nodelist=./rack7.txt --ntasks-per-node=2 --ntasks=4",
    },
    Launcher.PALS: {
        "ranks": "--envall --cpu-bind none -n 4",
        "hosts": "--envall --cpu-bind none --ppn 2 --hosts a,b -n 4",
        "hostfile": "--envall --cpu-bind none --ppn 2 --hostfile rack7.txt -n 4",
    },
}
ASKED: dict[str, dict[str, Any]] = {
    "ranks": {"ranks": 4},
    "hosts": {"hosts": "a:2,b:2"},
    "hostfile": {"hostfile": "rack7.txt"},
}


@pytest.mark.parametrize("flavour", GOLDEN)
@pytest.mark.parametrize("way", ASKED)
def test_each_launcher_gets_its_own_options(
    flavour: Launcher, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rack7.txt").write_text("a:2\nb:2\n")
    monkeypatch.chdir(tmp_path)
    assert options(flavour, env_names=("MINE",), **ASKED[way]) == GOLDEN[flavour][way]


@pytest.mark.parametrize("flavour", GOLDEN)
def test_no_value_of_a_variable_is_in_a_command_line(flavour: Launcher) -> None:
    shown = " ".join(plan(flavour, ranks=4, env_names=("MINE",)).argv)
    assert not [value for value in SECRETS.values() if value in shown]


@pytest.mark.parametrize("flavour", GOLDEN)
def test_the_plan_keeps_the_environment_but_this_machines_label_and_counts_ranks(flavour: Launcher) -> None:
    made = plan(flavour, hosts="a:3,b:3")
    rest = {name: value for name, value in SECRETS.items() if name != "PENSTOCK_HOST"}
    assert (made.environment, made.ranks, made.is_local) == (rest, 6, False)
    assert plan(flavour, hosts="a:3,b:3", env_names=("PENSTOCK_HOST",)).environment == SECRETS
    assert plan(flavour, hosts="localhost:3").environment == SECRETS


def test_extra_arguments_come_last_so_that_they_win() -> None:
    asked = options(Launcher.HYDRA, ranks=2, launcher_args=("-launcher", "fork"))
    assert asked == "-genvall -disable-auto-cleanup -n 2 -launcher fork"


def test_a_host_file_elsewhere_keeps_its_path_for_srun(tmp_path: Path) -> None:
    (tmp_path / "rack7").write_text("127.0.0.2:3\n")
    asked = plan(Launcher.SRUN, hostfile=str(tmp_path / "rack7"))
    assert asked.ranks == 3
    assert f"--nodelist={tmp_path}/rack7" in asked.argv


@pytest.mark.parametrize("flavour", [Launcher.SRUN, Launcher.PALS])
def test_unequal_counts_are_refused_where_a_launcher_cannot_place_them(flavour: Launcher) -> None:
    with pytest.raises(UsageError, match="same number of ranks on each host") as caught:
        plan(flavour, hosts="a:1,b:2")
    assert caught.value.where == "a:1, b:2"


@pytest.mark.parametrize("ranks", [0, -1])
def test_fewer_than_one_rank_cannot_run(ranks: int) -> None:
    with pytest.raises(UsageError, match="--ranks is"):
        plan(Launcher.HYDRA, ranks=ranks)


def test_ranks_that_would_stall_this_machine_are_refused_unless_it_is_named() -> None:
    most = 8 * len(os.sched_getaffinity(0))
    assert plan(Launcher.HYDRA, ranks=most).ranks == most
    with pytest.raises(UsageError, match=rf"insist with --hosts localhost:{most + 1}\."):
        plan(Launcher.HYDRA, ranks=most + 1)
    assert plan(Launcher.HYDRA, hosts=f"localhost:{most + 1}").ranks == most + 1
    assert plan(Launcher.SRUN, ranks=most + 1).ranks == most + 1


def test_nothing_to_count_ranks_by_is_refused() -> None:
    with pytest.raises(UsageError, match="number of ranks"):
        plan(Launcher.HYDRA)


def test_more_ranks_than_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="5 ranks do not fit into 4 slots") as caught:
        plan(Launcher.HYDRA, ranks=5, hosts="a:2,b:2")
    assert caught.value.where == "--hosts a:2,b:2"


def test_a_value_behind_an_env_name_is_refused_without_repeating_it() -> None:
    with pytest.raises(UsageError, match="holds a value") as caught:
        plan(Launcher.HYDRA, ranks=2, env_names=("TOKEN=hush-hush",))
    assert "hush-hush" not in str(caught.value)


def test_an_env_name_that_is_not_set_is_refused() -> None:
    with pytest.raises(UsageError, match="--env NOBODY is not set"):
        plan(Launcher.HYDRA, ranks=2, env_names=("NOBODY",))


@pytest.mark.parametrize(
    ("flavour", "environment", "asked", "local"),
    [
        (Launcher.HYDRA, {}, {"ranks": 2}, True),
        (Launcher.OPEN_MPI, {}, {"ranks": 2}, True),
        (Launcher.SRUN, {}, {"ranks": 2}, False),
        (Launcher.PALS, {}, {"ranks": 2}, False),
        (Launcher.HYDRA, {"SLURM_JOB_ID": "7"}, {"ranks": 2}, False),
        (Launcher.HYDRA, {"PBS_NODEFILE": "/var/x"}, {"hosts": "localhost:2"}, True),
        (Launcher.HYDRA, {}, {"hosts": "127.0.0.2:1,127.0.0.3:1"}, True),
        (Launcher.HYDRA, {}, {"hosts": "127.0.0.2:1,node1:1"}, False),
    ],
)
def test_a_job_is_local_only_when_no_rank_can_be_elsewhere(
    flavour: Launcher,
    environment: dict[str, str],
    asked: dict[str, Any],
    local: bool,  # noqa: FBT001 - a table
) -> None:
    made = plan_launch(PROGRAM, environment, launcher=("x", flavour), **asked)
    assert made.is_local is local


@pytest.mark.parametrize(
    ("said", "flavour"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", Launcher.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14", Launcher.HYDRA),
        ("mpiexec (Open MPI) 5.0.11", Launcher.OPEN_MPI),
        ("mpirun (OpenRTE) 4.1.6", Launcher.OPEN_MPI),
        ("prterun (PRRTE) 3.0.6", Launcher.OPEN_MPI),
        ("mpiexec version 1.5.0 (PALS)", Launcher.PALS),
        ("slurm 24.05.1", Launcher.SRUN),
    ],
)
def test_a_launchers_flavour_is_parsed_from_its_version(said: str, flavour: Launcher) -> None:
    assert parse_version(said, "mpiexec") is flavour


def test_an_unknown_launcher_is_refused_with_its_version_text() -> None:
    with pytest.raises(Unavailable, match=r"LAM 7\.1"):
        parse_version("LAM 7.1", "mpiexec")


def fake_launcher(folder: Path, name: str, says: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    return program


def test_the_launcher_beside_this_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    beside = fake_launcher(tmp_path, "mpiexec", "echo HYDRA")
    assert find_launcher("auto", {"PATH": "/usr/bin:/bin"}) == (str(beside), Launcher.HYDRA)


def test_without_one_beside_it_path_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    folder = tmp_path / "bin"
    folder.mkdir()
    found = {
        name: str(fake_launcher(folder, name, "echo Open MPI")) for name in ("mpirun", "srun", "mpiexec")
    }
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    assert find_launcher("mpirun", environment) == (found["mpirun"], Launcher.OPEN_MPI)
    assert find_launcher("srun", environment) == (found["srun"], Launcher.SRUN)
    assert find_launcher("pals", environment) == (found["mpiexec"], Launcher.PALS)


@pytest.mark.parametrize(
    ("name", "fix"),
    [("auto", "pip install 'penstock-io[mpi]'"), ("srun", "Slurm allocation"), ("pals", "PALS module")],
)
def test_a_missing_launcher_is_an_error_with_a_fix(
    name: Any, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(Unavailable) as caught:
        find_launcher(name, {"PATH": str(tmp_path)})
    assert fix in caught.value.fix


def test_a_launcher_that_cannot_run_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "mpiexec").write_text("no program")
    with pytest.raises(Unavailable, match="--version failed"):
        find_launcher("auto", {"PATH": ""})
