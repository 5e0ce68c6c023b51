"""Catalogs of runs: folders, entries, damage and removals; nothing is dropped silently."""

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError, UsageError
from penstock.results.active_run import ActiveRun
from penstock.results.history import (
    CatalogedRun,
    HistoryFile,
    delete_runs,
    find_run,
    find_run_folder,
    format_entry,
    read_catalog,
)
from penstock.results.run_record import RunRequest
from penstock.workload.load_workload import load

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def request() -> RunRequest:
    return RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["penstock", "x"])


def finished(parent: Path) -> Path:
    with ActiveRun.start(parent, request()) as run:
        run.finish()
    return run.folder


def foreign(parent: Path, name: str) -> Path:
    (parent / name).mkdir(parents=True)
    (parent / name / "summary.json").write_text('{"start": "2024-01-01T00:00:00", "metric": {}}')
    return parent / name


def listed(parent: Path) -> list[CatalogedRun]:
    return read_catalog(parent)[0]


def only(parent: Path) -> CatalogedRun:
    (run,) = listed(parent)
    return run


def test_folders_without_entries_and_entries_without_folders_are_listed(tmp_path: Path) -> None:
    alien, lost = foreign(tmp_path, "run1"), finished(tmp_path)
    for path in lost.iterdir():
        path.unlink()
    lost.rmdir()
    by_name = {run.folder: run for run in listed(tmp_path)}
    assert (by_name["run1"].began, by_name["run1"].where) == (None, "here")
    assert by_name["run1"].path == alien
    assert (by_name[lost.name].where, by_name[lost.name].why) == ("gone", "Its folder is gone.")


def test_damaged_history_hides_no_run(tmp_path: Path) -> None:
    first, second = finished(tmp_path), finished(tmp_path)
    path = HistoryFile(tmp_path).path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\0\0\0\n" + b"".join(lines[1:]) + b'{"format":1,"ev')
    runs, complaints = read_catalog(tmp_path)
    assert {run.folder: run.began is None for run in runs} == {first.name: True, second.name: False}
    assert len(complaints) == 2


@pytest.mark.parametrize("forged", ["x" * 5000, "/".join(["x" * 200] * 30), "a\0b", "a\nb", "\ud800"])
def test_an_entry_with_an_impossible_folder_is_reported_and_skipped(tmp_path: Path, forged: str) -> None:
    name = finished(tmp_path).name
    history = HistoryFile(tmp_path)
    entry = {**history.read()[0][0], "run": "forged", "folder": forged}
    with history.path.open("ab") as file:
        file.write(format_entry(entry))
    (run,), (complaint,) = read_catalog(tmp_path)
    assert run.folder == name
    assert "line 3 cannot be read: " in complaint


def test_a_later_run_in_the_same_named_folder_owns_it(tmp_path: Path) -> None:
    finished(tmp_path)
    for _ in range(2):
        with ActiveRun.start_in(tmp_path / "mine", request()) as run:
            run.finish()
    earlier, later = sorted(
        (run for run in listed(tmp_path) if run.folder == "mine"), key=lambda run: run.where
    )
    assert (earlier.where, earlier.why) == ("gone", f"Its folder is run {later.id}'s now.")
    assert later.path == tmp_path / "mine"
    assert find_run_folder(later.id, tmp_path) == tmp_path / "mine"


def test_named_folder_elsewhere_gets_no_history_beside_it(tmp_path: Path) -> None:
    with ActiveRun.start_in(tmp_path / "mine", request()) as run:
        run.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_whose_folder_cannot_be_made_is_entered_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise StorageError("The disk is full", uri="x")

    monkeypatch.setattr("penstock.results.run_folder.make_run_folder", full)
    with pytest.raises(StorageError):
        ActiveRun.start(tmp_path, request())
    run = only(tmp_path)
    assert (run.outcome, run.where) == ("failed", "gone")
    assert "The disk is full" in run.why


def test_an_end_that_cannot_be_entered_costs_the_run_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ActiveRun.start(tmp_path, request()) as run:
        history = HistoryFile(tmp_path)
        history.path.rename(history.path.with_suffix(".old"))
        history.path.mkdir()
        run.finish()
    assert "could not be entered" in caplog.text
    history.path.rmdir()
    history.path.with_suffix(".old").rename(history.path)
    assert only(tmp_path).outcome == "finished"


def test_a_deleted_run_stays_in_the_history(tmp_path: Path) -> None:
    folder, alien = finished(tmp_path), foreign(tmp_path, "run1")
    delete_runs(tmp_path, listed(tmp_path))
    assert not folder.exists()
    assert not alien.exists()
    run = only(tmp_path)
    assert (run.where, run.outcome, run.folder, run.path) == ("deleted", "finished", folder.name, None)


