"""Where tools for submissions disagreed with their own rules: each with the verdict that the rules give."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.submission.numbered_tree import BATCH, NUM_FILES, Submission, valid_submission

from penstock.submission.check import CheckedResult, check
from penstock.submission.edition import load_edition
from penstock.submission.finding import Validity, Verdict

EDITION = load_edition("v1.0")


def _more_files_than_needed(submission: Submission) -> None:
    for summary in submission.summaries():
        summary["num_files_train"] = NUM_FILES * 2


def _too_few_for_500_steps(submission: Submission) -> None:
    for summary in submission.summaries():
        summary["num_files_train"] = NUM_FILES - BATCH


def _mixed_memory_within_its_sum(submission: Submission) -> None:
    # Twice the first host's 128 GiB would ask for 9,376 files; the sum of 160 GiB asks for 5,859.
    for summary in submission.summaries():
        summary.update(num_hosts=2, host_memory_GB=[128.0, 32.0])


def _mixed_memory_beyond_its_sum(submission: Submission) -> None:
    # Twice the first host's 32 GiB would ask for 2,343 files; the sum of 224 GiB asks for 8,203.
    for summary in submission.summaries():
        summary.update(num_hosts=2, host_memory_GB=[32.0, 192.0])


def _fields_of_real_runs(submission: Submission) -> None:
    for summary in submission.summaries():
        assert {"train_au_mean_percentage", "train_au_meet_expectation"} <= summary["metric"].keys()


def _capitals(submission: Submission) -> None:
    submission.division = "Closed"
    submission.overrides(1)[0] = "workload=UNET3D_H100"


def _keys_of_runs(submission: Submission) -> None:
    submission.overrides(1).append("++workload.checkpoint.checkpoint_folder=/mnt/ckpt")


def _cosmoflow_at_its_own_minimum(submission: Submission) -> None:
    for run in range(1, 6):
        submission.overrides(run)[0] = "workload=cosmoflow_h100"
        submission.summary(run)["metric"]["train_au_percentage"] = [70.0]


@pytest.mark.parametrize(
    ("change", "rule", "verdict"),
    [
        pytest.param(_more_files_than_needed, "sizing.steps", Verdict.PASS, id="v1.0-D-1"),
        pytest.param(_too_few_for_500_steps, "sizing.steps", Verdict.FAIL, id="v1.0-D-2"),
        pytest.param(_mixed_memory_within_its_sum, "sizing.memory", Verdict.PASS, id="v1.0-D-3-within"),
        pytest.param(_mixed_memory_beyond_its_sum, "sizing.memory", Verdict.FAIL, id="v1.0-D-3-beyond"),
        pytest.param(_fields_of_real_runs, "utilization.stated", Verdict.PASS, id="v1.0-D-5"),
        pytest.param(_cosmoflow_at_its_own_minimum, "utilization.minimum", Verdict.PASS, id="v1.0-D-6"),
        pytest.param(_capitals, "runs.same", Verdict.PASS, id="v1.0-D-17"),
        pytest.param(_capitals, "parameters.allowed", Verdict.PASS, id="v1.0-D-22"),
        pytest.param(_keys_of_runs, "parameters.allowed", Verdict.PASS, id="v1.0-D-31"),
    ],
)
def test_the_rules_decide(
    change: Callable[[Submission], None], rule: str, verdict: Verdict, tmp_path: Path
) -> None:
    submission = valid_submission()
    change(submission)
    found = _judged(submission, tmp_path)
    assert {each.verdict for each in found.findings if each.rule == rule} == {verdict}


@pytest.mark.parametrize(("workload", "limit"), [("unet3d", 90), ("resnet50", 90), ("cosmoflow", 70)])
@pytest.mark.parametrize(("below", "verdict"), [(0.0, Verdict.PASS), (1e-6, Verdict.FAIL)])
def test_each_workload_has_its_own_minimum(
    workload: str, limit: float, below: float, verdict: Verdict, tmp_path: Path
) -> None:
    submission = valid_submission()
    for run in range(1, 6):
        submission.overrides(run)[0] = f"workload={workload}_a100"
        submission.summary(run)["metric"]["train_au_percentage"] = [limit - below]
    found = _judged(submission, tmp_path)
    assert {each.verdict for each in found.findings if each.rule == "utilization.minimum"} == {verdict}


@pytest.mark.parametrize("key", sorted(EDITION.parameters.closed | EDITION.parameters.tool))
def test_every_free_key_is_free_in_closed(key: str, tmp_path: Path) -> None:
    submission = valid_submission()
    submission.overrides(1).append(f"++{key}=1" if key.startswith("hydra") else f"++workload.{key}=1")
    assert _judged(submission, tmp_path).verdict is Validity.VALID


def test_the_lists_of_the_divisions_are_those_of_the_edition() -> None:
    assert len(EDITION.parameters.closed) == 10
    assert EDITION.parameters.open_adds == {
        "framework",
        "dataset.format",
        "dataset.num_samples_per_file",
        "reader.data_loader",
    }
    assert "reader.batch_size" not in EDITION.parameters.closed | EDITION.parameters.open_adds


def _judged(submission: Submission, root: Path) -> CheckedResult:
    (only,) = check(submission.write(root), EDITION)
    return only


def test_each_required_file_and_compared_key_is_of_the_edition() -> None:
    assert set(EDITION.run_files) == {
        "summary.json",
        "per_epoch_stats.json",
        "configs/config.yaml",
        "configs/overrides.yaml",
    }
    assert len(EDITION.parameters.compared) == 13
    assert {"train.epochs", "train.computation_time", "metric.au"} <= set(EDITION.parameters.compared)
    assert EDITION.accelerators == ("a100", "h100")
