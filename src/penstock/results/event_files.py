"""The step events of a run on disk: a spool file per rank while the run lasts, two Parquet tables afterwards.

A spool survives the death of its writer. It has a JSON line (format, clock), then frames: a header with the
kind, number and checksum of the rows, then the rows. Everything before the first incomplete frame is read,
nothing after it.

Rank 0 gathers all spools into `steps.parquet` and `spans.parquet`, one row group per rank, with one rank at a
time in memory. There are only two files, even for 1,000 ranks. Spools are removed only once both tables are
published.
"""

import logging
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.errors import ObjectNotFound, StorageError
from penstock.results import step_events
from penstock.results.parquet_tables import WORDS, Spool, open_table, publishing_table, read_spool_header
from penstock.results.phase_figures import PhaseFigures, compute_phase_figures
from penstock.results.run_record import RunRecord, read_recorded_workload
from penstock.storage.files.local_files import open_to_read
from penstock.storage.files.system_calls import translate_os_errors

logger = logging.getLogger(__name__)

FOLDER: Final = "spool"
_SUFFIX: Final = ".events"
_FRAME: Final = struct.Struct("<4sIII")
_MAGIC: Final = b"PSF1"
_STEPS, _SPANS = 1, 2
_TYPES: Final = {_STEPS: step_events.STEP_TYPE, _SPANS: step_events.SPAN_TYPE}


def spool_path(run_folder: Path, rank: int) -> Path:
    """Return the file of a rank's events while the run lasts. `gather_events` removes it."""
    return run_folder / FOLDER / f"{rank:06d}{_SUFFIX}"


class SpoolWriter(Spool):
    """Appends one rank's rows to its spool."""

    def __init__(self, path: Path, clock: step_events.RankClock) -> None:
        super().__init__(path, {"format": step_events.FORMAT_VERSION, **asdict(clock)})

    def append(self, rows: step_events.Rows) -> None:
        """Append steps or spans as one frame."""
        if len(rows):
            kind = _STEPS if rows.dtype == step_events.STEP_TYPE else _SPANS
            content = rows.tobytes()
            frame = _FRAME.pack(_MAGIC, kind, len(rows), zlib.crc32(content))
            self.write(frame + content)


def _read_clock(path: Path) -> step_events.RankClock:
    version = step_events.FORMAT_VERSION
    return read_spool_header(path, step_events.RankClock, what="step events", version=version)


def read_spool(path: Path) -> step_events.RankEvents:
    """Read all complete frames of a spool. An incomplete end is logged and left out."""
    with translate_os_errors("Opening", str(path)), open_to_read(path) as file:
        _, _, content = file.read().partition(b"\n")
    frames: dict[int, list[step_events.Rows]] = {_STEPS: [], _SPANS: []}
    position = 0
    while len(content) - position >= _FRAME.size:
        magic, kind, num_rows, checksum = _FRAME.unpack_from(content, position)
        if magic != _MAGIC or kind not in _TYPES:
            break
        begin = position + _FRAME.size
        end = begin + num_rows * _TYPES[kind].itemsize
        if end > len(content) or zlib.crc32(content[begin:end]) != checksum:
            break
        frames[kind].append(np.frombuffer(content, _TYPES[kind], num_rows, begin))
        position = end
    if position < len(content):
        logger.warning("%s: the last %d bytes are torn and left out", path, len(content) - position)
    return step_events.RankEvents(
        clock=_read_clock(path),
        steps=np.concatenate([np.empty(0, step_events.STEP_TYPE), *frames[_STEPS]]),
        spans=np.concatenate([np.empty(0, step_events.SPAN_TYPE), *frames[_SPANS]]),
    )


STEPS_FILE: Final = "steps.parquet"
SPANS_FILE: Final = "spans.parquet"
_ENUMS: Final[dict[str, type[IntEnum]]] = {"phase": step_events.StepPhase, "kind": step_events.SpanKind}
"""The columns that are stored as words instead of numbers, so that other programs can interpret them."""


