"""Counters of a run's hosts over its time: spools while it lasts, then one `counters.parquet`.

A spool is a JSON line about its host, then one a sample: its moment and the counters that have changed since
the sample before. The table has a row for each of those. Times are nanoseconds of the host's CLOCK_MONOTONIC,
as those of steps and spans. Invariant: neither writing nor reading a spool holds all samples in memory.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.cluster.host_counters import CounterSample
from penstock.errors import ObjectNotFound, StorageError
from penstock.results.arrow_columns import encode_words, make_numbers, make_words
from penstock.results.published_files import publishing

logger = logging.getLogger(__name__)

FOLDER: Final = "counters"
COUNTERS_FILE: Final = "counters.parquet"
FORMAT_VERSION: Final = 1
"""Raised whenever a column or a counter is renamed or means something else."""
_METADATA: Final = b"penstock"
_BATCH: Final = 50_000
"""Rows of one record batch."""
_SCHEMA: Final = (
    ("host", pa.dictionary(pa.int32(), pa.string())),
    ("monotonic_ns", pa.int64()),
    ("counter", pa.dictionary(pa.int32(), pa.string())),
    ("value", pa.int64()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledHost:
    """A host whose counters are recorded, its whole drives, and one moment on both of its clocks.

    `boot_id` is the machine's, "" if unknown: hosts on one machine share its drives.
    """

    host: str
    rank: int
    boot_id: str
    drives: tuple[str, ...]
    interval_s: float
    wall_ns: int
    monotonic_ns: int


class CounterSpool:
    """One host's samples while the run lasts. What `append` has returned from survives a kill."""

    def __init__(self, run_folder: Path, host: SampledHost) -> None:
        path = spool_path(run_folder, host.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("xb", buffering=0)
        self._before: Mapping[str, int] = {}
        self._write({"format": FORMAT_VERSION, **asdict(host)})

    def append(self, sample: CounterSample) -> None:
        """Append the counters that have changed since the last sample."""
        before = self._before
        changed = {name: value for name, value in sample.values.items() if before.get(name) != value}
        self._write({"t": sample.monotonic_ns, "c": changed})
        self._before = sample.values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, document: Mapping[str, Any]) -> None:
        rest = memoryview(json.dumps(document, separators=(",", ":")).encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]


def spool_path(run_folder: Path, rank: int) -> Path:
    """The spool of the host whose lowest rank is `rank`."""
    return run_folder / FOLDER / f"{rank:06d}.jsonl"


def gather_counters(run_folder: Path) -> None:
    """Convert all hosts' spools to the table, and remove them. For one rank, after a barrier."""
    paths = sorted((run_folder / FOLDER).glob("*.jsonl"))
    if not paths:
        return
    hosts = [_read_host(path) for path in paths]
    header = {"format": FORMAT_VERSION, "hosts": [asdict(host) for host in hosts]}
    schema = pa.schema(list(_SCHEMA), metadata={_METADATA: json.dumps(header).encode()})
    with ExitStack() as files:
        file = files.enter_context(publishing(run_folder, COUNTERS_FILE))
        table = files.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))
        for path, host in zip(paths, hosts, strict=True):
            for batch in _batches(path, host.host, schema):
                table.write_batch(batch)
    for path in paths:
        path.unlink()
    (run_folder / FOLDER).rmdir()


def read_counters(run_folder: Path) -> tuple[list[SampledHost], pa.Table]:
    """All hosts' counters: from the table, or from the spools of an active or interrupted run."""
    path = run_folder / COUNTERS_FILE
    if not path.exists():
        paths = sorted((run_folder / FOLDER).glob("*.jsonl"))
        if not paths:
            raise ObjectNotFound("This run has no sampled counters", uri=str(run_folder))
        hosts = [_read_host(spool) for spool in paths]
        schema = pa.schema(list(_SCHEMA))
        batches = [
            batch
            for spool, host in zip(paths, hosts, strict=True)
            for batch in _batches(spool, host.host, schema)
        ]
        return hosts, pa.Table.from_batches(batches, schema).unify_dictionaries()
    try:
        table = pq.ParquetFile(path).read()
        header = json.loads((table.schema.metadata or {}).get(_METADATA, b"{}"))
    except (pa.ArrowException, ValueError) as error:
        raise StorageError(f"Cannot read the counters: {error}", uri=str(path)) from error
    if header.get("format") != FORMAT_VERSION:
        raise StorageError(
            f"The counters have format {header.get('format')}, not {FORMAT_VERSION}",
            uri=str(path),
            fix="Read them with the version that wrote them.",
        )
    return [SampledHost(**{**host, "drives": tuple(host["drives"])}) for host in header["hosts"]], table


def _read_host(path: Path) -> SampledHost:
    with path.open("rb") as file:
        line = file.readline()
    try:
        header = json.loads(line)
        if header.pop("format") == FORMAT_VERSION:
            return SampledHost(**{**header, "drives": tuple(header["drives"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError("Not a spool of counters", uri=str(path), fix="Remove it.") from error
    raise StorageError(
        "This spool has another format", uri=str(path), fix="Read it with the version that wrote it."
    )


def _batches(path: Path, host: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    moments: list[int] = []
    names: list[str] = []
    values: list[int] = []
    for moment, changed in _samples(path):
        moments += [moment] * len(changed)
        names += changed.keys()
        values += changed.values()
        if len(values) >= _BATCH:
            yield _batch(host, moments, names, values, schema=schema)
            moments, names, values = [], [], []
    if values:
        yield _batch(host, moments, names, values, schema=schema)


def _samples(path: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """All complete samples; a warning tells of a line that was cut off when its writer was killed."""
    with path.open("rb") as file:
        file.readline()
        for number, line in enumerate(file, start=2):
            try:
                sample = json.loads(line)
                yield sample["t"], sample["c"]
            except (ValueError, KeyError, TypeError):
                logger.warning("%s: line %d is torn, what follows is left out", path, number)
                return


def _batch(
    host: str, moments: list[int], names: list[str], values: list[int], *, schema: pa.Schema
) -> pa.RecordBatch:
    columns = [
        make_words(np.zeros(len(values)), [host]),
        make_numbers(moments, np.int64),
        encode_words(names),
        make_numbers(values, np.int64),
    ]
    return pa.record_batch(columns, schema=schema)
