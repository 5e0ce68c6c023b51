"""Data files of each format beside what they cannot do without, on one core, into a sink that keeps nothing.

Raw formats stand beside content and the format's checksum in the same steps: the goal is 0.9. Encoded formats
stand beside their library alone, which gets finished arrays and writes to memory. Speeds are of stored bytes.
"""

from __future__ import annotations

import csv
import io
import time
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial

import google_crc32c
import h5py  # type: ignore[import-untyped]  # it brings no types
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from harness import Ratio, interleave
from penstock.dataset.content import Content
from penstock.dataset.formats import open_format
from penstock.dataset.formats.data_file_io import buffer_pool, verify_file, write_file
from penstock.storage import ObjectInfo, Release
from penstock.storage.aligned import aligned_buffer, copy_bytes
from penstock.storage.in_memory import MemoryStorage
from penstock.workload.enums import Compression, DataFormat
from penstock.workload.spec import Dataset, Parquet, ParquetColumn

SIZE_BYTES = 64 << 20
STEP_BYTES = 128 << 10
BUFFER_BYTES = 4 << 20
IMAGE_BYTES = 322_957
NUM_IMAGES = 40
PASSES = 3
CONTENT = Content(1, "benchmark")
POOL = buffer_pool()

RAW = {
    "npy": Dataset(format=DataFormat.NPY, record_length_bytes=Fraction(SIZE_BYTES)),
    "npz": Dataset(format=DataFormat.NPZ, record_length_bytes=Fraction(SIZE_BYTES)),
    "tfrecord": Dataset(
        format=DataFormat.TFRECORD, num_samples_per_file=585, record_length_bytes=Fraction("114660.07")
    ),
    "indexed_binary": Dataset(
        format=DataFormat.INDEXED_BINARY, num_samples_per_file=16384, record_length_bytes=Fraction(4096)
    ),
}
IMAGES = {
    "jpeg": Dataset(format=DataFormat.JPEG, record_length_bytes=Fraction(IMAGE_BYTES)),
    "png": Dataset(format=DataFormat.PNG, record_length_bytes=Fraction(IMAGE_BYTES)),
}
COLUMNS = tuple(ParquetColumn(name=f"c{number}", dtype="float32", size=512) for number in range(8))
ENCODED = {
    "hdf5": Dataset(format=DataFormat.HDF5, num_samples_per_file=64, record_length_bytes=Fraction(1 << 20)),
    "parquet": Dataset(
        format=DataFormat.PARQUET,
        num_samples_per_file=4096,
        parquet=Parquet(columns=COLUMNS, row_group_size=512),
    ),
    "npz deflated": Dataset(
        format=DataFormat.NPZ, record_length_bytes=Fraction(8 << 20), compression=Compression.ZIP
    ),
    "csv": Dataset(format=DataFormat.CSV, num_samples_per_file=16, record_length_bytes=Fraction(1 << 17)),
}


class Nowhere(MemoryStorage):
    """Storage that lets go of every buffer at once: what is left is the cost of making files."""

    def create(self, key: str, size_bytes: int | None = None) -> Dropped:  # type: ignore[override]  # nothing is kept
        """A sink that keeps nothing."""
        del size_bytes
        return Dropped(key)


class Dropped:
    """A sink that counts."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._size_bytes = 0

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Count and release."""
        self._size_bytes += buffer.nbytes
        if release is not None:
            release()

    def finish(self) -> ObjectInfo:
        """What was counted."""
        return ObjectInfo(key=self._key, size_bytes=self._size_bytes, modified_s=0.0)

    def abort(self) -> None:
        """Nothing was kept."""


def measure(repetitions: int) -> list[Ratio]:
    """Every format beside its limit or its library."""
    return interleave(_ours, _theirs, repetitions=repetitions, unit="GB/s")


def _ours() -> Mapping[str, float]:
    cases = {**RAW, **ENCODED}
    figures = {f"write {name}": _speed(partial(_write, dataset)) for name, dataset in cases.items()}
    figures |= {f"write {name}": _speed(partial(_write_images, dataset)) for name, dataset in IMAGES.items()}
    return figures | {f"verify {name}": _verify_speed(dataset) for name, dataset in RAW.items()}


def _theirs() -> Mapping[str, float]:
    plain, crc, crc32c = (Limit(add) for add in (_no_sum, zlib.crc32, _crc32c))
    limits = {"npy": plain, "npz": crc, "tfrecord": crc32c, "indexed_binary": plain}
    libraries: dict[str, Callable[[], int]] = {
        "jpeg": partial(_pillow, "jpeg"),
        "png": partial(_pillow, "png"),
        "hdf5": _h5py(),
        "parquet": _pyarrow(),
        "npz deflated": _zlib,
        "csv": _csv,
    }
    return (
        {f"write {name}": _speed(limit.write) for name, limit in limits.items()}
        | {f"write {name}": _speed(library) for name, library in libraries.items()}
        | {f"verify {name}": _speed(limit.verify) for name, limit in limits.items()}
    )


