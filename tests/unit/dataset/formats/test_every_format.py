"""What holds for every format alike, on storage in memory: sizes, reads, decoding, verification."""

import itertools
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.data_samples import read_samples

from penstock.dataset.content import Content
from penstock.dataset.formats import open_format
from penstock.dataset.formats.data_file_io import buffer_pool, verify_file, write_file
from penstock.dataset.formats.format_protocol import FileFormat, FilePlan, Sample
from penstock.errors import ObjectNotFound, ShortTransfer
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import read_object, write_object
from penstock.workload.enums import Compression, DataFormat
from penstock.workload.spec import Dataset, Hdf5, Parquet, ParquetColumn

POOL = buffer_pool()


def _dataset(kind: DataFormat, **fields: object) -> Dataset:
    base = Dataset(format=kind, num_samples_per_file=1, record_length_bytes=Fraction(6000))
    return replace(base, **fields)  # type: ignore[arg-type]  # the cases below name real fields


COLUMNS = (
    ParquetColumn(name="label", dtype="int8"),
    ParquetColumn(name="unread", dtype="float64", size=5, read=False),
    ParquetColumn(name="half", dtype="float16"),
    ParquetColumn(name="list", dtype="float32", size=30),
    ParquetColumn(name="bytes", dtype="uint8", size=17),
    ParquetColumn(name="small", dtype="uint16", size=3),
    ParquetColumn(name="truth", dtype="bool", size=2),
    ParquetColumn(name="word", dtype="string", size=9),
    ParquetColumn(name="blob", dtype="binary", size=100, read=False),
    ParquetColumn(name="last", dtype="int64"),
)

WITH_FILES = [kind for kind in DataFormat if kind is not DataFormat.SYNTHETIC]
CASES = {kind.value: _dataset(kind) for kind in WITH_FILES} | {
    "npy of many": _dataset(DataFormat.NPY, num_samples_per_file=5, record_element_type="float32"),
    "npz of many": _dataset(DataFormat.NPZ, num_samples_per_file=7, record_dims=(3, 5, 7)),
    "npz deflated": _dataset(DataFormat.NPZ, num_samples_per_file=3, compression=Compression.ZIP),
    "npz bz2": _dataset(DataFormat.NPZ, compression=Compression.BZ2),
    "tfrecord of many": _dataset(DataFormat.TFRECORD, num_samples_per_file=6, record_element_type="int16"),
    "indexed_binary of many": _dataset(DataFormat.INDEXED_BINARY, num_samples_per_file=5),
    "mmap_indexed_binary of many": _dataset(DataFormat.MMAP_INDEXED_BINARY, num_samples_per_file=9),
    "csv of many": _dataset(DataFormat.CSV, num_samples_per_file=3, record_length_bytes=Fraction(700)),
    "csv of int16": _dataset(DataFormat.CSV, num_samples_per_file=3, record_element_type="int16"),
    "csv of uint64": _dataset(DataFormat.CSV, record_element_type="uint64"),
    "csv of float32": _dataset(DataFormat.CSV, num_samples_per_file=2, record_element_type="float32"),
    "hdf5 of many": _dataset(DataFormat.HDF5, num_samples_per_file=5, record_element_type="int32"),
    "hdf5 deflated": _dataset(DataFormat.HDF5, num_samples_per_file=4, compression=Compression.GZIP),
    "hdf5 lzf, chunks by size": _dataset(
        DataFormat.HDF5,
        num_samples_per_file=9,
        compression=Compression.LZF,
        enable_chunking=True,
        chunk_size_bytes=13000,
    ),
    "hdf5 of two datasets in chunks": _dataset(
        DataFormat.HDF5_OPT,
        num_samples_per_file=5,
        record_dims=(6, 7, 8),
        hdf5=Hdf5(num_dset_per_record=2, chunk_dims=(2, 7, 8), max_shape=(99, 99, 99)),
    ),
    "parquet of many": _dataset(
        DataFormat.PARQUET, num_samples_per_file=10, parquet=Parquet(row_group_size=4)
    ),
    "parquet of columns": _dataset(
        DataFormat.PARQUET, num_samples_per_file=11, parquet=Parquet(columns=COLUMNS, row_group_size=4)
    ),
    "parquet by zstd, two groups at once": _dataset(
        DataFormat.PARQUET,
        num_samples_per_file=70,
        compression=Compression.ZSTD,
        parquet=Parquet(columns=COLUMNS[:3], row_group_size=16, generation_batch_size=32),
    ),
}
each_case = pytest.mark.parametrize("dataset", CASES.values(), ids=CASES.keys())


def _written(dataset: Dataset, index: int = 3) -> tuple[FileFormat, FilePlan, MemoryStorage, Content]:
    """A file as written, in a storage of the caller's own; encoding it once per module is enough."""
    kind, plan, objects = _encoded(dataset, index)
    storage = MemoryStorage()
    for key, stored in objects.items():
        write_object(storage, key, [stored])
    return kind, plan, storage, Content(7, index)


