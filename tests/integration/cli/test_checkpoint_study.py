"""`penstock checkpoint study` as it is typed: on one rank, on several, refused, and interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main

SMALL = (
    "--scale",
    "1/50000",
    "--checkpoints",
    "2",
    "--steps",
    "1",
    "--step-time",
    "1ms",
    "--parity-every",
    "2",
)


def places(folder: Path) -> tuple[str, ...]:
    return ("--fast", str(folder / "fast"), "--slow", str(folder / "slow"), "--out", str(folder / "out"))


def here(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["checkpoint", "study", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "checkpoint", "study", *words]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_study_report_and_json_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, *places(tmp_path), "--ranks", "1", "-c", "direct_slow,single_flushed")
    code, out, err = here(capsys, *words)
    assert code == 0, err
    for said in (
        "2 checkpoints of llama3-8b",
        "training waited",
        "T1 Measures of time",
        "union",
        "S1 ",
        "S4 ",
    ):
        assert said in out
    assert f"wrote {tmp_path}/out/report.html" in err
    # The rows are done: this only compares them again.
    code, out, err = here(capsys, *words, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    assert document["study"]["ranks"] == 1
    assert [row["name"] for row in document["rows"]] == ["direct_slow", "single_flushed"]
    for row in document["comparison"]["tables"]["t1_measures"]["rows"]:
        assert row["max_union_us"] <= row["max_sum_us"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "1"), "needs at least two ranks"),
        (("--ranks", "1", "-c", "singel"), "Did you mean single?"),
        (("--ranks", "1", "-c", "single", "--slow-bandwidth", "fast"), "is not a rate"),
        (("--ranks", "1", "-c", "single", "--model", "llama4"), "llama"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = here(capsys, *SMALL, *places(tmp_path), *words)
    assert (code, out) == (2, "")
    assert said in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_interrupted_study_on_four_ranks_continues(tmp_path: Path) -> None:
    words = (*SMALL, *places(tmp_path), "--json")
    first = start(*words)
    try:
        end_s = time.monotonic() + 200
        while not (tmp_path / "out" / "direct_slow" / "row.json").exists():
            assert first.poll() is None, first.communicate()
            assert time.monotonic() < end_s
            time.sleep(0.02)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
    finally:
        first.kill()
        first.communicate()
    kept = (tmp_path / "out" / "direct_slow" / "row.json").read_bytes()
    second = start(*words)
    out, err = second.communicate(timeout=280)
    assert second.returncode == 0, err
    assert (tmp_path / "out" / "direct_slow" / "row.json").read_bytes() == kept
    document = json.loads(out)
    assert (document["study"]["ranks"], len(document["rows"])) == (4, 8)
    assert {row["num_ranks"] for row in document["comparison"]["tables"]["t0"]["rows"]} == {4}
    left = [path for level in ("fast", "slow") for path in (tmp_path / level).rglob("*") if path.is_file()]
    assert left == []
