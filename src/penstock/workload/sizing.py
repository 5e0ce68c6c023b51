"""The sizes of samples and data sets, and how many accelerators a bandwidth can feed. Pure and exact.

The same arithmetic plans a data set and checks a run. It uses fractions right up to the printed text, because
rounding a quotient before taking its ceiling can lose a file.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Final

from penstock.errors import UsageError
from penstock.units import format_count, format_rate
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import element_bytes
from penstock.workload.spec import Dataset, ParquetColumn, Workload

MIN_STEPS: Final = 500
"""The number of steps that an epoch must have on every accelerator."""
MEMORY_MULTIPLE: Final = 5
"""The size of a data set must be at least this multiple of all hosts' memory."""
FILES_PER_FOLDER: Final = 10_000
"""With more files than this in one folder, listing and creating slow down on shared file systems."""


def record_bytes(dataset: Dataset) -> Fraction:
    """Return the mean size of a sample on storage, uncompressed: by columns, else dimensions, else length."""
    row_bytes = parquet_row_bytes(dataset)
    if row_bytes is not None:
        return Fraction(row_bytes)
    if dataset.record_dims:
        return Fraction(math.prod(dataset.record_dims) * element_bytes(dataset.record_element_type))
    return dataset.record_length_bytes


def read_bytes_per_sample(dataset: Dataset) -> Fraction:
    """Return the bytes of a sample that training reads: in Parquet, only columns with `read: true`."""
    if parquet_row_bytes(dataset) is None:
        return record_bytes(dataset)
    return Fraction(sum(column_bytes(column) for column in dataset.parquet.columns if column.read))


def parquet_row_bytes(dataset: Dataset) -> int | None:
    """Return the size of a row by its columns; None if the data set has no columns."""
    if dataset.format is not DataFormat.PARQUET or not dataset.parquet.columns:
        return None
    return sum(map(column_bytes, dataset.parquet.columns))


