"""`penstock results ls` and `rm` as people use them."""

import json
import re
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import main
from penstock.cli.mlpstorage import main as by_mlpstorages_words
from penstock.results.active_run import ActiveRun
from penstock.results.run_record import RunRequest
from penstock.workload.load_workload import load


def finished(parent: Path, *command: str, workload: str = "unet3d_h100") -> str:
    request = RunRequest(workload=load(workload).workload, ranks=1, hosts=[], command=command)
    with ActiveRun.start(parent, request) as run:
        run.finish()
    return run.folder.name


def failed(parent: Path) -> str:
    request = RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["penstock"])
    with ActiveRun.start(parent, request) as run:
        pass
    return run.folder.name


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["results", *words, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_runs_are_deleted_once_that_is_confirmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--results", str(tmp_path))
    first, second = finished(tmp_path, "penstock"), failed(tmp_path)
    document = told(capsys, "rm", "--status", "failed", *here)
    assert [run["name"] for run in document["runs"]] == [second]
    assert (tmp_path / second).is_dir()
    told(capsys, "rm", "--status", "failed", "--yes", *here)
    assert not (tmp_path / second).exists()
    listed = told(capsys, "ls", str(tmp_path))
    assert [run["name"] for run in listed["runs"]] == [first]
    assert [run["name"] for run in listed["deleted"]] == [second]


def test_a_removal_documents_what_is_known_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = finished(tmp_path, "penstock", "workloads")
    (known,) = told(capsys, "rm", name, "--results", str(tmp_path))["runs"]
    started = datetime.fromisoformat(known.pop("started"))
    assert timedelta(0) <= datetime.now(UTC) - started < timedelta(minutes=5)
    assert known == {
        "run": name[-6:],
        "folder": str(tmp_path / name),
        "name": name,
        "where": "here",
        "outcome": "finished",
        "why": "",
        "workload": "unet3d_h100",
        "has_entry": True,
        "command": ["penstock", "workloads"],
        "working_folder": str(Path.cwd()),
    }


def test_newest_runs_are_kept_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [finished(tmp_path, "penstock") for _ in range(3)]
    answer = told(capsys, "rm", "--keep-last", "2", "--results", str(tmp_path))
    assert [run["name"] for run in answer["runs"]] == names[:1]
    assert {run["name"]: run["reason"] for run in answer["spared"]} == dict.fromkeys(
        names[1:], "one of the last 2"
    )


def test_runs_are_filtered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path, "penstock")
    other = finished(tmp_path, "penstock", workload="resnet50_h100")
    listed = told(capsys, "ls", str(tmp_path), "--workload", "ResNet")
    assert [run["name"] for run in listed["runs"]] == [other]
    assert told(capsys, "ls", str(tmp_path), "--older-than", "2w")["runs"] == []
    assert told(capsys, "ls", str(tmp_path), "--status", "incomplete")["runs"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rm",), "No run is named"),
        (("rm", "x", "--status", "failed"), "named and selected by options"),
        (("rm", "nothing"), "No run is called 'nothing'"),
        (("rm", "--older-than", "2"), "neither an age nor a date"),
        (("rm", "--status", "dead"), "not an outcome"),
    ],
)
def test_contradictory_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    finished(tmp_path, "penstock")
    assert main(["results", *words, "--results", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_run_is_shown_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = finished(tmp_path, "penstock")
    (run,) = told(capsys, "ls", str(tmp_path))["runs"]
    assert told(capsys, "show", run["run"], "--results", str(tmp_path))["id"] == name


def test_list_reads_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, lost = finished(tmp_path, "penstock"), finished(tmp_path, "penstock")
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "summary.json").write_text('{"start": "2024-01-01T00:00:00", "metric": {}}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    shutil.rmtree(tmp_path / lost)
    with (tmp_path / ".penstock" / "history.jsonl").open("a") as file:
        file.write('{"format"')
    assert main(["results", "ls", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert f"{name}  finished\n" in told.out
    assert "run1  unknown (not in the history): Its summary has no end." in told.out
    assert re.search(r", ranks \d+, \d{4}-\d\d-\d\d \d\d:\d\d, ", told.out)
    assert f"Started here, without a directory\n  {lost}  finished: Its folder is gone." in told.out
    assert "broken" not in told.out
    assert "broken" in told.err
    assert "is cut off after 9 bytes" in told.err


def test_a_removal_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--results", str(tmp_path))
    name = finished(tmp_path, "penstock")
    for words, code, said in (
        (("rm", name), 0, f"Would be deleted:\n  {name}  finished"),
        (("rm", "--keep-last", "1"), 0, f"No run matches.\n  kept: {name}  finished (one of the last 1)"),
        (("rm", name, "--yes"), 0, f"Deleted:\n  {name}  finished"),
    ):
        capsys.readouterr()
        assert main(["results", *words, *here]) == code
        assert said in capsys.readouterr().out


def test_run_by_mlpstorage_is_recorded_as_its_penstock_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = ("dataset.num_files_train=4", "dataset.record_length=512", "dataset.record_length_stdev=0")
    settings = [word for value in values for word in ("--set", value)]
    data = tmp_path / "data" / "unet3d"
    assert main(["training", "generate", "unet3d_h100", "--data", f"file://{data}", *settings]) == 0
    words = ["whatif", "training", "unet3d", "run", "file", "--accelerator-type", "h100"]
    words += ["--num-accelerators", "1", "--data-dir", str(data.parent), "--results-dir", str(tmp_path / "r")]
    quick = ("reader.batch_size=1", "train.computation_time=0.001", "train.epochs=1", "metric.au=0")
    before = list(sys.argv)
    assert by_mlpstorages_words([*words, "--params", *values, *quick]) == 0
    assert sys.argv == before
    (run,) = told(capsys, "ls", str(tmp_path / "r"))["runs"]
    assert run["command"][:4] == ["penstock", "training", "run", "unet3d"]
