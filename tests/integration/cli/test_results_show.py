"""`penstock results` as people use it: ls, show, compare, on whole, half and foreign folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command_line import CommandResult, run_command
from tests.support.run_events import RankScript

from penstock.results.active_run import ActiveRun
from penstock.results.phase_figures import compute_phase_figures
from penstock.results.provenance import read_host
from penstock.results.run_record import RunRequest
from penstock.workload.load_workload import load
from penstock.workload.overrides import parse_settings

PUBLISHED = Path(os.environ.get("PENSTOCK_MLPERF_RESULTS", "/nowhere"))


def penstock(*words: str) -> CommandResult:
    return run_command("results", *words, COLUMNS="80")


def finished_run(parent: Path, *settings: str, wait: float = 0.5) -> str:
    workload = load("unet3d_h100", overrides=parse_settings(settings)).workload
    script = RankScript()
    script.epoch()
    for _ in range(4):
        script.step(wait, 0.5, 0.01, samples=7, read_bytes=7 * 146600628, read=wait, decode=0.01)
    script.end_block()
    script.end_epoch()
    request = RunRequest(
        workload=workload, ranks=1, hosts=[read_host("n")], command=["x"], remarks=["A remark."]
    )
    with ActiveRun.start(parent, request) as run:
        run.finish(train=compute_phase_figures([script.events()], workload))
    return run.folder.name


KILLED_RUN = """
import sys, time
from pathlib import Path
from penstock.bench.step_recorder import StepRecorder, read_clocks
from penstock.results.step_events import StepPhase, SpanEvent, SpanKind, StepEvent
from penstock.results.active_run import ActiveRun
from penstock.results.run_record import RunRequest
from penstock.results.event_files import SpoolWriter, spool_path
from penstock.workload.load_workload import load

workload = load("unet3d_h100").workload
run = ActiveRun.start(Path(sys.argv[1]), RunRequest(workload=workload, ranks=1, hosts=[], command=["x"]))
with StepRecorder(SpoolWriter(spool_path(run.folder, 0), read_clocks(0, "n"))) as recorder:
    for number in (1, 2, 3):
        now = time.monotonic_ns()
        recorder.add_step(StepEvent(0, 1, 1, number, now, now + 100, now + 400, now + 410, 7, 99, 7, 90, 5))
    recorder.add_span(SpanEvent(SpanKind.BLOCK, StepPhase.TRAIN, 1, 1, 3, now - 1000, now + 500, 0))
    print(run.folder.name, flush=True)
    time.sleep(120)
"""


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path), finished_run(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    result = penstock("ls", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.index(second) < result.stdout.index(first)
    assert "AU 49.34 % (strict 50.00 %)" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 90
    assert "broken" in result.stderr
    document = json.loads(penstock("ls", str(tmp_path), "--json").stdout)
    assert [run["id"] for run in document["runs"]] == [second, first]
    assert document["runs"][0]["bottleneck"] == "storage"
    assert len(document["unreadable"]) == 1


def test_empty_directory_lists_no_runs_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    result = penstock("ls", str(tmp_path))
    assert (result.returncode, result.stdout.strip()) == (0, f"No runs in {tmp_path}")
    result = penstock("ls", str(tmp_path / "absent"))
    assert result.returncode == 1
    assert "Listing the runs" in result.stderr
    assert "Traceback" not in result.stderr


def test_one_run_is_shown_with_epochs_times_and_verdict(tmp_path: Path) -> None:
    name = finished_run(tmp_path)
    result = penstock("show", name, "--results", str(tmp_path))
    assert result.returncode == 0, result.stderr
    for said in ("finished", "Epochs", "Times over all ranks", "Bottleneck: storage", "slowest rank"):
        assert said in result.stdout
    assert "A remark." in result.stderr
    document = json.loads(penstock("show", str(tmp_path / name), "--json").stdout)
    assert document["train"]["times"]["over_ranks"]["wait"]["p50_s"] == pytest.approx(0.5)
    assert document["settings"]["dataset.format"] == "npz"


def test_killed_run_is_interrupted_and_shows_its_complete_blocks(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        name = running.stdout.readline().strip()
        before = json.loads(penstock("show", name, "--results", str(tmp_path), "--json").stdout)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait(timeout=30)
    assert before["outcome"] == "running"
    after = json.loads(penstock("show", name, "--results", str(tmp_path), "--json").stdout)
    assert (after["outcome"], after["why"]) == ("interrupted", "Its process is gone.")
    assert after["train"]["au_strict_percent"]["mean"] == pytest.approx(75.0)
    assert after["train"]["read_bytes"] == 3 * 99


def test_a_run_without_events_is_shown_without_figures(tmp_path: Path) -> None:
    request = RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["x"])
    with ActiveRun.start(tmp_path, request) as run:
        pass
    result = penstock("show", str(run.folder))
    assert result.returncode == 0
    assert "It ended without figures." in result.stdout
    assert "no step events" in result.stderr
    assert json.loads(penstock("show", str(run.folder), "--json").stdout)["train"] is None


def test_runs_of_the_same_request_are_compared(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path), finished_run(tmp_path, "reader.read_threads=16", wait=0.25)
    result = penstock("compare", first, second, "--results", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "Not comparable" not in result.stdout
    assert "reader.read_threads" in result.stdout
    assert "(+33.3%)" in result.stdout
    document = json.loads(penstock("compare", first, second, "--results", str(tmp_path), "--json").stdout)
    assert document["is_comparable"] is True
    assert [each["key"] for each in document["varied"]] == ["reader.read_threads"]


def test_reasons_against_a_comparison_come_first(tmp_path: Path) -> None:
    first, second = finished_run(tmp_path), finished_run(tmp_path, "reader.batch_size=9")
    result = penstock("compare", first, second, "--results", str(tmp_path))
    assert result.returncode == 0, result.stderr
    said = result.stdout
    assert said.index("Not comparable") < said.index("reader.batch_size") < said.index("au_compat_percent")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "nothing"), 1, "Listing the runs"),
        (("compare", "one"), 2, "at least two"),
        (("show", "nothing", "--results", "/tmp"), 2, "No run is called 'nothing'"),
    ],
)
def test_missing_run_is_an_error(words: tuple[str, ...], code: int, said: str) -> None:
    result = penstock(*words)
    assert result.returncode == code
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", ["ls", "show", "compare", "rm", "restore", "rerun"])
def test_every_verb_shows_examples_and_offers_json(verb: str) -> None:
    result = penstock(verb, "--help")
    assert "Examples:" in result.stdout
    assert "--json" in result.stdout


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="PENSTOCK_MLPERF_RESULTS names no published results")
def test_published_runs_of_dlio_are_listed_shown_and_compared() -> None:
    folders = sorted({path.parent.parent for path in PUBLISHED.rglob("summary.json")})
    for folder in folders:
        document = json.loads(penstock("ls", str(folder), "--json").stdout)
        assert len(document["runs"]) == 5
        assert document["unreadable"] == []
    result = penstock("compare", *(str(path) for path in sorted(folders[0].glob("run*"))))
    assert result.returncode == 0, result.stderr
    assert "Not comparable" not in result.stdout
