"""`penstock submission init`, `status`, `run`, and runs that are handed in, as a person types them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cluster.facts.host_facts import AbsentHost, ClusterFacts
from penstock.cluster.gates.gate_model import Gate

SMALL = ("--set", "dataset.num_files_train=48")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Penstock = Callable[..., Done]


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str]) -> Penstock:
    """The command line, in this process."""

    def run(*words: str) -> Done:
        capsys.readouterr()
        code = main(list(words))
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def tree(tmp_path: Path, penstock: Penstock) -> str:
    made = penstock("submission", "init", "acme", str(tmp_path / "tree"))
    assert made.returncode == 0, made.stderr
    return str(tmp_path / "tree")


def test_tree_belongs_to_its_first_organisation(tree: str, penstock: Penstock) -> None:
    again = penstock("submission", "init", "acme", tree, "--json")
    assert json.loads(again.stdout) == {
        "schema": "submission-init/1",
        "root": tree,
        "organisation": "acme",
        "is_new": False,
    }
    other = penstock("submission", "init", "umbrella", tree)
    assert other.returncode == 2
    assert "already belongs to" in other.stderr


def test_open_run_becomes_a_result_and_status_shows_it(tree: str, tmp_path: Path, penstock: Penstock) -> None:
    data = str(tmp_path / "data")
    made = penstock("training", "generate", "retinanet_b200", *SMALL, "--data", data)
    assert made.returncode == 0, made.stderr
    # Which gates this machine passes is no matter here.
    skipped = [word for gate in Gate for word in ("--skip-gate", gate.value)]
    place = ("--data", data, "--submission", tree, "--system", "fast", *skipped)
    ran = penstock("training", "run", "retinanet_b200", *SMALL, "--set", "reader.read_threads=2",
                   "--open", *place, "--json")  # fmt: skip
    assert ran.returncode in (0, 1), ran.stderr  # a busy machine may be too slow
    leaf = Path(json.loads(ran.stdout)["results_dir"])
    assert leaf.parent == Path(tree, "open/acme/results/fast/training/retinanet/run")
    (file,) = leaf.glob("*_metadata.json")
    metadata = json.loads(file.read_text())
    assert metadata["verification"] == "OPEN"
    assert metadata["override_parameters"] == {
        "dataset.num_files_train": "48",
        "reader.read_threads": "2",
        "dataset.data_folder": data,
    }
    assert "AU" in (leaf / "training_run.stdout.log").read_text()
    (result,) = json.loads(penstock("submission", "status", tree, "--json").stdout)["results"]
    assert (result["num_runs"], result["num_runs_wanted"]) == (1, 6)
    assert result["lacks"][:3] == ["datasize", "datagen", "5 runs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--system", "fast"), "Add --closed or --open"),
        (("--closed",), "Add --system NAME"),
        (("--closed", "--open", "--system", "fast"), "mutually exclusive"),
        (("--closed", "--system", "a/b"), "'a/b' cannot be a system's name"),
        (("--closed", "--system", "fast", "--results", "runs"), "mutually exclusive"),
        (("--open", "--system", "fast", "--set", "train.epochs=1"), "(rule 3.6.3)"),
    ],
)
def test_run_that_cannot_be_submitted_is_refused_before_it_starts(
    tree: str, tmp_path: Path, penstock: Penstock, words: tuple[str, ...], said: str
) -> None:
    place = ("--data", str(tmp_path / "data"), "--submission", tree)
    refused = penstock("training", "run", "unet3d_b200", *place, *words)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert not (tmp_path / "tree" / "closed").exists()


def test_direct_reading_counts_as_the_divisions_own_key(
    tree: str, tmp_path: Path, penstock: Penstock
) -> None:
    place = ("--data", f"direct://{tmp_path}/data", "--submission", tree, "--system", "fast")
    refused = penstock("training", "run", "retinanet_b200", *place, "--open")
    assert refused.returncode == 2
    assert "reader.odirect is for unet3d alone (rule 3.6.3)" in refused.stderr


def test_submission_run_starts_with_its_gates(tree: str, tmp_path: Path, penstock: Penstock) -> None:
    place = ("--data", str(tmp_path / "data"), "--submission", tree, "--system", "fast", "--closed")
    stopped = penstock("submission", "run", "training", "unet3d_b200", *place)
    assert stopped.returncode == 3
    assert "gate apart: fail" in stopped.stderr
    assert not (tmp_path / "data" / "train").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--accelerator", "h100"), "h100 is not one of b200, mi355 (rule 2.1.11)"),
        (("--accelerator", "b200", "--system", "fa/st"), "cannot be a system's name"),
    ],
)
def test_what_the_edition_does_not_know_is_refused_before_anything_is_made(
    tree: str, tmp_path: Path, penstock: Penstock, words: tuple[str, ...], said: str
) -> None:
    place = ("--data", str(tmp_path / "data"), "--submission", tree, "--system", "fast", "--closed")
    refused = penstock("submission", "run", "training", "unet3d", *place, *words)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert [path.name for path in Path(tree).iterdir()] == ["mlperf-results.yaml"]
    assert not (tmp_path / "data").exists()


def test_data_in_the_tree_is_refused(tree: str, penstock: Penstock) -> None:
    place = ("--data", f"{tree}/data", "--submission", tree, "--system", "fast", "--closed")
    refused = penstock("submission", "run", "training", "unet3d_b200", *place)
    assert refused.returncode == 2
    assert "must be outside of the submission's tree (rule 3.4.1)" in refused.stderr


def test_space_is_asked_for_first_and_a_refusal_leaves_nothing(
    tree: str, tmp_path: Path, penstock: Penstock
) -> None:
    place = ("--data", str(tmp_path / "data"), "--submission", tree, "--system", "fast", "--closed")
    size = ("--set", "dataset.num_files_train=900000000")  # more than any disk has
    stopped = penstock("submission", "run", "training", "unet3d_b200", *size, *place, "--skip-gate", "apart")
    assert stopped.returncode == 3
    assert "gate space: fail" in stopped.stderr
    assert [path.name for path in Path(tree).iterdir()] == ["mlperf-results.yaml"]
    assert not (tmp_path / "data").exists()


def test_gates_name_an_option_of_the_verb(tree: str, tmp_path: Path, penstock: Penstock) -> None:
    place = ("--data", str(tmp_path / "data"), "--submission", tree, "--system", "fast", "--closed")
    stopped = penstock("submission", "run", "training", "unet3d_b200", *place)
    assert "Put --submission on another file system." in stopped.stderr


def test_claimed_tree_without_results_is_told_from_another_folder(
    tree: str, tmp_path: Path, penstock: Penstock
) -> None:
    checked = penstock("submission", "check", tree)
    assert checked.returncode == 3
    assert "There are no results in this tree yet" in checked.stderr
    assert f"penstock submission status {tree}" in checked.stderr
    other = penstock("submission", "check", str(tmp_path))
    assert other.returncode == 2


def test_too_small_data_set_is_refused_with_the_proof(tree: str, tmp_path: Path, penstock: Penstock) -> None:
    place = ("--data", str(tmp_path / "data"), "--submission", tree, "--system", "fast", "--closed")
    refused = penstock("submission", "run", "training", "unet3d_b200", *SMALL, *place)
    assert refused.returncode == 2
    assert "500 steps x 7 samples x 1 accelerator = 3,500 files" in refused.stderr


def test_description_is_written_once_and_then_compared_with_the_machine(
    tree: str, tmp_path: Path, penstock: Penstock
) -> None:
    words = ("submission", "describe", "--submission", tree, "--system", "fast", "--closed", "--json")
    first = penstock(*words)
    assert first.returncode == 1
    told = json.loads(first.stdout)
    path = Path(tree, "closed/acme/systems/fast.yaml")
    assert (told["file"], told["is_new"], told["drift"]) == (str(path), True, [])
    assert {
        key: problem[key]
        for problem in told["problems"]
        if "deployment" in problem["path"]
        for key in ("path", "line")
    } == {"path": "system_under_test.deployment", "line": 21}
    mended = path.read_text().replace("deployment: null", "deployment: onprem")
    path.write_text(mended.replace("quantity: 1", "quantity: 3"))
    again = json.loads(penstock(*words).stdout)
    assert not again["is_new"]
    assert [line for line in again["drift"] if line[1:].strip().startswith("quantity")] == [
        "-    quantity: 3",
        "+    quantity: 1",
    ]
    assert not any("deployment" in problem["path"] for problem in again["problems"])
    assert "quantity: 3" in path.read_text()


def test_a_description_is_printed_with_what_to_fill_in(tree: str, penstock: Penstock) -> None:
    words = ("submission", "describe", "--submission", tree, "--system", "fast", "--closed")
    path = Path(tree, "closed/acme/systems/fast.yaml")
    written = penstock(*words).stdout.splitlines()
    assert written[0] == f"{path}: written"
    count, *problems, picture = written[1:]
    assert count == f"{len(problems)} to fill in or correct:"
    assert "  line 21: system_under_test.deployment: fill in 'onprem' or 'cloud'" in problems
    assert picture == f"A picture of the system is missing: {path.with_suffix('.pdf')}"

    path.with_suffix(".pdf").touch()
    path.write_text(path.read_text().replace("quantity: 1", "quantity: 3"))
    compared = penstock(*words).stdout.splitlines()
    assert compared[:2] == [
        f"{path}: exists",
        "The machines differ from the description, which was not changed:",
    ]
    assert {"  -    quantity: 3", "  +    quantity: 1"} <= set(compared)
    assert count in compared
    assert not any("picture" in line or "matches the machines" in line for line in compared)


def test_a_description_of_part_of_a_cluster_is_refused(tree: str, tmp_path: Path, penstock: Penstock) -> None:
    lost = AbsentHost(host="n2", reason="no answer", exit_code=255, stderr="")
    facts = ClusterFacts(
        via="ssh", collected_at="2026-07-01", asked=("n2",), is_partial=True, present=(), absent=(lost,)
    )
    (tmp_path / "cluster.json").write_text(facts.model_dump_json())
    words = ("submission", "describe", "--submission", tree, "--system", "fast", "--closed")
    refused = penstock(*words, "--cluster", str(tmp_path / "cluster.json"))
    assert refused.returncode == 2
    assert "These facts are partial: n2 did not report" in refused.stderr
    assert not Path(tree, "closed/acme/systems/fast.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--accelerator", "b200"), "1 ranks are not 8 (rule 4.6.1)"),
        (("--accelerator", "b200", "--writes", "3"), "3 writes are not 10 or 0 (rule 4.7.1)"),
        (("--accelerator", "h100"), "h100 is not one of b200, mi355 (rule 4.3.4)"),
    ],
)
def test_forbidden_checkpoints_are_refused_before_any_is_written(
    tree: str, tmp_path: Path, penstock: Penstock, words: tuple[str, ...], said: str
) -> None:
    place = ("--to", str(tmp_path / "saves"), "--submission", tree, "--system", "fast", "--closed")
    for verb in (("checkpoint", "run"), ("submission", "run", "checkpointing")):
        refused = penstock(*verb, "llama3-8b", *place, *words)
        assert refused.returncode == 2
        assert said in refused.stderr
    assert not (tmp_path / "saves").exists()


def test_scaled_checkpoints_cannot_be_submitted(tree: str, tmp_path: Path, penstock: Penstock) -> None:
    place = ("--to", str(tmp_path / "saves"), "--submission", tree, "--system", "fast", "--open")
    refused = penstock("checkpoint", "run", "llama3-8b", *place, "--accelerator", "b200", "--scale", "0.01")
    assert "--scale must be 1: submitted checkpoints are full-size (rule 4.3.4)" in refused.stderr


def test_unknown_phase_is_refused(tree: str, tmp_path: Path, penstock: Penstock) -> None:
    place = ("--data", str(tmp_path / "data"), "--submission", tree, "--system", "fast", "--closed")
    refused = penstock("submission", "run", "training", "unet3d_b200", *place, "--only", "datasize")
    assert refused.returncode == 2
    assert "Choose from: datagen, run" in refused.stderr
