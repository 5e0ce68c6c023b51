"""Traces of our own runs: every byte that a run counts is in them, under its rank."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock.trace
from penstock.trace.capture.recorder import TraceRecorder, clock_ns
from penstock.trace.capture.traced_storage import OBJECTS, storage_kinds

pytest.importorskip("mpi4py")


def penstock_json(*words: str) -> Any:
    ended = subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def rows(traces: Path, query: str) -> list[tuple[Any, ...]]:
    with penstock.trace.load(str(traces)) as run:
        assert run.losses() == []
        return run.sql(query).fetchall()


def test_a_traced_checkpoint_run_has_the_bytes_of_each_rank(tmp_path: Path) -> None:
    found = penstock_json(
        "checkpoint", "run", "llama3-8b", "--scale", "0.00005", "--interval", "0s", "--chunk", "1MiB",
        "--buffer-memory", "8MiB", "--to", f"direct://{tmp_path}/ckpt", "--results", str(tmp_path / "runs"),
        "--writes", "2", "--reads", "2", "--ranks", "2", "--trace", str(tmp_path / "traces"),
    )  # fmt: skip
    moved = rows(
        tmp_path / "traces",
        "SELECT op, rank, sum(size_bytes) FROM events WHERE op IN ('pread', 'pwrite') AND path IN"
        " (SELECT path FROM events WHERE op = 'pread') GROUP BY op, rank ORDER BY op, rank",
    )
    assert [(op, rank) for op, rank, _ in moved] == [("pread", 0), ("pread", 1), ("pwrite", 0), ("pwrite", 1)]
    assert sum(num_bytes for op, _, num_bytes in moved if op == "pread") == found["read"]["verified_bytes"]
    assert sum(num_bytes for op, _, num_bytes in moved if op == "pwrite") == found["write"]["bytes"]
    paths = rows(tmp_path / "traces", "SELECT DISTINCT path FROM events WHERE op = 'pread'")
    assert all(Path(path).is_file() for (path,) in paths), "events name files where they lie"


@pytest.mark.slow
def test_a_traced_training_run_has_the_bytes_that_its_workers_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    settings = (
        "unet3d_h100", "--set", "dataset.num_files_train=12", "--set", "dataset.record_length_bytes=40KiB",
        "--set", "dataset.record_length_bytes_stdev=4KiB", "--set", "reader.batch_size=3",
        "--set", "metric.au=0",
        "--set", "train.epochs=1", "--set", "train.computation_time=5ms", "--set", "reader.read_threads=1",
        "--data", str(tmp_path / "data"),
    )  # fmt: skip
    penstock_json("training", "generate", *settings)
    found = penstock_json(
        "training", "run", *settings, "--results", str(tmp_path / "runs"), "--loader", "pytorch",
        "--ranks", "2", "--trace", str(tmp_path / "traces"),
    )  # fmt: skip
    # A rank looks at files itself before it trains, and calls stat to do so; its workers read.
    read = rows(
        tmp_path / "traces",
        "SELECT rank, count(DISTINCT pid), sum(size_bytes) FROM events WHERE op = 'pread' AND pid NOT IN"
        " (SELECT pid FROM events WHERE op = 'stat') GROUP BY rank ORDER BY rank",
    )
    assert [rank for rank, _, _ in read] == [0, 1]
    assert sum(num_bytes for _, _, num_bytes in read) == found["read_bytes"]


def test_requests_to_object_services_are_io_as_calls_for_files_are(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path, "0/1")
    recorder.record(storage_kinds(OBJECTS)["read"], clock_ns(), "s3://bucket/a", 0, 1000, 1000)
    recorder.close()
    with penstock.trace.load(tmp_path) as run:
        asked = run.events.filter("cat = 'OBJECT'").project("phase, op, path, size_bytes")
        assert asked.fetchall() == [("io", "pread", "s3://bucket/a", 1000)]
