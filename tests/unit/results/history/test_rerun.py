"""A run once more: the same words in the same folder, or a refusal that says what to do."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.results.history.history_file import RunBegan
from penstock.results.history.rerun import plan_rerun
from penstock.results.history.run_catalog import CatalogedRun, FolderPlace
from penstock.results.provenance import ProcessMark


def a_run(tmp_path: Path, *command: str, ranks: int = 1, is_named: bool = False) -> CatalogedRun:
    began = RunBegan(
        run="1a2b3c",
        at="2026-01-02T03:04:05.000000+00:00",
        folder="mine",
        is_named=is_named,
        workload="unet3d_h100",
        ranks=ranks,
        command=command,
        working_folder=str(tmp_path),
        settings={"AWS_REGION": "there", "PENSTOCK_X": "1"},
        process=ProcessMark(boot_id="b", pid_namespace=1, pid=2, start_ticks=3),
    )
    return CatalogedRun(
        id="1a2b3c",
        folder="mine",
        path=tmp_path / "mine",
        where=FolderPlace.HERE,
        batch="",
        outcome="finished",
        why="",
        workload="unet3d_h100",
        started=None,
        began=began,
        summary=None,
    )


def test_rerun_has_the_same_arguments_whatever_they_contain(tmp_path: Path) -> None:
    words = ("training", "run", "--data", "a b; rm -rf $HOME", "--set", "x='y'", "ü")
    replay = plan_rerun(a_run(tmp_path, "penstock", *words), {})
    assert replay.arguments[0] == sys.executable
    assert replay.arguments[3:] == words
    assert "from penstock.cli import main" in replay.arguments[2]
    assert replay.working_folder == str(tmp_path)
    assert replay.command == "penstock training run --data 'a b; rm -rf $HOME' --set 'x='\"'\"'y'\"'\"'' 'ü'"


def test_dlios_command_line_starts_its_own_program(tmp_path: Path) -> None:
    replay = plan_rerun(a_run(tmp_path, "penstock-dlio", "workload=unet3d_h100"), {})
    assert "from penstock.cli.dlio import main" in replay.arguments[2]


def test_changed_settings_are_listed(tmp_path: Path) -> None:
    run = a_run(tmp_path, "penstock", "training", "run")
    assert plan_rerun(run, {"AWS_REGION": "here", "AWS_NEW": "2", "PENSTOCK_X": "1"}).notes == (
        "AWS_NEW was not set, and is now 2",
        "AWS_REGION was there, and is now here",
    )


@pytest.mark.parametrize(
    ("command", "ranks", "reason", "advice"),
    [
        (("penstock", "training", "run", "--token", "***"), 1, "had a secret", "in the environment"),
        (("penstock", "run", "s3://***@host/x"), 1, "had a secret", "in the environment"),
        (("penstock", "run", "caf\ufffd"), 1, "not text", "yourself"),
        (("penstock", "training", "run"), 4, "started by a launcher", "mpiexec -n 4 penstock training run"),
        (("their-tool", "run"), 1, "another program", "Repeat it with that program"),
        ((), 1, "another program", "Repeat it with that program"),
    ],
)
def test_command_that_would_differ_is_refused(
    tmp_path: Path, command: tuple[str, ...], ranks: int, reason: str, advice: str
) -> None:
    with pytest.raises(UsageError, match=reason) as refusal:
        plan_rerun(a_run(tmp_path, *command, ranks=ranks), {})
    assert advice in refusal.value.fix


@pytest.mark.parametrize("option", [("--ranks", "4"), ("--ranks=4",), ("--hosts", "a:2,b:2")])
def test_ranks_that_the_command_starts_itself_are_its_own(tmp_path: Path, option: tuple[str, ...]) -> None:
    assert plan_rerun(a_run(tmp_path, "penstock", "training", "run", *option, ranks=4), {}).notes


def test_missing_working_folder_is_an_error(tmp_path: Path) -> None:
    run = a_run(tmp_path / "gone", "penstock", "training", "run")
    with pytest.raises(UsageError, match="is gone"):
        plan_rerun(run, {})


def test_a_repetition_never_clears_the_run_that_it_repeats(tmp_path: Path) -> None:
    run = a_run(tmp_path, "penstock-dlio", "++hydra.run.dir=out/mine", is_named=True)
    with pytest.raises(UsageError, match="would overwrite") as refusal:
        plan_rerun(run, {})
    assert "penstock results rm 1a2b3c" in refusal.value.fix
    assert plan_rerun(replace(run, path=None), {}).working_folder == str(tmp_path)


def test_run_without_an_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no entry for mine"):
        plan_rerun(replace(a_run(tmp_path), began=None), {})
