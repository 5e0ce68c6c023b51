"""Darshan's logs (`.darshan`), and its extended traces (DXT) as text of `darshan-dxt-parser`.

DXT records reads and writes of each rank, each of which becomes one event. Of everything else, a log has
only sums: one event per file, rank and direction stands for all calls without their own event, and the
account says so. Bytes and times of the events add up to the counters. MPI-IO's segments have a separate
category, because the same bytes are recorded again as POSIX calls. Invariant: a damaged log can end only the
separate process that reads it (`darshan_dump.py`), never this one.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from penstock.optional_libraries import explained_imports
from penstock.trace.event_schema import ALL_RANKS, FileAccount, LineFate, ParsedLine, parse_int64

_FILE: Final = re.compile(r"#\s*DXT,\s*file_id:\s*\d+,\s*file_name:\s*(.*?)\s*")
_PLACE: Final = re.compile(r"#\s*DXT,\s*rank:\s*(-?\d+),\s*hostname:\s*(\S+)\s*")
_START: Final = re.compile(r"#\s*start_time:\s*(\d+)(?:\.(\d+))?.*")
_SEGMENT: Final = re.compile(
    r"\s*X_(\w+)\s+(-?\d+)\s+(read|write)\s+(\d+)\s+(-?\d+)\s+(\d+)\s+(\d+\.?\d*)\s+(\d+\.?\d*)"
    r"(?:\s+\[.*\])?(?:\s+(N/A|\d+))?\s*"
)


_ALONE: Final = re.compile(r"#\s*nprocs:\s*1\s*")
_OF_PROCESS: Final = re.compile(r".*_id\d+-(\d+)_\d+-\d+-\d+-.*")
"""A log's name since Darshan 3.3: user, program, job, process, date."""


def _find_pid(name: str) -> int | None:
    """Return the PID in a log's file name, or None. Without MPI, each process writes a log as rank 0."""
    match = _OF_PROCESS.fullmatch(name)
    return int(match[1]) if match else None


