"""`penstock training run --loader MODULE:FACTORY`: a user's loader unmodified, and where its waits went."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import CommandResult, run_command

pytest.importorskip("torch")

LOADERS = """
import multiprocessing
import os
import signal
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
    return DataLoader(Images(__file__, late_s=0.1), batch_size=2)

def kept():
    return DataLoader(Rows(), batch_size=2, num_workers=1, persistent_workers=True)

def damaged():
    return DataLoader(Images(__file__, damaged=5), batch_size=2, num_workers=1)

class Killed(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3)

def killed():
    return DataLoader(Killed(), batch_size=2, num_workers=1)

def stays():
    return DataLoader(Images(__file__, count=40), batch_size=4, num_workers=1, persistent_workers=True)

def from_data():
    return DataLoader(Images("data/one.bin", count=4), batch_size=2)

class Lying:
    def __len__(self):
        return 100
    def __iter__(self):
        yield from ([1], [2])

def lying():
    return Lying()

def leaving():
    yield [1]
    raise SystemExit(3)

def spawned():
    return DataLoader(Images(__file__), batch_size=2, num_workers=1, multiprocessing_context="spawn")

def broken():
    raise KeyError("no such data set")

def endless():
    return DataLoader(Images(__file__, count=1000), num_workers=2)

def kill_workers(batch):
    for worker in multiprocessing.active_children():
        worker.kill()
    time.sleep(0.2)

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
    assert result.returncode in (0, 1), result.stderr  # 1 if it waits too long, as most loaders here do
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
    assert [one["change"] for one in waits["trials"]] == ["workers=4"]
    page = Path(document["results_dir"], "report.html").read_text()
    assert "Where the seconds of waiting went" in page
    assert waits["answer"].partition(";")[0] in page
    assert here.exists()


@pytest.mark.usefixtures("here")
def test_loader_without_workers_reads_in_the_consumer() -> None:
    _, waits = measure("--loader", "my_loaders:alone", "--batch-time", "1ms", "--steps", "4")
    assert (waits["bottleneck"], waits["batches"]) == ("storage", 4)


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
def test_killed_worker_error_names_pid_and_step() -> None:
    failed = run("--loader", "my_loaders:killed", "--batch-time", "20ms")
    assert failed.returncode == 1
    assert "A worker of the loader my_loaders:killed died at step" in failed.stderr
    assert "worker (pid" in failed.stderr


@pytest.mark.usefixtures("here")
def test_death_of_a_worker_during_the_cleanup_changes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    remove, killed = shutil.rmtree, []

    def kill_and_remove(*args: Any, **named: Any) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
            killed.append(worker.pid)
            time.sleep(0.2)  # meanwhile the kernel tells of the death
        remove(*args, **named)

    monkeypatch.setattr(shutil, "rmtree", kill_and_remove)
    failed = run("--loader", "my_loaders:damaged", "--batch-time", "1ms")
    assert killed
    assert failed.returncode == 1
    assert "at step 3 of epoch 1: ValueError: sample 5 is damaged" in failed.stderr


@pytest.mark.usefixtures("here")
def test_death_of_a_worker_during_a_step_is_an_error_of_the_loader() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    failed = run("--loader", "my_loaders:endless", "--step", "my_loaders:kill_workers")
    assert failed.returncode == 1
    assert "A worker of the loader my_loaders:endless died at step 2 of epoch 1: worker (pid" in failed.stderr
    assert "is killed by signal: Killed" in failed.stderr
    assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.usefixtures("here")
def test_loader_that_leaves_the_program_fails_the_run() -> None:
    failed = run("--loader", "my_loaders:leaving", "--batch-time", "1ms")
    assert failed.returncode == 1
    assert "at step 2 of epoch 1: SystemExit: 3" in failed.stderr


@pytest.mark.usefixtures("here")
def test_loader_that_has_fewer_batches_than_it_says_is_measured() -> None:
    _, waits = measure("--loader", "my_loaders:lying", "--batch-time", "1ms", "--epochs", "2")
    assert waits["batches"] == 4


@pytest.mark.usefixtures("here")
def test_reads_of_workers_that_stay_are_those_of_their_samples() -> None:
    _, waits = measure("--loader", "my_loaders:stays", "--batch-time", "10ms", "--epochs", "12")
    assert (waits["samples"], waits["workers"]) == (480, 1)
    sample = waits["per_sample"]
    # A file is read twice, the second time to its end, and each batch is asked for with two reads more. A
    # worker's last report may be 100 ms old: a small part of twelve epochs.
    assert 1.8 <= sample["reads"] <= 3
    assert sample["read_bytes"] == pytest.approx(len(LOADERS), rel=0.25)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_spawned_workers_are_measured_without_their_start() -> None:
    _, waits = measure("--loader", "my_loaders:spawned", "--batch-time", "1ms")
    assert (waits["batches"], waits["bottleneck"]) == (6, "startup")
    assert waits["per_sample"]["read_bytes"] == pytest.approx(len(LOADERS), rel=0.3)


def test_fewer_batches_than_the_length_promises_are_told(here: Path) -> None:
    (here / "my_lengths.py").write_text(
        "class Short(list):\n    def __len__(self):\n        return 9\n\n"
        "def make():\n    return Short([[1], [2]])\n"
    )
    result = run("--loader", "my_lengths:make")
    assert "Epoch 1 ended after 2 of the 9 batches that the loader's length promises" in result.stderr


def test_data_is_evicted_before_each_epoch(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "one.bin").write_bytes(bytes(1 << 20))
    words = ("--loader", "my_loaders:from_data", "--batch-time", "1ms", "--data", "data", "--epochs", "2")
    document, waits = measure(*words)
    caches = [one["cache"] for one in document["outside_of_score"]["epochs"]]
    assert [one["total_bytes"] for one in caches] == [1 << 20] * 2
    assert all(one["resident_bytes"] <= one["before_bytes"] for one in caches)
    assert waits["per_sample"]["read_bytes"] >= 1 << 20


@pytest.mark.usefixtures("here")
def test_loader_is_as_it_was_after_the_run() -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data._utils import fetch

    kinds = (DataLoader, fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    before = [dict(vars(kind)) for kind in kinds]
    assert run("--loader", "my_loaders:kept", "--batch-time", "1ms", "--set", "metric.au=0").returncode == 0
    assert [dict(vars(kind)) for kind in kinds] == before


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("unet3d", "--batch-time", "1s", "--data", "data"),
            "--batch-time would be ignored: only a loader of your own takes it",
        ),
        ((), "Missing argument 'WORKLOAD'"),
        (
            ("--loader", "my_loaders:slow", "--threads", "4"),
            "--threads would be ignored: a loader of your own",
        ),
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
    words += ["--set", "metric.au=0"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--results", "runs", "--json"],
        check=False, cwd=here, env=dict(os.environ), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    waits = document["outside_of_score"]["waits"]
    assert (document["accelerators"], waits["batches"], waits["samples"]) == (2, 8, 16)
