"""A recorder killed at random moments leaves a prefix of its steps, and a record that readers see through."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.results.event_files import read_spool, spool_path
from penstock.results.run_record import RunOutcome, read_record

RECORDER = """
import sys, time
from pathlib import Path
from penstock.bench.recorded_run import StepRecorder, read_clocks
from penstock.results.step_events import StepEvent
from penstock.results.active_run import ActiveRun
from penstock.results.run_record import RunRequest
from penstock.results.event_files import SpoolWriter, spool_path
from penstock.workload.load_workload import load

request = RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["x"])
run = ActiveRun.start(Path(sys.argv[1]), request)
print(run.folder, flush=True)
spool = SpoolWriter(spool_path(run.folder, 0), read_clocks(0, "n"))
recorder = StepRecorder(spool, capacity=64, on_flush=run.heartbeat)
step = 0
while True:
    step += 1
    now = time.monotonic_ns()
    recorder.add_step(StepEvent(0, 1, 1, step, now, now, now, now, 1, step, 1, 1, 1))
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_recorder_leaves_a_prefix_of_its_steps(tmp_path: Path, seed: int) -> None:
    recorder = subprocess.Popen(
        [sys.executable, "-c", RECORDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert recorder.stdout is not None
        folder = Path(recorder.stdout.readline().strip())
        _await_bytes(spool_path(folder, 0), 20_000)
        time.sleep(random.Random(seed).uniform(0, 0.05))
    finally:
        recorder.send_signal(signal.SIGKILL)
        recorder.wait(timeout=30)
    events = read_spool(spool_path(folder, 0))
    steps = events.steps["step"].tolist()
    assert len(steps) >= 64
    assert steps == list(range(1, len(steps) + 1))
    assert events.steps["read_bytes"].tolist() == steps
    record = read_record(folder)
    assert (record.outcome, record.why) == (RunOutcome.INTERRUPTED, "Its process is gone.")


def _await_bytes(path: Path, size_bytes: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_size >= size_bytes:
            return
        time.sleep(0.005)
    raise AssertionError(f"{path} did not grow")
