"""`penstock results watch` beside real runs: what they do, what they wait for, and how they end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.run_events import WAITING_STATUS

from penstock.cli.app import main
from penstock.cli.results_watch import SILENT_S, _WatchedRun
from penstock.errors import ObjectNotFound
from penstock.results.active_run import ActiveRun
from penstock.results.run_record import RunRequest
from penstock.results.run_status import Meter, RunStatus, StatusFile, format_metrics, read_status
from penstock.workload.load_workload import load

DOCS = Path(__file__).parents[3] / "docs" / "following.md"
SMALL = (
    "--set", "dataset.num_files_train=28", "--set", "dataset.record_length_bytes=64KiB",
    "--set", "dataset.record_length_bytes_stdev=0", "--set", "train.epochs=1",
    # Between epochs nothing then lies that a watcher could show instead of one.
    "--set", "reader.drop_page_cache=false",
    "--set", "metric.au=0",  # a busy machine may be late
)  # fmt: skip


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *words]


@contextmanager
def started(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*words), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with ExitStack() as undo:
        undo.callback(process.kill)
        yield process
        process.communicate()


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def until(check: Callable[[], Any], *, limit_s: float = 60) -> Any:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if found := check():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{check} was not true in {limit_s} s")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, in whose folder runs are made."""
    folder = tmp_path_factory.mktemp("watched")
    subprocess.run(
        command("training", "generate", "unet3d_h100", *SMALL, "--data", "data"), cwd=folder, check=True
    )
    return folder


def status_in(folder: Path) -> RunStatus | None:
    found = sorted(folder.glob("runs/*/status.json"))
    return read_status(found[0].parent) if found else None


def test_a_run_is_watched_to_its_end_from_another_process(place: Path, tmp_path: Path) -> None:
    long = ("--set", "train.computation_time=0.2", "--set", "train.epochs=8")
    data = ("--data", str(place / "data"), "--results", "runs", "--ranks", "2")
    words = ("training", "run", "unet3d_h100", *SMALL, *long, *data, "--metrics-dir", ".")
    with started(*words, cwd=tmp_path) as run, ExitStack() as watching:
        until(lambda: (seen := status_in(tmp_path)) is not None and seen.totals.get("steps"))
        # The run is there for as long as its watchers take to start.
        with stopped([_pid_of_rank(run.pid, rank) for rank in range(2)]):
            once = subprocess.run(
                command("results", "watch", "--once", "--json"), cwd=tmp_path, check=True, capture_output=True
            )
            now = json.loads(once.stdout)
            assert (now["outcome"], now["kind"], now["ranks"]) == ("running", "training", 2)
            watcher = watching.enter_context(started("results", "watch", now["run"][-6:], cwd=tmp_path))
            assert watcher.stderr is not None
            assert re.search(r"epoch \d+ of 8: \d of 2 steps", watcher.stderr.readline())
        said, _ = watcher.communicate(timeout=60)
        assert run.wait(timeout=60) == 0
    assert watcher.returncode == 0
    assert "Bottleneck" in said
    last = status_in(tmp_path)
    assert last is not None
    assert (last.outcome, last.exit_code, last.totals["samples"]) == ("finished", 0, 8 * 28)
    assert last.totals["read_bytes"] >= 28 * 64 * 1024
    text = (tmp_path / f"penstock-{last.run}.prom").read_text()
    outcomes = next(f for f in text_string_to_metric_families(text) if f.name == "penstock_run_outcome")
    assert {sample.labels["outcome"] for sample in outcomes.samples if sample.value} == {"finished"}


