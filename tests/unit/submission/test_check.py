"""The engine, the tree's shapes, and editions."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.submission.numbered_tree import RESULT, valid_submission
from tests.support.submission.timed_tree import valid_round

from penstock.errors import UsageError
from penstock.submission.check import apply_rule, check, exit_code
from penstock.submission.edition import choose_edition, load_edition
from penstock.submission.find_results import search_tree
from penstock.submission.result_files import TreeContext, read_results
from penstock.submission.rules import rule_by_id
from penstock.submission.rules.rule import Case, Finding, Validity, Verdict
from penstock.workload.sizing import MEMORY_MULTIPLE, MIN_STEPS

EDITION = load_edition("v1.0")


def fail_after_nothing(case: Case) -> Iterator[Finding]:
    yield from ()
    raise KeyError(f"{case.edition.edition} {case.name}")


DEFECTIVE = replace(rule_by_id("runs.number"), id="test.defective", judge=fail_after_nothing)


def test_a_defect_of_a_rule_is_not_checked_and_never_invalid(tmp_path: Path) -> None:
    root = valid_submission().write(tmp_path)
    (place,) = search_tree(root).results
    (result,) = read_results(place, TreeContext(name="acme"), root, num_warm_ups=0)
    (finding,) = apply_rule(DEFECTIVE, result, EDITION)
    assert finding.verdict is Verdict.NOT_CHECKED
    assert "KeyError" in finding.proof
    (judged,) = check(root, EDITION, rules=[DEFECTIVE])
    assert judged.verdict is Validity.NOT_CHECKED
    assert exit_code([judged]) == 3


@pytest.mark.parametrize("start", ["", "closed", "closed/acme"])
def test_a_round_a_division_and_a_submitter_are_understood(start: str, tmp_path: Path) -> None:
    root = valid_submission().write(tmp_path) / start
    (judged,) = check(root, EDITION)
    assert (judged.division, judged.organisation) == ("closed", "acme")
    assert judged.verdict is Validity.VALID


def test_runs_below_runs_and_noise_are_understood(tmp_path: Path) -> None:
    submission = valid_submission()
    submission.files = {path.replace("/run", "/runs/run"): value for path, value in submission.files.items()}
    submission.files[f"{RESULT}/runs/.DS_Store"] = "noise"
    submission.files["notes/readme.txt"] = "noise"
    (judged,) = check(submission.write(tmp_path), EDITION)
    assert judged.verdict is Validity.VALID


def test_clients_of_a_run_add_up(tmp_path: Path) -> None:
    submission = valid_submission()
    for path in [path for path in submission.files if "/run" in path]:
        run, _, rest = path.removeprefix(f"{RESULT}/").partition("/")
        value = submission.files.pop(path)
        for client in ("c001", "c002"):
            submission.files[f"{RESULT}/{run}/{client}/{rest}"] = value
    (judged,) = check(submission.write(tmp_path), EDITION)
    assert judged.num_accelerators == 4
    assert judged.metrics["train_throughput_mean_samples_per_second"] == pytest.approx(83.4, rel=1e-12)


def test_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No results found"):
        list(check(tmp_path, EDITION))
    with pytest.raises(UsageError, match="no such folder"):
        list(check(tmp_path / "nowhere", EDITION))


def test_editions_are_known_by_name_and_by_their_trees(tmp_path: Path) -> None:
    assert choose_edition("auto", valid_submission().write(tmp_path / "1")).edition == "v1.0"
    for edition in ("v2.0", "v3.0"):
        assert choose_edition("auto", valid_round(edition).write(tmp_path / edition)).edition == edition
    assert choose_edition("v3.0", tmp_path / "1").edition == "v3.0"
    with pytest.raises(UsageError, match="no edition 'v9'"):
        choose_edition("v9", tmp_path)


def test_each_submitter_of_a_round_is_judged_by_its_own_edition(tmp_path: Path) -> None:
    first, second, third = valid_submission(), valid_round("v2.0"), valid_round("v3.0")
    second.organisation, second.division = "other", "open"
    third.organisation = "third"
    for tree in (first, second, third):
        tree.write(tmp_path)
    choice = choose_edition("auto", tmp_path)
    assert choice.edition == "v1.0, v2.0, v3.0"
    assert len(choice.for_the_reviewer) == len(set(choice.for_the_reviewer)) > 10
    judged = {(result.organisation, result.edition) for result in check(tmp_path, choice)}
    assert judged == {("acme", "v1.0"), ("other", "v2.0"), ("third", "v3.0")}


def test_an_edition_asks_what_a_plan_gives() -> None:
    assert (EDITION.sizing.min_steps, EDITION.sizing.memory_multiple) == (MIN_STEPS, MEMORY_MULTIPLE)