def _speed(work: Callable[[], int]) -> float:
    """GB/s of the bytes that `work` says it made: the best of several passes."""
    best = 0.0
    for _ in range(PASSES):
        start = time.perf_counter()
        size_bytes = work()
        best = max(best, size_bytes / (time.perf_counter() - start) / 1e9)
    return best


def _write(dataset: Dataset) -> int:
    kind = open_format(dataset, 1)
    stored = write_file(kind, kind.plan(0, "file"), Nowhere(), CONTENT, POOL)
    return sum(info.size_bytes for info in stored)


def _write_images(dataset: Dataset) -> int:
    kind, place = open_format(dataset, 1), Nowhere()
    return sum(
        write_file(kind, kind.plan(index, "file"), place, Content(1, index), POOL)[0].size_bytes
        for index in range(NUM_IMAGES)
    )


def _verify_speed(dataset: Dataset) -> float:
    """Reading from memory is part of it: a copy, as every storage makes one."""
    kind, place = open_format(dataset, 1), MemoryStorage()
    plan = kind.plan(0, "file")
    size_bytes = sum(info.size_bytes for info in write_file(kind, plan, place, CONTENT, POOL))

    def verify() -> int:
        assert verify_file(kind, plan, place, CONTENT) is None
        return size_bytes

    return _speed(verify)


def _no_sum(_piece: memoryview, value: int) -> int:
    return value


def _crc32c(piece: memoryview, value: int) -> int:
    return int(google_crc32c.extend(value, bytes(piece)))


class Limit:
    """Content and a sum, step by step, in warm buffers: what no raw format can be faster than, by much."""

    def __init__(self, add: Callable[[memoryview, int], int]) -> None:
        self._add = add
        self._buffer = aligned_buffer(BUFFER_BYTES)
        self._stored = aligned_buffer(SIZE_BYTES)
        CONTENT.fill(self._stored, 0)

    def write(self) -> int:
        """Made and summed."""
        value = 0
        for offset in range(0, SIZE_BYTES, STEP_BYTES):
            place = offset % BUFFER_BYTES
            piece = self._buffer[place : place + STEP_BYTES]
            CONTENT.fill(piece, offset)
            value = self._add(piece, value)
        return SIZE_BYTES

    def verify(self) -> int:
        """Copied in by whole buffers, then compared and summed."""
        value = 0
        for start in range(0, SIZE_BYTES, BUFFER_BYTES):
            copy_bytes(self._buffer, self._stored[start : start + BUFFER_BYTES])
            for place in range(0, BUFFER_BYTES, STEP_BYTES):
                piece = self._buffer[place : place + STEP_BYTES]
                assert CONTENT.verify(piece, start + place) is None
                value = self._add(piece, value)
        return SIZE_BYTES


def _made(size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    text = np.empty(size_bytes, dtype=np.uint8)
    CONTENT.fill(text.data, 0)
    return text


def _pillow(kind: str) -> int:
    """Noise of the pixels that give about a photograph's file: the encoder's work a stored byte."""
    rows = 430 if kind == "jpeg" else 328
    pixels = _made(rows * rows * 3).reshape(rows, rows, 3)
    total = 0
    for _ in range(NUM_IMAGES // 4):
        file = io.BytesIO()
        Image.fromarray(pixels).save(
            file, kind, **({"quality": 85} if kind == "jpeg" else {"compress_level": 1})
        )
        total += file.tell()
    return total


def _h5py() -> Callable[[], int]:
    records = _made(64 << 20).reshape(64, 1024, 1024)

    def write() -> int:
        file = io.BytesIO()
        with h5py.File(file, "w") as target:
            target.create_dataset("records_0", data=records)
        return file.getbuffer().nbytes

    return write


def _pyarrow() -> Callable[[], int]:
    arrays = [
        pa.FixedSizeListArray.from_arrays(pa.array(_made(4096 * 2048).view(np.float32)), 512) for _ in COLUMNS
    ]
    table = pa.table(dict(zip((column.name for column in COLUMNS), arrays, strict=True)))

    def write() -> int:
        file = io.BytesIO()
        pq.write_table(
            table, file, row_group_size=512, compression="NONE", use_dictionary=False, write_statistics=False
        )
        return file.tell()

    return write


def _zlib() -> int:
    """Content is made with it: a hundredth of the work."""
    return len(zlib.compress(_made(8 << 20).data, 4))


def _csv() -> int:
    """Python's own writer, of lists that are made with it."""
    rows = _made(16 << 17).reshape(16, -1).tolist()
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.tell()


if __name__ == "__main__":
    for ratio in measure(repetitions=5):
        print(ratio.line(None))
