"""Runs in folders that users name: an earlier run is replaced unless it is active."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from penstock.cluster.facts.host_facts import AbsentHost, ClusterFacts
from penstock.errors import StorageError, UsageError
from penstock.results.active_run import ActiveRun
from penstock.results.history import HistoryFile
from penstock.results.parquet_tables import Spool
from penstock.results.provenance import read_host
from penstock.results.run_folder import RUN_FILE, run_folder_name
from penstock.results.run_record import RunOutcome, RunRequest, read_record
from penstock.workload.load_workload import load


def request() -> RunRequest:
    return RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[read_host("n")], command=["x"])


def test_the_folder_is_made_and_gives_the_run_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with ActiveRun.start_in(folder, request()) as run:
        assert run.folder == folder
        run.finish()
    assert read_record(folder).id == "run"
    assert read_record(folder).outcome is RunOutcome.FINISHED


def test_files_of_an_earlier_run_are_removed_and_others_stay(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["spool", "counters"])
def test_nothing_is_removed_or_written_through_a_linked_folder(name: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    with ActiveRun.start_in(folder, request()) as run:
        run.finish()
    outside.mkdir()
    files = [outside / "000000.jsonl", outside / "000000.events"]
    for file in files:
        file.touch()
    (folder / name).symlink_to(outside)
    with pytest.raises(StorageError, match=f"{name} is a link"):
        ActiveRun.start_in(folder, request())
    assert all(file.exists() for file in files)
    with pytest.raises(StorageError, match=f"{name} is a link"):
        Spool(folder / name / "000001.events", {})
    assert sorted(outside.iterdir()) == sorted(files)


def test_a_folder_without_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with ActiveRun.start_in(tmp_path, request()) as run:
        run.finish()
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_active_run_is_not_replaced(tmp_path: Path) -> None:
    with ActiveRun.start_in(tmp_path, request()) as run:
        with pytest.raises(UsageError, match="is active"):
            ActiveRun.start_in(tmp_path, request())
        run.finish()
    assert read_record(tmp_path).outcome is RunOutcome.FINISHED


def test_facts_of_the_cluster_are_written_beside_the_record(tmp_path: Path) -> None:
    cluster = ClusterFacts(
        via="mpi",
        collected_at="2026-07-01",
        asked=("n",),
        is_partial=True,
        present=(),
        absent=(AbsentHost(host="n", reason="it did not answer", exit_code=None, stderr=""),),
    )
    with ActiveRun.start_in(tmp_path / "run", replace(request(), cluster=cluster)) as run:
        run.finish()
    text = (tmp_path / "run" / "cluster.json").read_text()
    assert ClusterFacts.model_validate_json(text) == cluster
    assert text.endswith("}\n")
    with ActiveRun.start_in(tmp_path / "other", request()) as run:
        run.finish()
    assert not (tmp_path / "other" / "cluster.json").exists()


def test_run_is_entered_in_the_history_of_its_parent_only_if_there_is_one(tmp_path: Path) -> None:
    with ActiveRun.start_in(tmp_path / "first", request()) as run:
        run.finish()
    assert not HistoryFile(tmp_path).exists()
    with ActiveRun.start(tmp_path, request()) as run:
        run.finish()
    with ActiveRun.start_in(tmp_path / "second", request()) as run:
        run.finish()
    began, ended, named_began, named_ended = HistoryFile(tmp_path).read()[0]
    name = run_folder_name("unet3d_h100", datetime.fromisoformat(began["at"]), began["run"])
    assert (began["event"], began["is_named"], began["folder"]) == ("began", False, name)
    assert (ended["event"], ended["run"], ended["outcome"]) == ("ended", began["run"], "finished")
    assert (named_began["is_named"], named_began["folder"]) == (True, "second")
    assert named_ended["run"] == named_began["run"]


def test_failed_run_is_entered_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad"), ActiveRun.start(tmp_path, request()):
        raise ValueError("bad batch")
    ended = HistoryFile(tmp_path).read()[0][-1]
    assert (ended["outcome"], ended["why"]) == ("failed", "ValueError: bad batch")
