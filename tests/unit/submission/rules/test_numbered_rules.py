"""Rules of v1.0 at their limits: sizes, means, memory, divisions."""

import pytest
from tests.support.submission.numbered_tree import NUM_FILES, Submission, valid_submission
from tests.support.submission.tree_store import TreeStore

from penstock.submission.check import CheckedResult
from penstock.submission.edition import load_edition
from penstock.submission.rules.rule import Finding, Validity, Verdict

EDITION = load_edition("v1.0")


def judged(submission: Submission, store: TreeStore) -> CheckedResult:
    """The one result of a submission."""
    (only,) = store.check(submission)
    return only


def findings_of(rule: str, found: CheckedResult) -> list[Finding]:
    """What one rule found."""
    return [finding for finding in found.findings if finding.rule == rule]


@pytest.fixture(scope="module")
def valid(store: TreeStore) -> CheckedResult:
    """A valid submission, checked once."""
    return judged(valid_submission(), store)


def test_a_valid_tree_is_valid_with_recomputed_figures(valid: CheckedResult) -> None:
    assert valid.verdict is Validity.VALID
    assert (valid.organisation, valid.division, valid.system) == ("acme", "closed", "fast")
    assert (valid.workload, valid.accelerator, valid.num_accelerators) == ("unet3d", "h100", 2)
    assert valid.metrics["train_throughput_mean_samples_per_second"] == pytest.approx(41.7, rel=1e-12)
    assert valid.metrics["train_au_mean_percentage"] == 97.0


@pytest.mark.parametrize(
    ("metric", "verdict"), [([90.0, 90.0], Verdict.PASS), ([89.0, 90.999], Verdict.FAIL)]
)
def test_the_minimum_itself_is_enough(metric: list[float], verdict: Verdict, store: TreeStore) -> None:
    submission = valid_submission()
    submission.summary(2)["metric"]["train_au_percentage"] = metric
    found = findings_of("utilization.minimum", judged(submission, store))
    assert [each.verdict for each in found].count(verdict) >= 1
    assert (verdict is Verdict.FAIL) == any(each.verdict is Verdict.FAIL for each in found)


def test_a_missing_field_is_not_checked_and_named(store: TreeStore) -> None:
    submission = valid_submission()
    metric = submission.summary(3)["metric"]
    metric["train_au_percent"] = metric.pop("train_au_percentage")
    found = judged(submission, store)
    unknown = [each for each in found.findings if each.verdict is Verdict.NOT_CHECKED]
    assert found.verdict is Validity.NOT_CHECKED
    of_utilization = {"utilization.minimum", "utilization.maximum", "rates.utilization"}
    assert {each.rule for each in unknown} == {"means.run"} | of_utilization
    assert all("metric.train_au_percentage (is train_au_percent meant?)" in each.proof for each in unknown)
    assert all(each.evidence.endswith("run3/summary.json") for each in unknown)


def test_memory_that_a_description_limits_is_left_to_the_reviewer(store: TreeStore) -> None:
    submission = valid_submission()
    for summary in submission.summaries():
        summary["host_memory_GB"] = [256.0]
    submission.files["systems/fast.json"] = {"options": ["echo 32G > /sys/fs/cgroup/mlperf/memory.max"]}
    found = judged(submission, store)
    memory = findings_of("sizing.memory", found)
    assert {each.verdict for each in memory} == {Verdict.WARNING}
    assert "5 x 32 GiB" in memory[0].proof
    assert found.verdict is Validity.VALID


