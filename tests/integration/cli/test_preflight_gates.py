"""Gates through the command line: alone, before runs that they warn, and before runs that they stop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main

SMALL = ("llama3-8b", "--scale", "0.0001", "--interval", "0s", "--writes", "1", "--reads", "1")


def test_gates_can_be_inspected_alone_on_ranks(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words = ("--gate", "storage", "--gate", "clock", "--data", str(tmp_path), "--ranks", "2", "--json")
    seen = subprocess.run(
        [sys.executable, "-m", "penstock", "cluster", "check", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ,
    )
    assert seen.returncode == 0, seen.stderr
    document = json.loads(seen.stdout)
    assert (document["verdict"], document["ranks"]) == ("pass", 2)
    assert [each["gate"] for each in document["gates"]] == ["clock", "storage"]
    assert "2 ranks read the same bytes" in document["gates"][1]["found"]
    assert list(tmp_path.iterdir()) == []


def test_failing_gate_is_reported_with_its_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gate", "apart", "--data", str(tmp_path / "data"), "--results", str(tmp_path / "runs"))
    assert main(["cluster", "check", *words]) == 1
    said = capsys.readouterr().out
    assert "results are on the measured file system" in said
    assert "Put --results on another file system" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gate", "spcae"), "Did you mean space?"),
        (("cluster.json", "--gate", "space"), "Leave FILE out"),
        (("--gate", "space", "--results", __file__), "is not a directory"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_a_fix(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["cluster", "check", *words]) == 2
    assert said in capsys.readouterr().err


def test_run_records_findings_and_skips_and_may_keep_results_beside_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    place = ("--to", str(tmp_path / "ckpt"), "--results", str(tmp_path / "runs"))
    assert main(["checkpoint", "run", *SMALL, *place, "--skip-gate", "limits"]) == 0
    assert "gate apart" not in capsys.readouterr().err
    (record,) = (tmp_path / "runs").glob("*/run.json")
    preflight = json.loads(record.read_text())["preflight"]
    assert (preflight["is_strict"], preflight["cluster"]) == (False, "whole")
    verdicts = {each["gate"]: each["verdict"] for each in preflight["findings"]}
    assert len(verdicts) == 8
    assert (verdicts["limits"], verdicts["apart"], verdicts["storage"]) == (
        "skipped",
        "not applicable",
        "pass",
    )
    assert json.loads((record.parent / "cluster.json").read_text())["via"] == "ranks"
    assert not [path for path in record.parent.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]


def test_closed_gate_stops_a_submission_run_before_its_first_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--data", str(tmp_path / "data"), "--results", str(tmp_path / "runs"))
    assert main(["training", "run", "unet3d_h100", *place, "--open", "--loader", "native"]) == 3
    said = capsys.readouterr().err
    assert "gate apart: fail: " in said
    assert "--skip-gate NAME" in said
    assert list(tmp_path.iterdir()) == []


def test_unknown_gate_cannot_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--to", str(tmp_path / "ckpt"), "--results", str(tmp_path / "runs"))
    assert main(["checkpoint", "run", *SMALL, *place, "--skip-gate", "aprat"]) == 2
    assert "Did you mean apart?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
