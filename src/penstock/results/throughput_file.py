"""`throughput.parquet` of a run of checkpoints: the bytes that each rank moved over the time of each round.

A row is a rank's bytes in one bucket of time; a bucket without bytes has none. Times are seconds since the
rank began the round, so that clocks of hosts do not matter.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import StorageError
from penstock.results.arrow_columns import encode_words, make_numbers, read_numbers
from penstock.results.published_files import publishing

THROUGHPUT_FILE: Final = "throughput.parquet"
FORMAT_VERSION: Final = 1
"""Raised whenever a column is renamed or means something else."""
_METADATA: Final = b"penstock"


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """What one rank moved in each of so many buckets of a round, which are `width_s` long."""

    width_s: float
    sizes_bytes: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundThroughput:
    """One round, rank by rank."""

    direction: str
    step: int
    ranks: Sequence[MovedBytes]


def write_throughput(folder: Path, rounds: Sequence[RoundThroughput]) -> None:
    """Publish the rounds of a run."""
    rows: dict[str, list[Any]] = {
        name: [] for name in ("direction", "step", "rank", "at_s", "width_s", "bytes")
    }
    for measured in rounds:
        for rank, moved in enumerate(measured.ranks):
            filled = [number for number, size_bytes in enumerate(moved.sizes_bytes) if size_bytes]
            rows["direction"] += [measured.direction] * len(filled)
            rows["step"] += [measured.step] * len(filled)
            rows["rank"] += [rank] * len(filled)
            rows["at_s"] += [number * moved.width_s for number in filled]
            rows["width_s"] += [moved.width_s] * len(filled)
            rows["bytes"] += [moved.sizes_bytes[number] for number in filled]
    metadata = {_METADATA: json.dumps({"format": FORMAT_VERSION}).encode()}
    schema = pa.schema(
        [
            ("direction", pa.dictionary(pa.int32(), pa.string())), ("step", pa.int32()), ("rank", pa.int32()),
            ("at_s", pa.float64()), ("width_s", pa.float64()), ("bytes", pa.int64()),
        ],
        metadata=metadata,
    )  # fmt: skip
    with publishing(folder, THROUGHPUT_FILE) as file:
        columns = [encode_words(rows["direction"])]
        columns += [
            make_numbers(rows[field.name], field.type.to_pandas_dtype()) for field in list(schema)[1:]
        ]
        pq.write_table(pa.table(columns, schema=schema), file, compression="zstd")


def read_throughput(folder: Path) -> list[RoundThroughput]:
    """The rounds in their order; nothing of a run that did not record them."""
    path = folder / THROUGHPUT_FILE
    if not path.is_file():
        return []
    try:
        table = pq.ParquetFile(path).read()
        header = json.loads((table.schema.metadata or {}).get(_METADATA, b"{}"))
    except (pa.ArrowException, ValueError) as error:
        raise StorageError(f"Cannot read the throughput: {error}", uri=str(path)) from error
    if header.get("format") != FORMAT_VERSION:
        raise StorageError(
            f"The throughput has format {header.get('format')}, not {FORMAT_VERSION}",
            uri=str(path),
            fix="Read it with the version that wrote it.",
        )
    columns = {name: read_numbers(table[name]) for name in ("step", "rank", "at_s", "width_s", "bytes")}
    directions = np.array(table["direction"].cast(pa.string()).to_pylist(), dtype=object)
    rounds = dict.fromkeys(zip(directions.tolist(), columns["step"].tolist(), strict=True))
    num_ranks = int(columns["rank"].max()) + 1 if len(columns["rank"]) else 0
    found = []
    for direction, step in rounds:
        own = (directions == direction) & (columns["step"] == step)
        ranks = [_of_rank(columns, own & (columns["rank"] == rank)) for rank in range(num_ranks)]
        found.append(RoundThroughput(direction=direction, step=step, ranks=ranks))
    return found


def _of_rank(columns: dict[str, Any], rows: Any) -> MovedBytes:
    if not rows.any():
        return MovedBytes(1.0, ())
    width_s = float(columns["width_s"][rows][0])
    places = np.round(columns["at_s"][rows] / width_s).astype(int)
    sizes = np.zeros(int(places.max()) + 1, np.int64)
    sizes[places] = columns["bytes"][rows]
    return MovedBytes(width_s, sizes.tolist())
