"""The files of a checkpoint run: `checkpoints.json` and `throughput.parquet`.

`bench.checkpoint` writes the first, which has each round and the totals of all writes and reads; the reader
refuses any other format number. The second has the bytes that each rank transferred over the time of each
round: a row has a rank's bytes in one interval; an interval without bytes has no row. Its times are seconds
since the rank began the round, so that hosts' clocks need not agree.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from penstock.errors import ObjectNotFound, StorageError
from penstock.results.counter_files import IoReconciliation, ReconciliationVerdict
from penstock.results.parquet_tables import WORDS, open_table, publishing_table
from penstock.results.published_files import read_json
from penstock.results.run_folder import CHECKPOINTS_FILE

FORMAT_VERSION: Final = 1
"""The format of both files, incremented whenever a key or column is renamed or changes its meaning."""
THROUGHPUT_FILE: Final = "throughput.parquet"
_NUMBER: Final = (int, float)
_MAYBE: Final = (int, float, type(None))
_DIRECTION: Final[Mapping[str, type | tuple[type, ...]]] = {
    "checkpoints": int, "bytes": int, "duration_s": _NUMBER, "gib_per_s": _MAYBE, "mean_gib_per_s": _MAYBE,
    "p99_ms": _NUMBER, "bottleneck": str,
}  # fmt: skip
_DOCUMENT: Final[Mapping[str, type | tuple[type, ...]]] = {
    "model": str, "target": str, "checkpoint_bytes": int, "write": (dict, type(None)),
    "read": (dict, type(None)), "bottleneck": str, "is_right": bool, "gap_s": _MAYBE,
}  # fmt: skip


def judge(*, is_right: bool, is_from_memory: bool, deliveries: Sequence[IoReconciliation]) -> str:
    """Return the verdict of a checkpoint run: passed, doubtful (memory may have served reads) or failed."""
    missed = any(one.verdict is ReconciliationVerdict.FAIL for one in deliveries)
    return ("doubtful" if is_from_memory or missed else "passed") if is_right else "failed"


def read_checkpoints(folder: Path) -> Mapping[str, Any] | None:
    """Read `checkpoints.json` in a run's folder; return None if it is missing, as no round has finished.

    `write` and `read` are None if nothing was written or read; the rates of `read` are None if the page cache
    may have served every read.
    """
    path = folder / CHECKPOINTS_FILE
    try:
        document = read_json(path, formats=[FORMAT_VERSION])
    except ObjectNotFound:
        return None
    checked: list[tuple[str, Any, Any]] = [("", document, _DOCUMENT)]
    checked += [(f"{name}.", document.get(name), _DIRECTION) for name in ("write", "read")]
    for where, part, keys in checked:
        for key, kind in keys.items() if isinstance(part, dict) else ():
            if not isinstance(part.get(key), kind):
                raise StorageError(f"This is not as Penstock writes it: {where}{key}", uri=str(path))
    return document


def summarize_checkpoints(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the totals of a run, without the figures of each round and stream."""
    figures = {key: document[key] for key in _DOCUMENT}
    for name in ("write", "read"):
        if figures[name] is not None:
            figures[name] = {key: figures[name][key] for key in _DIRECTION}
    return figures


MovedBytes = list[tuple[float, float, int]]
"""When the intervals of a round begin and how long they are, in seconds, and one rank's bytes in each."""


Throughput = dict[tuple[str, int], list[MovedBytes]]
"""The bytes that each rank transferred, for the rounds of a run in order, by direction and step."""


_COLUMNS: Final = {
    "direction": WORDS, "step": pa.int32(), "rank": pa.int32(), "at_s": pa.float64(), "width_s": pa.float64(),
    "bytes": pa.int64(),
}  # fmt: skip


def write_throughput(folder: Path, rounds: Throughput) -> None:
    rows = [
        (direction, step, rank, *interval)
        for (direction, step), ranks in rounds.items()
        for rank, intervals in enumerate(ranks)
        for interval in intervals
    ]
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
    arrays = [pa.array(columns[0], pa.string()).dictionary_encode()]
    arrays += map(pa.array, columns[1:], list(_COLUMNS.values())[1:])
    with publishing_table(folder, THROUGHPUT_FILE, _COLUMNS, {"format": FORMAT_VERSION}) as table:
        table.write_table(pa.table(arrays, schema=table.schema))


def read_throughput(folder: Path) -> Throughput:
    """Read the throughput of the rounds, in order; return an empty mapping if the run recorded none."""
    path = folder / THROUGHPUT_FILE
    if not path.is_file():
        return {}
    table = open_table(path, "moved bytes", FORMAT_VERSION)[0].read()
    found: dict[tuple[str, int], dict[int, MovedBytes]] = {}
    directions = table["direction"].to_pylist()
    rows = zip(directions, *(table[name].to_pylist() for name in list(_COLUMNS)[1:]), strict=True)
    num_ranks = 0
    for direction, step, rank, *interval in rows:
        found.setdefault((direction, step), {}).setdefault(rank, []).append((*interval,))
        num_ranks = max(num_ranks, rank + 1)
    return {key: [ranks.get(rank, []) for rank in range(num_ranks)] for key, ranks in found.items()}
