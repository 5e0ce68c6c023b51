"""Trees as people hand them in: odd names, leavings, folders too many or too few."""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.submission.numbered_tree import RESULT, Submission, valid_submission
from tests.support.submission.timed_tree import valid_round
from tests.support.submission.tree_store import TreeStore

from penstock.errors import UsageError
from penstock.submission.check import check, check_lone_descriptions
from penstock.submission.edition import choose_edition, load_edition
from penstock.submission.find_results import require_results, search_tree
from penstock.submission.rules.rule import Validity, Verdict

V1 = load_edition("v1.0")
REPORT = "mlperf_storage_report.json"


def renamed(*pairs: tuple[str, str]) -> Callable[[Submission], None]:
    def change(tree: Submission) -> None:
        for old, new in pairs:
            tree.files = {path.replace(old, new): value for path, value in tree.files.items()}

    return change


def added(**files: str) -> Callable[[Submission], None]:
    return lambda tree: tree.files.update(files)


def with_leavings(tree: Submission) -> None:
    for path in list(tree.files):
        folder, _, name = path.rpartition("/")
        tree.files[f"{folder}/._{name}"] = "\0\5\26\7 not JSON"
        tree.files[f"{folder}/.DS_Store"] = "\0"
        tree.files[f"{folder}/{name}~"] = "an editor's copy"
    tree.files["__MACOSX/systems/._fast.json"] = "\0"


def split_among_clients(tree: Submission) -> None:
    for path in [path for path in tree.files if "/run" in path]:
        run, _, rest = path.removeprefix(f"{RESULT}/").partition("/")
        tree.files[f"{RESULT}/{run}/client-1/{rest}"] = tree.files.pop(path)


