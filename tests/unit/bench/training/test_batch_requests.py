"""The I/O pattern of each format, as a storage sees it: which files, which ranges, in which order."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

import pytest

from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.loader_protocol import BatchRequest, ReadRequest
from penstock.bench.loader.native_loader import NativeLoader, NativeOptions
from penstock.bench.training.batch_requests import TRANSFER_BYTES, BatchPlanner, plan_ahead
from penstock.bench.training.training_files import TrainingFiles, open_files
from penstock.bench.training.training_loop import ZeroCostStorage, count_limit_steps, object_sizes
from penstock.bench.training.training_plan import RankEpoch, shard_training
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import KEY, DatasetRecipe
from penstock.dataset.generate import generate
from penstock.errors import ObjectNotFound, ShortTransfer, UsageError
from penstock.progress import Progress
from penstock.results.step_events import StepPhase
from penstock.storage import Source
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedSource, WrappedStorage, write_object
from penstock.workload.enums import Compression, DataFormat, Shuffle
from penstock.workload.spec import Dataset, Parquet, ParquetColumn, ReaderSection, Train, Workload

SHUFFLED: dict[str, Any] = {"file_shuffle": Shuffle.SEED, "sample_shuffle": Shuffle.SEED}


@dataclass(frozen=True)
class Seen:
    key: str
    offset: int
    size_bytes: int


class RecordingStorage(WrappedStorage):
    """Keeps what was read, in the order of the calls."""

    def __init__(self, inside: MemoryStorage) -> None:
        super().__init__(inside)
        self.seen: list[Seen] = []
        self.lock = threading.Lock()

    def open(self, key: str) -> Source:
        return _RecordingSource(super().open(key), key, self)


class _RecordingSource(WrappedSource):
    def __init__(self, inside: Source, key: str, storage: RecordingStorage) -> None:
        super().__init__(inside)
        self.key, self.storage = key, storage

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self.storage.lock:
            self.storage.seen.append(Seen(self.key, offset, buffer.nbytes))
        super().read_into(offset, buffer)


@dataclass
class Stage:
    """A small data set in memory, and one rank that reads it."""

    dataset: Dataset
    reader: ReaderSection = field(
        default_factory=lambda: ReaderSection(batch_size=4, shuffle_size=8, **SHUFFLED)
    )
    num_ranks: int = 1

    def __post_init__(self) -> None:
        self.storage = RecordingStorage(MemoryStorage())
        recipe = DatasetRecipe(dataset=self.dataset, seed=3, reduction=IRREDUCIBLE)
        if self.dataset.format is not DataFormat.SYNTHETIC:
            generate(recipe, self.storage, comm=SoloComm(), threads=1, progress=Progress())
        self.sizes = {info.key: info.size_bytes for info in self.storage.list() if info.key != KEY}

    @property
    def workload(self) -> Workload:
        return Workload(name="w", dataset=self.dataset, reader=self.reader, train=Train(epochs=2))

    def files(self) -> TrainingFiles:
        return open_files(self.dataset, self.storage, seed=9, evaluates=True)

    def order(self, epoch: int = 1, rank: int = 0) -> RankEpoch:
        sharding = shard_training(
            self.workload,
            block_samples=self.files().block_samples(),
            num_ranks=self.num_ranks,
            division=Remainder.ROTATE,
            seed=5,
        )
        return RankEpoch(sharding, rank=rank, epoch=epoch)

    def requests(self, epoch: int = 1, rank: int = 0) -> list[BatchRequest]:
        order = self.order(epoch, rank)
        batches = BatchPlanner(
            self.files(), self.storage, StepPhase.TRAIN, transfer_bytes=self.reader.transfer_bytes
        )
        return list(batches.of_epoch(order, order.count_samples() // order.sharding.batch_size))

    def read(self, epoch: int = 1) -> list[Seen]:
        """What storage sees of one epoch, read by one thread so that the order is the loader's."""
        requests = self.requests(epoch)
        self.storage.seen.clear()
        loader = NativeLoader(self.storage, NativeOptions(threads=1, buffer_bytes=1 << 24))
        try:
            for _ in loader.epoch(requests):
                pass
        finally:
            loader.close()
        return self.storage.seen

    def whole_files(self) -> Counter[Seen]:
        return Counter(Seen(key, 0, size) for key, size in self.sizes.items())


def dataset(kind: DataFormat, **fields: Any) -> Dataset:
    base = Dataset(format=kind, num_files_train=8, record_length_bytes=Fraction(6000))
    return replace(base, **fields)