@cache
def _encoded(dataset: Dataset, index: int) -> tuple[FileFormat, FilePlan, dict[str, bytes]]:
    kind, storage = open_format(dataset, seed=7), MemoryStorage()
    plan = kind.plan(index, f"train/img_{index}_of_9.{dataset.format}")
    write_file(kind, plan, storage, Content(7, index), POOL)
    keys = [part.key(plan.name) for part in plan.parts]
    return kind, plan, {key: bytes(read_object(storage, key)) for key in keys}


@each_case
def test_a_file_is_as_big_as_planned(dataset: Dataset) -> None:
    _, plan, storage, _ = _written(dataset)
    for part in plan.parts:
        stored = storage.stat(part.key(plan.name)).size_bytes
        assert part.size_bytes in (None, stored)
        assert stored > 0


@each_case
def test_a_file_as_written_verifies(dataset: Dataset) -> None:
    assert verify_file(*_written(dataset)) is None


@each_case
def test_every_sample_decodes_to_what_was_generated_alone_and_together(dataset: Dataset) -> None:
    kind, plan, storage, content = _written(dataset)
    with closing(storage.open(plan.name)) as source:
        found = kind.survey(plan, source)
        every = range(plan.num_samples)
        together = read_samples(kind, plan, found, source, every)
        assert len(together) == plan.num_samples
        np.testing.assert_array_equal(_bits(together), _bits(kind.expected(plan, content, every)))
        for sample in every:
            one = range(sample, sample + 1)
            alone = read_samples(kind, plan, found, source, one)
            np.testing.assert_array_equal(_bits(alone[0]), _bits(together[sample]))
            np.testing.assert_array_equal(_bits(alone), _bits(kind.expected(plan, content, one)))


def _bits(values: Sample) -> Sample:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


@each_case
def test_reads_stay_inside_the_file_in_order_without_overlap(dataset: Dataset) -> None:
    kind, plan, storage, _ = _written(dataset)
    with closing(storage.open(plan.name)) as source:
        found = kind.survey(plan, source)
        for start, stop in itertools.combinations(range(plan.num_samples + 1), 2):
            reads = [read for read in kind.reads(plan, found, range(start, stop)) if read.part == 0]
            assert reads
            assert all(read.size_bytes > 0 for read in reads)
            for one, following in itertools.pairwise(reads):
                assert one.offset + one.size_bytes <= following.offset
            assert reads[-1].offset + reads[-1].size_bytes <= source.size_bytes


@each_case
def test_no_samples_need_no_read(dataset: Dataset) -> None:
    kind, plan, storage, _ = _written(dataset)
    with closing(storage.open(plan.name)) as source:
        assert list(kind.reads(plan, kind.survey(plan, source), range(0))) == []


@each_case
def test_the_same_seed_writes_the_same_bytes_and_another_file_others(dataset: Dataset) -> None:
    _, plan, one, _ = _written(dataset)
    _encoded.cache_clear()
    _, _, again, _ = _written(dataset)
    _, other_plan, other, _ = _written(dataset, index=4)
    assert read_object(one, plan.name) == read_object(again, plan.name)
    assert read_object(one, plan.name) != read_object(other, other_plan.name)


@each_case
@settings(max_examples=settings().max_examples // 6)
@given(choice=st.data())
def test_any_flipped_byte_is_found_where_it_is(dataset: Dataset, choice: st.DataObject) -> None:
    kind, plan, storage, content = _written(dataset)
    part = choice.draw(st.sampled_from(plan.parts))
    stored = read_object(storage, part.key(plan.name))
    offset = choice.draw(st.integers(0, len(stored) - 1))
    stored[offset] ^= choice.draw(st.integers(1, 255))
    write_object(storage, part.key(plan.name), [stored])
    wrong = verify_file(kind, plan, storage, content)
    assert wrong is not None
    assert wrong.name == part.key(plan.name)
    assert wrong.what.startswith(f"byte {offset}: ")


@each_case
@pytest.mark.parametrize("share", [0.0, 0.4, 0.999])
def test_a_truncated_file_is_an_error_that_names_it(dataset: Dataset, share: float) -> None:
    kind, plan, storage, content = _written(dataset)
    for part in plan.parts:
        key = part.key(plan.name)
        whole = read_object(storage, key)
        write_object(storage, key, [whole[: int(share * len(whole))]])
        with pytest.raises(ShortTransfer, match=r"truncated") as caught:
            verify_file(kind, plan, storage, content)
        assert caught.value.uri == key
        write_object(storage, key, [whole])


@each_case
def test_a_file_with_a_byte_too_many_is_noticed(dataset: Dataset) -> None:
    kind, plan, storage, content = _written(dataset)
    whole = read_object(storage, plan.name)
    write_object(storage, plan.name, [whole, b"\0"])
    if plan.parts[0].size_bytes is None:
        wrong = verify_file(kind, plan, storage, content)
        assert wrong is not None
        assert wrong.what.startswith(f"byte {len(whole)}: ")
    else:
        with pytest.raises(ShortTransfer, match="instead of"):
            verify_file(kind, plan, storage, content)


@each_case
def test_a_missing_file_is_not_found(dataset: Dataset) -> None:
    kind, plan, storage, content = _written(dataset)
    storage.delete(plan.name)
    with pytest.raises(ObjectNotFound):
        verify_file(kind, plan, storage, content)
