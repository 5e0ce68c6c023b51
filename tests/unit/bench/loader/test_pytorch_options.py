"""The pytorch loader in the rank itself, without workers: options, arithmetic and what a worker would do."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.loader.loader_protocol import BatchRequest, ReadRequest
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import write_object
from penstock.workload.enums import ProcessStart

pytest.importorskip("torch")

import torch

from penstock.bench.loader.pytorch_loader import PytorchLoader, PytorchOptions, _Arrival, _Reads


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    for index in range(10):
        write_object(storage, f"f{index}", [bytes(1000 + index)])
    return storage


def _whole(*indices: int) -> BatchRequest:
    return BatchRequest(tuple(ReadRequest(f"f{index}") for index in indices), len(indices))


@given(st.integers(1, 64), st.integers(0, 1000))
def test_all_workers_together_have_the_prefetch_in_hand_and_no_more_than_a_round(
    workers: int, prefetch: int
) -> None:
    factor = PytorchOptions(workers=workers, sample_bytes=1, prefetch_batches=prefetch).prefetch_factor
    assert factor is not None
    assert factor >= 1
    assert factor * workers >= prefetch
    assert (factor - 1) * workers < max(prefetch, 1)


def test_without_workers_nothing_is_prefetched() -> None:
    assert PytorchOptions(workers=0, sample_bytes=1, prefetch_batches=8).prefetch_factor is None


@pytest.mark.parametrize(
    "wrong", [{"workers": -1}, {"prefetch_batches": -1}, {"sample_bytes": 0}, {"buffer_bytes": 0}]
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"reader\.read_threads"):
        PytorchOptions(**{"workers": 1, "sample_bytes": 1, **wrong})


def test_workers_are_spawned_where_nothing_else_is_asked_for_as_with_dlio() -> None:
    assert PytorchOptions(workers=1, sample_bytes=1).context is ProcessStart.SPAWN


def test_without_workers_the_rank_reads_each_epoch_s_own_plan_in_order(storage: MemoryStorage) -> None:
    loader = PytorchLoader(lambda: storage, PytorchOptions(workers=0, sample_bytes=16))
    first = list(loader.epoch([_whole(1, 2), _whole(3)]))
    second = list(loader.epoch(_whole(index) for index in (9, 0)))
    loader.close()
    assert [batch.read_bytes for batch in first] == [2003, 1003]
    assert [batch.read_bytes for batch in second] == [1009, 1000]
    assert [(batch.num_samples, batch.num_reads) for batch in first] == [(2, 2), (1, 1)]
    assert all(batch.read_ns > 0 for batch in first + second)
    assert loader.counters.read_bytes == 2003 + 1003 + 1009 + 1000


def test_a_rank_that_reads_itself_stacks_by_one_thread_as_a_worker_does(storage: MemoryStorage) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    loader = PytorchLoader(lambda: storage, PytorchOptions(workers=0, sample_bytes=16))
    assert torch.get_num_threads() == 1
    loader.close()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_an_object_read_in_ranges_is_let_go_at_the_end(storage: MemoryStorage) -> None:
    loader = PytorchLoader(lambda: storage, PytorchOptions(workers=0, sample_bytes=16, buffer_bytes=64))
    request = BatchRequest((ReadRequest("f1", 100, 300), ReadRequest("f1", 400, 1)), 3)
    (batch,) = loader.epoch([request])
    loader.close()
    loader.close()
    assert (batch.read_bytes, batch.num_reads, batch.num_samples) == (301, 2, 3)


def test_a_batch_arrives_as_a_tensor_of_its_samples_decoded_size(storage: MemoryStorage) -> None:
    reads = _Reads(PytorchOptions(workers=0, sample_bytes=48))
    assert reads[lambda: storage].samples is None
    arrival = reads[_whole(1, 2, 3)]
    assert arrival.samples is not None
    assert (tuple(arrival.samples.shape), arrival.samples.dtype) == ((3, 48), torch.uint8)
    assert reads[BatchRequest((ReadRequest("f1"),), 0)].samples is None


def test_an_error_travels_whole_beside_no_samples(storage: MemoryStorage) -> None:
    reads = _Reads(PytorchOptions(workers=0, sample_bytes=48))
    assert reads[lambda: storage].samples is None
    arrival: _Arrival = pickle.loads(pickle.dumps(reads[_whole(77)]))
    assert arrival.samples is None
    assert isinstance(arrival.outcome, ObjectNotFound)
    assert arrival.outcome.uri.endswith("f77")


def test_a_failed_plan_comes_out_as_itself(storage: MemoryStorage) -> None:
    def requests() -> Any:
        yield _whole(1)
        raise ObjectNotFound("No footer", uri="mem://planned")

    loader = PytorchLoader(lambda: storage, PytorchOptions(workers=0, sample_bytes=1))
    epoch = loader.epoch(requests())
    assert next(epoch).read_bytes == 1001
    with pytest.raises(ObjectNotFound, match="mem://planned"):
        next(epoch)
    loader.close()
