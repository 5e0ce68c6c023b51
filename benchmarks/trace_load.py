"""Loading traces beside DuckDB's own JSON reader: a cold question, a sorted table, and questions on tables.

2,000,000 events in four files of DFTracer's newest generation. Theirs are the same columns by `read_json`,
and SQL that makes the same table: texts of hashes joined, in order of time, as Parquet. Every measurement is
a fresh process, its start included. Printed besides: each verb on a table of as many events as
PENSTOCK_BENCH_ROWS says (default 10,000,000), in seconds of wall time, of CPU and MiB, beside what DuckDB
takes for the same groups and unions of the same table by window functions.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from tests.support.trace_files import Writing, write_trace

from harness import Ratio, interleave
from penstock.progress import Progress
from penstock.trace.event_schema import BATCH_SCHEMA, TEXT_COLUMNS
from penstock.trace.reading.trace_files import find_trace_files
from penstock.trace.trace_set import GatheredEvents, convert, name_trace_files, write_table

NUM_FILES = 4
EVENTS_PER_FILE = int(os.environ.get("PENSTOCK_BENCH_EVENTS", "2000000")) // NUM_FILES
TABLE_ROWS = int(os.environ.get("PENSTOCK_BENCH_ROWS", "10000000"))
COPIES = 20
QUERY = "SELECT name, count(*), sum({dur}) FROM {events} GROUP BY name ORDER BY name"
_IO, _COMPUTE = "cat IN ('POSIX', 'STDIO')", "name LIKE '%compute%'"
_CLASS = "regexp_replace(parse_filename(path), '[0-9-]+', '', 'g')"
VERBS = {
    "summary": [("1", _IO), ("1", _COMPUTE), ("1", f"{_IO} OR {_COMPUTE}"), ("1", "cat = 'reader'")],
    "ops": [("op", _IO)],
    "files": [("path", "path IS NOT NULL")],
    "classes": [(f"{_CLASS}, op", "path IS NOT NULL")],
    "ranks": [("rank, pid, host", _IO)],
    "overlap": [("pid, host", where) for where in (_IO, _COMPUTE, f"{_IO} OR {_COMPUTE}")],
    "sizes": [],
    "timeline": [("ts_us // 10000000", _IO)],
}
"""The groups and conditions of each verb's unions."""

_THEIR_QUESTION = """
import sys, duckdb
columns = "{name: 'VARCHAR', ph: 'VARCHAR', ts: 'BIGINT', dur: 'BIGINT'}"
source = f"read_json({sys.argv[2:]}, format = 'newline_delimited', ignore_errors = true, columns = {columns})"
print(duckdb.sql(sys.argv[1].format(dur="dur", events=source)).fetchall())
"""

_THEIR_TABLE = """
import sys, duckdb
target, *files = sys.argv[1:]
arguments = (
    'STRUCT(hhash VARCHAR, fhash VARCHAR, ret BIGINT, "offset" BIGINT, epoch INTEGER, step INTEGER,'
    " name VARCHAR, value VARCHAR)"
)
columns = (
    "{name: 'VARCHAR', cat: 'VARCHAR', pid: 'BIGINT', tid: 'BIGINT', ts: 'BIGINT', dur: 'BIGINT', ph: 'INT',"
    f" args: '{arguments}'}}"
)
source = (
    f"read_json({files}, format = 'newline_delimited', ignore_errors = true, filename = true,"
    f" columns = {columns})"
)
duckdb.execute(f'''
    COPY (
        WITH names AS (
            SELECT name AS kind, pid, args.value AS value, any_value(args.name) AS text
            FROM {source} WHERE name IN ('FH', 'HH') GROUP BY ALL
        )
        SELECT ts AS ts_us, dur AS dur_us, ts + dur AS end_us, e.name, cat, e.pid, tid, h.text AS host,
               f.text AS path, args.ret AS size_bytes, args."offset" AS "offset", args.ret AS ret,
               args.epoch AS epoch, args.step AS step, filename AS file
        FROM {source} e
        LEFT JOIN names f ON f.kind = 'FH' AND f.pid = e.pid AND f.value = args.fhash
        LEFT JOIN names h ON h.kind = 'HH' AND h.pid = e.pid AND h.value = args.hhash
        WHERE ph = 1 ORDER BY ts
    ) TO '{target}' (COMPRESSION zstd)''')
"""


_THEIR_ANSWERS = """
import sys, json, duckdb
table, *unions = sys.argv[1:]
for by, where in map(json.loads, unions):
    duckdb.sql(f'''
        SELECT {by}, count(*), sum(dur_us), sum(size_bytes), max(dur_us),
               sum(greatest(0, end_us - greatest(ts_us, coalesce(reach, ts_us))))
        FROM (
            SELECT *, max(end_us) OVER (
                PARTITION BY {by} ORDER BY ts_us ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reach
            FROM read_parquet('{table}') WHERE {where})
        GROUP BY {by}''').fetchall()
if not unions:
    quantiles = ", ".join(f"quantile_cont(size_bytes, {share})" for share in (0.25, 0.5, 0.75, 0.99))
    duckdb.sql(f"SELECT op, count(*), avg(size_bytes), stddev(size_bytes), {quantiles}"
               f" FROM read_parquet('{table}') WHERE size_bytes IS NOT NULL GROUP BY op").fetchall()
"""


