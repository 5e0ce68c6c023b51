"""Results as they are found and read: places, runs, warm-ups, clients, descriptions."""

from pathlib import Path

import pytest
from tests.support.submission import tree_changes as do
from tests.support.submission.numbered_tree import RESULT, valid_submission
from tests.support.submission.timed_tree import Round, valid_checkpointing, valid_round, valid_training
from tests.support.submission.tree_store import Tree, TreeStore

from penstock.submission.check import read_tree
from penstock.submission.edition import detect_edition, load_edition
from penstock.submission.find_results import (
    find_result_dirs,
    find_submitters,
    search_tree,
)
from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_files import SubmittedResult
from penstock.workload.mlperf_divisions import SubmissionDivision

TRAINING = "closed/acme/results/fast/training/unet3d"


def read(tree: Tree, store: TreeStore) -> list[SubmittedResult]:
    return list(read_tree(store.write(tree), load_edition(tree.edition)))


def test_the_first_run_of_a_training_is_a_warm_up_and_of_checkpointing_none(store: TreeStore) -> None:
    (training,) = read(valid_training(num_runs=3), store)
    assert [run.is_warm_up for run in training.runs] == [True, False, False]
    assert [run.name for run in training.runs if not run.is_warm_up] == ["20260701_102000", "20260701_104000"]
    (checkpointing,) = read(valid_checkpointing(), store)
    assert [run.is_warm_up for run in checkpointing.runs] == [False, False]
    (alone,) = read(valid_training(num_runs=1), store)
    assert [run.is_warm_up for run in alone.runs] == [False]


def test_phases_are_read_in_their_order(store: TreeStore) -> None:
    (result,) = read(valid_training(num_runs=2), store)
    names = [directory.name.removeprefix(f"{TRAINING}/") for directory in result.all_dirs()]
    assert names == [
        "datasize/20260701_070000",
        "datagen/20260701_080000",
        "run/20260701_100000",
        "run/20260701_102000",
    ]
    assert result.report.file == f"{TRAINING}/run/results.json"
    assert [system.file for system in result.systems] == ["closed/acme/systems/fast.yaml"]
    assert result.systems[0].lines["system_under_test",] >= 1
    assert result.run_dirs()[0].stats == ()
    (checkpointing,) = read(valid_checkpointing(), store)
    assert [len(run_dir.stats) for run_dir in checkpointing.run_dirs()] == [8, 8]


def test_a_run_whose_accelerator_is_unknown_joins_the_others_on_one(store: TreeStore) -> None:
    tree = valid_training(num_runs=3)
    tree.overrides("run", 1).pop(0)
    (result,) = read(tree, store)
    assert len(result.runs) == 3
    tree.overrides("run", 2)[0] = "workload=unet3d_mi355"
    assert [result.name.removeprefix(TRAINING) for result in read(tree, store)] == [
        " (b200)",
        " (unknown)",
        " (mi355)",
    ]


def test_settings_are_what_the_command_line_set(store: TreeStore) -> None:
    tree = valid_training(num_runs=2)
    tree.overrides("run", 0)[1:] = ["+hydra.x=1", "~workload.reader.odirect", "++workload.a.b=c=d"]
    (result,) = read(tree, store)
    settings = result.run_dirs()[0].settings()
    assert settings == {"workload": "unet3d_b200", "hydra.x": "1", "reader.odirect": "", "a.b": "c=d"}


@pytest.mark.parametrize(
    ("overrides", "proof"),
    [
        ({"a": 1}, "this is not a list of overrides"),
        ([1], "this is not a list of overrides"),
        (["++workload.a=1"], r"no override says workload=\.\.\."),
        (["workload=unet3d"], "workload=unet3d names no accelerator"),
    ],
)
def test_overrides_without_a_workload_are_named(overrides: object, proof: str, store: TreeStore) -> None:
    tree = valid_training(num_runs=2)
    do.replace("run", 0, "dlio_config/overrides.yaml", overrides)(tree)
    (result,) = read(tree, store)
    with pytest.raises(MissingFact, match=proof):
        result.run_dirs()[0].workload()


def test_the_accelerator_is_looked_for_in_two_places(store: TreeStore) -> None:
    tree = valid_training(num_runs=2)
    do.forget("accelerator", number=0)(tree)
    do.forget("accelerator", number=1)(tree)
    do.args(number=1, accelerator_type="B200")(tree)
    (result,) = read(tree, store)
    assert [run.accelerator() for run in result.run_dirs()] == ["", "b200"]


def test_two_files_of_metadata_are_none(store: TreeStore) -> None:
    tree = valid_training(num_runs=2)
    do.replace("run", 0, "other_metadata.json", {})(tree)
    (result,) = read(tree, store)
    metadata = result.run_dirs()[0].metadata
    assert metadata.problem == "it has 2 files *_metadata.json, not one"
    assert metadata.file == f"{TRAINING}/run/20260701_100000"


