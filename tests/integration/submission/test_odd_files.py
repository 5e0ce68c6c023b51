"""What files may hold: garbage is never a crash, and never `invalid` by a defect of ours."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.submission import tree_changes as do
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.timed_tree import Round, valid_checkpointing, valid_round, valid_training

from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.parsed_file import read_description, read_file
from penstock.submission.rules import rule_by_id
from penstock.submission.rules.rule import Verdict
from penstock.submission.system_description import find_schema_problems

EDITION: Final = load_edition("v3.0")
GARBAGE: Final = ("[1, 2", "null", '"text"', "\x00", "[]", "")
ODD: Final[tuple[Any, ...]] = (None, "text", [], {}, -1, 1e300, True, [None], {"a": None}, "1")


def base(name: str) -> Round:
    """A small tree: a training of three runs, or a checkpointing."""
    return valid_checkpointing() if name == "checkpointing" else valid_training(num_runs=3)


def one_of_each(name: str) -> list[str]:
    """The files of the first leaf of each phase, and those above."""
    tree = base(name)
    firsts = [
        tree.leaves(phase)[0]
        for phase in ("datasize", "datagen", "run", "checkpointing")
        if tree.leaves(phase)
    ]
    leaves = {leaf for phase in ("run", "checkpointing") for leaf in tree.leaves(phase)} - set(firsts)
    return [path for path in tree.files if not any(path.startswith(leaf) for leaf in leaves)]


def defects(tree: Round, root: Path) -> list[str]:
    """What rules themselves failed with."""
    return [
        f"{finding.rule}: {finding.proof}"
        for judged in check(tree.write(root), EDITION)
        for finding in judged.findings
        if "the rule itself failed" in finding.proof
    ]


def files(*, num_each: int) -> list[Any]:
    """Every kind of file, with so many kinds of garbage."""
    return [
        pytest.param(name, path, GARBAGE[(number + step) % len(GARBAGE)], id=f"{path}-{step}")
        for name in ("training", "checkpointing")
        for number, path in enumerate(one_of_each(name))
        for step in range(num_each)
    ]


@pytest.mark.parametrize(("name", "path", "garbage"), files(num_each=1))
def test_garbage_in_a_file_is_never_a_crash(name: str, path: str, garbage: str, tmp_path: Path) -> None:
    tree = base(name)
    tree.files[path] = garbage
    assert defects(tree, tmp_path) == []


def test_garbage_in_a_file_of_v1_is_never_a_crash(tmp_path: Path) -> None:
    one_of_each = [path for path in valid_submission().files if "/run" not in path or "/run3/" in path]
    for number, path in enumerate(one_of_each):
        for garbage in ("", "[1, 2", "null", '"text"', "\x00", "[]"):
            submission = valid_submission()
            submission.files[path] = garbage
            root = submission.write(tmp_path / f"{number}-{ord(garbage[:1] or ' ')}-{len(garbage)}")
            (judged,) = check(root, load_edition("v1.0"))
            defects = [each for each in judged.findings if "the rule itself failed" in each.proof]
            assert defects == [], path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path", "garbage"), files(num_each=len(GARBAGE)))
def test_all_garbage_in_a_file_is_never_a_crash(name: str, path: str, garbage: str, tmp_path: Path) -> None:
    test_garbage_in_a_file_is_never_a_crash(name, path, garbage, tmp_path)


def values(tree: object, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all values in a file."""
    if above:
        yield above
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from values(value, (*above, key))


def places() -> list[tuple[str, str, tuple[str | int, ...]]]:
    """Every value of every kind of file."""
    found = []
    for name in ("training", "checkpointing"):
        tree = base(name)
        for path in one_of_each(name):
            if not isinstance(tree.files[path], str):
                found += [(name, path, place) for place in values(tree.files[path])]
    return found


def odd_at(name: str, path: str, place: tuple[str | int, ...], odd: Any) -> Round:
    """A tree with an odd value somewhere."""
    tree = base(name)
    here = tree.files[path] = copy.deepcopy(tree.files[path])
    for step in place[:-1]:
        here = here[step]
    here[place[-1]] = odd
    return tree