def test_no_run_is_deleted_where_that_cannot_be_recorded(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    runs = listed(tmp_path)
    history = HistoryFile(tmp_path).path
    history.rename(tmp_path / "elsewhere")
    history.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a link"):
        delete_runs(tmp_path, runs)
    assert folder.exists()


def test_runs_that_version_0_2_moved_to_its_trash_are_named_with_their_place(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    place = tmp_path / ".penstock" / "trash" / "20260102-030405-abcd"
    place.mkdir(parents=True)
    folder.rename(place / folder.name)
    HistoryFile(tmp_path).append("removed", folder.name[-6:], folder=folder.name, batch=place.name)
    run = only(tmp_path)
    assert (run.where, run.outcome) == ("gone", "finished")
    assert run.why == f"An earlier version moved its folder to .penstock/trash/{place.name}."
    assert find_run_folder(str(place / folder.name), tmp_path) == place / folder.name


def test_running_run_is_never_deleted(tmp_path: Path) -> None:
    with ActiveRun.start(tmp_path, request()) as run:
        with pytest.raises(UsageError, match="still running"):
            delete_runs(tmp_path, listed(tmp_path))
        assert run.folder.is_dir()
        run.finish()


def test_a_run_is_not_removed_into_itself(tmp_path: Path) -> None:
    folder = foreign(tmp_path, "run1")
    with pytest.raises(UsageError, match="Name its parent"):
        delete_runs(folder, listed(folder))
    assert [path.name for path in folder.iterdir()] == ["summary.json"]


def test_unreadable_run_is_listed_and_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    odd = foreign(tmp_path, "odd")
    (odd / "summary.json").write_text('{"start": "yesterday", "metric": {}}')
    by_name = {run.folder: run for run in listed(tmp_path)}
    assert (by_name["broken"].outcome, by_name["broken"].summary) == ("unreadable", None)
    assert "run.json" in by_name["broken"].why
    assert by_name["odd"].started is None
    delete_runs(tmp_path, [by_name["broken"]])
    assert [run.folder for run in listed(tmp_path)] == ["odd"]


def test_exact_folder_name_needs_no_history(tmp_path: Path) -> None:
    folder = foreign(tmp_path, "run1")
    assert find_run_folder(str(folder), Path("nowhere")) == folder
    assert find_run_folder("run1", tmp_path) == folder


def test_undecodable_arguments_are_recorded_with_replacement_characters(tmp_path: Path) -> None:
    odd = replace(request(), command=["penstock", os.fsdecode(b"caf\xe9")], environment={"AWS_X": "\udcff"})
    with ActiveRun.start(tmp_path, odd) as run:
        run.finish()
    found = only(tmp_path)
    assert found.outcome == "finished"
    assert found.began is not None
    assert found.began["command"] == ["penstock", "caf\ufffd"]
    assert found.began["settings"] == {"AWS_X": "\ufffd"}


def test_a_run_made_elsewhere_below_its_results_is_followed_to_its_last_name(tmp_path: Path) -> None:
    draft, leaf = tmp_path / ".mlps" / "draft", tmp_path / "closed" / "acme" / "20260701_100000"
    with ActiveRun.start_in(draft, request(), results=tmp_path) as run:
        run.finish()
    assert only(tmp_path).folder == ".mlps/draft"
    leaf.parent.mkdir(parents=True)
    draft.rename(leaf)
    assert only(tmp_path).where == "gone"
    HistoryFile(tmp_path).publish(draft, leaf)
    found = only(tmp_path)
    assert (found.folder, found.path) == ("closed/acme/20260701_100000", leaf)
    assert (found.outcome, found.where) == ("finished", "here")
    assert find_run_folder(found.id, tmp_path) == leaf
    with pytest.raises(UsageError, match="Name its parent"):
        delete_runs(tmp_path, [found])


def test_publishing_a_run_without_an_entry_changes_nothing(tmp_path: Path) -> None:
    HistoryFile(tmp_path).publish(tmp_path / "a", tmp_path / "b")
    assert not HistoryFile(tmp_path).exists()
    finished(tmp_path)
    HistoryFile(tmp_path).publish(tmp_path / "a", tmp_path / "b")
    assert len(HistoryFile(tmp_path).read()[0]) == 2


@pytest.mark.parametrize(
    ("change", "outcome"),
    [({}, "running"), ({"start_ticks": 1}, "interrupted"), ({"pid_namespace": 1}, "unknown")],
)
def test_run_without_an_end_is_judged_by_its_process(
    change: dict[str, Any], outcome: str, tmp_path: Path
) -> None:
    history = HistoryFile(tmp_path)
    began = dict(history.begin(replace(request(), ranks=2), NOW, named="lost"))
    process = {**began["process"], **change}
    history.path.write_bytes(format_entry({**began, "process": process}))
    run = only(tmp_path)
    assert (run.outcome, run.why) == (outcome, "Its end was never entered. Its folder is gone.")
    assert (run.path, run.started, run.workload) == (None, NOW, "unet3d_h100")


def test_catalog_is_sorted_from_the_newest_run_to_the_oldest(tmp_path: Path) -> None:
    foreign(tmp_path, "old")
    first, second = finished(tmp_path), finished(tmp_path)
    undated = tmp_path / "undated"
    undated.mkdir()
    (undated / "summary.json").write_text('{"metric": {}}')
    folders = [run.folder for run in listed(tmp_path)]
    assert folders == [second.name, first.name, "old", "undated"]


def test_run_is_named_by_its_id_its_path_or_a_unique_part_of_its_name(tmp_path: Path) -> None:
    foreign(tmp_path, "morning-a")
    foreign(tmp_path, "morning-b")
    folder = finished(tmp_path)
    runs = listed(tmp_path)
    own = next(run for run in runs if run.folder == folder.name)
    for text in (own.id, folder.name, str(folder), "unet3d"):
        assert find_run(text, runs, where="here") is own
    with pytest.raises(UsageError, match="'morning' names 2 runs: morning-"):
        find_run("morning", runs, where="here")
    for text in ("", "evening"):
        with pytest.raises(UsageError, match="No run is called"):
            find_run(text, runs, where="here")
    assert find_run_folder(own.id, tmp_path) == folder
