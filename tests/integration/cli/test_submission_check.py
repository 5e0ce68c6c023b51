"""`penstock submission` as a person calls it."""

import json
from pathlib import Path

import pytest
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.timed_tree import valid_round

from penstock.cli.app import main


def test_valid_tree_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submission", "check", str(valid_submission().write(tmp_path)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    assert document["edition"] == "v1.0"
    assert (result["org"], result["workload"], result["verdict"]) == ("acme", "unet3d", "valid")
    assert document["summary"]["valid"] == 1


def test_verdicts_are_printed_as_a_table_with_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["submission", "check", str(valid_submission().write(tmp_path))]) == 0
    title, names, _, row, count, *points = [
        line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()
    ]
    assert title == "Results, by the rules of v1.0"
    assert names.split() == [
        "organisation", "division", "system", "workload", "accelerators", "samples/s", "verdict",
    ]  # fmt: skip
    assert row.split() == ["acme", "closed", "fast", "unet3d", "2", "h100", "41.7", "valid"]
    assert count == "1 results, 1 valid, 0 invalid, 0 not checked"
    assert points[0] == "For the reviewer, because files cannot show it:"
    assert "caches were cleared between runs" in points


def test_invalid_tree_exits_with_1_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submission = valid_submission()
    submission.drop("systems/")
    assert main(["submission", "check", str(submission.write(tmp_path))]) == 1
    shown = capsys.readouterr().out
    assert "fail: structure.folders: acme/ has no systems/" in shown
    assert "invalid" in shown


def test_unreadable_result_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submission = valid_submission()
    submission.summary(1).pop("num_hosts")
    assert main(["submission", "check", str(submission.write(tmp_path))]) == 3
    assert "not checked: sizing.memory: there is no field num_hosts" in capsys.readouterr().out


def test_a_submitter_without_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (valid_submission().write(tmp_path) / "closed" / "idle").mkdir()
    assert main(["submission", "check", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["summary"]["without_results"] == ["closed/idle"]
    assert "closed/idle: no results are here" in told.err


@pytest.mark.parametrize("edition", ["v2.0", "v3.0"])
def test_later_editions_are_recognised_by_their_trees(
    edition: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submission", "check", str(valid_round(edition).write(tmp_path)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["edition"] == edition
    assert {each["workload"] for each in document["results"]} == {"unet3d", "llama3-8b"}


def test_rules_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submission", "rules"]) == 0
    assert "sizing.steps" in capsys.readouterr().out
    assert main(["submission", "rules", "sizing.steps"]) == 0
    shown = capsys.readouterr().out
    assert "passes:" in shown
    assert "fails:" in shown
    assert main(["submission", "rules", "nothing"]) == 2
