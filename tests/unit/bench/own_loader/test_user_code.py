"""A user's code by name: what is called with what, and how errors name the way out."""

import socket
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench.own_loader.user_code import (
    SampleCounter,
    announce_epoch,
    call_with_known,
    explain_failure,
    find_batch_size,
    load_user_code,
    names_user_code,
)
from penstock.errors import StorageError, UsageError

KNOWN = {"rank": 1, "world_size": 4, "epochs": 2, "seed": 7}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "a_users_module.py"
    path.write_text(
        "def make(rank):\n    return [rank]\nclass Box:\n    @staticmethod\n    def make(): return []\n"
    )
    yield path
    import sys

    sys.modules.pop("a_users_module", None)


def test_module_in_the_current_folder_is_found(module: Path) -> None:
    assert module.exists()
    assert load_user_code("a_users_module:make", where="--loader")(rank=3) == [3]
    assert load_user_code("a_users_module:Box.make", where="--loader")() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [("no_such_module_here:make", "no_such_module_here.py"), ("a_users_module:mkae", "functions make")],
)
def test_wrong_name_is_an_error_that_names_the_way_out(module: Path, text: str, said: str) -> None:
    assert module.exists()
    with pytest.raises(UsageError, match=said):
        load_user_code(text, where="--loader")


def test_names_of_loaders_are_not_taken_for_user_code() -> None:
    assert names_user_code("package.module:function")
    assert not names_user_code("native")
    assert not names_user_code("C:/loader.py")


def test_factory_gets_the_arguments_it_declares() -> None:
    assert call_with_known(lambda: "none", KNOWN, where="x") == "none"
    assert call_with_known(lambda rank, seed=0: (rank, seed), KNOWN, where="x") == (1, 7)
    assert call_with_known(lambda **named: named, KNOWN, where="x") == KNOWN
    assert call_with_known(lambda other=5: other, KNOWN, where="x") == 5


def test_factory_that_needs_something_unknown_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="does not pass: path"):
        call_with_known(lambda path, rank: (path, rank), KNOWN, where="x")


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (np.zeros((8, 3)), 8),
        ((np.zeros((8, 3)), np.zeros(8)), 8),
        ({"x": np.zeros((5, 2)), "y": [1, 2, 3, 4, 5]}, 5),
        ([np.zeros((8, 3)), np.zeros(8)], 8),
        ([np.zeros((8, 3))], 8),
        ([np.zeros((30, 30)), np.zeros((40, 30)), np.zeros((50, 30))], 3),
        ([{"x": np.zeros(4)}, {"x": np.zeros(4)}], 2),
        ({"text": ["a", "b", "c"]}, 3),
        (["a", "b"], 2),
        (5, 1),
    ],
    ids=["array", "tuple", "dict", "columns", "column", "ragged", "dicts", "texts", "list", "number"],
)
def test_samples_are_found_in_a_batch(batch: Any, samples: int) -> None:
    assert SampleCounter()(batch) == samples


def test_counter_tells_a_pair_of_arrays_from_two_samples() -> None:
    class Loader:
        batch_size = 1

    pair = [np.zeros((1, 3)), np.zeros(1)]
    assert SampleCounter(find_batch_size(Loader()))(pair) == 1
    counter = SampleCounter(8)
    sizes = [counter([np.zeros((size, 3)), np.zeros(size)]) for size in (8, 8, 1)]
    assert sizes == [8, 8, 1]


def test_counter_counts_batches_that_change_their_form() -> None:
    counter = SampleCounter(4)
    batches: list[Any] = [{"x": np.zeros((4, 2))}, {"y": np.zeros((3, 2))}, 5, (np.zeros(2), np.zeros(2))]
    assert [counter(batch) for batch in batches] == [4, 3, 1, 2]
    assert find_batch_size([]) is None


def test_sampler_and_data_set_hear_of_each_epoch() -> None:
    class Told:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader:
        sampler, dataset = Told(), Told()

    announce_epoch(Loader, 3, "mine:x")
    announce_epoch([], 3, "mine:x")
    assert (Loader.sampler.epochs, Loader.dataset.epochs) == ([3], [3])


def test_a_sampler_that_rejects_an_epoch_is_the_users_error() -> None:
    class Loader:
        @staticmethod
        def set_epoch(epoch: int) -> None:
            raise ValueError(f"no order for epoch {epoch}")

    with pytest.raises(
        StorageError, match="set_epoch of the loader mine:x failed: ValueError: no order for epoch 3"
    ):
        announce_epoch(Loader, 3, "mine:x")


def test_a_traceback_through_files_in_shared_memory_is_no_full_shared_memory() -> None:
    said = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/dev/shm/mine/data.py", line 9, in __getitem__
ValueError: corrupt sample 020"""
    found = explain_failure(ValueError(said), loader="mine:bad", epoch=1, step=3)
    assert "failed at step 3 of epoch 1: ValueError: corrupt sample 020" in str(found)
    full = "unable to open shared memory object </torch_1_2> in read-write mode: No space left on device (28)"
    assert str(explain_failure(RuntimeError(full), loader="x:y", epoch=1, step=1)).startswith("Shared memory")


@pytest.mark.parametrize("end", [ConnectionResetError, EOFError, FileNotFoundError])
def test_a_worker_that_died_while_its_batch_was_fetched_is_named_as_dead(
    tmp_path: Path, end: type[Exception]
) -> None:
    ours, theirs = socket.socketpair()
    with closing(Connection(ours.detach())) as connection:
        if end is ConnectionResetError:
            connection.send_bytes(b"unread when the other side ends, which resets the connection")
        theirs.close()
        # Torch also connects to the worker for the descriptors of shared memory.
        fetch = partial(Client, str(tmp_path / "gone")) if end is FileNotFoundError else connection.recv_bytes
        with pytest.raises(end) as caught:
            fetch()
    found = explain_failure(caught.value, loader="mine:x", epoch=1, step=2)
    assert str(found).startswith("A worker of the loader mine:x died at step 2 of epoch 1")


def test_a_file_that_the_users_code_misses_is_no_dead_worker(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "multiprocessing").read_bytes()
    found = explain_failure(caught.value, loader="mine:x", epoch=1, step=2)
    assert "died" not in str(found)
