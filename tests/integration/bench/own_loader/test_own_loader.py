"""`penstock training run --loader MODULE:FACTORY`: a user's loader unmodified, and where its waits went."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import CommandResult, run_command

pytest.importorskip("torch")

LOADERS = """
import time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Images(Dataset):
    def __init__(self, path, count=12, late_s=0.0, damaged=None):
        self.path, self.count, self.late_s, self.damaged = path, count, late_s, damaged
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if get_worker_info() is not None:
            assert type(get_worker_info().dataset) is Images
        if index == self.damaged:
            raise ValueError(f"sample {index} is damaged")
        time.sleep(self.late_s)
        with open(self.path, "rb") as file:
            file.read()
        return torch.zeros(3)

class Rows(IterableDataset):
    def __iter__(self):
        for _ in range(8):
            time.sleep(0.01)
            yield torch.zeros(2)

started = []

def greet(worker):
    assert get_worker_info().id == worker

def slow(rank, world_size):
    return DataLoader(
        Images(__file__, late_s=0.1), batch_size=2, num_workers=2, worker_init_fn=greet, shuffle=True
    )

def alone(seed=1, **named):
    return DataLoader(Images(__file__, late_s=0.01), batch_size=2)

def kept():
    return DataLoader(Rows(), batch_size=2, num_workers=1, persistent_workers=True)

def damaged():
    return DataLoader(Images(__file__, damaged=5), batch_size=2, num_workers=1)

def broken():
    raise KeyError("no such data set")

def generated(rank):
    for _ in range(4 + 2 * rank):
        time.sleep(0.005)
        yield [rank, rank]

def step(batch):
    started.append(batch.shape)
    time.sleep(0.03)
"""


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loaders.py").write_text(LOADERS)
    yield tmp_path
    sys.modules.pop("my_loaders", None)


def run(*words: str) -> CommandResult:
    return run_command("training", "run", "--results", "runs", *words)


def measure(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    result = run("--json", *words)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    return document, document["outside_of_score"]["waits"]


def test_slow_storage_is_named_and_the_stages_add_up(here: Path) -> None:
    document, waits = measure(
        "--loader", "my_loaders:slow", "--batch-time", "1ms", "--epochs", "2", "--try", "workers=4"
    )
    # Three batches for each worker and epoch; the rest depends on what else the machine does.
    assert waits["stages"]["storage_s"] > 0.3
    assert sum(waits["stages"].values()) == pytest.approx(waits["wait_s"], rel=1e-6)
    assert waits["wait_s"] + waits["consumer_s"] == pytest.approx(
        sum(one["elapsed_s"] for one in document["epochs"]), rel=0.02
    )
    assert (waits["batches"], waits["samples"], waits["workers"]) == (12, 24, 2)
    size = len(LOADERS)
    assert size <= waits["per_sample"]["read_bytes"] <= 1.2 * size
    assert waits["per_sample"]["opens"] == pytest.approx(1, abs=0.3)
    assert [one["change"] for one in waits["predictions"] if one["tried"]] == ["workers=4"]
    page = Path(document["results_dir"], "report.html").read_text()
    assert "Where the seconds of waiting went" in page
    assert waits["answer"].partition(";")[0] in page
    assert here.exists()


@pytest.mark.usefixtures("here")
def test_loader_without_workers_reads_in_the_consumer() -> None:
    _, waits = measure("--loader", "my_loaders:alone", "--batch-time", "1ms", "--steps", "4")
    assert (waits["bottleneck"], waits["batches"]) == ("storage", 4)
    assert "workers=2" in {one["change"] for one in waits["predictions"]}


@pytest.mark.usefixtures("here")
def test_users_own_step_consumes_batches_and_can_be_the_limit() -> None:
    _, waits = measure(
        "--loader", "my_loaders:kept", "--step", "my_loaders:step", "--epochs", "5", "--set", "metric.au=0.3"
    )
    assert sys.modules["my_loaders"].started[0] == (2, 2)
    assert (waits["bottleneck"], waits["batches"]) == ("consumer", 20)


@pytest.mark.usefixtures("here")
def test_failing_loader_is_an_error_that_names_the_sample_and_the_line() -> None:
    failed = run("--loader", "my_loaders:damaged", "--batch-time", "1ms")
    assert failed.returncode == 1
    assert "at step 3 of epoch 1: ValueError: sample 5 is damaged" in failed.stderr
    assert "my_loaders.py:" in failed.stderr


@pytest.mark.usefixtures("here")
def test_failing_factory_and_step_are_the_users_errors() -> None:
    failed = run("--loader", "my_loaders:broken", "--batch-time", "1ms")
    assert failed.returncode == 1
    assert "The factory my_loaders:broken failed: KeyError: 'no such data set'" in failed.stderr
    failed = run("--loader", "my_loaders:generated", "--step", "my_loaders:step")
    assert failed.returncode == 1
    assert "The step my_loaders:step failed at step 1 of epoch 1: AttributeError" in failed.stderr


@pytest.mark.usefixtures("here")
def test_loader_is_as_it_was_after_the_run() -> None:
    from torch.utils.data import dataloader

    kinds = (dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter)
    before = [dict(vars(kind)) for kind in kinds]
    assert run("--loader", "my_loaders:generated", "--batch-time", "1ms").returncode == 0
    assert [dict(vars(kind)) for kind in kinds] == before


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("unet3d", "--batch-time", "1s", "--data", "data"), "belong to a loader of your own"),
        ((), "Missing argument 'WORKLOAD'"),
        (("--loader", "my_loaders:slow", "--threads", "4"), "--threads does not go with"),
        (("--loader", "my_loaders:slow", "--try", "magic=4"), "workers=N, prefetch=N"),
        (("--loader", "my_loaders:slow", "--step", "x:y", "--batch-time", "1s"), "mutually exclusive"),
    ],
    ids=["without-loader", "without-workload", "threads", "trial", "two-steps"],
)
def test_options_that_do_not_fit_are_refused(words: tuple[str, ...], said: str) -> None:
    refused = run(*words)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_ranks_take_as_many_steps_as_the_shortest_loader(here: Path) -> None:
    pytest.importorskip("mpi4py")
    import os
    import subprocess

    words = ["training", "run", "--loader", "my_loaders:generated", "--batch-time", "1ms", "--ranks", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--results", "runs", "--json"],
        check=False, cwd=here, env=dict(os.environ), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    waits = document["outside_of_score"]["waits"]
    assert (document["accelerators"], waits["batches"], waits["samples"]) == (2, 8, 16)
