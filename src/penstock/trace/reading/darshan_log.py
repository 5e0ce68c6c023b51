"""Darshan's logs themselves (`.darshan`), through PyDarshan: single reads and writes where the log has them.

What Darshan's extended tracing (DXT) recorded becomes one event per read or write. Of everything else a log
has sums only: one event per file, rank and direction stands for all its calls, and the account says so.
Invariant: a damaged log ends another process, never this one (`darshan_dump.py`).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final

from penstock.optional_libraries import explained_imports
from penstock.trace.event_schema import ALL_RANKS, FileAccount
from penstock.trace.reading.event_batch import BATCH_ROWS, TraceFile, build_batch

if TYPE_CHECKING:
    import pyarrow as pa

_CALLS: Final = {
    "POSIX": {
        "read": ("READS",),
        "write": ("WRITES",),
        "metadata": ("OPENS", "STATS", "SEEKS", "FSYNCS", "FDSYNCS"),
    },
    "STDIO": {
        "read": ("READS",),
        "write": ("WRITES",),
        "metadata": ("OPENS", "SEEKS", "FLUSHES"),
    },
    "MPIIO": {
        "read": ("INDEP_READS", "COLL_READS", "SPLIT_READS", "NB_READS"),
        "write": ("INDEP_WRITES", "COLL_WRITES", "SPLIT_WRITES", "NB_WRITES"),
        "metadata": ("INDEP_OPENS", "COLL_OPENS", "SYNCS"),
    },
}  # fmt: skip
"""The counters whose sum is the number of calls, by category and direction."""
_BYTES: Final = {"read": "BYTES_READ", "write": "BYTES_WRITTEN"}
_SPANS: Final = {
    "read": ("F_READ_TIME", ("F_READ_START_TIMESTAMP",), ("F_READ_END_TIMESTAMP",)),
    "write": ("F_WRITE_TIME", ("F_WRITE_START_TIMESTAMP",), ("F_WRITE_END_TIMESTAMP",)),
    "metadata": (
        "F_META_TIME",
        ("F_OPEN_START_TIMESTAMP", "F_CLOSE_START_TIMESTAMP"),
        ("F_OPEN_END_TIMESTAMP", "F_CLOSE_END_TIMESTAMP"),
    ),
}
"""The counters of the time that all calls took, of their first beginnings, and of their last ends."""
_UNREAD: Final = ("H5F", "H5D", "PNETCDF_FILE", "PNETCDF_VAR", "DFS", "DAOS", "BG/Q", "MDHIM")
"""Modules with I/O that has no events here."""


class DarshanLog:
    """Reads one log."""

    def __init__(self, file: TraceFile, account: FileAccount) -> None:
        self._file = file
        self._account = account
        self._start_us = self._num_processes = self._num_of_all = 0
        self._hosts: dict[int, str] = {}
        self._traced: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._num_sums = self._num_summed = 0

    def read(self) -> Iterator[pa.RecordBatch]:
        """The log's events; Unavailable without PyDarshan."""
        with explained_imports():
            if find_spec("darshan") is None:
                raise ModuleNotFoundError("No module named 'darshan'", name="darshan")
        rows: list[Mapping[str, Any]] = []
        for row in self._rows():
            rows.append(row)
            if len(rows) >= BATCH_ROWS:
                yield build_batch(rows, self._file)
                rows = []
        if rows:
            yield build_batch(rows, self._file)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        dump = [sys.executable, "-m", "penstock.trace.reading.darshan_dump", str(self._file.path)]
        # The library's complaints go to a file: a pipe that nobody reads meanwhile would fill up.
        with TemporaryFile() as complaints:
            with subprocess.Popen(dump, stdout=subprocess.PIPE, stderr=complaints) as process:
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        if line.endswith(b"\n"):
                            yield from self._parse(json.loads(line))
                    process.wait()
                finally:
                    process.kill()
            complaints.seek(0)
            text = complaints.read().decode(errors="replace")
        self._find_faults(process.returncode, text.strip().splitlines())

    def _parse(self, record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "start_us" in record:
            self._start_us, self._num_processes = record["start_us"], record["nprocs"]
            self._note_modules(record["modules"], record["partial"])
        elif "segments" in record:
            yield from self._segments(record)
        else:
            yield from self._sums(record)

    def _segments(self, record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if record["rank"] >= 0:
            self._hosts[record["rank"]] = record["host"]
        for verb, segments in record["segments"].items():
            self._traced[record["cat"]] += len(segments)
            for number, (offset, size_bytes, begin, end) in enumerate(segments):
                self._account.lines += 1
                if not (math.isfinite(begin) and math.isfinite(end)) or end < begin or size_bytes < 0:
                    text = f"{verb} {offset} {size_bytes} {begin} {end}"
                    self._account.count_damage(
                        self._account.lines, "impossible numbers", text, salvaged=False
                    )
                    continue
                self._account.events += 1
                yield self._row(
                    record,
                    verb,
                    (self._microseconds(begin), self._microseconds(end)),
                    host=record["host"],
                    size_bytes=size_bytes,
                    offset=offset if offset >= 0 else None,
                    ret=size_bytes,
                    args=f'{{"segment":{number}}}',
                )

    def _sums(self, record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The events that stand for all calls of a file, in directions that have no segments."""
        cat, counters = record["cat"], record["counters"]
        for verb, names in _CALLS[cat].items():
            num_calls = sum(max(0, counters.get(f"{cat}_{name}", 0)) for name in names)
            if verb != "metadata":
                self._counted[cat] += num_calls
            if not num_calls or (verb != "metadata" and self._traced[cat]):
                continue
            time, begins, ends = _SPANS[verb]
            begin = min((t for name in begins if (t := counters.get(f"{cat}_{name}", 0)) > 0), default=0)
            end = max((t for name in ends if (t := counters.get(f"{cat}_{name}", 0)) > 0), default=begin)
            begin_us, time_us = self._microseconds(begin), round(counters.get(f"{cat}_{time}", 0) * 1e6)
            args = {
                "is_sum": True,
                "calls": num_calls,
                "time_us": time_us,
                "last_end_us": self._microseconds(end),
            }
            # Calls of several ranks or threads took more time together than there was between first and last.
            end_us = begin_us + max(0, min(time_us, self._microseconds(end) - begin_us))
            self._account.lines += 1
            self._account.events += time_us >= 0
            if time_us < 0:
                self._account.count_damage(
                    self._account.lines, "negative time", f"{cat}_{time} {time_us} us", salvaged=True
                )
            self._num_sums += 1
            self._num_of_all += record["rank"] == ALL_RANKS
            self._num_summed += num_calls
            yield self._row(
                record,
                verb,
                (begin_us, end_us),
                host=self._hosts.get(record["rank"]),
                size_bytes=counters.get(f"{cat}_{_BYTES[verb]}") if verb in _BYTES else None,
                args=json.dumps(args, separators=(",", ":")),
            )

    def _row(
        self, record: Mapping[str, Any], verb: str, span_us: tuple[int, int], **columns: Any
    ) -> Mapping[str, Any]:
        rank = record["rank"]
        return {
            "ts_us": span_us[0],
            "dur_us": span_us[1] - span_us[0],
            "name": verb,
            "cat": record["cat"],
            "pid": rank,
            "tid": rank,
            "rank": rank if rank >= 0 else None,
            "path": record["path"],
            **columns,
        }

    def _microseconds(self, seconds: float) -> int:
        return self._start_us + round(seconds * 1e6)

    def _note_modules(self, modules: list[str], partial: list[str]) -> None:
        unread = [name for name in modules if name in _UNREAD]
        if unread:
            self._account.notes.append(f"its modules {', '.join(unread)} are not read")
        if partial:
            self._account.faults.append(
                f"Darshan ran out of memory for {', '.join(partial)}: files or calls are missing"
            )

    def _find_faults(self, returncode: int, complaints: list[str]) -> None:
        account = self._account
        account.faults.extend(
            f"Darshan's library: {line.removeprefix('Error: ')}" for line in complaints[-3:]
        )
        if returncode > 0 and not complaints:
            account.faults.append("Darshan's library cannot open it")
        if returncode < 0:
            account.faults.append(f"it is damaged: reading it was ended by signal {-returncode}")
        if returncode == 0 and not (self._num_sums or any(self._traced.values())):
            account.faults.append("it has no I/O: Darshan recorded no file that the job read or wrote")
        for cat, num_traced in self._traced.items():
            if num_traced < self._counted[cat]:
                account.missing += self._counted[cat] - num_traced
                account.faults.append(
                    f"{num_traced:,} of {self._counted[cat]:,} {cat} reads and writes are in its DXT data"
                )
        if self._num_sums:
            account.notes.append(
                f"{self._num_sums:,} events are sums of {self._num_summed:,} calls, because Darshan did not"
                " trace these one by one: their times are right in sum, but not where they are"
            )
        if self._num_of_all:
            account.notes.append(
                f"{self._num_of_all:,} of them are of files that all {self._num_processes:,} ranks share, and"
                " say nothing of single ranks"
            )
