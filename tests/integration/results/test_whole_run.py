"""A whole run from its first record to its last file, recorded by real processes."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.errors import ObjectNotFound
from penstock.results.active_run import ActiveRun
from penstock.results.dlio_files import DlioOutputs, write_dlio_files
from penstock.results.event_files import gather_events, read_events, recompute_figures
from penstock.results.phase_figures import PhaseFigures, compute_phase_figures
from penstock.results.provenance import read_host
from penstock.results.run_comparison import summarize_run
from penstock.results.run_record import RunOutcome, RunRequest, read_record
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_settings

RANK = """
import sys, time
from pathlib import Path
from penstock.bench.epoch_order import DrawnTimes
from penstock.bench.recorded_run import StepRecorder, read_clocks
from penstock.bench.training.training_loop import compute_until
from penstock.results.step_events import StepPhase, SpanEvent, SpanKind, StepEvent
from penstock.results.event_files import SpoolWriter, spool_path
from penstock.workload.quantities import Duration

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
times = DrawnTimes(duration=Duration(mean_s=0.004), seed=1, phase=StepPhase.TRAIN, rank=rank)
with StepRecorder(SpoolWriter(spool_path(folder, rank), read_clocks(rank, "n"))) as recorder:
    for epoch in (1, 2):
        begun = time.monotonic_ns()
        for step, compute_ns in enumerate(times.of_epoch(epoch, 5), start=1):
            start = time.monotonic_ns()
            time.sleep(0.001)
            loaded = time.monotonic_ns()
            computed = compute_until(loaded + compute_ns)
            recorder.add_step(
                StepEvent(
                    StepPhase.TRAIN, epoch, 1, step, start, loaded, computed, computed, 7, 100, 7, 900, 5
                )
            )
        for kind in (SpanKind.BLOCK, SpanKind.EPOCH):
            recorder.add_span(SpanEvent(kind, StepPhase.TRAIN, epoch, 1, 5, begun, time.monotonic_ns(), 0))
"""

WORKLOAD = load("unet3d_h100", overrides=parse_settings(["dataset.num_files_train=105"])).workload


def record_ranks(folder: Path, num_ranks: int) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(folder), str(rank)]) for rank in range(num_ranks)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * num_ranks


def close(run: ActiveRun) -> PhaseFigures:
    """What rank 0 does behind the last barrier."""
    gather_events(run.folder, run.record.ranks)
    ranks = read_events(run.folder)
    train = compute_phase_figures(ranks, WORKLOAD)
    assert train is not None
    finished = DlioOutputs(
        workload=WORKLOAD,
        ranks=ranks,
        hosts=[read_host("n")],
        started=datetime.fromisoformat(run.record.started_at),
        ended=datetime.now(UTC),
        train=train,
        evaluation=None,
    )
    write_dlio_files(run.folder, finished)
    run.finish(train=train)
    return train


def request(num_ranks: int) -> RunRequest:
    return RunRequest(workload=WORKLOAD, ranks=num_ranks, hosts=[read_host("n")], command=["x"])


def test_a_run_of_three_processes_leaves_all_its_files_and_the_same_figures_everywhere(
    tmp_path: Path,
) -> None:
    with ActiveRun.start(tmp_path, request(3)) as run:
        record_ranks(run.folder, 3)
        figures = close(run)
    names = {path.name for path in run.folder.iterdir()}
    assert names == {
        "run.json", "steps.parquet", "spans.parquet", "report.html", "summary.json", "dlio.log", ".hydra",
        *(f"{rank}_output.json" for rank in range(3)),
        *(f"{rank}_per_epoch_stats.json" for rank in range(3)),
    }  # fmt: skip
    record = read_record(run.folder)
    assert record.outcome is RunOutcome.FINISHED
    assert record.train is not None
    assert recompute_figures(run.folder, record) == figures
    assert record.train.au_compat_percent == figures.au_compat_percent
    (run.folder / "run.json").unlink()
    assert summarize_run(run.folder).au_compat_percent == figures.au_compat_percent.mean


def test_utilization_follows_from_one_ranks_own_output_file(tmp_path: Path) -> None:
    """DLIO's formula once more, from nothing but the lists and dates that DLIO's readers see."""
    with ActiveRun.start(tmp_path, request(1)) as run:
        record_ranks(run.folder, 1)
        figures = close(run)
    output = json.loads((run.folder / "0_output.json").read_text())
    stats = json.loads((run.folder / "0_per_epoch_stats.json").read_text())
    for epoch in figures.epochs:
        found, block = output[str(epoch.epoch)], stats[str(epoch.epoch)]["block1"]
        compute, proc = found["compute"]["block1"], found["proc"]["block1"]
        assert len(compute) == 5
        assert all(seconds >= 0.004 for seconds in compute)
        elapsed_s = _seconds(block["end"]) - _seconds(block["start"])
        au = 100 * sum(compute[1:]) / (elapsed_s - proc[0])
        assert au == pytest.approx(epoch.au_compat_percent, abs=0.05)  # dates have microseconds
        # Weighted by its steps on the way to an epoch's mean, the same number may differ in its last bit.
        assert found["au"]["block1"] == pytest.approx(epoch.au_compat_percent, rel=1e-14)


def test_a_run_that_misses_a_ranks_events_has_failed_and_says_which(tmp_path: Path) -> None:
    folders = []

    def run_of_three() -> None:
        with ActiveRun.start(tmp_path, request(3)) as run:
            folders.append(run.folder)
            record_ranks(run.folder, 2)
            close(run)

    with pytest.raises(ObjectNotFound, match="first rank 2"):
        run_of_three()
    record = read_record(folders[0])
    assert record.outcome is RunOutcome.FAILED
    assert "first rank 2" in record.why
    assert not (folders[0] / "summary.json").exists()


def _seconds(date: str) -> float:
    minutes, seconds = date.split(":")[1:]
    return int(minutes) * 60 + float(seconds)