def test_this_edition_cuts_a_part_of_a_file_off(store: TreeStore) -> None:
    submission = valid_submission()
    for summary in submission.summaries():
        summary.update(num_files_train=NUM_FILES // 3, num_samples_per_file=3)
    steps = findings_of("sizing.steps", judged(submission, store))
    assert {each.verdict for each in steps} == {Verdict.PASS}
    assert "2,333.3 -> 2,333 files" in steps[0].proof


@pytest.mark.parametrize(
    ("num_files", "verdict"), [(9_376, Verdict.PASS), (9_375, Verdict.PASS), (9_374, Verdict.FAIL)]
)
def test_the_memory_limit_is_exact(num_files: int, verdict: Verdict, store: TreeStore) -> None:
    submission = valid_submission()
    for summary in submission.summaries():
        summary.update(num_files_train=num_files, host_memory_GB=[256.0])  # 9,375.1 files
    memory = findings_of("sizing.memory", judged(submission, store))
    assert {each.verdict for each in memory} == {verdict}


@pytest.mark.parametrize(("share", "verdict"), [(0.9e-9, Verdict.PASS), (1.1e-9, Verdict.FAIL)])
def test_means_may_differ_by_the_tolerance(share: float, verdict: Verdict, store: TreeStore) -> None:
    submission = valid_submission()
    submission.report()["train_throughput_mean_samples_per_second"] *= 1 + share
    means = findings_of("means.report", judged(submission, store))
    assert (verdict is Verdict.FAIL) == any(each.verdict is Verdict.FAIL for each in means)


def test_hosts_of_a_cluster_add_up_and_a_malformed_list_is_not_checked(store: TreeStore) -> None:
    submission = valid_submission()
    for summary in submission.summaries():
        summary.update(num_hosts=2, host_memory_GB=[128.0, 64.0])
    submission.summary(5)["host_memory_GB"] = [128.0, 128.0, 64.0, 64.0]
    memory = findings_of("sizing.memory", judged(submission, store))
    assert [each.verdict for each in memory] == [Verdict.FAIL] * 4 + [Verdict.NOT_CHECKED]
    assert "5 x 192 GiB" in memory[0].proof


def test_absurd_numbers_are_not_checked(store: TreeStore) -> None:
    submission = valid_submission()
    submission.summary(1)["metric"]["train_throughput_samples_per_second"] = [1e308, 1e308]
    submission.summary(2)["metric"]["train_au_percentage"] = [10**400]
    found = judged(submission, store)
    assert found.verdict is not Validity.VALID
    assert "train_throughput_mean_samples_per_second" not in found.metrics


def test_open_lets_more_be_changed(store: TreeStore) -> None:
    submission = valid_submission()
    submission.division = "Open"
    submission.overrides(1).append("++workload.dataset.format=hdf5")
    assert judged(submission, store).verdict is Validity.VALID


@pytest.mark.parametrize(("workload", "limit"), [("unet3d", 90), ("resnet50", 90), ("cosmoflow", 70)])
@pytest.mark.parametrize(("below", "verdict"), [(0.0, Verdict.PASS), (1e-6, Verdict.FAIL)])
def test_each_workload_has_its_own_minimum(
    workload: str, limit: float, below: float, verdict: Verdict, store: TreeStore
) -> None:
    submission = valid_submission()
    for run in range(1, 6):
        submission.overrides(run)[0] = f"workload={workload}_a100"
        submission.summary(run)["metric"]["train_au_percentage"] = [limit - below]
    found = findings_of("utilization.minimum", judged(submission, store))
    assert {each.verdict for each in found} == {verdict}


@pytest.mark.parametrize("key", sorted(EDITION.parameters.closed | EDITION.parameters.tool))
def test_every_free_key_is_free_in_closed(key: str, store: TreeStore) -> None:
    submission = valid_submission()
    submission.overrides(1).append(f"++{key}=1" if key.startswith("hydra") else f"++workload.{key}=1")
    assert judged(submission, store).verdict is Validity.VALID


def test_the_lists_of_the_divisions_are_those_of_the_edition() -> None:
    assert len(EDITION.parameters.closed) == 10
    assert EDITION.parameters.open_adds == {
        "framework",
        "dataset.format",
        "dataset.num_samples_per_file",
        "reader.data_loader",
    }
    assert "reader.batch_size" not in EDITION.parameters.closed | EDITION.parameters.open_adds
