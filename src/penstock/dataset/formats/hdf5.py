"""HDF5 files as DLIO writes them: `records_0` to `records_k`, each (samples, rows, columns), and `labels`.

For `hdf5` and `hdf5_opt`. Sample i is the content from i x sample_bytes onward, divided evenly among the
datasets of a record; labels are the content that follows all samples. One file is held in memory while it is
written, and its metadata while it is read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import h5py  # type: ignore[import-untyped]  # it brings no types
import numpy as np

from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_objects import RangesFile
from penstock.dataset.formats.file_writer import FormatSink
from penstock.errors import UsageError
from penstock.storage import Source
from penstock.workload.enums import Compression
from penstock.workload.spec import Dataset

_BATCH_BYTES: Final = 8 << 20
_LARGEST_CHUNK: Final = 1 << 30
"""HDF5 allows less than 4 GiB, and a reader holds a whole chunk in memory."""
_UNREADABLE: Final = (OSError, KeyError, ValueError, RuntimeError, TypeError, AttributeError)
"""The exceptions that h5py raises for damaged files."""


class Hdf5Format(fp.FileFormat):
    """Files that h5py opens. They are read by chunk, or by sample if there are no chunks."""

    compressions = (Compression.GZIP, Compression.LZF)

    def __init__(self, dataset: Dataset, seed: int) -> None:
        super().__init__(dataset, seed)
        # Samples must be divisible into the datasets of a record.
        self._num_datasets = self._elements_multiple = dataset.hdf5.num_dset_per_record
        if dataset.record_dims and dataset.record_dims[0] % self._num_datasets:
            raise UsageError(
                f"{dataset.record_dims[0]} rows cannot be cut into {self._num_datasets} equal datasets",
                where="dataset.hdf5.num_dset_per_record",
                fix="Choose a divisor of the first of record_dims.",
            )

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        """Return blocks of one chunk, and a single part whose size only the library knows."""
        chunks = self._chunks(plan.dims, plan.dtype)
        return chunks[0] if chunks else 1, (fp.FilePart(size_bytes=None),)

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Build the file in memory."""
        # HDF5 goes back to what it has written, which a sink cannot do.
        whole, rows = io.BytesIO(), plan.dims[0] // self._num_datasets
        with h5py.File(whole, "w") as file:
            targets = [self._create(file, plan, number) for number in range(self._num_datasets)]
            step = max(1, _BATCH_BYTES // (plan.sample_bytes * plan.block_samples)) * plan.block_samples
            batch = memoryview(bytearray(min(step, plan.num_samples) * plan.sample_bytes))
            for start in range(0, plan.num_samples, step):
                stop = min(start + step, plan.num_samples)
                text = batch[: (stop - start) * plan.sample_bytes]
                out.content.fill(text, start * plan.sample_bytes)
                samples = fp.as_array(plan, text, stop - start)
                for number, target in enumerate(targets):
                    target[start:stop] = samples[:, number * rows : (number + 1) * rows]
            labels = fp.make_content(out.content, plan.num_samples * plan.sample_bytes, plan.num_samples * 8)
            file.create_dataset("labels", data=np.frombuffer(labels, dtype="<i8"))
        out.raw(whole.getbuffer())

    def survey(self, plan: fp.FilePlan, source: Source) -> fp.FileSurvey:
        """Read the file's metadata, as h5py does, to find each chunk."""
        known: list[fp.Extent] = []

        def record(offset: int, target: memoryview) -> None:
            source.read_into(offset, target)
            known.append(fp.Extent(offset, bytes(target)))

        blocks: list[list[fp.RangeRead]] = [[] for _ in range(-(-plan.num_samples // plan.block_samples))]
        try:
            with h5py.File(RangesFile(source.size_bytes, record), "r") as file:
                for number in range(self._num_datasets):
                    stored = file[f"records_{number}"]
                    if stored.chunks:
                        for index in range(stored.id.get_num_chunks()):
                            chunk = stored.id.get_chunk_info(index)
                            read = fp.RangeRead(offset=chunk.byte_offset, size_bytes=chunk.size)
                            blocks[chunk.chunk_offset[0] // plan.block_samples].append(read)
                    else:
                        step = stored.nbytes // max(1, len(stored))
                        for sample in range(len(stored)):
                            offset = stored.id.get_offset() + sample * step
                            read = fp.RangeRead(offset=offset, size_bytes=step)
                            blocks[sample // plan.block_samples].append(read)
        except (*_UNREADABLE, IndexError) as error:
            raise fp.make_damage_error(plan, str(error)) from error
        return fp.FileSurvey(
            size_bytes=source.size_bytes,
            known=tuple(known),
            blocks=tuple(fp.merge_ranges(block) for block in blocks),
        )

    def reads(self, plan: fp.FilePlan, survey: fp.FileSurvey, samples: range) -> Iterator[fp.RangeRead]:
        """Yield the ranges of whole chunks that contain the samples; adjacent ones are merged."""
        if samples:
            first, last = samples.start // plan.block_samples, samples[-1] // plan.block_samples
            yield from fp.merge_ranges(read for block in survey.blocks[first : last + 1] for read in block)

    def decode(
        self, plan: fp.FilePlan, survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Let HDF5 unpack the chunks."""
        gathered = fp.GatheredRanges([*survey.known, *pieces])
        try:
            with h5py.File(RangesFile(survey.size_bytes, gathered.read_into), "r") as file:
                parts = [
                    file[f"records_{number}"][samples.start : samples.stop]
                    for number in range(self._num_datasets)
                ]
            return np.concatenate(parts, axis=1).reshape(len(samples), *plan.dims)
        except _UNREADABLE as error:
            raise fp.make_damage_error(plan, str(error)) from error

    def _create(self, file: Any, plan: fp.FilePlan, number: int) -> Any:  # h5py has no types
        shape = (plan.num_samples, plan.dims[0] // self._num_datasets, *plan.dims[1:])
        level = self._dataset.compression_level if self._dataset.compression is Compression.GZIP else None
        return file.create_dataset(
            f"records_{number}",
            shape=shape,
            dtype=plan.dtype,
            chunks=self._chunks(plan.dims, plan.dtype),
            maxshape=self._full_rank(self._dataset.hdf5.max_shape, shape, first=plan.num_samples),
            compression=None
            if self._dataset.compression is Compression.NONE
            else self._dataset.compression.value,
            compression_opts=level,
        )

    def _chunks(self, dims: tuple[int, ...], dtype: str) -> tuple[int, ...] | None:
        """Return a chunk's shape, as requested or derived from the requested size; None if none is needed."""
        asked, num_samples = self._dataset.hdf5, self._dataset.num_samples_per_file
        shape = (num_samples, dims[0] // self._num_datasets, *dims[1:])
        if asked.chunk_dims:
            chunks = self._full_rank(asked.chunk_dims, shape, first=1)
            assert chunks is not None
            return tuple(min(pair) for pair in zip(chunks, shape, strict=True))
        by_size = self._dataset.enable_chunking
        if not (by_size or asked.max_shape or self._dataset.compression is not Compression.NONE):
            return None
        row_bytes = math.prod(dims[1:]) * np.dtype(dtype).itemsize
        wanted = self._dataset.chunk_size_bytes if by_size else 0
        rows = max(1, (wanted or min(shape[1] * row_bytes, _LARGEST_CHUNK)) // row_bytes)
        return (min(num_samples, max(1, rows // shape[1])), min(rows, shape[1]), *dims[1:])

    def _full_rank(
        self, asked: tuple[int, ...], shape: tuple[int, ...], *, first: int
    ) -> tuple[int, ...] | None:
        """Return requested dimensions as those of a dataset, with `first` in front if they are a sample's."""
        if not asked:
            return None
        if len(asked) == len(shape) - 1:
            return (first, *asked)
        if len(asked) == len(shape):
            return asked
        raise UsageError(
            f"{list(asked)} does not fit the dimensions of the samples, {list(shape[1:])}",
            where="dataset.hdf5",
            fix=f"chunk_dims and max_shape have {len(shape) - 1} numbers for a sample, or one more in front.",
        )