def measure(repetitions: int) -> list[Ratio]:
    """Ours over theirs, in events a second of wall time."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        traces = folder / "traces"
        traces.mkdir()
        _write(traces)
        files = [str(path) for path in find_trace_files([str(traces)])]
        table, theirs = str(folder / "run.events"), str(folder / "their.parquet")
        penstock = [sys.executable, "-m", "penstock", "trace"]
        ask = QUERY.format(dur="dur_us", events="events")
        ours_runs = {
            "cold question": [*penstock, "sql", ask, *files, "--json"],
            "load to a sorted table": [*penstock, "load", *files, "--out", table, "--json"],
        }
        their_runs = {
            "cold question": [sys.executable, "-c", _THEIR_QUESTION, QUERY, *files],
            "load to a sorted table": [sys.executable, "-c", _THEIR_TABLE, theirs, *files],
        }
        ratios = interleave(
            lambda: {name: _rate(command) for name, command in ours_runs.items()},
            lambda: {name: _rate(command) for name, command in their_runs.items()},
            repetitions=repetitions,
            unit="M events a second (theirs: DuckDB's read_json)",
        )
        for kind, command in ours_runs.items():
            (_, ours_s, ours_mib), (_, their_s, their_mib) = _run(command), _run(their_runs[kind])
            print(
                f"  {kind}: {ours_s:.2f} CPU s and {ours_mib:.0f} MiB,"
                f" theirs {their_s:.2f} CPU s and {their_mib:.0f} MiB"
            )
        _print_questions(folder)
    return ratios


def _write(folder: Path) -> None:
    writings = [
        Writing(events=EVENTS_PER_FILE, rank=rank, files=5000, seed=rank) for rank in range(NUM_FILES)
    ]
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_trace, [folder] * NUM_FILES, writings))


def _rate(command: list[str]) -> float:
    """Millions of events a second, from the start of the process to its end."""
    return NUM_FILES * EVENTS_PER_FILE / _run(command)[0] / 1e6


def _run(command: list[str]) -> tuple[float, float, float]:
    """Seconds of wall time and of CPU, and the most memory in MiB, of a process of its own."""
    begin_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - begin_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise RuntimeError(f"{' '.join(command[:6])} failed")
    return took_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def _print_questions(folder: Path) -> None:
    """Each verb on a large table, as loads write it: copies of one trace with other processes."""
    rows, large = TABLE_ROWS // COPIES, folder / "large.events"
    # Not in this process: what it has used at most would count as the memory of the processes that it starts.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(_make_table, folder, rows, large).result()
    print(f"  {rows * COPIES:,} events:  ours: s, CPU s, MiB   DuckDB: s, CPU s, MiB")
    for verb, unions in VERBS.items():
        ours = _run([sys.executable, "-m", "penstock", "trace", verb, str(large), "--json"])
        asked = [json.dumps(union) for union in unions]
        theirs = _run([sys.executable, "-c", _THEIR_ANSWERS, str(large), *asked])
        figures = "   ".join(
            f"{took_s:5.2f} {cpu_s:5.2f} {mib:5.0f}" for took_s, cpu_s, mib in (ours, theirs)
        )
        print(f"  {verb:9}  {figures}")


def _make_table(folder: Path, rows: int, large: Path) -> None:
    traces, table = folder / "small", folder / "small.events"
    traces.mkdir()
    write_trace(traces, Writing(events=rows, rank=0, files=5000))
    facts = convert(name_trace_files(find_trace_files([str(traces)]), run=""), table, progress=Progress())
    scratch = folder / "runs"
    scratch.mkdir()
    gathered = GatheredEvents(scratch)
    for copy in range(COPIES):
        with pq.ParquetFile(table, read_dictionary=list(TEXT_COLUMNS)) as source:
            for batch in source.iter_batches(columns=BATCH_SCHEMA.names):
                gathered.add(copy, _of_process(batch.cast(BATCH_SCHEMA), copy))
    with duckdb.connect() as connection:
        write_table(connection, gathered.source(connection), large, facts)


def _of_process(batch: pa.RecordBatch, copy: int) -> pa.RecordBatch:
    """The same events of another process."""
    for name in ("pid", "rank"):
        place = batch.schema.get_field_index(name)
        values = batch.column(place).to_numpy() + copy
        batch = batch.set_column(
            place, batch.schema.field(place), pa.array(values, batch.schema.types[place])
        )
    return batch
