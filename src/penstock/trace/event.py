"""The waist of the trace flow: the columns of an event, and what is said of each file that was read.

    trace files -> reading -> events (this shape) -> table -> questions -> comparison, findings

Readers make rows of this shape, questions ask them; neither knows the other. Invariants: times are whole
microseconds with `end_us = ts_us + dur_us`, and every line of a file is counted exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, whether a value may be missing, and what it says."""

    name: str
    type: pa.DataType
    nullable: bool
    meaning: str


COLUMNS: Final = (
    Column("ts_us", pa.int64(), False, "when it began: microseconds since 1970 by the clock of its host"),
    Column("dur_us", pa.int64(), False, "how long it took"),
    Column("end_us", pa.int64(), False, "when it ended: ts_us + dur_us"),
    Column("op", pa.string(), False, "what was done, by one name whatever the libc's: open, stat, write"),
    Column("name", pa.string(), False, "the same as traced: open64, __xstat, write"),
    Column("cat", pa.string(), False, "the layer that traced it: POSIX, STDIO, checkpoint"),
    Column("pid", pa.int64(), False, "process, as traced (a rank in traces of DLIO)"),
    Column("tid", pa.int64(), False, "thread, as traced"),
    Column("rank", pa.int32(), True, "rank of the process in its job"),
    Column("host", pa.string(), True, "machine"),
    Column("path", pa.string(), True, "file that was worked on"),
    Column("size_bytes", pa.int64(), True, "bytes that were moved"),
    Column("offset", pa.int64(), True, "where in the file"),
    Column("ret", pa.int64(), True, "what the call returned"),
    Column("epoch", pa.int32(), True, "epoch of the training"),
    Column("step", pa.int32(), True, "step of the training"),
    Column("args", pa.string(), False, "JSON text of everything else that was traced of it"),
    Column("run", pa.string(), False, "the run that the file belongs to"),
    Column("file", pa.string(), False, "the trace file that it was read from"),
)

SCHEMA: Final = pa.schema([pa.field(each.name, each.type, each.nullable) for each in COLUMNS])

SAMPLES_KEPT: Final = 5
"""Damaged lines that a file's account shows; all are counted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One damaged line: where it stands, what is wrong with it, how it begins."""

    line: int
    reason: str
    text: str


@dataclass(slots=True, kw_only=True)
class FileAccount:
    """What became of every line of one trace file: `lines = events + salvaged + metadata + blank + dropped`.

    `events` were whole, `salvaged` are events of damaged lines (`salvaged_reasons`); both are rows of the table.
    `metadata` explains other lines, `blank` lines are empty or a bracket. `announced_events` is what the file's
    writer counted, None if it didn't say; `faults` are about the file as a whole, as a torn end.
    """

    file: str
    dialect: str = ""
    lines: int = 0
    events: int = 0
    salvaged: int = 0
    metadata: int = 0
    blank: int = 0
    dropped: int = 0
    skipped: int = 0
    salvaged_reasons: Counter[str] = field(default_factory=Counter)
    dropped_reasons: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    announced_events: int | None = None
    hosts: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    size_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Nothing was lost and nothing had to be guessed."""
        return not (self.dropped or self.salvaged or self.faults)

    def count_damage(self, line: int, reason: str, text: str, *, salvaged: bool) -> None:
        """Count one damaged line, and keep it as a sample while there are few."""
        if salvaged:
            self.salvaged += 1
            self.salvaged_reasons[reason] += 1
        else:
            self.dropped += 1
            self.dropped_reasons[reason] += 1
        if len(self.samples) < SAMPLES_KEPT:
            self.samples.append(Sample(line, reason, text[:200]))

    def document(self) -> Mapping[str, Any]:
        """The account as JSON."""
        return {
            "file": self.file,
            "dialect": self.dialect,
            "size_bytes": self.size_bytes,
            "lines": self.lines,
            "events": self.events,
            "salvaged": self.salvaged,
            "metadata": self.metadata,
            "blank": self.blank,
            "dropped": self.dropped,
            "skipped": self.skipped,
            "salvaged_reasons": dict(self.salvaged_reasons),
            "dropped_reasons": dict(self.dropped_reasons),
            "faults": self.faults,
            "samples": [{"line": one.line, "reason": one.reason, "text": one.text} for one in self.samples],
            "announced_events": self.announced_events,
            "hosts": sorted(self.hosts),
            "ranks": sorted(self.ranks),
        }
