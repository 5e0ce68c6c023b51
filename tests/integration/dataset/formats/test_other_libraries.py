"""Files as the libraries of their formats see them: on disk, opened without anything of Penstock."""

import csv
import io
import shutil
import struct
import subprocess
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.dataset.content import Content
from penstock.dataset.formats import open_format
from penstock.dataset.formats.data_file_io import buffer_pool, verify_file, write_file
from penstock.dataset.formats.format_protocol import FilePlan
from penstock.storage.uri import open_storage
from penstock.workload.enums import Compression, DataFormat
from penstock.workload.spec import Dataset, Hdf5, Parquet, ParquetColumn

SEED = 11
POOL = buffer_pool()


def _write(folder: Path, dataset: Dataset, index: int = 0) -> tuple[Path, FilePlan, Content]:
    storage, content = open_storage(f"file://{folder}", {}), Content(SEED, index)
    kind = open_format(dataset, SEED)
    plan = kind.plan(index, f"train/img_{index}_of_4.{dataset.format}")
    write_file(kind, plan, storage, content, POOL)
    assert verify_file(kind, plan, storage, content) is None
    return folder / plan.name, plan, content


def _dataset(kind: DataFormat, samples: int = 1, size: int = 40_000) -> Dataset:
    return Dataset(format=kind, num_samples_per_file=samples, record_length_bytes=Fraction(size))


