"""Leaves that our own runs leave in a submission's tree."""

import json
from pathlib import Path

import pytest
import yaml
from tests.integration.workflows.submission.small_result import NUM_FILES, SmallResult

from penstock.errors import PenstockError
from penstock.results.run_record import RunOutcome, read_record
from penstock.submission.authoring.run_sequence import read_series_state
from penstock.submission.code_image import POINTER, POOL, image_name, parse_pointer, tree_digest
from penstock.submission.parsed_file import read_file


@pytest.fixture
def small(tmp_path: Path) -> SmallResult:
    return SmallResult(root=tmp_path / "tree", data=tmp_path / "data")


def test_a_run_becomes_a_leaf_with_all_its_files(small: SmallResult) -> None:
    small.datasize()
    small.datagen()
    published_dir = next(small.runs(1))
    assert (
        published_dir.relative_to(small.root)
        .as_posix()
        .startswith("closed/acme/results/fast/training/unet3d/run/2026")
    )
    stamp = published_dir.name
    expected = {
        "training_run.stdout.log", "training_run.stderr.log", "0_output.json", "0_per_epoch_stats.json",
        "summary.json", "dlio.log", "dlio_config", "fs_separation.json", "datagen-manifest.json",
        "provenance.json", f"training_{stamp}_metadata.json", ".mlps-code-image", "run.json",
    }  # fmt: skip
    assert expected <= {path.name for path in published_dir.iterdir()}
    assert {path.name for path in (published_dir / "dlio_config").iterdir()} == {
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    }
    metadata = json.loads((published_dir / f"training_{stamp}_metadata.json").read_text())
    assert metadata["verification"] == "CLOSED"
    assert metadata["parameters"]["dataset"]["num_files_train"] == NUM_FILES
    assert metadata["args"]["data_dir"] == str(small.data)
    assert metadata["result_dir"] == str(published_dir)
    assert metadata["system_info"]["total_memory_bytes"] == 16 * 1024
    assert "workload=unet3d_b200" in yaml.safe_load(
        (published_dir / "dlio_config/overrides.yaml").read_text()
    )
    assert (published_dir / "training_run.stdout.log").read_text() == f"{published_dir}\n"
    assert read_record(published_dir).outcome is RunOutcome.FINISHED


def test_a_leaf_points_to_the_program_that_made_it(small: SmallResult) -> None:
    small.datagen()
    published_dir = next(small.runs(1))
    digest = parse_pointer(read_file(published_dir / POINTER, published_dir))
    assert tree_digest(small.root / POOL / image_name(digest)) == digest
    stamp = json.loads((published_dir / "provenance.json").read_text())
    assert stamp["tool"]["code_image"] == f"md5-tree-v2:{digest}"
    assert None not in stamp.values()


def test_a_series_says_how_far_it_is(small: SmallResult) -> None:
    small.datasize()
    small.datagen()
    leaves = list(small.runs(2))
    state = read_series_state(small.session.series)
    assert [published_dir.folder for published_dir in state.runs] == leaves
    assert [len(state.datasizes), len(state.datagens)] == [1, 1]
    assert state.attempts == ()
    assert state.unreadable == ()


def test_a_run_that_fails_leaves_no_leaf_but_an_attempt_that_says_why(small: SmallResult) -> None:
    small.datagen()
    victim = next((small.data / "train").iterdir())
    victim.write_bytes(victim.read_bytes()[:100])
    with pytest.raises(PenstockError):
        small.run()
    state = read_series_state(small.session.series)
    assert state.runs == ()
    assert [attempt.outcome for attempt in state.attempts] == ["failed"]
    assert not (small.root / "closed/acme/results/fast/training/unet3d/run").exists()


def test_the_next_run_takes_no_name_that_is_taken(small: SmallResult) -> None:
    small.datagen()
    small.clock.step *= 0
    first, second = small.runs(2)
    assert first.name < second.name
