"""Darshan's logs and texts: real ones, against the sums of Darshan's own library."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import Unavailable
from penstock.trace.event_schema import BATCH_SCHEMA, FileAccount, TraceFile
from penstock.trace.reading.darshan import rows_of_log
from penstock.trace.reading.trace_files import LOG_MAGIC
from penstock.trace.trace_set import read_trace_file

FIXTURES = Path(os.environ.get("PENSTOCK_TRACE_FIXTURES", "/nowhere")) / "darshan"
needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason="PENSTOCK_TRACE_FIXTURES is not set")

START_US = 1_727_387_307_000_000


def _read(path: Path) -> tuple[list[dict[str, Any]], FileAccount]:
    reading = read_trace_file(TraceFile(path=path, run="r"))
    rows = pa.Table.from_batches(list(reading.batches), BATCH_SCHEMA).to_pylist()
    account = reading.account
    assert (
        account.lines
        == account.events + account.salvaged + account.metadata + account.blank + account.dropped
    )
    assert len(rows) == account.events + account.salvaged
    return rows, account


@pytest.mark.parametrize(
    ("ending", "tid"),
    [
        ("", 3),
        ("  [12]", 3),
        ("  [ 12] [ 13]", 3),
        ("   N/A", 3),
        ("  [12] [13]   N/A", 3),
        ("   140234567890", 140234567890),
        ("  [12]   4711", 4711),
    ],
)
def test_segment_may_end_in_its_targets_and_its_thread(ending: str, tid: int, tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    line = " X_POSIX       3  write        0               0        4194304      0.0125      0.5000"
    path.write_text(f"# DXT, file_id: 1, file_name: /d/a\n# start_time: 1727387307\n{line}{ending}\n")
    ((row,), account) = _read(path)
    assert account.is_whole
    assert (row["pid"], row["tid"], row["rank"], row["size_bytes"]) == (3, tid, 3, 4194304)
    assert (row["ts_us"], row["dur_us"]) == (START_US + 12_500, 487_500)


def test_text_without_segments_says_so(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_text("# DXT, file_id: 1, file_name: /d/a\n# DXT, rank: 0, hostname: n0\n")
    rows, account = _read(path)
    assert (rows, account.metadata) == ([], 2)
    assert account.faults == ["it has no segments: Darshan traced no reads and no writes"]


@needs_fixtures
def test_text_of_todays_parser_loses_nothing(tmp_path: Path) -> None:
    rows, account = _read(FIXTURES / "unet3d_a100.darshan.txt.gz")
    assert account.is_whole
    assert len(rows) == 1953
    assert sum(row["size_bytes"] for row in rows) == 14_018_796
    simple, account = _read(FIXTURES / "sample-dxt-simple.darshan.txt")
    assert account.is_whole
    assert [(row["cat"], row["size_bytes"]) for row in simple] == [
        ("POSIX", 40),
        ("POSIX", 4000),
        ("MPIIO", 4000),
    ]


@needs_fixtures
def test_log_has_the_segments_of_its_text() -> None:
    pytest.importorskip("darshan")
    read = {}
    for name in ("unet3d_a100.darshan", "unet3d_a100.darshan.txt.gz"):
        rows, _ = _read(FIXTURES / name)
        rows = [row for row in rows if "segment" in row["args"]]
        keys = ("name", "cat", "rank", "host", "path", "size_bytes", "offset", "args")
        read[name] = sorted((tuple(row[key] for key in keys), row["ts_us"], row["dur_us"]) for row in rows)
    log, text = read.values()
    assert [row[0] for row in log] == [row[0] for row in text]
    # The text has the job's start in whole seconds, and times in tenths of milliseconds.
    shift_us = 866_252
    assert max(abs(a[1] - shift_us - b[1]) for a, b in zip(log, text, strict=True)) <= 51
    assert max(abs(a[2] - b[2]) for a, b in zip(log, text, strict=True)) <= 101


def _example_logs() -> list[Path]:
    darshan = pytest.importorskip("darshan")
    return sorted((Path(darshan.__file__).parent / "examples" / "example_logs").glob("*.darshan"))


def test_logs_of_darshans_own_examples_have_the_bytes_that_its_library_tells() -> None:
    logs = [*_example_logs(), *FIXTURES.glob("*.darshan")]
    assert len(logs) >= 5
    for log in logs:
        rows, _ = _read(log)
        expected, times = _library_sums(log)
        told = dict.fromkeys(expected, 0)
        for row in rows:
            if row["name"] in ("read", "write"):
                told[row["cat"], row["name"]] += row["size_bytes"]
        assert told == expected, log.name
        for cat, seconds in _library_seconds(log).items():
            own = [row for row in rows if row["cat"] == cat]
            us = sum(max(0, json.loads(row["args"]).get("time_us", row["dur_us"])) for row in own)
            assert us / 1e6 == pytest.approx(seconds, abs=1e-6 * len(rows)), (log.name, cat)
        for (cat, verb), segments in times.items():
            own = [row for row in rows if (row["cat"], row["name"]) == (cat, verb)]
            assert len(own) == len(segments), log.name
            assert sum(row["dur_us"] for row in own) / 1e6 == pytest.approx(
                sum(segments), abs=len(own) * 1e-6
            )


def _library_sums(log: Path) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], list[float]]]:
    """Bytes of each layer and direction, and durations of single calls, by PyDarshan's report."""
    darshan = importlib.import_module("darshan")
    report = darshan.DarshanReport(str(log), read_all=True)
    sums: dict[tuple[str, str], int] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for module, cat in (("POSIX", "POSIX"), ("STDIO", "STDIO"), ("MPI-IO", "MPIIO")):
        if module in report.records:
            counters = report.records[module].to_df()["counters"]
            sums[cat, "read"] = int(counters[f"{cat}_BYTES_READ"].sum())
            sums[cat, "write"] = int(counters[f"{cat}_BYTES_WRITTEN"].sum())
    for module, cat in (("DXT_POSIX", "POSIX"), ("DXT_MPIIO", "MPIIO")):
        if module in report.modules:
            report.mod_read_all_dxt_records(module)
            for record in report.records[module].to_df():
                for verb in ("read", "write"):
                    segments = record[f"{verb}_segments"]
                    if len(segments):
                        made = times.setdefault((cat, verb), [])
                        made += list(segments["end_time"] - segments["start_time"])
    return sums, times