def test_an_absent_rank_is_named_ctrl_c_leaves_the_run_alone_and_a_killed_run_has_died(
    place: Path, tmp_path: Path
) -> None:
    long = (
        "--set",
        "train.computation_time=0.2",
        "--set",
        "train.epochs=500",
        "--set",
        "reader.batch_size=2",
    )
    data = ("--data", str(place / "data"), "--results", "runs", "--ranks", "3")
    with started("training", "run", "unet3d_h100", *SMALL, *long, *data, cwd=tmp_path) as run:
        until(lambda: (seen := status_in(tmp_path)) is not None and seen.totals.get("steps"))
        with stopped([_pid_of_rank(run.pid, 2)]):
            seen = until(lambda: (now := status_in(tmp_path)) is not None and now.absent_ranks and now)
            assert (seen.state, seen.absent_ranks) == ("waiting for ranks", (2,))
            assert seen.state_s >= 5
            assert seen.awaiting.startswith("all ranks to finish step")
        until(lambda: (now := status_in(tmp_path)) is not None and not now.absent_ranks)
        with started("results", "watch", cwd=tmp_path) as watcher:
            assert watcher.stderr is not None
            assert "epoch" in watcher.stderr.readline()
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(timeout=30) == 130
            assert "the run continues" in watcher.stderr.read()
        assert run.poll() is None
        with started("results", "watch", cwd=tmp_path) as watcher:
            assert watcher.stderr is not None
            watcher.stderr.readline()
            os.kill(_pid_of_rank(run.pid, 0), signal.SIGKILL)
            assert watcher.wait(timeout=30) == 1
            assert watcher.stdout is not None
            said = watcher.stdout.read()
    assert "died, training unet3d_h100 on 3 ranks" in said
    assert "Its process is gone." in said


def test_an_interrupted_and_a_failed_run_end_with_their_exit_codes(tmp_path: Path) -> None:
    for error, code in (
        (KeyboardInterrupt(), 130),
        (ObjectNotFound("No such object"), 2),
        (ValueError(), 70),
    ):
        with pytest.raises(type(error)), Meter() as meter, make_run(tmp_path) as run:  # noqa: PT012 - both end
            run.show_in_folder(meter)
            raise error
        assert main(["results", "watch", run.folder.name, "--results", str(tmp_path)]) == code


def _pid_of_rank(launcher: int, rank: int) -> int:
    """The process of a rank is the one of its number that has no child with the same."""
    import psutil

    ranks = [
        process
        for process in psutil.Process(launcher).children(recursive=True)
        if process.environ().get("PMI_RANK") == str(rank)
    ]
    return max(ranks, key=lambda process: len(process.parents())).pid


def test_without_an_active_run_the_command_says_what_to_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    assert main(["results", "watch", "--results", str(tmp_path / "runs")]) == 2
    assert "No run is active" in capsys.readouterr().err


def make_run(parent: Path) -> ActiveRun:
    request = RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["penstock"])
    return ActiveRun.start(parent, request)


def test_a_run_without_a_status_is_shown_by_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_run(tmp_path) as run:
        assert main(["results", "watch", run.folder.name, "--results", str(tmp_path), "--once"]) == 0
        assert "running, training unet3d on 1 rank" in capsys.readouterr().out
        run.finish()
    assert main(["results", "watch", run.folder.name, "--results", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "finished"


def test_a_run_that_falls_silent_where_processes_cannot_be_seen_has_died(tmp_path: Path) -> None:
    now_s = [0.0]
    with make_run(tmp_path) as run:
        status = replace(WAITING_STATUS, host="elsewhere")
        StatusFile(run.folder).show(status)
        watched = _WatchedRun(run.folder, clock=lambda: now_s[0])
        assert watched.look().outcome == "running"
        now_s[0] = SILENT_S - 1
        assert watched.look().outcome == "running"
        now_s[0] = SILENT_S + 1
        assert watched.look().outcome == "died"
        run.finish()


def test_the_docs_list_every_figure_with_its_labels() -> None:
    status = replace(WAITING_STATUS, exit_code=0)
    listed = dict(re.findall(r"^\| `(penstock_run_\w+)` \| (.*?) \|", DOCS.read_text(), re.MULTILINE))
    found = {}
    for family in text_string_to_metric_families(format_metrics(status)):
        for sample in family.samples:
            found[sample.name] = set(sample.labels) - {"run"}
    assert found.keys() == listed.keys()
    for name, labels in found.items():
        assert all(f"`{label}`" in listed[name] for label in labels), name