def gather_events(run_folder: Path, num_ranks: int) -> None:
    """Convert all ranks' spools to the two tables, and remove them.

    Only one rank calls this, after a barrier.
    """
    paths = [spool_path(run_folder, rank) for rank in range(num_ranks)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        raise ObjectNotFound(
            f"The step events of {len(missing)} of {num_ranks} ranks are not here, first rank {missing[0]}",
            uri=str(run_folder),
            fix="Put the results on a file system that all hosts share.",
        )
    write_tables(run_folder, list(map(_read_clock, paths)), map(read_spool, paths))
    for path in paths:
        path.unlink()
    (run_folder / FOLDER).rmdir()


def write_tables(
    run_folder: Path, clocks: Sequence[step_events.RankClock], events: Iterator[step_events.RankEvents]
) -> None:
    """Write both tables from the ranks' events, which come in the order of `clocks`."""
    header = {"format": step_events.FORMAT_VERSION, "ranks": [asdict(clock) for clock in clocks]}
    step_columns, span_columns = (
        {"rank": pa.int32(), **{name: WORDS if name in _ENUMS else pa.int64() for name in row.names or ()}}
        for row in (step_events.STEP_TYPE, step_events.SPAN_TYPE)
    )
    with (
        publishing_table(run_folder, STEPS_FILE, step_columns, header) as steps,
        publishing_table(run_folder, SPANS_FILE, span_columns, header) as spans,
    ):
        for rank in events:
            for table, rows in ((steps, rank.steps), (spans, rank.spans)):
                columns: list[Any] = [pa.array(np.full(len(rows), rank.clock.rank, np.int32))]
                for name in table.schema.names[1:]:
                    if name in _ENUMS:
                        words = [member.name.lower() for member in _ENUMS[name]]
                        columns.append(
                            pa.DictionaryArray.from_arrays(pa.array(rows[name], pa.int32()), words)
                        )
                    else:
                        columns.append(pa.array(rows[name]))
                # Each rank has one row group, so that readers can load one rank at a time.
                table.write_batch(pa.record_batch(columns, schema=table.schema), max(1, len(rows)))


def read_events(run_folder: Path) -> list[step_events.RankEvents]:
    """Read all ranks' events from the tables, or from the spools of an active or interrupted run."""
    if not (run_folder / STEPS_FILE).exists():
        paths = sorted((run_folder / FOLDER).glob(f"*{_SUFFIX}"))
        if not paths:
            raise ObjectNotFound("This run has no step events", uri=str(run_folder))
        return [read_spool(path) for path in paths]
    clocks, steps = _read_table(run_folder / STEPS_FILE, step_events.STEP_TYPE)
    _, spans = _read_table(run_folder / SPANS_FILE, step_events.SPAN_TYPE)
    return [
        step_events.RankEvents(clock=clock, steps=steps[clock.rank], spans=spans[clock.rank])
        for clock in clocks
    ]


def _read_table(
    path: Path, row_type: np.dtype[np.void]
) -> tuple[list[step_events.RankClock], dict[int, step_events.Rows]]:
    file, header = open_table(path, "events", step_events.FORMAT_VERSION)
    clocks = [step_events.RankClock(**clock) for clock in header["ranks"]]
    by_rank = {clock.rank: np.empty(0, row_type) for clock in clocks}
    try:
        groups = [file.read_row_group(index) for index in range(file.num_row_groups)]
    except pa.ArrowException as error:
        raise StorageError(f"Cannot read the events: {error}", uri=str(path)) from error
    for group in filter(len, groups):
        rows = np.empty(len(group), row_type)
        for name in row_type.names or ():
            if name in _ENUMS:
                numbers = {member.name.lower(): member.value for member in _ENUMS[name]}
                rows[name] = [numbers[word] for word in group[name].to_pylist()]
            else:
                rows[name] = group[name].to_numpy()
        by_rank[group["rank"][0].as_py()] = rows
    return clocks, by_rank


def recompute_figures(
    folder: Path, record: RunRecord, phase: step_events.StepPhase = step_events.StepPhase.TRAIN
) -> PhaseFigures | None:
    """Compute a phase's figures from its events alone, even if the run has not finished.

    The figures include times by rank. Returns None if no epoch has a block that all ranks completed.
    """
    workload = read_recorded_workload(record, folder)
    return compute_phase_figures(read_events(folder), workload, phase=phase)