def _library_seconds(log: Path) -> dict[str, float]:
    """Seconds that each layer counted for reads, for writes with their syncs, and for metadata."""
    report = importlib.import_module("darshan").DarshanReport(str(log), read_all=True)
    return {
        cat: sum(
            float(report.records[module].to_df()["fcounters"][f"{cat}_F_{kind}_TIME"].clip(lower=0).sum())
            for kind in ("READ", "WRITE", "META")
        )
        for module, cat in (("POSIX", "POSIX"), ("STDIO", "STDIO"), ("MPI-IO", "MPIIO"))
        if module in report.records
    }


def test_log_without_extended_tracing_has_sums_and_says_so() -> None:
    (log,) = [log for log in _example_logs() if log.name == "noposix.darshan"]
    rows, account = _read(log)
    assert account.dialect == "darshan log"
    assert account.is_whole
    sums, *shared = account.notes
    assert sums.startswith("4 events are sums of 2,811,539 calls")
    assert sums in "".join(account.losses())
    assert len(shared) == any(row["rank"] is None for row in rows)
    assert {row["name"] for row in rows} == {"read", "write", "metadata"}
    assert all('"is_sum":true' in row["args"] for row in rows)


def test_damaged_log_is_told_and_ends_nothing(tmp_path: Path) -> None:
    (log,) = [log for log in _example_logs() if log.name == "dxt.darshan"]
    content = log.read_bytes()
    for name, damaged in {
        "unknown": b"9.99" + content[4:],
        "cut": content[: len(content) // 2],
        "header": content[:32] + b"\xff" * 16 + content[48:],
    }.items():
        path = tmp_path / f"{name}.darshan"
        path.write_bytes(damaged)
        _, account = _read(path)
        assert account.dialect == "darshan log"
        assert account.faults
    assert "expected version" in "".join(_read(tmp_path / "unknown.darshan")[1].faults)


def test_log_without_the_library_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.darshan"
    path.write_bytes(b"3.41\0\0\0\0" + LOG_MAGIC[0] + bytes(1000))
    monkeypatch.setitem(sys.modules, "darshan", None)
    with pytest.raises(Unavailable, match=r"pip install 'penstock-io\[darshan\]'"):
        _read(path)


_FILLS_MEMORY = """
def log_open(path):
    return {"handle": 1, "whole": bytes(5 << 30)}
"""


def test_log_that_unpacks_to_gigabytes_ends_only_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "darshan" / "backend"
    library.mkdir(parents=True)
    for path in (library.parent / "__init__.py", library / "__init__.py"):
        path.touch()
    (library / "cffi_backend.py").write_text(_FILLS_MEMORY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "job.darshan"
    log.write_bytes(b"3.41\0\0\0\0" + LOG_MAGIC[0])
    rows, account = _read(log)
    assert rows == []
    assert "Darshan's library: MemoryError" in account.faults


@contextmanager
def _parsing(records: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], FileAccount]]:
    account = FileAccount(file="x.darshan")
    job = {"start_us": START_US, "nprocs": 4, "modules": ["POSIX"], "partial": []}
    rows = [dict(row) for row in rows_of_log((job, *records), account)]
    yield rows, account


