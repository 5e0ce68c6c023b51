"""Trees as large as those of published rounds, within the time and the memory that a laptop has."""

import json
import sys
import time
from pathlib import Path

import pytest
from tests.support.measured_process import run_measured
from tests.support.submission.numbered_tree import RESULT, valid_submission
from tests.support.submission.timed_tree import valid_checkpointing

from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.rules.rule import Validity


def rank_files(root: Path, *, num_ranks: int, num_each: int) -> int:
    """Write a checkpointing of so many ranks, each with files of its own; returns the number of files."""
    tree = valid_checkpointing()
    tree.rename_model("llama3-1t")
    for number, leaf in enumerate(tree.leaves("checkpointing")):
        tree.summary("checkpointing", number)["num_accelerators"] = num_ranks
        tree.metadata("checkpointing", number)["num_processes"] = num_ranks
        statistics = tree.files[f"{leaf}/0_per_epoch_stats.json"]
        for rank in range(num_ranks):
            tree.files[f"{leaf}/{rank}_per_epoch_stats.json"] = statistics
            for part in range(num_each - 1):
                tree.files[f"{leaf}/{rank}_output_{part}.json"] = {"hostname": "node1"}
    tree.write(root)
    return len(tree.files)


@pytest.mark.parametrize(("num_ranks", "num_each"), [(64, 2), pytest.param(1024, 6, marks=pytest.mark.slow)])
def test_checkpointing_of_many_ranks_is_checked_in_little_time_and_memory(
    num_ranks: int, num_each: int, tmp_path: Path
) -> None:
    num_files = rank_files(tmp_path / "tree", num_ranks=num_ranks, num_each=num_each)
    assert num_files > 2 * num_ranks * num_each
    command = [sys.executable, "-m", "penstock", "submission", "check", str(tmp_path / "tree"), "--json"]
    used = run_measured(command, tmp_path / "output")
    (result,) = json.loads((tmp_path / "output").read_text())["results"]
    ranks = [f for f in result["findings"] if f["rule"] in ("checkpoint.ranks", "means.checkpoint")]
    assert {finding["verdict"] for finding in ranks} == {"pass"}
    assert used.cpu_s < 30
    assert used.mib < 300


def test_660_runs_are_checked_in_a_second_and_a_half(tmp_path: Path) -> None:
    submission = valid_submission()
    runs = {path: value for path, value in submission.files.items() if path.startswith(RESULT)}
    for number in range(1, 132):
        submission.files |= {path.replace(RESULT, f"{RESULT}_{number}"): v for path, v in runs.items()}
    root = submission.write(tmp_path)
    edition = load_edition("v1.0")
    begin = time.process_time()
    results = list(check(root, edition))
    took_s = time.process_time() - begin
    assert (len(results), sum(len(runs) for runs in map(_runs, results))) == (132, 660)
    assert {result.verdict for result in results} == {Validity.VALID}
    # A loaded machine needs twice the time for the same work.
    assert took_s < 2 * 1.5


def _runs(result: object) -> set[str]:
    findings = getattr(result, "findings", ())
    return {finding.evidence for finding in findings if finding.rule == "rates.maximum"}
