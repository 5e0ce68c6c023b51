"""A run's events for good: `steps.parquet` and `spans.parquet`, one row group a rank.

Place in the flow: rank 0 gathers all spools when the run is over; whoever judges reads here. One file of
each kind also for 1,000 ranks, a rank at a time in memory. Invariant: spools outlive the gathering of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import ObjectNotFound, StorageError
from penstock.results.durable import publishing
from penstock.results.events import (
    FORMAT_VERSION,
    SPAN_TYPE,
    STEP_TYPE,
    Phase,
    RankClock,
    RankEvents,
    SpanKind,
)
from penstock.results.spool import FOLDER, read_clock, read_spool, spool_path, spool_paths

if TYPE_CHECKING:
    from enum import IntEnum

    from penstock.results.events import Rows

STEPS_FILE: Final = "steps.parquet"
SPANS_FILE: Final = "spans.parquet"
_METADATA: Final = b"penstock"
_WORDS: Final[dict[str, type[IntEnum]]] = {"phase": Phase, "kind": SpanKind}
"""Columns that are words in the file, so that any reader of Parquet understands them."""


def gather(run_folder: Path, num_ranks: int) -> None:
    """Turn the spools of all ranks into the two tables, and remove them. For one rank, after a barrier."""
    paths = [spool_path(run_folder, rank) for rank in range(num_ranks)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        raise ObjectNotFound(
            f"The step events of {len(missing)} of {num_ranks} ranks are not here, first rank {missing[0]}",
            uri=str(run_folder),
            fix="Put --results on a file system that all hosts share.",
        )
    write_tables(run_folder, [read_clock(path) for path in paths], map(read_spool, paths))
    for path in paths:
        path.unlink()
    (run_folder / FOLDER).rmdir()


def write_tables(run_folder: Path, clocks: Sequence[RankClock], events: Iterator[RankEvents]) -> None:
    """Write both tables from the ranks' events, which come in the order of `clocks`."""
    header = {"format": FORMAT_VERSION, "ranks": [asdict(clock) for clock in clocks]}
    metadata = {_METADATA: json.dumps(header).encode()}
    with ExitStack() as files:
        steps = _writer(files, run_folder, STEPS_FILE, _schema(STEP_TYPE, metadata))
        spans = _writer(files, run_folder, SPANS_FILE, _schema(SPAN_TYPE, metadata))
        for each in events:
            steps.write_batch(_batch(each.clock.rank, each.steps, steps.schema), max(1, len(each.steps)))
            spans.write_batch(_batch(each.clock.rank, each.spans, spans.schema), max(1, len(each.spans)))


def read_events(run_folder: Path) -> list[RankEvents]:
    """All ranks' events: from the tables, or from the spools of a run that goes on or was cut short."""
    if not (run_folder / STEPS_FILE).exists():
        paths = spool_paths(run_folder)
        if not paths:
            raise ObjectNotFound("This run has no step events", uri=str(run_folder))
        return [read_spool(path) for path in paths]
    clocks, steps = _read_table(run_folder / STEPS_FILE, STEP_TYPE)
    _, spans = _read_table(run_folder / SPANS_FILE, SPAN_TYPE)
    return [RankEvents(clock=clock, steps=steps[clock.rank], spans=spans[clock.rank]) for clock in clocks]


def _writer(files: ExitStack, folder: Path, name: str, schema: pa.Schema) -> pq.ParquetWriter:
    file = files.enter_context(publishing(folder, name))
    return files.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))


def _schema(row_type: np.dtype[np.void], metadata: dict[bytes, bytes]) -> pa.Schema:
    assert row_type.names is not None
    columns = [("rank", pa.int32())]
    columns += [(name, _words() if name in _WORDS else pa.int64()) for name in row_type.names]
    return pa.schema(columns, metadata=metadata)


def _words() -> pa.DataType:
    return pa.dictionary(pa.int32(), pa.string())


def _batch(rank: int, rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    columns: list[Any] = [pa.array(np.full(len(rows), rank, np.int32))]
    columns += [_column(name, rows[name]) for name in schema.names[1:]]
    return pa.record_batch(columns, schema=schema)


def _column(name: str, values: Any) -> Any:
    if name not in _WORDS:
        return pa.array(np.ascontiguousarray(values))
    words = [member.name.lower() for member in _WORDS[name]]
    return pa.DictionaryArray.from_arrays(pa.array(values.astype(np.int32)), pa.array(words))


def _read_table(path: Path, row_type: np.dtype[np.void]) -> tuple[list[RankClock], dict[int, Rows]]:
    try:
        file = pq.ParquetFile(path)
        header = json.loads((file.schema_arrow.metadata or {}).get(_METADATA, b"{}"))
        if header.get("format") != FORMAT_VERSION:
            raise StorageError(
                f"The events have format {header.get('format')}, not {FORMAT_VERSION}",
                uri=str(path),
                fix="Read them with the version that wrote them.",
            )
        clocks = [RankClock(**clock) for clock in header["ranks"]]
        groups = [_rows(file.read_row_group(index), row_type) for index in range(file.num_row_groups)]
    except (pa.ArrowException, FileNotFoundError) as error:
        raise StorageError(f"Cannot read the events: {error}", uri=str(path)) from error
    by_rank = {clock.rank: np.empty(0, row_type) for clock in clocks}
    by_rank.update({int(ranks[0]): rows for ranks, rows in groups if len(rows)})
    return clocks, by_rank


def _rows(group: pa.Table, row_type: np.dtype[np.void]) -> tuple[Any, Rows]:
    assert row_type.names is not None
    rows = np.empty(group.num_rows, row_type)
    for name in row_type.names:
        rows[name] = _values(name, group.column(name))
    return group.column("rank").to_numpy(), rows


def _values(name: str, column: Any) -> Any:
    if name not in _WORDS:
        return column.to_numpy()
    numbers = {member.name.lower(): member.value for member in _WORDS[name]}
    return np.array([numbers[word] for word in column.to_pylist()], np.int64)
