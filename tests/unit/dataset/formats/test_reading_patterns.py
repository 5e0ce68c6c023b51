"""Which ranges a training run touches, format by format: what a trace of it must show."""

from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from penstock.dataset.content import Content
from penstock.dataset.formats import open_format
from penstock.dataset.formats.data_file_io import buffer_pool, write_file
from penstock.dataset.formats.format_protocol import (
    COMPUTED,
    Extent,
    FileFormat,
    FilePlan,
    FileSurvey,
    RangeRead,
)
from penstock.errors import StorageError, UsageError
from penstock.storage.in_memory import MemoryStorage
from penstock.workload.enums import Compression, DataFormat
from penstock.workload.spec import Dataset, Hdf5, Parquet, ParquetColumn

POOL = buffer_pool()


def _stored(dataset: Dataset) -> tuple[FileFormat, FilePlan, FileSurvey, MemoryStorage]:
    kind, storage = open_format(dataset, 1), MemoryStorage()
    plan = kind.plan(0, "file")
    write_file(kind, plan, storage, Content(1, 0), POOL)
    before = storage.counters.read_bytes
    with closing(storage.open("file")) as source:
        found = kind.survey(plan, source)
    if found is COMPUTED:
        assert storage.counters.read_bytes == before
    return kind, plan, found, storage


def _dataset(kind: DataFormat, samples: int = 1, size: int = 10_000) -> Dataset:
    return Dataset(format=kind, num_samples_per_file=samples, record_length_bytes=Fraction(size))


@pytest.mark.parametrize(
    "dataset",
    [
        *(
            _dataset(kind)
            for kind in (DataFormat.NPY, DataFormat.NPZ, DataFormat.JPEG, DataFormat.PNG, DataFormat.CSV)
        ),
        _dataset(DataFormat.NPZ, 5),
        _dataset(DataFormat.TFRECORD, 5),
        replace(_dataset(DataFormat.NPZ, 5), compression=Compression.ZIP),
    ],
    ids=lambda dataset: f"{dataset.format} of {dataset.num_samples_per_file}",
)
def test_files_that_cannot_be_read_in_part_are_read_whole_and_once(dataset: Dataset) -> None:
    kind, plan, found, storage = _stored(dataset)
    whole = RangeRead(offset=0, size_bytes=storage.stat("file").size_bytes)
    assert plan.block_samples == plan.num_samples
    for samples in (range(1), range(plan.num_samples)):
        assert list(kind.reads(plan, found, samples)) == [whole]


@pytest.mark.parametrize("kind_name", [DataFormat.INDEXED_BINARY, DataFormat.MMAP_INDEXED_BINARY])
def test_a_record_of_an_indexed_binary_is_read_alone_after_both_indexes(kind_name: DataFormat) -> None:
    kind, plan, found, _ = _stored(_dataset(kind_name, 9, 100))
    assert list(kind.reads(plan, found, range(4, 6))) == [
        RangeRead(part=1, offset=0, size_bytes=72),
        RangeRead(part=2, offset=0, size_bytes=72),
        RangeRead(offset=400, size_bytes=200),
    ]
    assert plan.block_samples == 1


def test_hdf5_without_chunks_is_read_sample_by_sample() -> None:
    kind, plan, found, _ = _stored(_dataset(DataFormat.HDF5, 6))
    (read,) = kind.reads(plan, found, range(3, 4))
    assert read.size_bytes == plan.sample_bytes
    (all_samples,) = kind.reads(plan, found, range(6))
    assert all_samples.size_bytes == 6 * plan.sample_bytes
    assert read.offset == all_samples.offset + 3 * plan.sample_bytes


def test_hdf5_is_read_by_chunk_and_a_chunk_of_many_samples_whole() -> None:
    dataset = replace(_dataset(DataFormat.HDF5, 10), record_dims=(5, 20), hdf5=Hdf5(chunk_dims=(4, 5, 20)))
    kind, plan, found, _ = _stored(dataset)
    assert plan.block_samples == 4
    for samples in (range(5, 6), range(4, 8)):
        assert sum(read.size_bytes for read in kind.reads(plan, found, samples)) == 400
    assert sum(read.size_bytes for read in kind.reads(plan, found, range(3, 5))) == 800