ODDITIES: dict[str, Callable[[Submission], object]] = {
    "endings in capitals": renamed((".json", ".JSON"), (".yaml", ".YAML")),
    "leavings of macOS and editors": with_leavings,
    "runs with the workload's name": renamed(*((f"/run{n}/", f"/unet3d_h100_run_{n}/") for n in range(1, 6))),
    "runs with other names": renamed(*((f"/run{n}/", f"/attempt {n}/") for n in range(1, 6))),
    "runs below runs, the report above": renamed((f"{RESULT}/run", f"{RESULT}/runs/run")),
    "the report one level up": renamed((f"{RESULT}/run", f"{RESULT}/h100/run")),
    "the report two levels up": renamed((f"{RESULT}/run", f"{RESULT}/h100/best/run")),
    "other names beside a datagen": lambda tree: [
        renamed(*((f"/run{n}/", f"/attempt {n}/") for n in range(1, 6)))(tree),
        added(**{f"{RESULT}/datagen/summary.json": "{}"})(tree),
    ],
    "the report among runs": renamed(
        (f"{RESULT}/run", f"{RESULT}/runs/run"), (f"{RESULT}/{REPORT}", f"{RESULT}/runs/{REPORT}")
    ),
    "one folder per client": split_among_clients,
    "folders in capitals": renamed(("systems/", "Systems/"), ("results/", "Results/")),
    "a leftover run without a summary": added(**{"results/fast/old/run1/notes.txt": "-"}),
    "an empty system": added(**{"results/slow/unet3d/.keep": ""}),
    "code with test data": added(
        **{
            "results/fast/code/tests/data/run1/summary.json": "{}",
            f"results/fast/code/tests/data/{REPORT}": "{}",
        }
    ),
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_odd_tree_has_its_one_result_and_it_is_valid(oddity: str, store: TreeStore) -> None:
    tree = valid_submission()
    ODDITIES[oddity](tree)
    (judged,) = check(store.write(tree), V1)
    kinds = (Verdict.FAIL, Verdict.NOT_CHECKED)
    assert [finding for finding in judged.findings if finding.verdict in kinds] == []
    assert judged.verdict is Validity.VALID
    assert (judged.system, judged.num_accelerators) == ("fast", 2)
    assert judged.metrics["train_throughput_mean_samples_per_second"] == pytest.approx(41.7)


def test_what_belongs_to_no_result_is_named_once(store: TreeStore) -> None:
    tree = valid_submission()
    for oddity in ("a leftover run without a summary", "an empty system", "code with test data"):
        ODDITIES[oddity](tree)
    tree.files["results/fast/datagen/x/log.txt"] = "-"
    home = "closed/acme/results"
    assert search_tree(store.write(tree)).leftovers == (
        f"{home}/fast/code",
        f"{home}/fast/datagen",
        f"{home}/fast/old",
        f"{home}/slow",
    )


def test_empty_systems_and_models_of_v3_are_leftovers(store: TreeStore) -> None:
    tree = valid_round("v3.0")
    tree.files |= {f"closed/acme/results/{name}/.keep": "" for name in ("idle", "fast/kv_cache/llama3.1-8b")}
    found = search_tree(store.write(tree))
    assert found.leftovers == ("closed/acme/results/fast/kv_cache/llama3.1-8b", "closed/acme/results/idle")
    assert len(found.results) == 2


def test_leavings_in_a_tree_of_v3_change_no_finding(store: TreeStore) -> None:
    tree = valid_round("v3.0")
    for path, value in list(tree.files.items()):
        folder, _, name = path.rpartition("/")
        if name != "main.py" and "code-images" not in path:
            tree.files |= {f"{folder}/._{name}": "\0", f"{folder}/{name}~": value}
    assert [result.verdict for result in store.check(tree)] == [Validity.VALID] * 2


def test_description_that_lacks_a_brace_is_not_checked_and_the_rest_is_judged(store: TreeStore) -> None:
    tree = valid_submission()
    tree.files["systems/fast.json"] = '{\n "nodes": [\n  {"memory": "64 GB"}\n ]\n'
    (judged,) = store.check(tree)
    (finding,) = [finding for finding in judged.findings if finding.verdict is not Verdict.PASS]
    assert (finding.verdict, finding.rule) == (Verdict.NOT_CHECKED, "structure.system")
    assert "line 5 column 1" in finding.proof


def test_description_among_the_results_is_a_warning(store: TreeStore) -> None:
    tree = valid_submission()
    renamed(("systems/", "results/fast/systems/"))(tree)
    (judged,) = store.check(tree)
    (finding,) = [finding for finding in judged.findings if finding.verdict is not Verdict.PASS]
    assert (finding.verdict, finding.rule) == (Verdict.WARNING, "structure.folders")
    assert "its description is closed/acme/results/fast/systems/fast.json" in finding.proof
    assert search_tree(store.write(tree)).leftovers == ()


def test_two_results_below_one_report_are_two(store: TreeStore) -> None:
    tree = valid_submission()
    runs = {path: value for path, value in tree.files.items() if "/run" in path}
    for name in ("a", "b"):
        tree.files |= {path.replace("/unet3d/", f"/unet3d/{name}/"): value for path, value in runs.items()}
    tree.drop(f"{RESULT}/run")
    judged = store.check(tree)
    assert [result.name.rpartition("/")[2] for result in judged] == ["a", "b"]


def test_folder_that_cannot_be_listed_stops_nobody_else(
    store: TreeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, other = valid_submission(), valid_submission()
    other.organisation = "other"
    root = store.write(tree)
    other.write(root)
    listed = os.scandir

    def refuse(folder: Path) -> object:
        if folder.name == "unet3d" and "other" in folder.parts:
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    found = search_tree(root)
    assert [location.name for location in found.results] == [f"closed/acme/{RESULT}"]
    (reason,) = found.unreadable
    assert reason.startswith("closed/other: This folder cannot be listed: Permission denied")


def test_whole_round_of_both_divisions_editions_and_pools_is_judged_in_one_call(
    store: TreeStore, tmp_path: Path
) -> None:
    first, second = valid_submission(), valid_round("v3.0")
    first.organisation, first.division = "Oldest", "open"
    second.organisation = "NewCo"
    pooled = valid_round("v3.0")
    pooled.organisation = "Pool-Co"
    pooled.rename("code-images/", "Pool-Co/")
    second.rename("code-images/", "closed/acme/code-images/")
    for tree in (first, second, pooled):
        tree.write(tmp_path)
    for path in ("closed/Idle/systems/x.yaml", "README.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("system_under_test: {solution: {usable_capacity_tib: 2}}\n")
    judged = {
        (result.organisation, result.division, result.edition, result.verdict)
        for result in check(tmp_path, choose_edition("auto", tmp_path))
    }
    assert judged == {
        ("Oldest", "open", "v1.0", Validity.VALID),
        ("NewCo", "closed", "v3.0", Validity.VALID),
        ("Pool-Co", "closed", "v3.0", Validity.VALID),
    }
    assert search_tree(tmp_path).without_results == ("closed/Idle",)


def test_link_to_a_folder_is_not_entered(store: TreeStore) -> None:
    root = store.write(valid_submission())
    system = root / "closed" / "acme" / "results" / "fast"
    (system / "loop").symlink_to(system)
    found = search_tree(root)
    assert [location.name for location in found.results] == [f"closed/acme/{RESULT}"]
    assert found.leftovers == ("closed/acme/results/fast/loop",)


def test_links_inside_of_runs_are_named(store: TreeStore) -> None:
    root = store.write(valid_submission())
    run = root / "closed" / "acme" / RESULT / "run2"
    (run / "configs" / "loop").symlink_to(run)
    (run / ".itself").symlink_to(run / ".itself")
    (location,) = search_tree(root).results
    assert location.stray == ("the link run2/.itself", "the link run2/configs/loop")


def test_links_inside_of_each_phase_are_named(store: TreeStore) -> None:
    tree = valid_round("v3.0")
    root = store.write(tree)
    leaves = [root / "closed" / "acme" / tree.leaves(phase)[0] for phase in ("datasize", "datagen", "run")]
    leaves = [next(root.rglob(leaf.name)) for leaf in leaves]
    for leaf in leaves:
        (leaf / "elsewhere").symlink_to("/")
    training = next(each for each in search_tree(root).results if each.benchmark.value == "training")
    assert training.stray == tuple(f"the link {leaf.parent.name}/{leaf.name}/elsewhere" for leaf in leaves)


@pytest.mark.parametrize("inside", [RESULT, f"{RESULT}/run2", "results/fast", "results"])
def test_folder_inside_of_results_names_the_folder_to_give(inside: str, store: TreeStore) -> None:
    home = store.write(valid_submission()) / "closed" / "acme"
    with pytest.raises(UsageError, match=f"Give the submitter's folder, {home.resolve()}:"):
        require_results(search_tree(home / inside), home / inside)


def test_descriptions_without_results_are_judged_by_themselves(store: TreeStore) -> None:
    tree = valid_round("v3.0")
    described = copy.deepcopy(tree.files["closed/acme/systems/fast.yaml"])
    del described["system_under_test"]["solution"]["availability"]
    tree.files |= {"closed/idle/systems/slow.yaml": described, "closed/idle/systems/odd.yaml": "a: [1"}
    root = store.write(tree)
    found = search_tree(root)
    alone = check_lone_descriptions(found, load_edition("v3.0"), root)
    assert {name: [finding.verdict for finding in findings] for name, findings in alone.items()} == {
        "closed/idle/systems/odd.yaml": [Verdict.NOT_CHECKED],
        "closed/idle/systems/slow.yaml": [Verdict.FAIL],
    }
    assert "solution.availability: Field required" in alone["closed/idle/systems/slow.yaml"][0].proof
    assert check_lone_descriptions(found, load_edition("v2.0"), root) == {}


def test_pool_of_an_organisation_is_known_by_its_images_alone(store: TreeStore) -> None:
    tree = valid_round("v3.0")
    tree.organisation = "AcmeCo"
    tree.rename("code-images/", "AcmeCo/")
    tree.drop(".mlps-image-pool")
    assert [result.verdict for result in store.check(tree)] == [Validity.VALID] * 2


def test_folder_of_several_rounds_is_judged_in_one_call(tmp_path: Path) -> None:
    valid_submission().write(tmp_path / "v1.0")
    valid_round("v3.0").write(tmp_path / "v3.0")
    judged = list(check(tmp_path, choose_edition("auto", tmp_path)))
    assert [(result.edition, result.verdict) for result in judged] == [
        ("v1.0", Validity.VALID),
        ("v3.0", Validity.VALID),
        ("v3.0", Validity.VALID),
    ]
    assert judged[0].name == f"v1.0/closed/acme/{RESULT}"
