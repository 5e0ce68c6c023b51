"""`penstock training run` as a person types it: on ranks, what it prints and leaves, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.command_line import CommandResult, run_command
from tests.support.s3.server import BUCKET

if TYPE_CHECKING:
    from tests.support.s3.server import S3Server

pytest.importorskip("mpi4py")

SIZES = ("--set", "dataset.num_files_train=28", "--set", "dataset.record_length_bytes=40KiB")
SETTINGS = (
    *SIZES,
    "--set", "dataset.record_length_bytes_stdev=4KiB", "--set", "reader.batch_size=3",
    "--set", "train.epochs=2", "--set", "train.computation_time=5ms",
    "--set", "metric.au=0",  # a busy machine may be late
)  # fmt: skip


def penstock(*words: str, environment: Mapping[str, str] | None = None) -> CommandResult:
    """Run one rank in this process; start a process for several, and for a client with keys of its own."""
    if environment is None and "--ranks" not in words:
        return run_command(*words)
    result = subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        check=False,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return CommandResult(result.returncode, result.stdout, result.stderr)


def run(place: Path, *words: str) -> CommandResult:
    where = ("--data", str(place / "data"), "--results", str(place / "runs"))
    return penstock("training", "run", "unet3d_h100", *SETTINGS, *where, *words)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = penstock("training", "generate", "unet3d_h100", *SETTINGS, "--data", str(tmp_path / "data"))
    assert made.returncode == 0, made.stderr
    return tmp_path


def sizes(place: Path) -> list[int]:
    return [path.stat().st_size for path in (place / "data" / "train").iterdir()]


def test_a_run_below_its_required_utilization_fails_everywhere(place: Path) -> None:
    result = run(
        place, "--set", "metric.au=1", "--set", "train.epochs=1", "--set", "train.computation_time=1us"
    )
    assert result.returncode == 1
    assert "  verdict   FAILED" in result.stdout
    (folder,) = (place / "runs").glob("unet3d*")
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 1


@pytest.mark.parametrize(("ranks", "steps"), [(1, 9), (4, 2)])
def test_ranks_report_utilization_and_write_dlios_files(place: Path, ranks: int, steps: int) -> None:
    result = run(place, "--ranks", str(ranks), "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert 0 < document["au_compat"] <= 100
    assert 0 < document["au_strict"] <= 100
    assert document["accelerators"] == ranks
    assert document["samples_per_s"] > 0
    assert [epoch["samples"] for epoch in document["epochs"]] == [ranks * steps * 3] * 2
    assert 0 < document["read_bytes"] <= 2 * sum(sizes(place))
    assert document["bottleneck"] in ("none", "storage", "client CPU", "barrier")
    folder = Path(document["results_dir"])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_accelerators"] == ranks
    assert len(summary["metric"]["train_au_percentage"]) == 2
    for rank in range(ranks):
        output = json.loads((folder / f"{rank}_output.json").read_text())
        assert len(output["1"]["load"]["block1"]) == steps
    record = json.loads((folder / "run.json").read_text())
    assert record["outcome"] == "finished"
    assert [len(epoch["ranks"]) for epoch in record["plan"]["epochs"]] == [ranks, ranks]
    left_out = [epoch["left_out"]["samples"] for epoch in record["plan"]["epochs"]]
    assert left_out == [28 - ranks * steps * 3] * 2


def test_report_has_a_table_and_the_evidence(place: Path) -> None:
    result = run(place)
    assert result.returncode == 0, result.stderr
    for said in (
        "unet3d_h100, 1 accelerator",
        "strict %",
        "by DLIO's formula",
        "harness",
        "limit",
        "results",
    ):
        assert said in result.stdout
    assert "[METRIC]" not in result.stdout
    (overall,) = re.findall(r"by DLIO's formula, (\S+) % strictly", result.stdout)
    rows = map(str.split, result.stdout.splitlines())
    epochs = [row[2] for row in rows if row[:1] in (["1"], ["2"])]
    assert min(map(float, epochs)) - 0.01 <= float(overall) <= max(map(float, epochs)) + 0.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_file_ends_all_ranks_and_is_named_with_its_rank(place: Path, ranks: int) -> None:
    victim = place / "data" / "train" / "img_13_of_28.npz"
    victim.write_bytes(victim.read_bytes()[:-7])
    result = run(place, "--ranks", str(ranks), "--set", "reader.batch_size=2")
    assert result.returncode == 1
    assert "img_13_of_28.npz" in result.stderr
    assert "Traceback" not in result.stderr
    assert ranks == 1 or "Rank " in result.stderr
    (folder,) = (place / "runs").glob("unet3d*")
    seen = json.loads(penstock("results", "show", str(folder), "--json").stdout)
    assert "running" not in json.dumps(seen)


def test_a_missing_file_ends_all_ranks_and_is_named(place: Path) -> None:
    (place / "data" / "train" / "img_27_of_28.npz").unlink()
    result = run(place, "--ranks", "2")
    assert result.returncode == 2
    assert "img_27_of_28.npz" in result.stderr
    assert "training generate" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--loader", "magic"), "No loader is called 'magic' (--loader). Available: native, pytorch."),
        (("--check", "half"), "Invalid value 'half' (--check). Choose from: off, sample, full."),
        (("--closed",), "reader.batch_size must stay as it is in the closed division (rule 3.6.2)"),
        (("--remainder", "halve"), "Invalid value 'halve' (--remainder). Choose from: rotate, drop, pad"),
        (("--set", "dataset.num_files_train=99"), "has 28 files, but dataset.num_files_train is 99"),
        (("--set", "reader.batch_size=50"), "28 samples are too few for 1 rank with batches of 50"),
    ],
)
def test_wrong_usage_says_what_would_be_right(place: Path, words: tuple[str, ...], said: str) -> None:
    result = run(place, *words)
    assert said in result.stderr
    assert result.returncode in (1, 2)


def test_unsupported_requests_are_reported_and_recorded(place: Path) -> None:
    profiled = ("--set", "workflow.profiling=true", "--set", "profiling.profiler=tensorboard")
    result = run(place, *profiled, "--json")
    assert result.returncode == 0, result.stderr
    assert "tensorboard is not started; a run records only iostat figures" in result.stderr
    record = json.loads((Path(json.loads(result.stdout)["results_dir"]) / "run.json").read_text())
    assert any("profiling" in remark for remark in record["remarks"])


def test_checkpoints_during_training_are_durable_and_not_scored(place: Path) -> None:
    saves = ("--set", "workflow.checkpoint=true", "--set", "checkpoint.steps_between_checkpoints=3")
    model = ("--set", "model.model_size_bytes=100000", "--checkpoints", str(place / "saves"))
    result = run(place, *saves, *model, "--ranks", "2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    taken = document["outside_of_score"]["checkpoints"]
    assert (taken["checkpoints"], taken["bytes_each"]) == (2, 100_000)
    files = sorted(str(path.relative_to(place / "saves")) for path in (place / "saves").rglob("*.pt"))
    assert files == [f"global_epoch{epoch}_step3/model_states-0.pt" for epoch in (1, 2)]
    assert all(path.stat().st_size == 100_000 for path in (place / "saves").rglob("*.pt"))
    folder = Path(document["results_dir"])
    stats = json.loads((folder / "0_per_epoch_stats.json").read_text())
    assert set(stats["1"]) >= {"block1", "block2", "save_ckpt1"}
    assert stats["1"]["block1"]["end"] <= stats["1"]["save_ckpt1"]["start"]
    assert stats["1"]["save_ckpt1"]["end"] <= stats["1"]["block2"]["start"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metric"]["save_checkpoint_duration_mean_seconds"] > 0


def test_too_little_space_for_checkpoints_is_reported_before_the_first_epoch(place: Path) -> None:
    saves = ("--set", "workflow.checkpoint=true", "--set", "model.model_size_bytes=500TiB")
    late = ("--set", "checkpoint.checkpoint_after_epoch=2")
    result = run(place, *saves, *late, "--checkpoints", str(place / "saves"))
    assert result.returncode == 1
    assert "Writing all checkpoints" in result.stderr
    assert not (place / "saves").exists() or not list((place / "saves").rglob("*.pt"))


def test_seed_is_the_workloads_the_users_or_random_and_always_recorded(place: Path) -> None:
    def seed(*words: str) -> int:
        document = json.loads(run(place, "--json", *words).stdout)
        record = json.loads((Path(document["results_dir"]) / "run.json").read_text())
        return int(record["seeds"]["order"])

    assert seed() == 123
    assert seed("--seed", "7") == 7
    assert seed("--set", "reader.file_shuffle=random") != seed("--set", "reader.file_shuffle=random")


def test_ranks_train_from_an_object_service(moto: S3Server, tmp_path: Path) -> None:
    uri = f"s3://{BUCKET}/{tmp_path.name}"
    made = penstock(
        "training", "generate", "unet3d_h100", *SETTINGS, "--data", uri, environment=moto.environment
    )
    assert made.returncode == 0, made.stderr
    where = ("--data", uri, "--results", str(tmp_path / "runs"), "--ranks", "2", "--json")
    result = penstock("training", "run", "unet3d_h100", *SETTINGS, *where, environment=moto.environment)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert [epoch["samples"] for epoch in document["epochs"]] == [24, 24]
    assert document["read_bytes"] > 0
    assert [epoch["cache"] for epoch in document["outside_of_score"]["epochs"]] == [None, None]
    text = (Path(document["results_dir"]) / "run.json").read_text()
    assert moto.environment["AWS_SECRET_ACCESS_KEY"] not in text
