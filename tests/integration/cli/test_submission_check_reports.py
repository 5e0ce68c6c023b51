"""`penstock submission report`, and the files of `check`, as a person calls them."""

import csv
import json
from pathlib import Path

import pytest
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.timed_tree import valid_checkpointing

from penstock.cli.app import main


def files_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_report_without_options_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = valid_submission().write(tmp_path)
    before = files_below(root)
    assert main(["submission", "report", str(root), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["edition"], document["written"]) == ("v1.0", [])
    (result,) = document["results"]
    (throughput, *_) = result["figures"]
    assert (throughput["unit"], throughput["mean"]) == ("samples/s", pytest.approx(41.7))
    assert files_below(root) == before


def test_report_of_invalid_results_exits_with_0_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submission = valid_submission()
    submission.drop("systems/")
    assert main(["submission", "report", str(submission.write(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert "closed/acme/results/fast/unet3d: invalid" in shown
    assert "unet3d on 2 h100" in shown


def test_results_that_cannot_be_recomputed_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submission = valid_submission()
    submission.configs()[0]["dataset"].pop("record_length")
    root = submission.write(tmp_path)
    assert main(["submission", "report", str(root), "--write"]) == 0
    said = capsys.readouterr().err
    assert "not recomputed: read bandwidth: there is no field workload.dataset.record_length" in said
    assert "its report cannot be written" in said


def test_write_option_puts_reports_beside_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = valid_checkpointing()
    tree.drop("results.json")
    root = tree.write(tmp_path)
    assert main(["submission", "report", str(root), "--write", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    place = root / "closed/acme/results/fast/checkpointing/llama3-8b"
    assert written == [str(place / "results.json"), str(place / "results.csv")]


def test_check_writes_requested_files_whatever_it_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submission = valid_submission()
    submission.drop("systems/")
    root = submission.write(tmp_path / "round")
    out = tmp_path / "out"
    words = ["--csv", str(out / "a.csv"), "--html", str(out / "a.html"), "--json"]
    assert main(["submission", "check", str(root), *words]) == 1
    findings = json.loads(capsys.readouterr().out)["results"][0]["findings"]
    with (out / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(findings) == len(rows)
    assert [row["rule"] for row in rows] == [finding["rule"] for finding in findings]
    assert (out / "a.html").read_text().lstrip().startswith("<!DOCTYPE html>")


def test_unwritable_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = valid_submission().write(tmp_path / "round")
    (tmp_path / "file").write_text("")
    assert main(["submission", "check", str(root), "--csv", str(tmp_path / "file" / "a.csv")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
