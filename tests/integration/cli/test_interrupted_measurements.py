"""Ctrl-C between the parts of a measurement: what was measured before is kept, as an interrupted run."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.results.run_folder import run_folders

LIMIT_S = 300.0


def interrupt_once_written(root: Path, name: str, *words: str) -> tuple[dict[str, Any], str]:
    """Interrupt a command once its run's folder has a file of this name; return that file and its output."""
    running = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words, "--results", str(root / "runs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + LIMIT_S
    while not list(root.glob(f"runs/*/{name}")) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    shown, said = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 130, said
    (folder,) = run_folders(root / "runs")
    assert json.loads((folder / "run.json").read_text())["outcome"] == "interrupted"
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found, shown


def test_a_search_for_the_sustained_load_keeps_the_loads_that_it_has_measured(tmp_path: Path) -> None:
    pace = ("--requests", "20", "--users", "2", "--think", "10s", "--speedup", "20", "--objective", "5s")
    found, _ = interrupt_once_written(
        tmp_path, "kvcache.json", "kvcache", "run", "--to", str(tmp_path / "kv"), "--scale", "1/10000", *pace
    )
    assert found["sustained"]["points"][0]["speedup"] == pytest.approx(20)
    assert found["read"]["bytes"] > 0


def test_a_probe_keeps_and_prints_the_parts_that_are_finished(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    size = ("--size", "1MiB", "--streams", "1", "--blocks", "1MiB", "--measure", "best,knee")
    found, shown = interrupt_once_written(
        tmp_path, "probe.json", "storage", "probe", str(tmp_path / "data"), *size, "--json"
    )
    assert found["measurements"]
    printed = json.loads(shown)
    assert printed["measurements"][: len(found["measurements"])] == found["measurements"]
