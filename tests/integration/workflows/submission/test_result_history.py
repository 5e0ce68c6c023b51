"""Runs of a submission in the history of their tree: known by their last names, and no stray to a judge."""

from pathlib import Path

from tests.integration.workflows.submission.small_result import SmallResult

from penstock.results.history import find_run_folder, read_catalog
from penstock.submission.check import check
from penstock.submission.edition import choose_edition


def test_runs_are_entered_in_their_trees_history_and_judges_see_no_stray(tmp_path: Path) -> None:
    small = SmallResult(root=tmp_path / "tree", data=tmp_path / "data")
    small.datagen()
    leaves = list(small.runs(2))
    runs, _ = read_catalog(small.root)
    assert [run.path for run in runs] == leaves[::-1]
    assert {(run.outcome, run.where) for run in runs} == {("finished", "here")}
    assert find_run_folder(runs[0].id, small.root) == leaves[1]
    (judged,) = check(small.root, choose_edition("auto", small.root))
    assert not any(".penstock" in f"{found.proof} {found.evidence}" for found in judged.findings)