def reads_of(request: BatchRequest) -> list[ReadRequest]:
    return [read for read in request.requests if isinstance(read, ReadRequest)]


ONE_SAMPLE = (
    DataFormat.NPZ,
    DataFormat.NPY,
    DataFormat.JPEG,
    DataFormat.PNG,
    DataFormat.CSV,
    DataFormat.TFRECORD,
)


@pytest.mark.parametrize("kind", ONE_SAMPLE)
def test_files_of_one_sample_are_read_whole_each_once_in_another_order_each_epoch(kind: DataFormat) -> None:
    stage = Stage(dataset(kind, num_files_train=16))
    first, second = list(stage.read(1)), list(stage.read(2))
    assert Counter(first) == Counter(second) == stage.whole_files()
    assert first != second
    assert [read.key for read in first] != sorted(stage.sizes)


@pytest.mark.parametrize("kind", [DataFormat.NPZ, DataFormat.NPY])
def test_archives_of_many_samples_are_read_whole_each_once(kind: DataFormat) -> None:
    stage = Stage(dataset(kind, num_samples_per_file=6))
    assert Counter(stage.read()) == stage.whole_files()


def test_a_batch_asks_for_a_file_only_when_it_begins_with_it() -> None:
    stage = Stage(
        dataset(DataFormat.NPZ, num_samples_per_file=6),
        ReaderSection(batch_size=4, file_shuffle=Shuffle.SEED),
    )
    assert [len(request.requests) for request in stage.requests()][:6] == [1, 1, 0, 1, 1, 0]