def test_hdf5_chunks_have_the_size_asked_for() -> None:
    dataset = replace(_dataset(DataFormat.HDF5, 8), record_dims=(10, 100), enable_chunking=True)
    for chunk_bytes, expected in ((500, 1), (1000, 1), (3500, 3), (99_999, 8), (0, 1)):
        sized = replace(dataset, chunk_size_bytes=chunk_bytes)
        assert open_format(sized, 1).plan(0, "file").block_samples == expected


def test_parquet_reads_only_the_columns_to_be_read_of_the_row_groups_wanted() -> None:
    columns = tuple(
        ParquetColumn(name=f"c{number}", dtype="float64", size=3, read=number in (1, 2, 5))
        for number in range(7)
    )
    dataset = replace(_dataset(DataFormat.PARQUET, 100), parquet=Parquet(columns=columns, row_group_size=30))
    kind, plan, found, storage = _stored(dataset)
    assert (plan.block_samples, plan.sample_bytes, plan.dims) == (30, 7 * 24, (3 * 24,))
    per_group = [list(kind.reads(plan, found, range(start, start + 1))) for start in (0, 30, 60, 90)]
    assert [len(reads) for reads in per_group] == [2, 2, 2, 2]  # columns 1 and 2 are neighbours
    first = sum(read.size_bytes for read in per_group[0])
    assert first == pytest.approx(30 * 72, rel=0.15)
    both = list(kind.reads(plan, found, range(29, 31)))
    assert both == per_group[0] + per_group[1]
    assert storage.stat("file").size_bytes > 2 * sum(read.size_bytes for reads in per_group for read in reads)


def test_parquet_reads_its_footer_and_nothing_else_to_find_its_row_groups() -> None:
    dataset = replace(_dataset(DataFormat.PARQUET, 40, 20_000), parquet=Parquet(row_group_size=10))
    kind, plan, _, storage = _stored(dataset)
    before = storage.counters.read_bytes
    with closing(storage.open("file")) as source:
        kind.survey(plan, source)
    assert storage.counters.read_bytes - before == 64 << 10


def test_synthetic_samples_touch_no_storage() -> None:
    kind = open_format(_dataset(DataFormat.SYNTHETIC, 4), 1)
    plan = kind.plan(3, "nothing")
    assert plan.parts == ()
    storage = MemoryStorage()
    assert write_file(kind, plan, storage, Content(1, 1), POOL) == ()
    assert list(kind.reads(plan, COMPUTED, range(4))) == []
    decoded = kind.decode(plan, COMPUTED, [], range(1, 3))
    assert decoded.shape == (2, *plan.dims)
    np.testing.assert_array_equal(decoded, kind.expected(plan, Content(1, 1), range(1, 3)))
    assert list(storage.list()) == []
    with pytest.raises(UsageError, match="has no bytes"):
        kind.emit(plan, 0, None)  # type: ignore[arg-type]  # no pen is touched


@pytest.mark.parametrize(
    "kind_name",
    [
        DataFormat.NPY,
        DataFormat.NPZ,
        DataFormat.TFRECORD,
        DataFormat.INDEXED_BINARY,
        DataFormat.CSV,
        DataFormat.PNG,
    ],
)
def test_decoding_needs_every_byte_that_was_asked_for(kind_name: DataFormat) -> None:
    kind, plan, found, storage = _stored(_dataset(kind_name))
    size_bytes = plan.parts[0].size_bytes
    assert size_bytes is not None
    buffer = memoryview(bytearray(size_bytes))
    storage.open("file").read_into(0, buffer)
    halves = [Extent(100, buffer[100:]), Extent(0, buffer[:100])]
    np.testing.assert_array_equal(
        kind.decode(plan, found, halves, range(1)), kind.expected(plan, Content(1, 0), range(1))
    )
    with pytest.raises(StorageError, match="was not read"):
        kind.decode(plan, found, halves[1:], range(1))
