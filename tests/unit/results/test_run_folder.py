"""A run in a folder that its user named: the earlier run there gives way, unless it still goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.results.active_run import ActiveRun
from penstock.results.provenance import read_host
from penstock.results.run_folder import RUN_FILE
from penstock.results.run_record import RunOutcome, RunRequest, read_record
from penstock.workload.loading import load


def request() -> RunRequest:
    return RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[read_host("n")], command=["x"])


def test_the_folder_is_made_and_gives_the_run_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with ActiveRun.start_in(folder, request()) as run:
        assert run.folder == folder
        run.finish()
    assert read_record(folder).id == "run"
    assert read_record(folder).outcome is RunOutcome.FINISHED


def test_what_an_earlier_run_left_is_gone_and_other_files_stay(tmp_path: Path) -> None:
    with ActiveRun.start_in(tmp_path, request()) as run:
        run.finish()
    (tmp_path / "spool").mkdir()
    old = ["summary.json", "steps.parquet", "3_output.json", "3_per_epoch_stats.json", "spool/000003.events"]
    for name in (*old, "notes.txt", "my_output.json"):
        (tmp_path / name).touch()
    with ActiveRun.start_in(tmp_path, request()) as run:
        run.finish()
    assert {path.name for path in tmp_path.iterdir()} == {RUN_FILE, "spool", "notes.txt", "my_output.json"}
    assert not list((tmp_path / "spool").iterdir())


def test_a_folder_without_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with ActiveRun.start_in(tmp_path, request()) as run:
        run.finish()
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_a_run_that_goes_on_is_not_pushed_aside(tmp_path: Path) -> None:
    with ActiveRun.start_in(tmp_path, request()) as run:
        with pytest.raises(UsageError, match="is active"):
            ActiveRun.start_in(tmp_path, request())
        run.finish()
    assert read_record(tmp_path).outcome is RunOutcome.FINISHED