def test_shuffled_samples_have_their_whole_window_read_first() -> None:
    stage = Stage(
        dataset(DataFormat.NPZ, num_samples_per_file=6),
        ReaderSection(batch_size=4, shuffle_size=12, **SHUFFLED),
    )
    assert [len(request.requests) for request in stage.requests()][:6] == [2, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("transfer_bytes", [None, 4096])
def test_tfrecords_are_read_front_to_back_file_by_file(transfer_bytes: int | None) -> None:
    large = 3 * TRANSFER_BYTES // 10 if transfer_bytes is None else 6000
    stage = Stage(
        dataset(
            DataFormat.TFRECORD,
            num_samples_per_file=10,
            record_length_bytes=Fraction(large),
            num_files_train=4,
        ),
        ReaderSection(batch_size=4, transfer_bytes=transfer_bytes, **SHUFFLED),
    )
    step = transfer_bytes or TRANSFER_BYTES
    seen = stage.read()
    runs = [(key, list(reads)) for key, reads in groupby(seen, key=lambda read: read.key)]
    assert sorted(key for key, _ in runs) == sorted(stage.sizes)
    for key, reads in runs:
        offsets = list(range(0, stage.sizes[key], step))
        assert [read.offset for read in reads] == offsets
        assert sum(read.size_bytes for read in reads) == stage.sizes[key]
        assert all(read.size_bytes == step for read in reads[:-1])


def test_tfrecord_pieces_come_with_the_first_batch_that_needs_them() -> None:
    stage = Stage(
        dataset(DataFormat.TFRECORD, num_samples_per_file=8, num_files_train=1),
        ReaderSection(batch_size=2, transfer_bytes=1024, file_shuffle=Shuffle.SEED),
    )
    (size_bytes,) = stage.sizes.values()
    ends = [max(read.offset + (read.size_bytes or 0) for read in reads_of(one)) for one in stage.requests()]
    for batch, end in enumerate(ends, start=1):
        assert end >= size_bytes * batch // 4
        assert end < size_bytes * batch // 4 + 1024 or end == size_bytes


def test_indexed_records_are_read_alone_and_their_indexes_once_a_file() -> None:
    stage = Stage(dataset(DataFormat.INDEXED_BINARY, num_samples_per_file=10, num_files_train=2))
    seen = stage.read()
    records = [read for read in seen if read.key.endswith("indexed_binary")]
    indexes = [read for read in seen if not read.key.endswith("indexed_binary")]
    assert len(records) == 20
    assert {read.size_bytes for read in records} == {6000}
    assert {(read.key, read.offset) for read in records} == {
        (key, sample * 6000) for key in stage.sizes if key.endswith("indexed_binary") for sample in range(10)
    }
    assert Counter(read.key for read in indexes) == Counter(
        key for key in stage.sizes if not key.endswith("indexed_binary")
    )
    assert records != sorted(records, key=lambda read: (read.key, read.offset))


def test_indexed_records_that_stay_in_turn_are_read_file_by_file() -> None:
    stage = Stage(
        dataset(DataFormat.MMAP_INDEXED_BINARY, num_samples_per_file=8, num_files_train=6),
        ReaderSection(batch_size=4, file_shuffle=Shuffle.SEED),
    )
    records = [read for read in stage.read() if read.key.endswith("binary")]
    runs = [list(reads) for _, reads in groupby(records, key=lambda read: read.key)]
    assert len(runs) == 6
    assert all([read.offset for read in reads] == [6000 * sample for sample in range(8)] for reads in runs)


def test_parquet_is_read_by_row_group_and_only_in_the_columns_marked() -> None:
    columns = (
        ParquetColumn(name="wanted", dtype="int32", size=50),
        ParquetColumn(name="unwanted", dtype="int32", size=500, read=False),
    )
    parquet = Parquet(columns=columns, row_group_size=10)
    stage = Stage(dataset(DataFormat.PARQUET, num_samples_per_file=40, num_files_train=3, parquet=parquet))
    seen = stage.read()
    assert len(seen) == 12
    assert {read.key for read in seen} == set(stage.sizes)
    # Ten rows of 50 integers, with the little that the format adds; the other column is ten times as big.
    assert all(2000 <= read.size_bytes < 2000 * 1.5 for read in seen)
    assert [(read.key, read.offset) for read in seen] != sorted((read.key, read.offset) for read in seen)


def test_hdf5_samples_are_read_where_they_lie() -> None:
    stage = Stage(dataset(DataFormat.HDF5, num_samples_per_file=8, num_files_train=3))
    seen = stage.read()
    assert sum(read.size_bytes for read in seen) == 3 * 8 * 6000
    assert {read.key for read in seen} == set(stage.sizes)


def test_what_surveys_read_is_counted() -> None:
    stage = Stage(dataset(DataFormat.HDF5, num_samples_per_file=8, num_files_train=3))
    order, batches = stage.order(), BatchPlanner(stage.files(), stage.storage, StepPhase.TRAIN)
    stage.storage.seen.clear()
    for _ in batches.of_epoch(order, 6):
        pass
    assert batches.survey_bytes == sum(read.size_bytes for read in stage.storage.seen) > 0


def test_few_files_are_remembered() -> None:
    stage = Stage(dataset(DataFormat.HDF5, num_samples_per_file=8, num_files_train=3))
    order = stage.order()
    forgetful = BatchPlanner(stage.files(), stage.storage, StepPhase.TRAIN, known_files=1)
    mindful = BatchPlanner(stage.files(), stage.storage, StepPhase.TRAIN, known_files=3)
    for batches in (forgetful, mindful):
        list(batches.of_epoch(order, 6))
        list(batches.of_epoch(order, 6))
    assert forgetful.survey_bytes > mindful.survey_bytes


def test_synthetic_samples_touch_no_storage() -> None:
    stage = Stage(dataset(DataFormat.SYNTHETIC, num_files_train=16))
    assert [request.requests for request in stage.requests()] == [()] * 4
    assert stage.read() == []


def test_compressed_files_are_read_whole_though_their_size_is_not_known() -> None:
    stage = Stage(dataset(DataFormat.NPZ, compression=Compression.ZIP))
    assert Counter(stage.read()) == stage.whole_files()


def test_ranks_read_different_files_and_together_all_of_them() -> None:
    stage = Stage(dataset(DataFormat.NPZ, num_files_train=24), num_ranks=3)
    keys = [
        {read.key for request in stage.requests(rank=rank) for read in reads_of(request)} for rank in range(3)
    ]
    assert [len(each) for each in keys] == [8, 8, 8]
    assert set.union(*keys) == set(stage.sizes)


def test_a_file_of_another_size_is_an_error_that_names_it() -> None:
    stage = Stage(dataset(DataFormat.NPZ))
    key = min(stage.sizes)
    write_object(stage.storage, key, [b"x" * 100])
    with pytest.raises(ShortTransfer, match=f"{key}.*Generate or copy it again"):
        stage.read()


def test_of_files_from_elsewhere_nothing_is_presumed_but_their_names() -> None:
    stage = Stage(dataset(DataFormat.NPZ))
    stage.storage.delete(KEY)
    key = min(stage.sizes)
    write_object(stage.storage, key, [b"x" * 100])
    stage.sizes[key] = 100
    assert stage.files().recipe is None
    assert Counter(stage.read()) == stage.whole_files()


def test_tfrecords_from_elsewhere_are_read_to_their_end() -> None:
    stage = Stage(dataset(DataFormat.TFRECORD, num_samples_per_file=4, num_files_train=2))
    stage.storage.delete(KEY)
    key = min(stage.sizes)
    write_object(stage.storage, key, [b"x" * 100])
    stage.sizes[key] = 100
    assert sum(read.size_bytes for read in stage.read()) == sum(stage.sizes.values())


def test_fewer_files_than_lie_there_may_be_asked_for_and_no_more() -> None:
    stage = Stage(dataset(DataFormat.NPZ))
    asked = replace(stage.dataset, num_files_train=5)
    files = open_files(asked, stage.storage, seed=9, evaluates=False)
    assert [key for number in (0, 2, 4) for key in files.keys_of(StepPhase.TRAIN, number)] == [
        f"train/img_{number}_of_8.npz" for number in (0, 2, 4)
    ]
    with pytest.raises(UsageError, match=r"has 8 files, but .* is 9"):
        open_files(replace(asked, num_files_train=9), stage.storage, seed=9, evaluates=False)


def test_a_data_set_that_was_made_otherwise_is_refused() -> None:
    stage = Stage(dataset(DataFormat.NPZ))
    asked = replace(stage.dataset, record_length_bytes=Fraction(7000))
    with pytest.raises(UsageError, match="record_length_bytes"):
        open_files(asked, stage.storage, seed=9, evaluates=False)


def test_evaluation_files_come_after_those_of_training() -> None:
    stage = Stage(dataset(DataFormat.NPZ, num_files_train=2, num_files_eval=3))
    files = stage.files()
    assert files.plan(StepPhase.EVAL, 0).name == "valid/img_0_of_3.npz"
    assert files.plan(StepPhase.EVAL, 0).index == 2
    numbers = [*((StepPhase.TRAIN, number) for number in range(2)), *((StepPhase.EVAL, n) for n in range(3))]
    assert [key for phase, number in numbers for key in files.keys_of(phase, number)] == sorted(stage.sizes)


def test_requests_are_planned_ahead_and_come_in_order() -> None:
    made: list[int] = []

    def make() -> Iterator[BatchRequest]:
        for number in range(10):
            made.append(number)
            yield BatchRequest((), number)

    planned = plan_ahead(make(), depth=3)
    assert next(planned).num_samples == 0
    assert [request.num_samples for request in planned] == list(range(1, 10))
    assert made == list(range(10))


def test_planning_that_fails_says_so_where_its_request_is_wanted() -> None:
    def fail() -> Iterator[BatchRequest]:
        yield BatchRequest((), 1)
        raise ObjectNotFound("gone")

    planned = plan_ahead(fail(), depth=3)
    assert next(planned).num_samples == 1
    with pytest.raises(ObjectNotFound, match="gone"):
        next(planned)


def test_leaving_early_ends_the_planning() -> None:
    planned = plan_ahead(iter([BatchRequest((), number) for number in range(100)]), depth=2)
    next(planned)
    planned.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-planner")]


@pytest.mark.parametrize(
    "kind", [*ONE_SAMPLE, DataFormat.INDEXED_BINARY, DataFormat.PARQUET, DataFormat.HDF5]
)
def test_on_storage_without_cost_the_same_is_asked_for_and_nothing_read(kind: DataFormat) -> None:
    stage = Stage(dataset(kind, num_files_train=16))
    requests = stage.requests()
    free = ZeroCostStorage(object_sizes(requests, stage.storage), stage.storage)
    expected = sum(read.size_bytes for read in stage.read())
    stage.storage.seen.clear()
    loader = NativeLoader(free, NativeOptions(threads=2))
    batches = list(loader.epoch(requests))
    loader.close()
    assert sum(batch.read_bytes for batch in batches) == expected
    assert stage.storage.seen == []


def test_sizes_of_files_from_elsewhere_are_looked_up() -> None:
    stage = Stage(dataset(DataFormat.NPZ))
    stage.storage.delete(KEY)
    assert object_sizes(stage.requests(), stage.storage) == stage.sizes


def test_an_object_that_nobody_told_of_costs_an_error() -> None:
    with pytest.raises(ObjectNotFound, match="size of this object is not known"):
        ZeroCostStorage({}).open("x")


def test_a_ceiling_run_is_short_whatever_a_step_takes() -> None:
    assert count_limit_steps(0.323, 1000) == 9
    assert count_limit_steps(10.0, 1000) == 8
    assert count_limit_steps(0.0, 1000) == 200
    assert count_limit_steps(0.04755, 1000) == 63
    assert count_limit_steps(0.04755, 5) == 5
