"""`penstock training plan` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys


def _plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "training", "plan", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_the_plan_is_a_document_of_samples_and_files() -> None:
    result = _plan("unet3d_h100", "--ranks", "4", "--rank", "2", "--epoch", "3", "--head", "5", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert len(document["samples"]) == 5
    assert document["num_samples"] == 42
    first = document["samples"][0]
    assert first["file"] == f"train/img_{first['index']:03d}_of_168.npz"


def test_a_plan_for_people_names_rank_and_epoch() -> None:
    result = _plan("unet3d_h100", "--ranks", "4", "--rank", "2", "--epoch", "3")
    assert "Rank 2 of 4 reads 42 samples in epoch 3" in result.stdout


def test_a_division_that_is_none_names_its_option() -> None:
    result = _plan("unet3d_h100", "--division", "conquer")
    assert result.returncode == 2
    assert "--division" in result.stderr
    assert "rotate, drop, pad, error" in result.stderr