def read_darshan_text(
    chunks: Iterable[bytes], account: FileAccount, name: str = ""
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a DXT text. Its times are seconds since the job's start, which its head gives."""
    start_us = path = host = own_pid = None
    num_relative = num_segments = 0
    for line in (line for chunk in chunks for line in chunk.split(b"\n")[:-1]):
        text = line.decode(errors="backslashreplace")
        parsed = _parse_segment(text, start_us or 0, path, host, own_pid)
        account.lines += 1
        account.count(parsed, line)
        if parsed.row is not None:
            num_segments += 1
            num_relative += start_us is None
            yield parsed.row
        elif match := _FILE.fullmatch(text):
            path = match[1]
        elif match := _PLACE.fullmatch(text):
            host = match[2]
        elif _ALONE.fullmatch(text):
            own_pid = _find_pid(name)
        elif (match := _START.fullmatch(text)) and len(match[1]) < 12:
            start_us = int(match[1]) * 1_000_000 + int((match[2] or "0").ljust(6, "0")[:6])
    if not num_segments:
        account.faults.append("it has no segments: Darshan traced no reads and no writes")
    if num_relative:
        account.faults.append(f"{num_relative} events have times since the job began: it has no start_time")


def _parse_segment(
    line: str, start_us: int, path: str | None, host: str | None, own_pid: int | None
) -> ParsedLine:
    if not line.strip():
        return ParsedLine(LineFate.BLANK)
    if line.lstrip().startswith("#"):
        return ParsedLine(LineFate.METADATA)
    segment_line = _SEGMENT.fullmatch(line)
    if segment_line is None:
        return ParsedLine(LineFate.DROPPED, reason="not a segment")
    module, rank, verb, segment, offset, length, begin, end, thread = segment_line.groups()
    size_bytes, begins = parse_int64(length), parse_int64(offset)
    if not float(begin) <= float(end) < 1e12 or size_bytes is None or begins is None or len(rank) > 9:
        return ParsedLine(LineFate.DROPPED, reason="impossible numbers")
    begin_us, end_us = (round(float(seconds) * 1e6) for seconds in (begin, end))
    # Since 3.5, Darshan records the thread; in earlier versions, there is one for each rank.
    tid = parse_int64(thread) if thread else None
    pid = int(rank) if own_pid is None else own_pid
    return ParsedLine(
        LineFate.EVENT,
        row={
            "ts_us": start_us + begin_us,
            "dur_us": end_us - begin_us,
            "name": verb,
            "cat": module,
            "pid": pid,
            "tid": pid if tid is None else tid,
            "rank": pid if own_pid is None and pid >= 0 else None,
            "host": host,
            "path": path,
            "size_bytes": size_bytes,
            "offset": begins if begins >= 0 else None,
            "ret": size_bytes,
            "args": f'{{"segment":{int(segment)}}}',
        },
    )


_CALLS: Final = {
    "POSIX": {
        "read": ("READS",),
        "write": ("WRITES",),
        "metadata": ("OPENS", "STATS", "SEEKS"),
        "fsync": ("FSYNCS", "FDSYNCS"),
    },
    "STDIO": {
        "read": ("READS",),
        "write": ("WRITES",),
        "metadata": ("OPENS", "SEEKS"),
        "fsync": ("FLUSHES",),
    },
    "MPIIO": {
        "read": ("INDEP_READS", "COLL_READS", "SPLIT_READS", "NB_READS"),
        "write": ("INDEP_WRITES", "COLL_WRITES", "SPLIT_WRITES", "NB_WRITES"),
        "metadata": ("INDEP_OPENS", "COLL_OPENS"),
        "fsync": ("SYNCS",),
    },
}  # fmt: skip
"""The counters whose sum is the number of calls, by category and direction."""
_SHAPES: Final = {
    "read": {"sequential": "SEQ_READS", "consecutive": "CONSEC_READS"},
    "write": {"sequential": "SEQ_WRITES", "consecutive": "CONSEC_WRITES"},
    "metadata": {"unaligned": "FILE_NOT_ALIGNED", "alignment_bytes": "FILE_ALIGNMENT"},
}
"""What POSIX counters say about calls besides their number, by the names of the arguments."""
_BINS: Final = (
    "0_100", "100_1K", "1K_10K", "10K_100K", "100K_1M", "1M_4M", "4M_10M", "10M_100M", "100M_1G", "1G_PLUS",
)  # fmt: skip
"""Counters of calls by size in bytes."""
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
"""The counters of the total time of calls, of the first call's beginning, and of the last call's end."""
_UNREAD: Final = frozenset(("H5F", "H5D", "PNETCDF_FILE", "PNETCDF_VAR", "DFS", "DAOS", "BG/Q", "MDHIM"))
"""Modules whose I/O is not turned into events."""


def read_darshan_log(path: Path, account: FileAccount) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a log. Raises `Unavailable` without PyDarshan."""
    with explained_imports():
        if find_spec("darshan") is None:
            raise ModuleNotFoundError("No module named 'darshan'", name="darshan")
    yield from rows_of_log(_dump_records(path, account), account, path.name)


def _dump_records(path: Path, account: FileAccount) -> Iterator[Mapping[str, Any]]:
    """Yield the records that another process reads, then add that process's errors to the account."""
    dump = [sys.executable, "-P", "-m", "penstock.trace.reading.darshan_dump", str(path)]
    # The library's messages go to a file, because a pipe that is not read meanwhile would fill up.
    with TemporaryFile() as complaints:
        with subprocess.Popen(dump, stdout=subprocess.PIPE, stderr=complaints) as process:
            assert process.stdout is not None
            try:
                yield from (json.loads(line) for line in process.stdout if line.endswith(b"\n"))
                process.wait()
            finally:
                process.kill()
        complaints.seek(0)
        lines = complaints.read().decode(errors="replace").strip().splitlines()
    account.faults += [f"Darshan's library: {line.removeprefix('Error: ')}" for line in lines[-3:]]
    if process.returncode > 0 and not lines:
        account.faults.append("Darshan's library cannot open it")
    if process.returncode < 0:
        account.faults.append(f"it is damaged: reading it was ended by signal {-process.returncode}")


def rows_of_log(
    records: Iterable[Mapping[str, Any]], account: FileAccount, name: str = ""
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows for the records of `darshan_dump`: the job, then segments, then counters."""
    start_us = num_processes = num_sums = num_of_all = num_summed = 0
    own_pid: int | None = None
    hosts: dict[int, str] = {}
    # The calls, bytes and microseconds of segments, by category, file, rank and direction.
    traced: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
    counted: Counter[str] = Counter()

    for record in records:
        if "start_us" in record:
            start_us, num_processes = record["start_us"], record["nprocs"]
            own_pid = _find_pid(name) if num_processes == 1 else None
            unread = sorted(_UNREAD.intersection(record["modules"]))
            if unread:
                account.notes.append(f"its modules {', '.join(unread)} are not read")
            if record["partial"]:
                partial = ", ".join(record["partial"])
                account.faults.append(f"Darshan ran out of memory for {partial}: files or calls are missing")
            continue
        cat, rank, path = record["cat"], record["rank"], record["path"]
        hosts |= {rank: record["host"]} if "host" in record and rank >= 0 else {}
        pid = rank if own_pid is None else own_pid
        base = {
            "cat": cat,
            "pid": pid,
            "tid": pid,
            "rank": rank if rank >= 0 and own_pid is None else None,
            "path": path,
        }
        for verb, segments in record.get("segments", {}).items():
            for number, (offset, size_bytes, begin, end) in enumerate(segments):
                account.lines += 1
                if not (math.isfinite(begin) and math.isfinite(end)) or end < begin or size_bytes < 0:
                    text = f"{verb} {offset} {size_bytes} {begin} {end}"
                    account.count(ParsedLine(LineFate.DROPPED, reason="impossible numbers"), text.encode())
                    continue
                account.events += 1
                dur_us = round(end * 1e6) - round(begin * 1e6)
                for who in (rank, ALL_RANKS):
                    sums = traced[cat, path, who, verb]
                    sums[:] = sums[0] + 1, sums[1] + size_bytes, sums[2] + dur_us
                yield {
                    **base,
                    "name": verb,
                    "ts_us": start_us + round(begin * 1e6),
                    "dur_us": dur_us,
                    "host": record["host"],
                    "size_bytes": size_bytes,
                    "offset": offset if offset >= 0 else None,
                    "ret": size_bytes,
                    "args": f'{{"segment":{number}}}',
                }
        counters = record.get("counters", {})
        counted[cat] += _count_calls(cat, "read", counters) + _count_calls(cat, "write", counters)
        # Counters become events that stand for the calls of a file without their own event.
        own = {verb: traced.get((cat, path, rank, verb), (0, 0, 0)) for verb in _SPANS}
        for verb, size_bytes, begin_us, dur_us, args in _sum_calls(cat, counters, own):
            account.lines += 1
            salvaged = ParsedLine(LineFate.SALVAGED, reason="negative time")
            fate = ParsedLine(LineFate.EVENT) if args["time_us"] >= 0 else salvaged
            account.count(fate, f"{cat} {verb} {args['time_us']} us".encode())
            num_sums += 1
            num_of_all += rank == ALL_RANKS
            num_summed += args["calls"] + args.get("fsyncs", 0)
            args |= {"last_end_us": start_us + args["last_end_us"], "num_ranks": num_processes}
            yield {
                **base,
                "name": verb,
                "ts_us": start_us + begin_us,
                "dur_us": dur_us,
                "host": hosts.get(rank),
                "size_bytes": size_bytes,
                "args": json.dumps(args, separators=(",", ":")),
            }
    num_traced: Counter[str] = Counter()
    for (cat, _, rank, _), (num_calls, _, _) in traced.items():
        num_traced[cat] += num_calls if rank != ALL_RANKS else 0
    if not (account.faults or num_sums or traced):
        account.faults.append("it has no I/O: Darshan recorded no file that the job read or wrote")
    account.notes += [
        f"{number:,} of {counted[cat]:,} {cat} reads and writes are in its DXT data, the others only in sums"
        for cat, number in num_traced.items()
        if number < counted[cat]
    ]
    if num_sums:
        account.notes.append(
            f"{num_sums:,} events are sums of {num_summed:,} calls, because Darshan did not trace these one"
            " by one: their times are right in sum, but not their places in time"
        )
    if num_of_all:
        account.notes.append(
            f"{num_of_all:,} of them are of files that all {num_processes:,} ranks share, and say nothing"
            " about single ranks"
        )


def _count_calls(cat: str, verb: str, counters: Mapping[str, Any]) -> int:
    return sum(max(0, counters.get(f"{cat}_{name}", 0)) for name in _CALLS[cat][verb])


def _sum_calls(
    cat: str, counters: Mapping[str, Any], segments: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, int | None, int, int, dict[str, Any]]]:
    """Yield name, bytes, start, duration and arguments for each direction's calls without a segment.

    `segments` has the number, bytes and microseconds of the calls that have a segment.
    """
    for verb, (time, begins, ends) in _SPANS.items():
        num_traced, traced_bytes, traced_us = segments[verb]
        num_calls = max(0, _count_calls(cat, verb, counters) - num_traced)
        num_syncs = _count_calls(cat, "fsync", counters) if verb == "write" else 0
        if not (num_calls or num_syncs):
            continue
        # An fsync may end later than the last write, but not later than the last close.
        until = (*ends, "F_CLOSE_END_TIMESTAMP") if num_syncs else ends
        begun = [at for name in begins if (at := counters.get(f"{cat}_{name}", 0)) > 0]
        ended = [at for name in until if (at := counters.get(f"{cat}_{name}", 0)) > 0]
        begin_us = round(min(begun, default=0.0) * 1e6)
        end_us = round(max(ended) * 1e6) if ended else begin_us
        time_us = round(counters.get(f"{cat}_{time}", 0) * 1e6)
        time_us = max(0, time_us - traced_us) if num_traced else time_us
        args = {"is_sum": True, "calls": num_calls, "time_us": time_us, "last_end_us": end_us}
        args |= {"fsyncs": num_syncs} if num_syncs else {}
        args |= _find_shape(verb, counters) if cat == "POSIX" and not num_traced else {}
        size_bytes = counters.get(f"{cat}_{_BYTES.get(verb)}")
        yield (
            # Darshan counts the time of fsync as time of writes.
            verb if num_calls else "fsync",
            max(0, size_bytes - traced_bytes) if size_bytes is not None and num_calls else None,
            begin_us,
            # The calls of several ranks or threads may together take longer than the time from first to last.
            max(0, min(time_us, end_us - begin_us)),
            args,
        )


def _find_shape(verb: str, counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many calls of a direction have each size, are in order or are unaligned, if known."""
    shape = {
        name: value
        for name, counter in _SHAPES[verb].items()
        if (value := counters.get(f"POSIX_{counter}", 0)) > 0
    }
    sizes = [counters.get(f"POSIX_SIZE_{verb.upper()}_{size}", 0) for size in _BINS]
    return {**shape, "sizes": sizes} if any(sizes) else shape
