"""`penstock training sweep`: real runs, one after the other, until the answer is known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("mpi4py")

if TYPE_CHECKING:
    from pathlib import Path

SMALL = (
    *("--set", "dataset.num_files_train=12", "--set", "dataset.record_length_bytes=64KiB"),
    *("--set", "dataset.record_length_bytes_stdev=0", "--set", "reader.batch_size=1"),
    *("--set", "train.epochs=1", "--set", "train.computation_time=20ms"),
)


def _training(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "training", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=180)


@pytest.fixture
def data(tmp_path: Path) -> str:
    place = str(tmp_path / "data")
    made = _training("generate", "unet3d_h100", *SMALL, "--data", place)
    assert made.returncode == 0, made.stderr
    return place


def test_sweep_finds_the_largest_number_and_keeps_every_run(tmp_path: Path, data: str) -> None:
    results = tmp_path / "runs"
    words = ("--data", data, "--results", str(results), "--most", "2", "--set", "metric.au=0.05", "--json")
    result = _training("sweep", "unet3d_h100", *SMALL, *words)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["accelerators"] == 2
    assert document["is_most"] is True
    assert [seen["accelerators"] for seen in document["tries"]] == [1, 2]
    assert len(list(results.glob("unet3d*"))) == 2


def test_sweep_exits_with_1_if_no_accelerator_is_fed(tmp_path: Path, data: str) -> None:
    words = ("--data", data, "--results", str(tmp_path / "runs"), "--most", "4", "--set", "metric.au=1")
    result = _training("sweep", "unet3d_h100", *SMALL, *words)
    assert result.returncode == 1, result.stderr
    assert re.search("Too slow for one accelerator|this client keeps none busy", result.stdout)


def test_failing_run_ends_the_sweep_with_its_error(tmp_path: Path) -> None:
    words = ("--data", str(tmp_path / "nothing"), "--results", str(tmp_path / "runs"), "--most", "4")
    result = _training("sweep", "unet3d_h100", *SMALL, *words)
    assert result.returncode == 1
    assert "root folder failed: No such file or directory" in result.stderr
    assert "The run with 1 accelerator failed" in result.stderr
