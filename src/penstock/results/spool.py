"""A rank's events while the run lasts: an append-only file that survives the death of its writer.

A JSON line (format, clock), then frames: a header with kind, count and checksum, then that many rows.
Invariant: whatever lies behind the first torn frame is not read, and everything before it is.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from penstock.errors import StorageError
from penstock.results.events import FORMAT_VERSION, SPAN_TYPE, STEP_TYPE, RankClock, RankEvents
from penstock.storage.files.durable import sync_open_file

if TYPE_CHECKING:
    from penstock.results.events import Rows

logger = logging.getLogger(__name__)

FOLDER: Final = "spool"
_SUFFIX: Final = ".events"
_FRAME: Final = struct.Struct("<4sIII")
_MAGIC: Final = b"PSF1"
_STEPS, _SPANS = 1, 2
_TYPES: Final = {_STEPS: STEP_TYPE, _SPANS: SPAN_TYPE}


def spool_path(run_folder: Path, rank: int) -> Path:
    """Where a rank's events are while the run lasts: one file a rank, removed by `tables.gather`."""
    return run_folder / FOLDER / f"{rank:06d}{_SUFFIX}"


def spool_paths(run_folder: Path) -> list[Path]:
    """The spools that are there, in rank order."""
    return sorted((run_folder / FOLDER).glob(f"*{_SUFFIX}"))


class SpoolWriter:
    """Appends rows. What `append_*` has returned from survives a kill, though not a power cut."""

    def __init__(self, path: Path, clock: RankClock) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._write(json.dumps({"format": FORMAT_VERSION, **asdict(clock)}).encode() + b"\n")

    def append_steps(self, rows: Rows) -> None:
        """Append steps, in one frame."""
        self._append(_STEPS, rows)

    def append_spans(self, rows: Rows) -> None:
        """Append spans, in one frame."""
        self._append(_SPANS, rows)

    def close(self) -> None:
        """Make everything durable. Safe twice."""
        if not self._file.closed:
            sync_open_file(self._file)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, kind: int, rows: Rows) -> None:
        if len(rows):
            content = rows.tobytes()
            self._write(_FRAME.pack(_MAGIC, kind, len(rows), zlib.crc32(content)) + content)

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]


def read_clock(path: Path) -> RankClock:
    """Whose spool this is."""
    with path.open("rb") as file:
        return _clock(file.readline(), path)


def read_spool(path: Path) -> RankEvents:
    """All whole frames of a spool; a torn tail is said in the log and left out."""
    line, _, content = path.read_bytes().partition(b"\n")
    frames: dict[int, list[Rows]] = {_STEPS: [], _SPANS: []}
    position = 0
    while (frame := _frame_at(content, position)) is not None:
        kind, rows, position = frame
        frames[kind].append(rows)
    if position < len(content):
        logger.warning("%s: the last %d bytes are torn and left out", path, len(content) - position)
    return RankEvents(
        clock=_clock(line, path),
        steps=np.concatenate([np.empty(0, STEP_TYPE), *frames[_STEPS]]),
        spans=np.concatenate([np.empty(0, SPAN_TYPE), *frames[_SPANS]]),
    )


def _frame_at(content: bytes, position: int) -> tuple[int, Rows, int] | None:
    if len(content) - position < _FRAME.size:
        return None
    magic, kind, num_rows, checksum = _FRAME.unpack_from(content, position)
    if magic != _MAGIC or kind not in _TYPES:
        return None
    begin = position + _FRAME.size
    end = begin + num_rows * _TYPES[kind].itemsize
    if end > len(content) or zlib.crc32(content[begin:end]) != checksum:
        return None
    return kind, np.frombuffer(content, _TYPES[kind], num_rows, begin), end


def _clock(line: bytes, path: Path) -> RankClock:
    try:
        header = json.loads(line)
        if header.pop("format") == FORMAT_VERSION:
            return RankClock(**header)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError("This is no spool of step events", uri=str(path), fix="Remove it.") from error
    raise StorageError(
        "This spool has another format", uri=str(path), fix="Read it with the version that wrote it."
    )
