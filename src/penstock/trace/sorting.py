"""The events of one file in the order of time, whatever the file's size, in bounded memory.

Place in the flow: between a file's batches and the table. What fits is sorted in memory; larger files are
sorted in runs on disk, which DuckDB merges. Invariant: no more than `limit` rows are held at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MEMORY_LIMIT: Final = "200MB"
"""What DuckDB may use to merge runs."""


def sorted_tables(batches: Iterator[pa.RecordBatch], scratch: Path, limit: int) -> Iterator[pa.Table]:
    """The events in the order of time, in tables of at most `limit` rows, about."""
    runs: list[Path] = []
    held: list[pa.RecordBatch] = []
    num_rows, end_us = 0, None
    is_in_order = True
    for batch in batches:
        held.append(batch)
        num_rows += batch.num_rows
        if num_rows >= limit:
            table = sort(held)
            first_us, last_us = _span(table)
            is_in_order &= end_us is None or first_us >= end_us
            end_us = last_us
            runs.append(_spill(table, scratch, len(runs)))
            held, num_rows = [], 0
    last = sort(held) if held else None
    if not runs:
        yield from [] if last is None else [last]
        return
    if last is not None:
        is_in_order &= end_us is None or _span(last)[0] >= end_us
        runs.append(_spill(last, scratch, len(runs)))
        last = None
    yield from _read(runs) if is_in_order else _merged(runs, scratch, limit)
    for run in runs:
        run.unlink()


def sort(batches: list[pa.RecordBatch]) -> pa.Table:
    """These batches as one table in the order of time; what is simultaneous keeps its order."""
    table = pa.Table.from_batches(batches)
    ts_us = table["ts_us"].to_numpy()
    if np.all(ts_us[1:] >= ts_us[:-1]):
        return table.unify_dictionaries()
    order = np.argsort(ts_us, kind="stable")
    return table.unify_dictionaries().take(pa.array(order))


def _span(table: pa.Table) -> tuple[int, int]:
    return table["ts_us"][0].as_py(), table["ts_us"][-1].as_py()


def _spill(table: pa.Table, scratch: Path, number: int) -> Path:
    path = scratch / f"run-{number:05d}.parquet"
    pq.write_table(table, path, compression="lz4", store_schema=False, row_group_size=1 << 17)
    return path


def _read(runs: list[Path]) -> Iterator[pa.Table]:
    for run in runs:
        with pq.ParquetFile(run) as file:
            for batch in file.iter_batches(1 << 17):
                yield pa.Table.from_batches([batch])


def _merged(runs: list[Path], scratch: Path, limit: int) -> Iterator[pa.Table]:
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": MEMORY_LIMIT,
        "temp_directory": str(scratch),
        "threads": 1,
        "preserve_insertion_order": True,
    }
    with duckdb.connect(config=settings) as connection:
        merged: Any = connection.sql(
            "SELECT * EXCLUDE (file_row_number, filename)"
            " FROM read_parquet(?, filename = true, file_row_number = true)"
            " ORDER BY ts_us, filename, file_row_number",
            params=[[str(run) for run in runs]],
        )
        for batch in merged.to_arrow_reader(min(limit, 1 << 17)):
            yield pa.Table.from_batches([batch])
