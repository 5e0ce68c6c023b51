"""Decoding while reading: every format, on threads and in torch's workers; what is wrong is named."""

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest

from penstock.bench.epoch_order import DrawnTimes, Remainder
from penstock.bench.loader.loader_protocol import (
    SAMPLED,
    Batch,
    BatchRequest,
    BlockRequest,
    ContentCheck,
    FormatDecoder,
)
from penstock.bench.loader.native_loader import NativeLoader, NativeOptions, RangeReader
from penstock.bench.training.batch_requests import BatchPlanner
from penstock.bench.training.training_files import TrainingFiles, open_files
from penstock.bench.training.training_plan import RankEpoch, shard_training
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import KEY, DatasetRecipe
from penstock.dataset.formats.format_protocol import Extent
from penstock.dataset.generate import generate
from penstock.errors import StorageError
from penstock.progress import Progress
from penstock.results.step_events import StepPhase
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import read_object, write_object
from penstock.workload.enums import Compression, DataFormat, Shuffle
from penstock.workload.quantities import Distribution, Duration
from penstock.workload.spec import Dataset, Hdf5, Parquet, ReaderSection, Workload

EVERY = [kind for kind in DataFormat if kind is not DataFormat.SYNTHETIC]
FULL = ContentCheck.FULL


@dataclass
class Stage:
    """A small data set in memory, and the requests of one rank that decodes it."""

    dataset: Dataset

    def __post_init__(self) -> None:
        self.storage = MemoryStorage()
        self.recipe = DatasetRecipe(dataset=self.dataset, seed=3, reduction=IRREDUCIBLE)
        generate(self.recipe, self.storage, comm=SoloComm(), threads=1, progress=Progress())

    def files(self) -> TrainingFiles:
        return open_files(self.dataset, self.storage, seed=9, evaluates=False)

    def requests(self, check: ContentCheck | None = FULL, **reader: Any) -> list[BatchRequest]:
        asked = ReaderSection(batch_size=3, shuffle_size=8, **{"sample_shuffle": Shuffle.SEED, **reader})
        files = self.files()
        sharding = shard_training(
            Workload(name="w", dataset=self.dataset, reader=asked),
            block_samples=files.block_samples(),
            num_ranks=1,
            division=Remainder.PAD,
            seed=5,
        )
        order = RankEpoch(sharding, rank=0, epoch=1)
        transfer_bytes = asked.transfer_bytes
        batches = BatchPlanner(
            files, self.storage, StepPhase.TRAIN, transfer_bytes=transfer_bytes, check=check
        )
        return list(batches.of_epoch(order, order.count_samples() // 3))

    def decoder(self) -> FormatDecoder:
        return FormatDecoder(self.files().data_files.kind, self.recipe)

    def damage(self, key: str, at: int) -> None:
        content = bytearray(read_object(self.storage, key))
        content[at] ^= 1
        write_object(self.storage, key, [bytes(content)])


def small(kind: DataFormat, **fields: Any) -> Dataset:
    base = Dataset(format=kind, num_files_train=3, num_samples_per_file=1, record_length_bytes=Fraction(3000))
    return replace(base, **fields)


def blocks_of(requests: Sequence[BatchRequest]) -> Iterator[BlockRequest]:
    for request in requests:
        for one in request.requests:
            if isinstance(one, BlockRequest):
                yield one


@pytest.mark.parametrize("kind", EVERY)
def test_every_format_decodes_to_what_was_generated_and_reads_every_sample_once(kind: DataFormat) -> None:
    num_samples = 1 if kind in (DataFormat.JPEG, DataFormat.PNG) else 6
    stage = Stage(small(kind, num_samples_per_file=num_samples, parquet=Parquet(row_group_size=2)))
    requests = stage.requests()
    seen = Counter((one.plan.name, sample) for one in blocks_of(requests) for sample in one.samples)
    assert set(seen.values()) == {1}
    assert len(seen) == 3 * num_samples
    with closing(NativeLoader(stage.storage, NativeOptions(threads=2), stage.decoder())) as loader:
        batches = list(loader.epoch(requests))
    assert sum(batch.num_samples for batch in batches) == 3 * num_samples
    assert sum(batch.decode_ns for batch in batches) > 0
    assert sum(batch.read_bytes for batch in batches) > 0


@pytest.mark.parametrize(
    "dataset",
    [
        small(DataFormat.NPZ, compression=Compression.ZIP),
        small(DataFormat.HDF5, num_samples_per_file=4, hdf5=Hdf5(chunk_dims=(20, 20))),
    ],
)
def test_compressed_and_chunked_files_decode_too(dataset: Dataset) -> None:
    stage = Stage(dataset)
    reader = RangeReader(stage.storage, 4096, stage.decoder())
    blocks = list(blocks_of(stage.requests()))
    served = [Batch() for _ in blocks]
    for block, totals in zip(blocks, served, strict=True):
        reader.serve(block, totals)
    reader.close()
    assert served
    assert all(one.decode_ns > 0 for one in served)


@pytest.mark.parametrize("kind", EVERY)
def test_blocks_travel_to_other_processes(kind: DataFormat) -> None:
    stage = Stage(small(kind))
    (first, *_) = blocks_of(stage.requests())
    decoder, block = pickle.loads(pickle.dumps((stage.decoder(), first)))
    reader = RangeReader(stage.storage, 4096, decoder)
    totals = Batch()
    reader.serve(block, totals)
    assert totals.read_bytes > 0
    reader.close()


def test_a_flipped_byte_is_named_with_its_file_and_sample() -> None:
    stage = Stage(small(DataFormat.INDEXED_BINARY, num_samples_per_file=6))
    key = next(one.key for one in stage.storage.list() if one.key.endswith("_1_of_3.indexed_binary"))
    stage.damage(key, 2 * 3000 + 17)
    loader = NativeLoader(stage.storage, NativeOptions(threads=1), stage.decoder())
    with closing(loader), pytest.raises(StorageError, match=r"Sample 2 of train/img_1_of_3.*generated"):
        list(loader.epoch(stage.requests()))


@pytest.mark.parametrize(("check", "share"), [("off", 0), ("sample", 1 / SAMPLED), ("full", 1)])
def test_as_many_blocks_are_checked_as_asked_for(check: str, share: float) -> None:
    stage = Stage(small(DataFormat.INDEXED_BINARY, num_files_train=4, num_samples_per_file=12))
    requests = stage.requests(ContentCheck(check))
    checked = [one.is_checked for one in blocks_of(requests)]
    assert len(checked) == 48
    assert sum(checked) == share * 48


def test_tfrecords_are_still_read_front_to_back_in_pieces_of_whole_records() -> None:
    stage = Stage(small(DataFormat.TFRECORD, num_samples_per_file=10))
    for transfer_bytes, records in ((1000, 1), (7000, 2)):
        requests = stage.requests(transfer_bytes=transfer_bytes, sample_shuffle=Shuffle.OFF)
        blocks = list(blocks_of(requests))
        assert {len(one.samples) for one in blocks} == {records}
        ends: dict[str, int] = {}
        for read in (read for one in blocks for read in one.reads):
            assert read.offset == ends.get(read.key, 0)
            assert read.size_bytes is not None
            assert read.size_bytes <= transfer_bytes
            ends[read.key] = read.offset + read.size_bytes
        assert ends == {info.key: info.size_bytes for info in stage.storage.list() if info.key != KEY}


def test_the_memory_of_a_block_serves_the_next_one() -> None:
    stage = Stage(small(DataFormat.NPY))
    kept: list[Sequence[Extent]] = []

    class Keeping(FormatDecoder):
        def decode(self, block: BlockRequest, pieces: Sequence[Extent]) -> None:
            kept.append(pieces)

    reader = RangeReader(stage.storage, 4096, Keeping(stage.files().data_files.kind, stage.recipe))
    first, second, _ = blocks_of(stage.requests())
    reader.serve(first, Batch())
    before = bytes(kept[0][0].content)
    reader.serve(second, Batch())
    assert bytes(kept[0][0].content) != before  # the same memory, read over
    reader.close()


def test_preprocessing_is_drawn_for_each_sample_the_same_in_every_run() -> None:
    times = DrawnTimes(
        duration=Duration(law=Distribution.EXPONENTIAL, scale_s=0.001), seed=1, phase=StepPhase.TRAIN, rank=0
    )
    one = times.of_batch(1, 2, 5)
    assert one == times.of_batch(1, 2, 5)
    assert len(set(one)) == 5
    assert one != times.of_batch(2, 2, 5)
    assert one != replace(times, rank=1).of_batch(1, 2, 5)
    assert replace(times, duration=Duration()).of_batch(1, 2, 5) == ()


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_preprocessing_counts_as_work_on_samples_and_none_of_it_is_lost(threads: int) -> None:
    request = BatchRequest((), 4, (1_000_000, 2_000_000, 3_000_000, 4_000_000))
    with closing(NativeLoader(MemoryStorage(), NativeOptions(threads=threads))) as loader:
        (batch,) = loader.epoch([request])
    assert batch.num_samples == 4
    assert batch.decode_ns >= 10_000_000
    assert batch.read_ns == 0
