"""What is told of attempts that left no result directory."""

import json
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.errors import OutOfSpace
from penstock.results.provenance import identify_this_process
from penstock.submission.authoring.owned_tree import (
    RecordedAttempt,
    ResultDirAddress,
    RunSeries,
    claim_tree,
    read_attempt,
    reserve_address,
)
from penstock.submission.tree_layout import Benchmark, SubmissionPhase
from penstock.workload.mlperf_divisions import SubmissionDivision

NOW = datetime(2026, 7, 1, 10, 0, 0, 250_000, tzinfo=UTC)


@pytest.fixture
def address(tmp_path: Path) -> ResultDirAddress:
    series = RunSeries(
        tree=claim_tree(tmp_path / "tree", "acme", now=NOW, by="tests"),
        division=SubmissionDivision.CLOSED,
        system="fast",
        benchmark=Benchmark.TRAINING,
        model="unet3d",
    )
    return reserve_address(series, SubmissionPhase.DATAGEN, now=NOW)


def test_start_is_not_rounded_down_to_the_second_of_its_name(address: ResultDirAddress) -> None:
    assert (address.stamp, address.started_at) == ("20260701_100000", NOW)


@pytest.mark.parametrize(
    ("error", "outcome", "why"),
    [
        (OutOfSpace("No room", uri="/data"), "failed", "No room (/data)"),
        (ValueError("odd"), "failed", "ValueError: odd"),
        (KeyboardInterrupt("Stopped by SIGTERM."), "interrupted", "Stopped by SIGTERM."),
        (KeyboardInterrupt(), "interrupted", "Stopped by its user, or because another rank failed."),
    ],
    ids=["error of ours", "error of Python", "signal", "interrupt"],
)
def test_reason_of_a_failed_attempt_is_kept(
    address: ResultDirAddress, error: BaseException, outcome: str, why: str
) -> None:
    with pytest.raises(type(error)), RecordedAttempt(address):
        raise error
    attempt = read_attempt(address.draft)
    assert (attempt.outcome, attempt.why) == (outcome, why)


def test_attempt_that_succeeded_leaves_nothing(address: ResultDirAddress) -> None:
    with RecordedAttempt(address):
        assert read_attempt(address.draft).outcome == "running"
        address.draft.rmdir()
    assert not (address.series.tree.root / ".mlps" / "under-way").exists()


def test_attempt_of_a_killed_process_names_it(address: ResultDirAddress) -> None:
    with RecordedAttempt(address):
        (file,) = address.draft.parent.glob("*.attempt.json")
        document = json.loads(file.read_text())
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        document["process"] = {**asdict(identify_this_process()), "pid": process.pid}
        file.write_text(json.dumps(document))
        attempt = read_attempt(address.draft)
    assert (attempt.outcome, attempt.why) == (
        "interrupted",
        f"Process {process.pid} was killed, or its machine stopped.",
    )


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"outcome": "lost", "why": "", "process": {}}'])
def test_damaged_attempt_file_is_named(address: ResultDirAddress, text: str) -> None:
    address.draft.with_name(f"{address.stamp}.attempt.json").write_text(text)
    attempt = read_attempt(address.draft)
    assert attempt.outcome == "unreadable"
    assert f"{address.stamp}.attempt.json" in attempt.why


def test_draft_without_an_attempt_file_is_interrupted(address: ResultDirAddress) -> None:
    attempt = read_attempt(address.draft)
    assert (attempt.outcome, attempt.why) == ("interrupted", "It left no run.json.")
