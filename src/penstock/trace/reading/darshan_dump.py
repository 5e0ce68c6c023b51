"""Prints the records of a Darshan log as JSON lines: `python -m penstock.trace.reading.darshan_dump LOG`.

This is a separate program because Darshan's library ends the process that opens a damaged log. The first line
is the job; each other line is one record: the segments of a file, or its counters.
"""

import importlib
import json
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TextIO

SEGMENT_MODULES: Final = {"DXT_POSIX": "POSIX", "DXT_MPIIO": "MPIIO"}
"""Modules with single reads and writes, mapped to their category, as in the text of darshan-dxt-parser."""
COUNTER_MODULES: Final = {"POSIX": "POSIX", "MPI-IO": "MPIIO", "STDIO": "STDIO"}
"""Modules with sums for each file, mapped to their category, which is also the prefix of their counters."""

_MOST_BYTES: Final = 4 << 30
"""The memory that reading a log may take; real logs take far less."""


def dump(path: str, out: TextIO) -> int:
    """Print the log; return 1 if it cannot be opened, in which case the library has printed why."""
    backend = importlib.import_module("darshan.backend.cffi_backend")
    log = backend.log_open(path)
    if not log["handle"]:
        return 1
    out.writelines(
        json.dumps(document, separators=(",", ":")) + "\n" for document in _documents(backend, log)
    )
    backend.log_close(log)
    return 0


def _documents(backend: Any, log: Any) -> Iterator[Mapping[str, Any]]:
    job, modules = backend.log_get_job(log), backend.log_get_modules(log)
    names = backend.log_get_name_records(log)
    partial = [name for name, module in modules.items() if module["partial_flag"]]
    start_us = job["start_time_sec"] * 1_000_000 + job["start_time_nsec"] // 1000
    yield {"start_us": start_us, "nprocs": job["nprocs"], "modules": list(modules), "partial": partial}
    keys = ("offset", "length", "start_time", "end_time")
    for module, cat in SEGMENT_MODULES.items():
        while (record := backend.log_get_dxt_record(log, module)) is not None:
            # Times are in seconds since the job's start.
            moves = {
                verb: [[part[key] for key in keys] for part in record[f"{verb}_segments"]]
                for verb in ("write", "read")
            }
            facts = {"rank": record["rank"], "host": record["hostname"], "segments": moves}
            yield {"cat": cat, "path": names.get(record["id"]), **facts}
    for module, cat in COUNTER_MODULES.items():
        while (record := backend.log_get_generic_record(log, module, "dict")) is not None:
            counters = {name: int(value) for name, value in record["counters"].items()}
            counters |= {name: float(value) for name, value in record["fcounters"].items()}
            facts = {"rank": int(record["rank"]), "counters": counters}
            yield {"cat": cat, "path": names.get(record["id"]), **facts}


if __name__ == "__main__":
    # The parts of a log are compressed, and the library unpacks them whole.
    with suppress(ValueError):  # this process has a lower limit already
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    sys.exit(dump(sys.argv[1], sys.stdout))