COUNTERS = {
    "POSIX_READS": 10, "POSIX_BYTES_READ": 4096, "POSIX_F_READ_TIME": 0.5,
    "POSIX_F_READ_START_TIMESTAMP": 1.0, "POSIX_F_READ_END_TIMESTAMP": 3.0,
}  # fmt: skip


@pytest.mark.parametrize(("time", "dur_us"), [(0.5, 500_000), (7.0, 2_000_000)])
def test_sum_lasts_as_long_as_its_calls_but_not_beyond_the_last(time: float, dur_us: int) -> None:
    counters = {**COUNTERS, "POSIX_F_READ_TIME": time}
    with _parsing([{"cat": "POSIX", "path": "/d/a", "rank": -1, "counters": counters}]) as ((row,), account):
        assert (row["ts_us"], row["dur_us"], row["size_bytes"]) == (START_US + 1_000_000, dur_us, 4096)
        assert (row["rank"], row["path"], row["host"]) == (None, "/d/a", None)
        assert f'"calls":10,"time_us":{round(time * 1e6)}' in row["args"]
        assert account.is_whole


def test_negative_time_is_salvaged_as_none() -> None:
    counters = {**COUNTERS, "POSIX_F_READ_TIME": -2662.7}
    with _parsing([{"cat": "POSIX", "path": "/d/a", "rank": 0, "counters": counters}]) as ((row,), account):
        assert row["dur_us"] == 0
        assert account.salvaged_reasons == {"negative time": 1}


def test_log_of_a_job_without_io_says_so() -> None:
    with _parsing([]) as (rows, account):
        assert (rows, account.faults) == (
            [],
            ["it has no I/O: Darshan recorded no file that the job read or wrote"],
        )


def test_calls_that_were_counted_and_not_traced_are_a_sum() -> None:
    segments = {"write": [], "read": [[0, 100, 1.0, 1.3], [100, 100, 2.5, 2.0]]}
    records = [
        {"cat": "POSIX", "path": "/d/a", "rank": 1, "host": "node1", "segments": segments},
        {"cat": "POSIX", "path": "/d/a", "rank": 1, "counters": COUNTERS},
    ]
    with _parsing(records) as ((row, rest), account):
        assert (row["ts_us"], row["dur_us"], row["host"]) == (START_US + 1_000_000, 300_000, "node1")
        assert (rest["name"], rest["size_bytes"], rest["dur_us"]) == ("read", 4096 - 100, 200_000)
        assert json.loads(rest["args"])["calls"] == 9
        assert account.dropped_reasons == {"impossible numbers": 1}
        assert "1 of 10 POSIX reads and writes are in its DXT data, the others only in sums" in account.notes
        assert account.faults == []