def sweep(stride: int, root: Path) -> None:
    """Odd values in every so manieth place."""
    found = {}
    for number, (name, path, place) in enumerate(places()):
        if number % stride == 0:
            tree = odd_at(name, path, place, ODD[number // stride % len(ODD)])
            found[path, place] = defects(tree, root / str(number))
    assert {where: told for where, told in found.items() if told} == {}


def test_odd_values_are_never_a_crash(tmp_path: Path) -> None:
    sweep(41, tmp_path)


@pytest.mark.slow
def test_all_odd_values_are_never_a_crash(tmp_path: Path) -> None:
    sweep(1, tmp_path)


@pytest.mark.parametrize("start", ["", "closed", "closed/acme"])
def test_a_round_a_division_and_a_submitter_are_understood(start: str, tmp_path: Path) -> None:
    root = valid_round().write(tmp_path) / start
    assert {(each.organisation, each.verdict.value) for each in check(root, EDITION)} == {("acme", "valid")}


def test_df_in_a_log_tells_file_systems_apart(tmp_path: Path) -> None:
    header = "Filesystem 1K-blocks Used Available Use% Mounted on\n"
    root, data = "/dev/sda1 100 10 90 10% /\n", "server:/x 100 10 90 10% /mnt/data\n"
    for number, (log, verdict) in enumerate(
        [(header + root + data, Verdict.PASS), (header + root, Verdict.FAIL)]
    ):
        tree = valid_training(num_runs=2)
        tree.drop("fs_separation.json")
        for leaf in range(2):
            do.replace("run", leaf, "training_run.stdout.log", log)(tree)
        judged = check(tree.write(tmp_path / str(number)), EDITION, rules=[rule_by_id("paths.filesystems")])
        assert {finding.verdict for each in judged for finding in each.findings} == {verdict}


def test_objects_have_no_file_system(tmp_path: Path) -> None:
    tree = valid_training(num_runs=2)
    for leaf in range(2):
        do.args("run", leaf, data_dir="s3://bucket/data")(tree)
    judged = check(tree.write(tmp_path), EDITION, rules=[rule_by_id("paths.filesystems")])
    assert {finding.verdict for each in judged for finding in each.findings} == {Verdict.NOT_APPLICABLE}


def test_breaches_of_a_description_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "fast.yaml"
    path.write_text("system_under_test:\n  deployment: basement\n  clients: []\n  solutions: {}\n")
    told = [str(problem) for problem in find_schema_problems(read_description(path, tmp_path))]
    assert told[0].startswith("line 1: system_under_test.solution: Field required")
    assert told[1].startswith("line 2: system_under_test.deployment: ")
    assert told[2].startswith("line 3: system_under_test.clients: ")
    assert told[3] == "line 4: system_under_test.solutions: there is no such key; is solution meant?"


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert read_file(tmp_path / "folder.json", tmp_path).problem == "cannot be read: Is a directory"
    assert read_file(tmp_path / "none.json", tmp_path).problem == "there is no such file"
    (tmp_path / "half.yaml").write_text("a: [1")
    assert read_file(tmp_path / "half.yaml", tmp_path).problem.startswith("cannot be understood: ")
    (tmp_path / "plain.log").write_text("words")
    assert read_file(tmp_path / "plain.log", tmp_path).value() == "words"


RESULTS: Final = "closed/acme/results/fast/training/unet3d/run/results.json"


def _open(tree: Round) -> None:
    tree.division = "open"


def _undeclared(tree: Round) -> None:
    tree.drop("/provenance.json")
    for metadata in tree.documents("run", "_metadata.json"):
        del metadata["provenance_file"]


@pytest.mark.parametrize(
    ("rule", "name", "change"),
    [
        pytest.param("provenance.run", "training", _undeclared, id="provenance.run"),
        pytest.param("provenance.edition", "training", _undeclared, id="provenance.edition"),
        pytest.param("provenance.manifest", "training", do.drop("submission.yaml"), id="provenance.manifest"),
        pytest.param("checkpoint.hosts", "checkpointing", _open, id="checkpoint.hosts"),
        pytest.param("order.left_out", "training", do.drop("/run.json"), id="order.left_out"),
        pytest.param("order.once", "training", do.drop("/run.json"), id="order.once"),
        pytest.param("means.results", "training", do.add(RESULTS, "{}"), id="means.results"),
    ],
)
def test_a_rule_about_something_else_is_not_applicable(
    rule: str, name: str, change: do.Change, tmp_path: Path
) -> None:
    tree = base(name)
    change(tree)
    judged = check(tree.write(tmp_path), EDITION, rules=[rule_by_id(rule)])
    assert {finding.verdict for each in judged for finding in each.findings} == {Verdict.NOT_APPLICABLE}


def test_epochs_that_a_limit_ended_are_not_held_against_all_samples(tmp_path: Path) -> None:
    tree = base("training")
    do.first_epoch(steps=3)(tree)
    judged = check(tree.write(tmp_path), EDITION, rules=[rule_by_id("order.once")])
    found = [finding for each in judged for finding in each.findings]
    assert {finding.verdict for finding in found} == {Verdict.PASS, Verdict.NOT_APPLICABLE}
    assert any("1 epochs ended early" in finding.proof for finding in found)


def test_five_runs_of_v2_are_left_to_the_reviewer_and_all_of_them_count(tmp_path: Path) -> None:
    tree = valid_training("v2.0", num_runs=5)
    (judged,) = check(tree.write(tmp_path), load_edition("v2.0"), rules=[rule_by_id("runs.number")])
    assert [finding.verdict for finding in judged.findings] == [Verdict.WARNING]
    assert judged.metrics["train_throughput_mean_samples_per_second"] == pytest.approx(164.9, rel=1e-12)


def test_v2_takes_unnamed_accelerators_for_its_own(tmp_path: Path) -> None:
    tree = valid_checkpointing("v2.0")
    for number in range(2):
        do.forget("accelerator", "checkpointing", number)(tree)
    (judged,) = check(tree.write(tmp_path), load_edition("v2.0"))
    assert judged.verdict.value == "valid"
