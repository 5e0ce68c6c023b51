"""Measure how many files threads create, look up, list and delete per second.

File systems are measured by plain system calls, one per file, as in mdtest: an empty file is created and
closed but not made durable, and each thread has its own folder. Other storages are called through the storage
protocol. Collective: every rank makes the same calls; a rate is the number of all ranks' files divided by the
time of the slowest rank.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.timed_streams import StartGate, run_together
from penstock.cluster.comm import Comm
from penstock.errors import StorageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import SupportsLocalPaths
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import write_object
from penstock.units import format_count

MetadataCall = Literal["create", "stat", "list", "delete"]
CALLS: Final[tuple[MetadataCall, ...]] = ("create", "stat", "list", "delete")
MOST_FILES: Final = 10_000
MOST_SECONDS: Final = 2.0
"""Creation ends after this time, or after the largest number of files per rank, whichever comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataRate:
    """One kind of call, made by `threads` threads on each rank.

    Latencies are of one file, or of one listing.
    """

    op: str
    mode: str
    ranks: int
    threads: int
    files: int
    elapsed_s: float
    files_per_s: float
    p50_ms: float
    p99_ms: float


_Calls = Mapping[str, Callable[[int], object]]
"""The calls on one thread's files. Each takes the file's number; `list` ignores it and lists all files."""


def _calls_on_files(folder: str) -> _Calls:
    """Return system calls on files in a folder, whose path is text because a `Path` costs more."""
    Path(folder).mkdir(parents=True)

    def create(number: int) -> None:
        os.close(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    def count_listed(_: int) -> int:
        with os.scandir(folder) as entries:
            return sum(1 for _ in entries)

    return {
        "create": create,
        "stat": lambda number: os.stat(f"{folder}/{number}"),  # noqa: PTH116 - as above
        "delete": lambda number: os.unlink(f"{folder}/{number}"),  # noqa: PTH108 - as above
        "list": count_listed,
    }


def _calls_on_objects(storage: Storage, prefix: str) -> _Calls:
    """Return the storage's own calls on empty objects below a prefix."""
    return {
        "create": lambda number: write_object(storage, f"{prefix}/{number}", (), size_bytes=0),
        "stat": lambda number: storage.stat(f"{prefix}/{number}"),
        "delete": lambda number: storage.delete(f"{prefix}/{number}"),
        "list": lambda _: sum(1 for _ in storage.list(prefix)),
    }


_Times = tuple[int, int, int, list[int]]
"""One thread's start, end, number of files, and the duration of each call."""


def measure_metadata(
    place: ProbeFolder, threads: Sequence[int], *, comm: Comm, progress: Progress
) -> Iterator[MetadataRate]:
    """Measure the four calls with each number of threads, on files that are removed again."""
    for number in threads:
        names = [_names(place, f"rank{comm.rank}-files{number}-{thread}") for thread in range(number)]
        created = [0] * number
        for call in CALLS:
            progress.begin(f"{place.mode} {call}, {format_count(number, 'thread')}", MOST_FILES)
            with translate_os_errors(f"The call {call}", place.storage.uri):
                times = _run(call, names, created, comm)
            progress.advance(sum(files for _, _, files, _ in times))
            if call == "create":
                created = [files for _, _, files, _ in times]
            yield _sum_up(call, place.mode, comm.gather(times, awaiting=f"all ranks to {call} files"))
        if place.folder is not None:
            for thread in range(number):
                with suppress(OSError):
                    (place.folder / f"rank{comm.rank}-files{number}-{thread}").rmdir()


def _names(place: ProbeFolder, folder: str) -> _Calls:
    if isinstance(place.storage, SupportsLocalPaths) and place.folder is not None:
        with translate_os_errors("Creating a folder", place.storage.uri):
            return _calls_on_files(str(place.folder / folder))
    return _calls_on_objects(place.storage, folder)


def _run(call: MetadataCall, names: Sequence[_Calls], created: Sequence[int], comm: Comm) -> list[_Times]:
    """Make one kind of call in all threads of this rank.

    They begin together with those of all other ranks.
    """
    most = [MOST_FILES // len(names)] * len(names) if call == "create" else created

    def time_calls(thread: int, gate: StartGate) -> _Times:
        act, limit = names[thread][call], most[thread]
        gate.wait()
        start_ns = began_ns = time.monotonic_ns()
        if call == "list":
            listed = act(0)
            if listed != limit:
                raise StorageError(
                    f"A listing has {listed} of {limit} files", fix="Find out what else removes files there."
                )
            end_ns = time.monotonic_ns()
            return start_ns, end_ns, limit, [end_ns - start_ns]
        until_ns = start_ns + round(MOST_SECONDS * 1e9) if call == "create" else None
        latencies: list[int] = []
        while len(latencies) < limit and (until_ns is None or not latencies or began_ns < until_ns):
            act(len(latencies))
            latencies.append(time.monotonic_ns() - began_ns)
            began_ns = time.monotonic_ns()
        return start_ns, began_ns, len(latencies), latencies

    return run_together(len(names), time_calls, comm=comm, what=f"{call} of files")


def _sum_up(call: MetadataCall, mode: str, ranks: Sequence[Sequence[_Times]]) -> MetadataRate:
    spans = ((max(end for _, end, *_ in times), min(start for start, *_ in times)) for times in ranks)
    elapsed_s = max(end_ns - start_ns for end_ns, start_ns in spans) / 1e9
    files = sum(files for times in ranks for _, _, files, _ in times)
    latencies = np.array([ns for times in ranks for *_, each in times for ns in each]) / 1e6
    p50, p99 = np.percentile(latencies, (50, 99))
    return MetadataRate(
        op=call,
        mode=mode,
        ranks=len(ranks),
        threads=len(ranks[0]),
        files=files,
        elapsed_s=elapsed_s,
        files_per_s=files / elapsed_s,
        p50_ms=float(p50),
        p99_ms=float(p99),
    )


def metadata_rows(rates: Sequence[MetadataRate]) -> list[dict[str, str]]:
    """Return one row for each call and number of threads."""
    return [
        {
            "call": rate.op,
            "mode": rate.mode,
            "threads": str(rate.threads),
            "files": f"{rate.files:,}",
            "files/s": f"{rate.files_per_s:,.0f}",
            "p50 ms": f"{rate.p50_ms:.3f}",
            "p99 ms": f"{rate.p99_ms:.3f}",
        }
        for rate in rates
    ]
