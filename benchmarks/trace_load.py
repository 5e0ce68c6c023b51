"""Loading traces beside DuckDB's own JSON reader, and searching them beside gunzip alone, in CPU seconds.

4,000,000 events in eight files of DFTracer's newest generation. What a core does is lines divided by CPU
seconds of all threads, so other work on the machine counts for little. A cold question asks for two columns,
which are all that DuckDB then parses; ours reads everything. Printed besides: reading alone, warm questions
on the table, and the memory that a conversion takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import duckdb
from isal import igzip
from tests.support.trace_files import Writing, write_trace

from harness import Ratio, interleave
from penstock.progress import Silent
from penstock.trace.event_table import convert
from penstock.trace.reading.chunks import read_pieces
from penstock.trace.reading.event_filter import ALL_EVENTS, EventFilter
from penstock.trace.reading.trace_file import TraceFile, read_matching_events
from penstock.trace.trace_set import find_trace_files, name_trace_files, open_trace_set

gunzip: Callable[[bytes], bytes] = igzip.decompress
NUM_FILES = 8
EVENTS_PER_FILE = int(os.environ.get("PENSTOCK_BENCH_EVENTS", "1000000")) // NUM_FILES

BY_NAME = "SELECT name, count(*), sum(dur) FROM {} GROUP BY name ORDER BY name"
SELECTIONS = {
    "one category of rare events": "cat = 'checkpoint'",
    "checkpoint files": "path LIKE '%/checkpoints/%'",
    "writes of checkpoint files": "op = 'write' AND path LIKE '%/checkpoints/%'",
}
QUESTIONS = {
    "operations": "SELECT op, count(*), sum(dur_us), sum(size_bytes) FROM events GROUP BY op",
    "files": "SELECT path, count(*), sum(size_bytes) AS b FROM events GROUP BY path ORDER BY b DESC LIMIT 20",
    "quantiles": "SELECT op, quantile_cont(size_bytes, [0.25, 0.5, 0.75]) FROM events GROUP BY op",
    "checkpoint files": "SELECT count(*), sum(dur_us) FROM events WHERE path LIKE '%/checkpoints/%'",
}


def measure(repetitions: int) -> list[Ratio]:
    """Ours over DuckDB's reader for a cold question; ours over gunzip alone for selective loads."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name) / "traces"
        folder.mkdir()
        _write(folder)
        files = find_trace_files([str(folder)])
        _warm_up(files[0])
        ratios = interleave(
            lambda: {
                "load to a sorted table": _rate(files, lambda: _load(files)),
                "cold question": _rate(files, lambda: _ask_cold(files)),
            },
            lambda: {
                "load to a sorted table": _rate(files, lambda: _load_duckdb(files)),
                "cold question": _rate(files, lambda: _ask_duckdb(files)),
            },
            repetitions=repetitions,
            unit="M lines a CPU second (theirs: DuckDB read_json)",
        )
        ratios += interleave(
            lambda: _selective(files),
            lambda: dict.fromkeys(SELECTIONS, _rate(files, lambda: _gunzip_whole(files))),
            repetitions=repetitions,
            unit="M lines a CPU second (theirs: igzip alone, a file at once)",
        )
        ratios += interleave(
            lambda: {f"{name}, in pieces": rate for name, rate in _selective(files).items()},
            lambda: {f"{name}, in pieces": _rate(files, lambda: _gunzip(files)) for name in SELECTIONS},
            repetitions=repetitions,
            unit="M lines a CPU second (theirs: igzip alone, in our pieces)",
        )
        _print_details(files, Path(name))
    return ratios


def _write(folder: Path) -> None:
    writings = [
        Writing(events=EVENTS_PER_FILE, rank=rank, files=5000, seed=rank) for rank in range(NUM_FILES)
    ]
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_trace, [folder] * NUM_FILES, writings))


def _warm_up(file: Path) -> None:
    """Compile the loops, which is kept for later processes."""
    for where in ("", *SELECTIONS.values()):
        _read([file], EventFilter(where=where))


def _rate(files: list[Path], work: Callable[[], object]) -> float:
    """Millions of lines a CPU second."""
    begin_s = time.process_time()
    work()
    return len(files) * EVENTS_PER_FILE / (time.process_time() - begin_s) / 1e6


