"""What tracing costs: small cached reads through our storage, traced and untraced, beside dftracer's preload.

Reads of 4 KiB from a file in the page cache, one thread. Ours go through a storage; dftracer's are calls of
`os.pread` in programs of their own, because a preload sees nothing else. An event's cost is what a traced
read takes more than an untraced one, in CPU time of all threads: ours with everything that encodes, packs and
writes the trace, dftracer's without its ending. How much of ours the reading thread itself spends, and what
it costs to record alone, is printed besides.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from harness import Ratio, interleave
from penstock.storage import open_storage
from penstock.trace.capture.external_tracers import dftracer_preload, plan_recording
from penstock.trace.capture.recorder import TraceRecorder
from penstock.trace.capture.trace_writer import EventKind, Layer
from penstock.trace.capture.traced_storage import TracedStorage

NUM_READS = int(os.environ.get("PENSTOCK_BENCH_EVENTS", "200000"))
READ_BYTES = 4096
FILE_BYTES = 4 << 20

# The same reads as a program's own calls, which is all that a preload sees.
PREADS = """
import os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDONLY)
number = int(sys.argv[2])
begin_s = time.process_time()
for at in range(number):
    os.pread(descriptor, 4096, at * 4096 % (4 << 20))
print(time.process_time() - begin_s)
"""

Cost = Callable[[], float]
READ = "cached 4 KiB reads, traced"
EVENT = "an event of a cached 4 KiB read"


def measure(repetitions: int) -> list[Ratio]:
    """Untraced over traced reads, ours and dftracer's; then what an event costs us and costs dftracer."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        (folder / "data" / "file").write_bytes(os.urandom(FILE_BYTES))
        costs: dict[str, list[float]] = {}

        def rate(what: str, cost: Cost) -> float:
            costs.setdefault(what, []).append(cost())
            return 1 / costs[what][-1]

        ratios = interleave(
            lambda: {READ: rate("a traced read", lambda: _ours(folder, traced=True))},
            lambda: {READ: rate("an untraced read", lambda: _ours(folder, traced=False))},
            repetitions=repetitions,
            unit="M reads a CPU second (theirs: the same storage, untraced)",
        )
        if dftracer_preload() is None:
            print("  dftracer is not installed: no comparison with it")
        else:
            ratios += interleave(
                lambda: {EVENT: rate("our event", lambda: _added(_ours, folder))},
                lambda: {EVENT: rate("dftracer's event", lambda: _added(_theirs, folder))},
                repetitions=repetitions,
                unit="M events a CPU second of tracing (theirs: dftracer's preload)",
            )
        for _ in range(repetitions):
            rate("of ours, in the reading thread", lambda: _added(_ours_in_thread, folder))
            rate("of that, to record", lambda: _recording(folder))
        for what, figures in costs.items():
            low, high = min(figures), max(figures)
            print(f"    {what:<32} {statistics.median(figures):6.2f} us  [{low:.2f} .. {high:.2f}]")
        return ratios


class Measured(Protocol):
    """A way to read, which gives microseconds a read."""

    def __call__(self, folder: Path, *, traced: bool) -> float:
        """Read, traced or not."""


def _added(measure_groups: Measured, folder: Path) -> float:
    """What tracing adds to a read."""
    return max(measure_groups(folder, traced=True) - measure_groups(folder, traced=False), 1e-3)


def _ours(folder: Path, *, traced: bool) -> float:
    """CPU microseconds of all threads a read through our storage, until the trace is whole."""
    return _read(folder, traced=traced, clock=time.process_time)[1]


def _ours_in_thread(folder: Path, *, traced: bool) -> float:
    """CPU microseconds of the thread that reads, until it has read."""
    return _read(folder, traced=traced, clock=time.thread_time)[0]


def _read(folder: Path, *, traced: bool, clock: Cost) -> tuple[float, float]:
    """Microseconds a read until all is read, and until the trace is whole."""
    storage = open_storage(str(folder / "data"), {})
    with tempfile.TemporaryDirectory(dir=folder) as traces:
        recorder = TraceRecorder(Path(traces))
        source = (TracedStorage(storage, recorder) if traced else storage).open("file")
        buffer = memoryview(bytearray(READ_BYTES))
        begin_s = clock()
        for at in range(NUM_READS):
            source.read_into(at * READ_BYTES % FILE_BYTES, buffer)
        read_s = clock() - begin_s
        recorder.close()
        whole_s = clock() - begin_s
        source.close()
        recorder.close()
    return read_s / NUM_READS * 1e6, whole_s / NUM_READS * 1e6


def _recording(folder: Path) -> float:
    """CPU microseconds of the thread that records an event."""
    kind = EventKind("pread64", "POSIX", Layer.LIBC_IO)
    with tempfile.TemporaryDirectory(dir=folder) as traces:
        recorder = TraceRecorder(Path(traces))
        record = recorder.record
        begin_s = time.thread_time()
        for at in range(NUM_READS):
            record(kind, at, "/data/file", at, READ_BYTES, READ_BYTES)
        elapsed_s = time.thread_time() - begin_s
        recorder.close()
    return elapsed_s / NUM_READS * 1e6


def _theirs(folder: Path, *, traced: bool) -> float:
    """CPU microseconds a read of a program, under dftracer's preload or without it."""
    data = folder / "data"
    with tempfile.TemporaryDirectory(dir=folder) as traces:
        environment: Mapping[str, str] = {}
        if traced:
            recording = plan_recording(["python"], Path(traces), tracer="dftracer", data=[str(data)])
            recording.folder.mkdir()
            environment = recording.environment
        ended = subprocess.run(
            [sys.executable, "-c", PREADS, str(data / "file"), str(NUM_READS)],
            env={**os.environ, **environment},
            check=True,
            capture_output=True,
            text=True,
        )
    return float(ended.stdout) / NUM_READS * 1e6