def column_bytes(column: ParquetColumn) -> int:
    """Return the size of this column in one row."""
    return column.size * element_bytes(column.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSizingRequest:
    """Everything that determines the size. `host_memory_bytes` has one entry per host; hosts may differ."""

    record_bytes: Fraction
    read_bytes_per_sample: Fraction
    num_samples_per_file: int
    batch_size: int
    computation_s: Fraction
    num_accelerators: int
    host_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSizing:
    """The smallest data set that is large enough, what it requires of storage, and the arithmetic as text.

    `num_subfolders` of 0 means none. Rates are those of accelerators that never wait, None without
    computation.
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

    def check_files(self, num_files: int) -> tuple[bool, str]:
        """Return whether `num_files` are enough, and the comparison as text."""
        passed = num_files >= self.min_files
        return passed, f"{num_files:,} files {'>=' if passed else '<'} {self.min_files:,} files needed"


def make_sizing_request(
    workload: Workload, *, num_accelerators: int, host_memory_bytes: Iterable[int]
) -> DatasetSizingRequest:
    """Return the request for sizing `workload`'s data set for these machines."""
    hosts = tuple(host_memory_bytes)
    if num_accelerators < 1 or not hosts or min(hosts) < 1:
        raise UsageError(
            f"{num_accelerators} accelerators on hosts of {list(hosts)} bytes are not a cluster",
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
    """Return the smallest data set by both rules: 500 steps per accelerator, five times all hosts' memory."""
    hosts, per_file = request.host_memory_bytes, request.num_samples_per_file
    by_steps = MIN_STEPS * request.batch_size * request.num_accelerators
    by_memory_exactly = MEMORY_MULTIPLE * sum(hosts) / request.record_bytes
    by_memory = math.ceil(by_memory_exactly)
    min_samples = max(by_steps, by_memory)
    min_files = -(-min_samples // per_file)
    if len(set(hosts)) == 1:  # one figure if hosts are equal (`1024 GiB`), otherwise a sum
        memory = _gibibytes(sum(hosts))
    else:
        groups = groupby(sorted(hosts, reverse=True))
        memory = f"({' + '.join(f'{len(list(equal))} x {_gibibytes(size)}' for size, equal in groups)})"
    unit = "files" if per_file == 1 else "samples"
    proof = [
        (
            f"steps: {MIN_STEPS} steps x {request.batch_size:,} samples x "
            f"{format_count(request.num_accelerators, 'accelerator')} = {by_steps:,} {unit}"
        ),
        (
            f"memory: {MEMORY_MULTIPLE} x {memory} / {bytes_text(request.record_bytes)} B = "
            f"{quotient_text(by_memory_exactly)} -> {by_memory:,} {unit}"
        ),
        f"larger: {'memory' if by_memory > by_steps else 'steps'}, {min_samples:,} {unit}",
    ]
    if per_file > 1:
        proof.append(
            f"files: {min_samples:,} samples / {per_file:,} samples per file = "
            f"{quotient_text(Fraction(min_samples, per_file))} -> {min_files:,} files"
        )
    rate = None
    if request.computation_s:
        rate = request.batch_size * request.read_bytes_per_sample / request.computation_s
    return DatasetSizing(
        request=request,
        min_samples_by_steps=by_steps,
        min_samples_by_memory=by_memory,
        min_samples=min_samples,
        min_files=min_files,
        dataset_bytes=math.ceil(min_files * per_file * request.record_bytes),
        num_subfolders=0 if min_files <= FILES_PER_FOLDER else -(-min_files // FILES_PER_FOLDER),
        bytes_per_accelerator_per_s=rate,
        bytes_per_s=rate * request.num_accelerators if rate is not None else None,
        proof=tuple(proof),
    )


def _gibibytes(memory_bytes: int) -> str:
    """Return the size in GiB if that is exact, so that a reader can check it by hand; else in bytes."""
    return f"{memory_bytes >> 30} GiB" if memory_bytes % (1 << 30) == 0 else f"{memory_bytes} B"


def bytes_text(size_bytes: Fraction) -> str:
    """Return the size in bytes as a workload gives it, without separators, to be pasted: `114660.07`."""
    return f"{size_bytes.numerator}" if size_bytes.denominator == 1 else f"{float(size_bytes):.15g}"


def quotient_text(value: Fraction) -> str:
    """Return `value` with one decimal, or with as many as distinguish it from a whole number: 37,500.2."""
    if value.denominator == 1:
        return f"{value.numerator:,}"
    for digits in range(1, 30):
        scaled = round(value * 10**digits)
        if scaled % 10**digits:
            return f"{scaled // 10**digits:,}.{scaled % 10**digits:0{digits}d}"
    return f"{value.numerator // value.denominator:,}"


MODEL: Final = (
    "prefetching hides reading: step = max(computation, reading), utilization = computation / step, "
    "bandwidth shared evenly, no other cost"
)
"""The assumptions of `forecast_accelerators`, which is exact under them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorForecast:
    """The largest number of accelerators that meets the threshold; the utilization with it and with one more.

    `num_accelerators` of 0 means that not even one is kept busy enough; `au` is then that of one accelerator.
    """

    num_accelerators: int
    au: Fraction
    au_with_one_more: Fraction
    threshold: Fraction
    step_read_bytes: Fraction
    computation_s: Fraction
    bytes_per_accelerator_per_s: Fraction
    bandwidth_bytes_per_s: Fraction
    proof: tuple[str, ...]


def forecast_accelerators(workload: Workload, bandwidth_bytes_per_s: Fraction) -> AcceleratorForecast:
    """Return the most accelerators whose utilization stays at or above the workload's threshold."""
    dataset, batch_size = workload.dataset, workload.reader.batch_size
    computation_s = Fraction(str(workload.train.computation_time.expected_s))
    threshold = Fraction(str(workload.metric.au))
    if bandwidth_bytes_per_s <= 0:
        raise UsageError("The bandwidth must be above 0", fix="Give a rate, for example 40GiB/s.")
    if computation_s == 0:
        raise UsageError("Without computation no bandwidth is ever enough", fix="Set train.computation_time.")
    if threshold == 0:
        raise UsageError("With a threshold of 0 any number passes", fix="Set metric.au.")
    read, whole = read_bytes_per_sample(dataset), record_bytes(dataset)
    step_bytes = batch_size * read
    exactly = bandwidth_bytes_per_s * computation_s / (threshold * step_bytes)
    num = math.floor(exactly)

    au, au_with_one_more = (
        computation_s / max(computation_s, accelerators * step_bytes / bandwidth_bytes_per_s)
        for accelerators in (max(num, 1), num + 1)
    )
    step, computation = f"{bytes_text(step_bytes)} B", f"{float(computation_s):g} s"
    rate = step_bytes / computation_s
    samples = f"{batch_size:,} samples x {bytes_text(read)} B"
    if read != whole:
        columns = dataset.parquet.columns
        num_read = sum(column.read for column in columns)
        samples += f" ({num_read} of {len(columns)} columns, rows of {bytes_text(whole)} B)"
    proof = [
        f"model: {MODEL}",
        f"a step reads {samples} = {step}",
        f"an accelerator that never waits: {step} / {computation} = {format_rate(float(rate))}",
        (
            f"{format_rate(float(bandwidth_bytes_per_s))} x {computation} / "
            f"({float(threshold):g} x {step}) = {quotient_text(exactly)} -> "
            f"{format_count(num, 'accelerator')}"
        ),
    ]
    if num:
        proof.append(
            f"{format_count(num, 'accelerator')}: utilization {_percent(au)} % >= {_percent(threshold)} %"
        )
    missed = f"{_percent(au_with_one_more)} % < {_percent(threshold)} %"
    proof.append(f"{format_count(num + 1, 'accelerator')}: utilization {missed}")
    return AcceleratorForecast(
        num_accelerators=num,
        au=au,
        au_with_one_more=au_with_one_more,
        threshold=threshold,
        step_read_bytes=step_bytes,
        computation_s=computation_s,
        bytes_per_accelerator_per_s=rate,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        proof=tuple(proof),
    )


def _percent(share: Fraction) -> str:
    """Return the share in percent, truncated so that a value below a threshold never seems to reach it."""
    return f"{math.floor(share * 10_000) / 100:.2f}"
