"""Ctrl-C between the parts of a measurement: what was measured before is kept, as an interrupted run."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.page_checks import read_banner
from tests.support.run_events import RankScript

from penstock.cli import main
from penstock.results.active_run import ActiveRun
from penstock.results.event_files import SpoolWriter, spool_path
from penstock.results.run_folder import run_folders
from penstock.results.run_record import RunRequest
from penstock.workload.load_workload import load

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


def test_a_checkpoint_run_shows_the_checkpoints_that_are_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--ranks", "2", "--scale", "0.0005", "--writes", "6", "--reads", "2", "--interval", "60s")
    found, _ = interrupt_once_written(
        tmp_path, "checkpoints.json", "checkpoint", "run", "llama3-8b", "--to", str(tmp_path / "to"), *size
    )
    assert [(each["direction"], each["step"]) for each in found["checkpoints"]] == [("write", 1)]
    (folder,) = run_folders(tmp_path / "runs")
    assert main(["results", "ls", str(tmp_path / "runs")]) == 0
    rate = f"{found['write']['gib_per_s']:.2f} GiB/s"
    assert f"written at {rate}" in capsys.readouterr().out
    assert main(["results", "show", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["write"]["checkpoints"] == 1
    # The ranks may have been stopped before the page was written.
    assert main(["results", "page", str(folder)]) == 0
    answers = read_banner(folder / "report.html")
    assert answers["Passed?"] == "interrupted"
    assert f"written with {rate}" in answers["How much"]


def test_ls_names_the_command_that_shows_an_unfinished_training_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["x"])
    with suppress(KeyboardInterrupt), ActiveRun.start(tmp_path, request) as run:
        script = RankScript(0)
        script.epoch()
        for _ in range(6):
            script.step(0.5, 0.5)
        script.end_block()
        events = script.events()
        with SpoolWriter(spool_path(run.folder, 0), events.clock) as spool:
            spool.append(events.steps)
            spool.append(events.spans)
        raise KeyboardInterrupt
    assert main(["results", "ls", str(tmp_path)]) == 0
    assert f"details: `penstock results show {run.folder}`" in capsys.readouterr().out
