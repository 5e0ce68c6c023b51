"""Writing and verifying one file: what is left behind by failures, and how damage is described."""

import io
import tracemalloc
import zipfile
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import pytest
from tests.support.data_samples import read_samples

from penstock.dataset.content import Content
from penstock.dataset.formats import open_format
from penstock.dataset.formats.data_file_io import buffer_pool, verify_file, write_file
from penstock.dataset.formats.file_writer import (
    BUFFER_BYTES,
    Checksum,
    DataFileChecker,
    DataFileWriter,
    FirstDifference,
    FormatSink,
)
from penstock.dataset.formats.format_protocol import FileFormat, FilePlan
from penstock.errors import ShortTransfer, StorageError
from penstock.storage import Release
from penstock.storage.aligned import BufferPool
from penstock.storage.in_memory import MemorySink, MemoryStorage
from penstock.storage.protocol import read_object, write_object
from penstock.workload.enums import Compression, DataFormat
from penstock.workload.spec import Dataset, Parquet, ParquetColumn

POOL = buffer_pool()
CONTENT = Content(1, 0)


class _Failing(MemoryStorage):
    """Storage whose sinks fail at their `failing`th buffer, and remember that they were aborted."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.failing = failing
        self.aborted: list[str] = []

    def create(self, key: str, size_bytes: int | None = None) -> MemorySink:
        storage = self

        class Sink(MemorySink):
            taken = 0

            def submit(self, buffer: memoryview, release: Release | None = None) -> None:
                self.taken += 1
                if self.taken == storage.failing:
                    raise StorageError("the disk is gone", uri=key)
                super().submit(buffer, release)

            def abort(self) -> None:
                storage.aborted.append(key)
                super().abort()

        return Sink(self, key, size_bytes)


def _written(dataset: Dataset) -> tuple[FileFormat, FilePlan, MemoryStorage]:
    kind, storage = open_format(dataset, 1), MemoryStorage()
    plan = kind.plan(0, "file")
    write_file(kind, plan, storage, CONTENT, POOL)
    return kind, plan, storage


def _dataset(kind: DataFormat, samples: int = 1, size: int = 5000) -> Dataset:
    return Dataset(format=kind, num_samples_per_file=samples, record_length_bytes=Fraction(size))


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_file_that_cannot_be_written_is_aborted_and_leaves_nothing(failing: int) -> None:
    storage = _Failing(failing)
    kind = open_format(_dataset(DataFormat.NPZ, 1, 3 * BUFFER_BYTES), 1)
    with pytest.raises(StorageError, match="the disk is gone"):
        write_file(kind, kind.plan(0, "file"), storage, CONTENT, POOL)
    assert storage.aborted == ["file"]
    assert list(storage.list()) == []


def test_an_index_is_stored_before_the_file_that_needs_it() -> None:
    storage = _Failing(failing=1)
    kind = open_format(_dataset(DataFormat.INDEXED_BINARY), 1)
    with pytest.raises(StorageError):
        write_file(kind, kind.plan(0, "file"), storage, CONTENT, POOL)
    assert storage.aborted == ["file.sz.idx"]
    stored = write_file(kind, kind.plan(0, "file"), MemoryStorage(), CONTENT, POOL)
    assert [info.key for info in stored] == ["file", "file.off.idx", "file.sz.idx"]


def test_a_large_file_goes_through_few_buffers() -> None:
    class Counting(BufferPool):
        made = 0

        def take(self) -> memoryview:
            if not self._idle:
                self.made += 1
            return super().take()

    pool, storage = Counting(1 << 16, 4), MemoryStorage()
    kind = open_format(_dataset(DataFormat.TFRECORD, 5, 600_000), 1)
    plan = kind.plan(0, "file")
    write_file(kind, plan, storage, CONTENT, pool)
    assert pool.made == 1
    assert verify_file(kind, plan, storage, CONTENT) is None


def _damage(storage: MemoryStorage, key: str, offset: int) -> None:
    stored = read_object(storage, key)
    stored[offset] ^= 1
    write_object(storage, key, [stored])


@pytest.mark.parametrize(
    "kind_name",
    [
        DataFormat.NPY,
        DataFormat.TFRECORD,
        DataFormat.INDEXED_BINARY,
        DataFormat.HDF5,
        DataFormat.CSV,
        DataFormat.PARQUET,
    ],
)
@pytest.mark.parametrize("sample", [0, 2, 4])
def test_damage_to_content_is_described_by_its_byte(kind_name: DataFormat, sample: int) -> None:
    dataset = replace(_dataset(kind_name, 5), parquet=Parquet(row_group_size=1))
    kind, plan, storage = _written(dataset)
    text = kind.expected(plan, CONTENT, range(sample, sample + 1)).tobytes()
    stored = bytes(read_object(storage, "file"))
    if kind_name is DataFormat.CSV:
        offset = sample * len(stored) // 5 + 42
    else:
        offset = stored.index(text[:1] if kind_name is DataFormat.NPY else text[:16]) + 3
    if kind_name is DataFormat.NPY:  # its samples are interleaved behind the header
        offset = len(stored) - 5 * plan.sample_bytes + sample
    _damage(storage, "file", offset)
    wrong = verify_file(kind, plan, storage, CONTENT)
    assert wrong is not None
    assert wrong.what.startswith(f"byte {offset}: it differs")
    by_encoder = kind_name in (DataFormat.HDF5, DataFormat.PARQUET)
    assert ("another version of its encoder" in wrong.what) is by_encoder


def test_damage_to_a_column_that_training_does_not_read_is_damage() -> None:
    columns = (ParquetColumn(name="a", dtype="float64", read=False), ParquetColumn(name="b", dtype="float64"))
    kind, plan, storage = _written(
        replace(_dataset(DataFormat.PARQUET, 50), parquet=Parquet(columns=columns))
    )
    _damage(storage, "file", 100)
    assert verify_file(kind, plan, storage, CONTENT) is not None


@pytest.mark.parametrize("part", [1, 2])
def test_a_wrong_index_is_named(part: int) -> None:
    kind, plan, storage = _written(_dataset(DataFormat.INDEXED_BINARY, 9))
    key = plan.parts[part].key("file")
    _damage(storage, key, 16)
    wrong = verify_file(kind, plan, storage, CONTENT)
    assert wrong is not None
    assert (wrong.name, wrong.what) == (key, "byte 16: it differs from what is generated")


@pytest.mark.parametrize(
    "dataset",
    [
        replace(_dataset(DataFormat.NPZ, 3), compression=Compression.ZIP),
        _dataset(DataFormat.HDF5, 3),
        replace(_dataset(DataFormat.PARQUET, 3)),
        _dataset(DataFormat.PNG),
        _dataset(DataFormat.JPEG),
    ],
    ids=lambda dataset: dataset.format.value,
)
@pytest.mark.parametrize("filler", [b"\0", b"\xff", b"\x50\x4b"])
def test_a_file_of_nonsense_is_wrong_and_nothing_worse(dataset: Dataset, filler: bytes) -> None:
    kind, plan, storage = _written(dataset)
    size = storage.stat("file").size_bytes
    write_object(storage, "file", [(filler * size)[:size]])
    wrong = verify_file(kind, plan, storage, CONTENT)
    assert wrong is not None
    assert wrong.what.startswith(("byte 0: ", "byte 1: ", "byte 2: "))
    assert wrong.name == "file"


@pytest.mark.parametrize("kind_name", [DataFormat.HDF5, DataFormat.PARQUET])
@pytest.mark.parametrize("kept", [0, 5, 200])
def test_a_loader_is_told_of_a_file_whose_metadata_is_gone(kind_name: DataFormat, kept: int) -> None:
    kind, plan, storage = _written(_dataset(kind_name, 3))
    stored = read_object(storage, "file")
    write_object(storage, "file", [stored[:kept], bytes(len(stored) - kept)])
    with pytest.raises(StorageError, match="file is damaged") as caught:
        kind.survey(plan, storage.open("file"))
    assert caught.value.uri == "file"


@pytest.mark.parametrize("kind_name", [DataFormat.HDF5, DataFormat.PARQUET, DataFormat.NPZ])
def test_a_loader_is_told_of_a_sample_that_does_not_unpack(kind_name: DataFormat) -> None:
    dataset = replace(_dataset(kind_name, 4), compression=Compression.GZIP)
    kind, plan, storage = _written(dataset)
    with closing(storage.open("file")) as source:
        found = kind.survey(plan, source)
        read = next(kind.reads(plan, found, range(1)))
        _damage(storage, "file", read.offset + read.size_bytes // 2)
    with closing(storage.open("file")) as source, pytest.raises(StorageError, match="file is damaged"):
        read_samples(kind, plan, found, source, range(1))


@pytest.mark.parametrize("dataset", [_dataset(DataFormat.HDF5, 3), replace(_dataset(DataFormat.PARQUET, 3))])
def test_a_loader_is_told_of_a_file_with_other_samples_than_planned(dataset: Dataset) -> None:
    kind, plan, storage = _written(replace(dataset, num_samples_per_file=9))
    fewer = replace(plan, num_samples=2, block_samples=1)
    with pytest.raises(StorageError, match="damaged"):
        kind.survey(fewer, storage.open("file"))


@pytest.mark.parametrize("dataset", [_dataset(DataFormat.HDF5, 3), _dataset(DataFormat.PARQUET, 3)])
def test_encoded_files_of_another_shape_are_wrong(dataset: Dataset) -> None:
    kind, plan, storage = _written(dataset)
    other = open_format(replace(dataset, num_samples_per_file=2), 1)
    write_file(other, other.plan(0, "file"), storage, CONTENT, POOL)
    assert verify_file(kind, plan, storage, CONTENT) is not None


def test_a_compressed_array_of_another_shape_is_damage() -> None:
    dataset = replace(_dataset(DataFormat.NPZ, 3), compression=Compression.ZIP)
    kind, plan, storage = _written(dataset)
    other = open_format(replace(dataset, record_length_bytes=Fraction(6000)), 1)
    write_file(other, other.plan(0, "file"), storage, CONTENT, POOL)
    with closing(storage.open("file")) as source, pytest.raises(StorageError, match="a different shape"):
        read_samples(kind, plan, kind.survey(plan, source), source, range(1))


def test_an_image_of_another_shape_is_damage() -> None:
    kind, plan, storage = _written(_dataset(DataFormat.PNG, 1, 5000))
    wrong_plan = replace(plan, dims=(1, 2, 3))
    with closing(storage.open("file")) as source, pytest.raises(StorageError, match=r"instead of \(1, 2, 3"):
        read_samples(kind, wrong_plan, kind.survey(wrong_plan, source), source, range(1))


def test_a_sum_is_the_same_for_who_writes_and_who_checks() -> None:
    storage = MemoryStorage()
    sink = storage.create("sums")
    writing = DataFileWriter(CONTENT, sink.submit, BufferPool(4096, 2))
    assert _sums(writing) == CHECK_VALUES
    writing.flush()
    sink.finish()
    assert _sums(DataFileChecker(CONTENT, storage.open("sums"), _never)) == CHECK_VALUES


CHECK_VALUES = [0xCBF43926, 0xE3069283]
"""What both algorithms give for the nine digits, by their definitions."""


def _sums(out: FormatSink) -> list[int]:
    sums = []
    for kind in Checksum:
        out.start_sum(kind)
        out.raw(b"123456789")
        sums.append(out.end_sum())
        out.fill(10_000)
    return sums


def _never(_needed: int) -> ShortTransfer:
    raise AssertionError


def test_bytes_behind_the_end_are_a_difference() -> None:
    storage = MemoryStorage()
    write_object(storage, "more", [b"abcd"])
    out = DataFileChecker(CONTENT, storage.open("more"), _never)
    out.raw(b"abc")
    with pytest.raises(FirstDifference) as caught:
        out.finish()
    assert caught.value.offset == 3


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_first_byte_that_differs_is_found(at: int) -> None:
    storage, text = MemoryStorage(), bytearray(b"abcd")
    write_object(storage, "some", [text])
    text[at] ^= 1
    with pytest.raises(FirstDifference) as caught:
        DataFileChecker(CONTENT, storage.open("some"), _never).raw(bytes(text))
    assert caught.value.offset == at


@pytest.mark.parametrize("told_bytes", [None, 100])
def test_an_archive_that_unpacks_to_more_than_planned_is_not_kept_whole(told_bytes: int | None) -> None:
    kind, plan, storage = _written(replace(_dataset(DataFormat.NPZ), compression=Compression.ZIP))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(100 << 20))
        if told_bytes is not None:
            archive.getinfo("x.npy").file_size = told_bytes
    write_object(storage, "file", [packed.getvalue()])
    tracemalloc.start()
    with closing(storage.open("file")) as source, pytest.raises(StorageError, match="file is damaged"):
        read_samples(kind, plan, kind.survey(plan, source), source, range(1))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20 << 20
