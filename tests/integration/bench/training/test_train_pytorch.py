"""Whole training runs on the pytorch loader, by the command line that people type."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.loader.native_loader import NativeOptions
from penstock.errors import UsageError
from penstock.storage.in_memory import MemoryStorage

pytest.importorskip("torch")

from penstock.bench.loader.pytorch_loader import PytorchOptions

DATASET = ("dataset.num_files_train=12", "dataset.record_length_bytes=20KiB")
SETTINGS = (
    *DATASET,
    "dataset.record_length_bytes_stdev=0",
    "dataset.record_length_bytes_resize=4KiB",
    "reader.batch_size=2",
    "train.epochs=3",
    "train.computation_time=0.01",
    "metric.au=0",  # a busy machine may be late
)


def _training(verb: str, data: Path, *words: str) -> subprocess.CompletedProcess[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "penstock", "training", verb, "unet3d_h100", "--data", str(data)]
    return subprocess.run(
        [*command, *settings, *words, "--json"], capture_output=True, text=True, timeout=280, check=False
    )


def _document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("train") / "data"
    _document(_training("generate", data))
    return data


def _reads_everything_each_epoch(data: Path, results: Path, ranks: int, context: str, workers: int) -> None:
    how = [f"reader.multiprocessing_context={context}", f"reader.read_threads={workers}"]
    words = ["--results", str(results), "--ranks", str(ranks), "--loader", "pytorch"]
    done = _training("run", data, *words, *(word for setting in how for word in ("--set", setting)))
    document = _document(done)
    held = sum(file.stat().st_size for file in data.rglob("*.npz"))
    assert [(epoch["samples"], epoch["read_bytes"]) for epoch in document["epochs"]] == [(12, held)] * 3
    outside = document["outside_of_score"]
    loader = outside["loader"]
    assert (loader["name"], loader["workers"], loader["context"]) == ("pytorch", workers, context)
    assert loader["sample_bytes"] == 4096
    assert outside["storage"]["counters"]["read_bytes"] >= 3 * held, "workers' reads are counted"
    assert document["ceiling"]["samples_per_s"] > 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ranks", "context", "workers"), [(1, "spawn", 1), (3, "fork", 2), (1, "fork", 0)])
def test_every_epoch_reads_all_files_whatever_starts_the_workers(
    data: Path, tmp_path: Path, ranks: int, context: str, workers: int
) -> None:
    _reads_everything_each_epoch(data, tmp_path, ranks, context, workers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_every_number_of_workers_of_every_kind_serves_every_number_of_ranks(
    data: Path, tmp_path: Path, ranks: int, context: str, workers: int
) -> None:
    for run in ("first", "second"):
        _reads_everything_each_epoch(data, tmp_path / run, ranks, context, workers)


@pytest.mark.timeout(240)
def test_a_file_that_shrinks_under_the_workers_is_named_and_nothing_hangs(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    for file in (path for path in data.rglob("*") if path.is_file()):
        (copy / file.relative_to(data)).parent.mkdir(parents=True, exist_ok=True)
        (copy / file.relative_to(data)).write_bytes(file.read_bytes())
    lost = sorted(copy.rglob("*.npz"))[5]
    lost.write_bytes(b"short")
    words = ["--results", str(tmp_path / "runs"), "--ranks", "2", "--loader", "pytorch", "--threads", "1"]
    context = [
        "--set",
        "reader.multiprocessing_context=fork",
        "--set",
        "dataset.listing_validation_interval=0",
    ]
    done = _training("run", copy, *words, *context)
    assert done.returncode == 1
    assert lost.name in done.stderr


def test_workers_that_cannot_open_storage_are_refused_before_they_start() -> None:
    with pytest.raises(UsageError, match="reopen"):
        PytorchOptions(workers=1, sample_bytes=1).start(MemoryStorage(), None)


def test_a_loader_says_in_the_record_which_one_it_is() -> None:
    assert NativeOptions(threads=3).document()["name"] == "native"
    assert PytorchOptions(workers=3, sample_bytes=1).document()["workers"] == 3