def test_runs_of_v1_are_in_the_order_of_their_numbers_and_may_be_spelt_otherwise(store: TreeStore) -> None:
    tree = valid_submission(num_runs=3)
    names = {"/run1/": "/run_10/", "/run2/": "/Run-2/", "/run3/": "/run3/"}
    for old, new in names.items():
        tree.files = {path.replace(old, new): value for path, value in tree.files.items()}
    (result,) = read(tree, store)
    assert [run.name for run in result.runs] == ["Run-2", "run3", "run_10"]
    assert result.location.stray == ()
    assert result.location.system == "fast"


def test_a_result_of_v1_without_a_system_takes_the_only_description(store: TreeStore) -> None:
    tree = valid_submission()
    tree.files = {path.replace("results/fast/", "results/"): value for path, value in tree.files.items()}
    (checked,) = store.check(tree)
    assert (checked.name, checked.system) == ("closed/acme/results/unet3d", "fast")
    tree.files["systems/slow.json"] = {}
    (checked,) = store.check(tree)
    assert checked.system == ""


def test_of_several_descriptions_of_v1_the_one_of_the_system_is_read(store: TreeStore) -> None:
    tree = valid_submission()
    tree.files["systems/slow.json"] = {}
    (result,) = read(tree, store)
    assert [system.file for system in result.systems] == ["closed/acme/systems/fast.json"]
    tree.drop("systems/fast.json")
    (result,) = read(tree, store)
    assert [system.file for system in result.systems] == ["closed/acme/systems/slow.json"]


def test_a_trailing_comma_is_remarked_on_and_kept_in_texts(store: TreeStore) -> None:
    tree = valid_submission()
    tree.files["systems/fast.json"] = '{"a": ["x,]", 1,],}'
    (result,) = read(tree, store)
    (system,) = result.systems
    assert system.content == {"a": ["x,]", 1]}
    assert system.remark == "a comma stands before a closing bracket"


def test_unknown_entries_beside_runs_are_stray(store: TreeStore) -> None:
    tree = valid_submission()
    tree.files[f"{RESULT}/notes.txt"] = "-"
    (result,) = read(tree, store)
    assert result.location.stray == ("notes.txt",)
    timed = valid_training(num_runs=2)
    timed.files |= {f"{TRAINING}/run/notes.txt": "-", f"{TRAINING}/more/x": "-", f"{TRAINING}/run/.x": "-"}
    (result,) = read(timed, store)
    assert result.location.stray == ("notes.txt", "more")
    assert result.location.phases == ("datagen", "datasize", "more", "run")


def test_submitters_are_named_with_their_folders(store: TreeStore) -> None:
    tree = valid_training(num_runs=2)
    tree.files |= {"open/idle/results/x": "-", "Closed/.hidden/results/y": "-", "closed/acme/Code/z": "-"}
    root = store.write(tree)
    submitters = sorted(find_submitters(root), key=lambda submitter: submitter.organisation)
    assert [(each.organisation, each.division) for each in submitters] == [
        ("acme", SubmissionDivision.CLOSED),
        ("idle", SubmissionDivision.OPEN),
    ]
    assert [each.top for each in submitters] == [root.resolve()] * 2
    assert search_tree(root).without_results == ("open/idle",)
    assert [Path(each).name for each in find_result_dirs(submitters[0])] == [
        "20260701_080000",
        "20260701_070000",
        "20260701_100000",
        "20260701_102000",
    ]
    assert [each.name for each in search_tree(root / "closed" / "acme").results] == [
        "results/fast/training/unet3d"
    ]


def _without(*parts: str) -> Round:
    tree = valid_round("v3.0")
    for part in parts:
        tree.drop(part)
    return tree


MARKS = (
    "code-images/",
    "mlperf-results.yaml",
    "submission.yaml",
    ".mlps-code-image",
    "provenance.json",
    "systems/",
)


@pytest.mark.parametrize("kept", MARKS)
def test_any_mark_of_v3_tells_its_trees(kept: str, store: TreeStore) -> None:
    root = store.write(_without(*(mark for mark in MARKS if mark != kept)))
    assert {detect_edition(submitter) for submitter in find_submitters(root)} == {"v3.0"}


def test_runs_by_time_without_a_mark_are_of_v2(store: TreeStore) -> None:
    (submitter,) = find_submitters(store.write(_without(*MARKS)))
    assert detect_edition(submitter) == "v2.0"
    (submitter,) = find_submitters(store.write(valid_submission()))
    assert detect_edition(submitter) == "v1.0"
