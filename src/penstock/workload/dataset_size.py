"""How large a data set must be for a valid result, and the sizes of its samples. Pure and exact.

The same arithmetic plans a data set and checks a run. It uses fractions up to the printed text, because
rounding a quotient before taking its ceiling can lose a file.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Final

from penstock.errors import UsageError
from penstock.units import format_bytes
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import element_bytes
from penstock.workload.spec import Dataset, ParquetColumn, Workload


def record_bytes(dataset: Dataset) -> Fraction:
    """The mean size of a sample on storage, before compression: columns, else dimensions, else length."""
    row_bytes = parquet_row_bytes(dataset)
    if row_bytes is not None:
        return Fraction(row_bytes)
    if dataset.record_dims:
        return Fraction(math.prod(dataset.record_dims) * element_bytes(dataset.record_element_type))
    return dataset.record_length_bytes


def read_bytes_per_sample(dataset: Dataset) -> Fraction:
    """What training reads of a sample: of Parquet only the columns that are marked to be read."""
    if parquet_row_bytes(dataset) is None:
        return record_bytes(dataset)
    return Fraction(sum(column_bytes(column) for column in dataset.parquet.columns if column.read))


def parquet_row_bytes(dataset: Dataset) -> int | None:
    """The size of a row by its columns; None where the data set has none."""
    if dataset.format is not DataFormat.PARQUET or not dataset.parquet.columns:
        return None
    return sum(column_bytes(column) for column in dataset.parquet.columns)


def column_bytes(column: ParquetColumn) -> int:
    """What one row holds of this column."""
    return column.size * element_bytes(column.dtype)


MIN_STEPS: Final = 500
"""Steps an epoch must have on every accelerator."""
MEMORY_MULTIPLE: Final = 5
"""How many times all hosts' memory a data set must hold."""
FILES_PER_FOLDER: Final = 10_000
"""Beyond this many, listing and creating in one folder slow down on shared file systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSizingRequest:
    """What decides the size. `host_memory_bytes` has one entry a host; hosts may differ."""

    record_bytes: Fraction
    read_bytes_per_sample: Fraction
    num_samples_per_file: int
    batch_size: int
    computation_s: Fraction
    num_accelerators: int
    host_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCheck:
    """Whether a data set is large enough, and the figures that say so."""

    passed: bool
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSizing:
    """The smallest data set that is large enough, what it asks of storage, and the arithmetic as text.

    `num_subfolders` of 0 means none. Rates are those of accelerators that never wait, None
    without computation.
    """

    request: DatasetSizingRequest
    min_samples_by_steps: int
    min_samples_by_memory: int
    min_samples: int
    min_files: int
    dataset_bytes: int
    num_subfolders: int
    bytes_per_accelerator_per_s: Fraction | None
    bytes_per_s: Fraction | None
    proof: tuple[str, ...]

    def check_files(self, num_files: int) -> SizeCheck:
        """Whether `num_files` are enough: the same ceiling, said the same way."""
        passed = num_files >= self.min_files
        sign = ">=" if passed else "<"
        return SizeCheck(passed=passed, proof=f"{num_files:,} files {sign} {self.min_files:,} files needed")


def make_sizing_request(
    workload: Workload, *, num_accelerators: int, host_memory_bytes: Iterable[int]
) -> DatasetSizingRequest:
    """What `workload` on these machines asks to be sized."""
    hosts = tuple(host_memory_bytes)
    if num_accelerators < 1 or not hosts or min(hosts) < 1:
        raise UsageError(
            f"{num_accelerators} accelerators on hosts of {list(hosts)} bytes make no cluster",
            fix="Give at least one accelerator, and the memory of at least one host.",
        )
    return DatasetSizingRequest(
        record_bytes=record_bytes(workload.dataset),
        read_bytes_per_sample=read_bytes_per_sample(workload.dataset),
        num_samples_per_file=workload.dataset.num_samples_per_file,
        batch_size=workload.reader.batch_size,
        computation_s=Fraction(str(workload.train.computation_time.expected_s)),
        num_accelerators=num_accelerators,
        host_memory_bytes=hosts,
    )


def size_dataset(request: DatasetSizingRequest) -> DatasetSizing:
    """The smallest data set by both rules: 500 steps for each accelerator, five times all memory."""
    by_steps = MIN_STEPS * request.batch_size * request.num_accelerators
    by_memory_exactly = MEMORY_MULTIPLE * sum(request.host_memory_bytes) / request.record_bytes
    by_memory = math.ceil(by_memory_exactly)
    min_samples = max(by_steps, by_memory)
    min_files = -(-min_samples // request.num_samples_per_file)
    num_samples = min_files * request.num_samples_per_file
    rate = _rate(request)
    return DatasetSizing(
        request=request,
        min_samples_by_steps=by_steps,
        min_samples_by_memory=by_memory,
        min_samples=min_samples,
        min_files=min_files,
        dataset_bytes=math.ceil(num_samples * request.record_bytes),
        num_subfolders=_num_subfolders(min_files),
        bytes_per_accelerator_per_s=rate,
        bytes_per_s=rate * request.num_accelerators if rate is not None else None,
        proof=tuple(_proof(request, by_steps, by_memory_exactly, min_samples)),
    )


def _rate(request: DatasetSizingRequest) -> Fraction | None:
    if request.computation_s == 0:
        return None
    return request.batch_size * request.read_bytes_per_sample / request.computation_s


def _num_subfolders(num_files: int) -> int:
    return 0 if num_files <= FILES_PER_FOLDER else -(-num_files // FILES_PER_FOLDER)


def _proof(
    request: DatasetSizingRequest, by_steps: int, by_memory: Fraction, min_samples: int
) -> Iterable[str]:
    is_one_each = request.num_samples_per_file == 1
    unit = "files" if is_one_each else "samples"
    yield (
        f"steps: {MIN_STEPS} steps x {request.batch_size:,} samples x "
        f"{request.num_accelerators:,} accelerators = {by_steps:,} {unit}"
    )
    yield (
        f"memory: {MEMORY_MULTIPLE} x {_memory_text(request.host_memory_bytes)} / "
        f"{bytes_text(request.record_bytes)} B = {quotient_text(by_memory)} "
        f"-> {math.ceil(by_memory):,} {unit}"
    )
    decisive = "memory" if math.ceil(by_memory) > by_steps else "steps"
    yield f"larger: {decisive}, {min_samples:,} {unit}"
    if not is_one_each:
        exactly = Fraction(min_samples, request.num_samples_per_file)
        yield (
            f"files: {min_samples:,} samples / {request.num_samples_per_file:,} samples a file = "
            f"{quotient_text(exactly)} -> {math.ceil(exactly):,} files"
        )


def _memory_text(hosts: tuple[int, ...]) -> str:
    """All memory as one figure where hosts are equal (`1024 GiB`), as a sum where they differ."""
    if len(set(hosts)) == 1:
        return _gibibytes(sum(hosts))
    groups = [(memory, len(list(members))) for memory, members in groupby(sorted(hosts, reverse=True))]
    return "(" + " + ".join(f"{count} x {_gibibytes(memory)}" for memory, count in groups) + ")"


def _gibibytes(memory_bytes: int) -> str:
    """In GiB where that is exact, so that the line can be checked by hand; else in bytes."""
    return f"{memory_bytes >> 30} GiB" if memory_bytes % (1 << 30) == 0 else f"{memory_bytes} B"


def bytes_text(size_bytes: Fraction) -> str:
    """Bytes as the workload gives them, without separators, so that they can be pasted: `114660.07`."""
    return f"{size_bytes.numerator}" if size_bytes.denominator == 1 else f"{float(size_bytes):.15g}"


def quotient_text(value: Fraction) -> str:
    """One decimal, or as many as tell `value` from a whole number that it is not: 37,500.2."""
    if value.denominator == 1:
        return f"{value.numerator:,}"
    for digits in range(1, 30):
        scaled = round(value * 10**digits)
        if scaled % 10**digits:
            return f"{scaled // 10**digits:,}.{scaled % 10**digits:0{digits}d}"
    return f"{value.numerator // value.denominator:,}"


def describe_size(size_bytes: int) -> str:
    """`5.00 TiB (5,497,558,138,880 B)`."""
    return f"{format_bytes(size_bytes)} ({size_bytes:,} B)"
