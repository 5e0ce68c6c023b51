"""What is noted of a DataLoader's fetches, in this process and in workers, and whose batch each was."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.own_loader.loader_watch import read_io, read_proc

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

from penstock.bench.own_loader.loader_watch import TorchWatch, WorkerDeaths  # noqa: E402 - needs torch
from penstock.bench.own_loader.waits import Delivery  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Samples(data.Dataset[Any]):  # type: ignore[misc, name-defined]  # known at run time only
    """Samples of which one is late, and which say who made them."""

    def __init__(self, count: int, late: int = -1) -> None:
        self.count, self.late = count, late

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index == self.late:
            time.sleep(0.05)
        info = data.get_worker_info()
        return info.id if info else -1


class Rows(data.IterableDataset[Any]):  # type: ignore[misc, name-defined]  # known at run time only
    """Workers that have 2, 4 and 6 rows."""

    def __iter__(self) -> Iterator[int]:
        worker = data.get_worker_info().id
        yield from [worker] * (2 * worker + 2)


class WithoutHash:
    """A user's collation that is compared by value, as a dataclass is."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithoutHash)

    def __call__(self, samples: object) -> object:
        return samples


def watch(loader: Any, epochs: int = 1) -> tuple[list[Any], list[Delivery]]:
    """The batches of the last epoch, and what was noted of it."""
    with WorkerDeaths() as deaths, TorchWatch(deaths) as watched:
        for _ in range(epochs):
            watched.take_deliveries()
            batches = list(loader)
        return batches, watched.take_deliveries()


def test_a_slow_fetch_among_fast_ones_slept() -> None:
    loader = data.DataLoader(Samples(40, late=21), batch_size=1, collate_fn=WithoutHash())
    batches, deliveries = watch(loader)
    assert batches == [[-1]] * 40
    slept = [row.loaded_ns - row.began_ns - row.awake_ns for *_, row in deliveries]
    assert len(slept) == 40
    assert slept.index(max(slept)) == 21
    assert max(slept) > 0.8 * 0.05e9


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_those_of_the_workers_that_made_them(*, persistent: bool) -> None:
    loader = data.DataLoader(Rows(), batch_size=2, num_workers=3, persistent_workers=persistent)
    batches, deliveries = watch(loader, epochs=2)
    made_by = [int(batch[0]) for batch in batches]
    assert made_by == [0, 1, 2, 1, 2, 2]
    known = {id(delivery.rows): maker for delivery, maker in zip(deliveries, made_by, strict=True)}
    assert [known[id(delivery.rows)] for delivery in deliveries] == made_by
    assert Counter(known.values()) == {0: 1, 1: 1, 2: 1}
    for delivery in deliveries:
        assert delivery.row.ended_ns <= delivery.given_ns
        assert delivery.began_ns <= delivery.row.began_ns
    assert any(delivery.began_ns for delivery in deliveries) is not persistent


def test_a_fetch_that_fails_is_no_batch_and_torch_is_as_before() -> None:
    def refuse(_samples: object) -> object:
        raise ZeroDivisionError

    from torch.utils.data._utils import fetch

    before = (data.DataLoader.__iter__, fetch._MapDatasetFetcher.fetch)
    with WorkerDeaths() as deaths, TorchWatch(deaths) as watched:
        with pytest.raises(ZeroDivisionError):
            list(data.DataLoader(Samples(2), collate_fn=refuse))
        assert watched.take_deliveries() == []
    assert (data.DataLoader.__iter__, fetch._MapDatasetFetcher.fetch) == before


def test_own_reads_are_left_out_of_the_kernels_figures(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(5000))
    before = read_io(os.getpid())
    for _ in range(20):
        read_proc("self/status")
    assert read_io(os.getpid()) == before
    with file.open("rb", buffering=0) as other:
        other.read(3000)
    after = read_io(os.getpid())
    assert after["rchar"] - before["rchar"] == 3000