def _content(content: Content, offset: int, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    content.fill(memoryview(buffer), offset)
    return bytes(buffer)


def test_numpy_loads_npy_with_samples_last(tmp_path: Path) -> None:
    path, plan, content = _write(tmp_path, replace(_dataset(DataFormat.NPY, 6), record_element_type="int32"))
    array = np.load(path)
    assert array.shape == (*plan.dims, 6)
    assert array.dtype == np.int32
    head_bytes = path.stat().st_size - array.nbytes
    assert head_bytes % 64 == 0
    assert array.tobytes() == _content(content, head_bytes, array.nbytes)


@pytest.mark.parametrize(
    "compression", [Compression.NONE, Compression.ZIP, Compression.GZIP, Compression.BZ2, Compression.XZ]
)
def test_numpy_loads_npz_with_x_and_labels_y(tmp_path: Path, compression: Compression) -> None:
    path, plan, _ = _write(tmp_path, replace(_dataset(DataFormat.NPZ, 3), compression=compression))
    with np.load(path) as archive:
        assert set(archive.files) == {"x", "y"}
        assert archive["x"].shape == (*plan.dims, 3)
        assert archive["x"].dtype == np.uint8
        assert archive["y"].shape == (3,)
        assert archive["y"].dtype == np.int64
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        stored = compression is Compression.NONE
        assert {entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist()} == {stored}


def test_a_stored_npz_holds_its_array_as_raw_content(tmp_path: Path) -> None:
    path, plan, content = _write(tmp_path, _dataset(DataFormat.NPZ))
    with np.load(path) as archive:
        raw = archive["x"].tobytes()
    offset = path.read_bytes().index(raw[:64])
    assert raw == _content(content, offset, plan.sample_bytes)


def test_the_unzip_program_accepts_an_npz(tmp_path: Path) -> None:
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    path, _, _ = _write(tmp_path, _dataset(DataFormat.NPZ, 2))
    done = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No errors detected" in done.stdout


def _crc32c(text: bytes) -> int:
    """CRC-32C bit by bit, by its definition: polynomial 0x1EDC6F41, reflected."""
    crc = 0xFFFFFFFF
    for byte in text:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked(text: bytes) -> bytes:
    crc = _crc32c(text)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _tfrecords(stream: io.BytesIO) -> Iterator[bytes]:
    while length := stream.read(8):
        assert stream.read(4) == _masked(length)
        example = stream.read(struct.unpack("<Q", length)[0])
        assert stream.read(4) == _masked(example)
        yield example


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: numbers and delimited ones."""
    stream = io.BytesIO(message)
    while stream.tell() < len(message):
        key = _varint(stream)
        yield key >> 3, (_varint(stream) if key & 7 == 0 else stream.read(_varint(stream)))


def _varint(stream: io.BytesIO) -> int:
    number, shift = 0, 0
    while True:
        byte = stream.read(1)[0]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number
        shift += 7


def _only(message: bytes, number: int) -> bytes:
    ((found, value),) = _fields(message)
    assert found == number
    assert isinstance(value, bytes)
    return value


def _example(message: bytes) -> dict[str, bytes | int]:
    """A `tf.Example` with features of one value each."""
    features: dict[str, bytes | int] = {}
    for number, entry in _fields(_only(message, 1)):
        assert number == 1
        assert isinstance(entry, bytes)
        pair = dict(_fields(entry))
        name, feature = pair[1], pair[2]
        assert isinstance(name, bytes)
        assert isinstance(feature, bytes)
        ((kind, values),) = _fields(feature)
        assert isinstance(values, bytes)
        if kind == 1:
            features[name.decode()] = _only(values, 1)
        else:
            assert kind == 3
            packed = io.BytesIO(_only(values, 1))
            features[name.decode()] = _varint(packed)
    return features


@pytest.mark.parametrize("size", [1, 100, 127, 128, 5000, 20_000])
def test_tfrecords_have_right_sums_and_hold_examples_of_image_and_size(tmp_path: Path, size: int) -> None:
    path, plan, content = _write(tmp_path, _dataset(DataFormat.TFRECORD, 3, size))
    records = list(_tfrecords(io.BytesIO(path.read_bytes())))
    assert len(records) == 3
    for number, record in enumerate(records):
        features = _example(record)
        assert set(features) == {"image", "size"}
        assert features["size"] == size
        image = features["image"]
        assert isinstance(image, bytes)
        offset = (number + 1) * path.stat().st_size // 3 - 4 - size
        assert image == _content(content, offset, plan.sample_bytes)


@pytest.mark.parametrize("kind", [DataFormat.INDEXED_BINARY, DataFormat.MMAP_INDEXED_BINARY])
def test_the_indexes_of_a_binary_give_every_record(tmp_path: Path, kind: DataFormat) -> None:
    path, plan, content = _write(tmp_path, _dataset(kind, 200_000, 5))
    offsets = np.fromfile(f"{path}.off.idx", dtype="<u8")
    sizes = np.fromfile(f"{path}.sz.idx", dtype="<u8")
    assert len(offsets) == len(sizes) == 200_000
    np.testing.assert_array_equal(offsets, np.cumsum(sizes) - sizes)
    records = np.memmap(path, dtype=np.uint8, mode="r")
    assert len(records) == offsets[-1] + sizes[-1]
    for number in (0, 1, 131_071, 131_072, 199_999):
        record = records[offsets[number] : offsets[number] + sizes[number]].tobytes()
        assert record == _content(content, int(offsets[number]), plan.sample_bytes)


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("uint8", 0, 256), ("int16", 0, 2**15), ("float32", 0, 1), ("float64", 0, 1)]
)
def test_csv_readers_take_the_numbers(tmp_path: Path, kind: str, low: int, high: int) -> None:
    path, plan, _ = _write(tmp_path, replace(_dataset(DataFormat.CSV, 5, 800), record_element_type=kind))
    with path.open(newline="") as lines:
        rows = [[float(entry) for entry in row] for row in csv.reader(lines)]
    assert np.shape(rows) == (5, *plan.dims)
    numbers = np.loadtxt(path, delimiter=",")
    np.testing.assert_array_equal(numbers, rows)
    assert numbers.min() >= low
    assert numbers.max() < high
    assert len(np.unique(numbers)) > plan.dims[0] // 4
    table = arrow_csv.read_csv(path, read_options=arrow_csv.ReadOptions(autogenerate_column_names=True))
    np.testing.assert_array_equal(np.stack([column.to_numpy() for column in table.columns], axis=1), rows)


@pytest.mark.parametrize("size", [*range(400, 700, 7), 999, 12_345, 65_536, 153_600, 322_957, 1_000_003])
@pytest.mark.parametrize("kind", [DataFormat.JPEG, DataFormat.PNG])
def test_an_image_has_exactly_the_size_asked_for_and_decodes(
    tmp_path: Path, kind: DataFormat, size: int
) -> None:
    if kind is DataFormat.JPEG and size < 450:
        size += 200
    path, plan, _ = _write(tmp_path, _dataset(kind, 1, size))
    assert path.stat().st_size == size
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Image.open(path) as image:
            assert image.format == ("JPEG" if kind is DataFormat.JPEG else "PNG")
            image.load()
            pixels = np.asarray(image)
    assert pixels.shape == plan.dims
    if size > 5000:
        assert pixels.std() > 30
        assert 0.25 < plan.dims[0] / plan.dims[1] < 4


def test_a_jpeg_is_accepted_by_the_strictest_reader_there_is(tmp_path: Path) -> None:
    djpeg = shutil.which("djpeg")
    if djpeg is None:
        pytest.skip("djpeg is not installed")
    path, plan, _ = _write(tmp_path, _dataset(DataFormat.JPEG, 1, 200_001))
    done = subprocess.run([djpeg, "-ppm", path], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr == b""
    assert len(done.stdout) > plan.dims[0] * plan.dims[1] * 3


def test_h5py_opens_records_in_datasets_and_labels(tmp_path: Path) -> None:
    import h5py  # type: ignore[import-untyped]  # it brings no types

    dataset = replace(
        _dataset(DataFormat.HDF5, 4),
        record_dims=(6, 50, 2),
        compression=Compression.GZIP,
        compression_level=7,
        hdf5=Hdf5(num_dset_per_record=3, chunk_dims=(1, 25, 2), max_shape=(8, 2, 50, 2)),
    )
    path, _, content = _write(tmp_path, dataset)
    with h5py.File(path) as file:
        assert sorted(file) == ["labels", "records_0", "records_1", "records_2"]
        assert file["labels"].shape == (4,)
        for name in ("records_0", "records_1", "records_2"):
            assert file[name].shape == (4, 2, 50, 2)
            assert file[name].chunks == (1, 1, 25, 2)
            assert file[name].maxshape == (8, 2, 50, 2)
            assert (file[name].compression, file[name].compression_opts) == ("gzip", 7)
        joined = np.concatenate([file[f"records_{number}"][2] for number in range(3)])
    assert joined.tobytes() == _content(content, 2 * 600, 600)


def test_pyarrow_opens_columns_in_row_groups(tmp_path: Path) -> None:
    columns = (
        ParquetColumn(name="dense", dtype="float32", size=4),
        ParquetColumn(name="category", dtype="int8"),
        ParquetColumn(name="text", dtype="string", size=6),
    )
    dataset = replace(
        _dataset(DataFormat.PARQUET, 1000),
        compression=Compression.SNAPPY,
        parquet=Parquet(columns=columns, row_group_size=300),
    )
    path, _, _ = _write(tmp_path, dataset)
    file = pq.ParquetFile(path, page_checksum_verification=True)
    assert [file.metadata.row_group(number).num_rows for number in range(4)] == [300, 300, 300, 100]
    assert file.metadata.row_group(0).column(0).compression == "SNAPPY"
    table = file.read()
    assert table.schema.field("dense").type.list_size == 4
    assert table.schema.field("category").type == pa.int8()
    assert all(len(word) == 6 for word in table.column("text").to_pylist())
    assert table.column("category").to_numpy().min() < -100


def test_parquet_rows_take_about_the_bytes_they_hold(tmp_path: Path) -> None:
    columns = tuple(
        ParquetColumn(
            name=f"feature_{number:03}", dtype=("float16", "float32", "float64", "int8")[number % 4]
        )
        for number in range(40)
    )
    dataset = replace(
        _dataset(DataFormat.PARQUET, 6144), parquet=Parquet(columns=columns, row_group_size=6144)
    )
    path, plan, _ = _write(tmp_path, dataset)
    assert path.stat().st_size / (plan.num_samples * plan.sample_bytes) < 1.06


UNIQUE = {
    **{
        kind: _dataset(kind, 1, 70_000)
        for kind in (DataFormat.NPY, DataFormat.NPZ, DataFormat.JPEG, DataFormat.PNG)
    },
    **{
        kind: _dataset(kind, 5, 20_000)
        for kind in (DataFormat.TFRECORD, DataFormat.HDF5, DataFormat.INDEXED_BINARY)
    },
    DataFormat.PARQUET: replace(_dataset(DataFormat.PARQUET, 20, 5000), parquet=Parquet(row_group_size=8)),
}


@pytest.mark.parametrize("dataset", UNIQUE.values(), ids=UNIQUE.keys())
def test_no_block_of_4_kib_comes_twice_and_files_do_not_compress(tmp_path: Path, dataset: Dataset) -> None:
    files = [_write(tmp_path, dataset, index)[0].read_bytes() for index in range(4)]
    blocks = [text[start : start + 4096] for text in files for start in range(0, len(text) - 4095, 4096)]
    assert len(blocks) >= 4 * 16
    assert len(set(blocks)) == len(blocks)
    assert all(len(zlib.compress(text, 1)) > 0.97 * len(text) for text in files)
    assert sum(len(zlib.compress(text, 1)) for text in files) > 0.99 * sum(map(len, files)) - 8192


def test_gigabytes_in_a_zip_use_its_64_bit_records(tmp_path: Path) -> None:
    from penstock.dataset.formats.npz import Member, directory_entry, end_of_archive, local_header, trailer

    size_bytes = (4 << 30) + 17
    large = Member("large.bin", 0, size_bytes)
    small = Member("small.bin", len(local_header(large)) + size_bytes + len(trailer(large, 0)), 3)
    path = tmp_path / "large.zip"
    with path.open("wb") as archive:
        archive.write(local_header(large))
        archive.truncate(len(local_header(large)) + size_bytes)  # a hole: no bytes on disk
        archive.seek(0, io.SEEK_END)
        archive.write(trailer(large, 0))
        assert archive.tell() == small.offset
        archive.write(local_header(small) + b"abc" + trailer(small, zlib.crc32(b"abc")))
        directory = directory_entry(large, 0) + directory_entry(small, zlib.crc32(b"abc"))
        offset = archive.tell()
        archive.write(directory + end_of_archive(2, len(directory), offset))
    with zipfile.ZipFile(path) as archive:
        assert [entry.file_size for entry in archive.infolist()] == [size_bytes, 3]
        assert archive.read("small.bin") == b"abc"
        with archive.open("large.bin") as member:
            assert member.read(5) == b"\0" * 5