def _ask_cold(files: list[Path]) -> object:
    with open_trace_set({"": [str(file) for file in files]}, progress=Silent()) as traces:
        return traces.connection.execute(
            BY_NAME.format("events").replace("sum(dur)", "sum(dur_us)")
        ).fetchall()


def _load(files: list[Path]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        return convert(name_trace_files(files, run=""), Path(folder) / "run.events", progress=Silent())


def _load_duckdb(files: list[Path]) -> object:
    arguments = 'STRUCT(hhash VARCHAR, fhash VARCHAR, ret BIGINT, "count" BIGINT, flags BIGINT, step BIGINT)'
    columns = (
        "{id: 'BIGINT', name: 'VARCHAR', cat: 'VARCHAR', type: 'INT', pid: 'BIGINT', tid: 'BIGINT',"
        f" ts: 'BIGINT', dur: 'BIGINT', ph: 'INT', args: '{arguments}'}}"
    )
    names = [str(file) for file in files]
    source = f"read_json({names}, format = 'newline_delimited', columns = {columns}, compression = 'gzip')"
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
        target = Path(folder) / "events.parquet"
        return connection.execute(f"COPY (SELECT * FROM {source} ORDER BY pid, ts) TO '{target}'").fetchall()


def _ask_duckdb(files: list[Path]) -> object:
    columns = "{name: 'VARCHAR', dur: 'BIGINT', ts: 'BIGINT', pid: 'BIGINT', args: 'JSON'}"
    names = [str(file) for file in files]
    source = f"read_json({names}, format = 'newline_delimited', columns = {columns}, compression = 'gzip')"
    with duckdb.connect() as connection:
        return connection.execute(BY_NAME.format(source)).fetchall()


def _selective(files: list[Path]) -> Mapping[str, float]:
    return {
        name: _rate(files, partial(_read, files, EventFilter(where=SELECTIONS[name]))) for name in SELECTIONS
    }


def _read(files: list[Path], selection: EventFilter) -> int:
    num_rows = 0
    with selection.open() as judge:
        for file in files:
            reading = read_matching_events(TraceFile(path=file), selection, judge)
            num_rows += sum(batch.num_rows for batch in reading.batches)
    return num_rows


def _gunzip(files: list[Path]) -> int:
    return sum(len(piece) for file in files for piece in read_pieces(file, print, lambda _: None))


def _gunzip_whole(files: list[Path]) -> int:
    return sum(len(gunzip(file.read_bytes())) for file in files)


def _print_details(files: list[Path], folder: Path) -> None:
    print(
        f"  reading into batches: {_rate(files, lambda: _read(files, ALL_EVENTS)):.2f} M lines a CPU second"
    )
    target = folder / "run.events"
    convert(name_trace_files(files, run=""), target, progress=Silent())
    packed_bytes = sum(file.stat().st_size for file in files)
    print(f"  the table is {target.stat().st_size / packed_bytes:.2f} of the packed files")
    with open_trace_set({"": [str(target)]}, progress=Silent()) as traces:
        for name, query in QUESTIONS.items():
            begin_s = time.perf_counter()
            begin_cpu_s = time.process_time()
            traces.connection.execute(query).fetchall()
            took_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            rate = len(files) * EVENTS_PER_FILE / cpu_s / 1e6
            print(f"  warm question, {name}: {took_s:.3f} s, {rate:.0f} M lines a CPU second")
    print(f"  memory of a conversion: {_peak_mib(files, folder / 'again.events')} MiB")


_PEAK = """
import sys
from pathlib import Path
from penstock.progress import Silent
from penstock.trace.trace_set import name_trace_files
from penstock.trace.event_table import convert

convert(name_trace_files([Path(name) for name in sys.argv[2:]], run=""), Path(sys.argv[1]), progress=Silent())
# The kernel's count for this program alone; what getrusage tells includes the parent before exec.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) // 1024)
"""


def _peak_mib(files: list[Path], target: Path) -> int:
    command = [sys.executable, "-c", _PEAK, str(target), *map(str, files)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