def test_time_of_fsync_is_an_event_where_writes_have_their_own() -> None:
    """Darshan adds it to the time of writes."""
    counters = {
        "POSIX_WRITES": 1, "POSIX_BYTES_WRITTEN": 100, "POSIX_FSYNCS": 3, "POSIX_F_WRITE_TIME": 0.75,
        "POSIX_F_WRITE_START_TIMESTAMP": 1.0, "POSIX_F_WRITE_END_TIMESTAMP": 1.25,
        "POSIX_F_CLOSE_END_TIMESTAMP": 2.0,
    }  # fmt: skip
    wrote = {
        "cat": "POSIX",
        "path": "/d/a",
        "rank": 2,
        "host": "n",
        "segments": {"write": [[0, 100, 1.0, 1.25]]},
    }
    summed = {"cat": "POSIX", "path": "/d/a", "rank": 2, "counters": counters}
    with _parsing([wrote, summed]) as ((write, fsync), _):
        assert (write["name"], write["dur_us"]) == ("write", 250_000)
        assert (fsync["name"], fsync["dur_us"], fsync["size_bytes"]) == ("fsync", 500_000, None)
        assert json.loads(fsync["args"])["fsyncs"] == 3
    with _parsing([summed]) as ((both,), _):
        assert (both["name"], both["dur_us"], both["size_bytes"]) == ("write", 750_000, 100)


def test_sums_have_what_was_counted_of_sizes_order_and_alignment() -> None:
    counters = {
        **COUNTERS, "POSIX_SIZE_READ_0_100": 4, "POSIX_SIZE_READ_1G_PLUS": 6, "POSIX_SEQ_READS": 5,
        "POSIX_CONSEC_READS": 3, "POSIX_OPENS": 1, "POSIX_FILE_NOT_ALIGNED": 7, "POSIX_FILE_ALIGNMENT": 4096,
    }  # fmt: skip
    with _parsing([{"cat": "POSIX", "path": "/d/a", "rank": 0, "counters": counters}]) as (rows, _):
        read, metadata = (json.loads(row["args"]) for row in rows)
    assert (read["sequential"], read["consecutive"], read["num_ranks"]) == (5, 3, 4)
    assert read["sizes"] == [4, 0, 0, 0, 0, 0, 0, 0, 0, 6]
    assert (metadata["unaligned"], metadata["alignment_bytes"]) == (7, 4096)


def test_logs_of_processes_without_mpi_are_told_apart_by_their_names() -> None:
    account = FileAccount(file="x.darshan")
    job = {"start_us": START_US, "nprocs": 1, "modules": ["POSIX"], "partial": []}
    summed = {"cat": "POSIX", "path": "/d/a", "rank": 0, "counters": COUNTERS}
    name = "jane_python_id4711-815_11-30-11842-3.darshan"
    (row,) = rows_of_log([job, summed], account, name)
    assert (row["pid"], row["tid"], row["rank"]) == (815, 815, None)
    (row,) = rows_of_log([{**job, "nprocs": 2}, summed], account, name)
    assert (row["pid"], row["tid"], row["rank"]) == (0, 0, 0)


def test_text_of_a_process_without_mpi_has_the_process_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "jane_python_id4711-815_11-30-11842-3.darshan.txt"
    path.write_text("# darshan log version: 3.41\n# nprocs: 1\n X_POSIX 0 read 0 0 10 0.1 0.2\n")
    ((row,), _) = _read(path)
    assert (row["pid"], row["tid"], row["rank"]) == (815, 815, None)


def test_compressed_text_is_read_as_the_text(tmp_path: Path) -> None:
    path = tmp_path / "job.txt.gz"
    path.write_bytes(gzip.compress(b"# DXT, rank: 0, hostname: n1\n X_MPIIO 0 read 0 0 10 0.1 0.2\n"))
    (rows, _) = _read(path)
    assert [(row["cat"], row["host"]) for row in rows] == [("MPIIO", "n1")]
