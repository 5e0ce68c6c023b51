"""Whose a results tree is."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.errors import DataDamaged, UsageError
from penstock.submission.authoring.owned_tree import (
    OwnedTree,
    claim_tree,
    require_owned_tree,
    require_plain_name,
)
from penstock.submission.tree_layout import SENTINEL
from penstock.workload.strict_yaml import parse_yaml

NOW = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)


def claim_for(organisation: str, root: Path) -> OwnedTree:
    return claim_tree(root, organisation, now=NOW, by="tests")


def test_a_new_folder_becomes_an_organisations_tree(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "tree"
    assert claim_for("acme", root).is_new
    assert require_owned_tree(root).organisation == "acme"
    assert [path.name for path in root.iterdir()] == [SENTINEL]
    assert parse_yaml((root / SENTINEL).read_text(), source="sentinel") == {
        "mlperf_results_version": 2,
        "orgname": "acme",
        "initialized_at": "2026-07-01T10:00:00Z",
        "initialized_by": "tests",
    }


def test_claiming_again_changes_nothing(tmp_path: Path) -> None:
    claim_for("acme", tmp_path)
    before = (tmp_path / SENTINEL).read_bytes()
    (tmp_path / "closed").mkdir()
    assert not claim_for("acme", tmp_path).is_new
    assert (tmp_path / SENTINEL).read_bytes() == before


@pytest.mark.parametrize("other", ["Acme", "umbrella"])
def test_anothers_tree_is_refused(tmp_path: Path, other: str) -> None:
    claim_for("acme", tmp_path)
    with pytest.raises(
        UsageError, match=r"This submission tree already belongs to 'acme' \(initialized .* case-sensitive\)"
    ):
        claim_for(other, tmp_path)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        claim_for("acme", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä"])
def test_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be an organization's name"):
        claim_for(name, tmp_path)


def test_one_of_two_simultaneous_claims_succeeds(tmp_path: Path) -> None:
    def attempt(organisation: str) -> str:
        try:
            return claim_for(organisation, tmp_path / "tree").organisation
        except UsageError:
            return "refused"

    names = [f"org{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(attempt, names))
    assert outcomes.count("refused") == 7
    assert require_owned_tree(tmp_path / "tree").organisation in outcomes


def test_unclaimed_folder_error_names_the_command_that_claims_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="penstock submission init"):
        require_owned_tree(tmp_path)


@pytest.mark.parametrize("text", ["- a list", "mlperf_results_version: 1\norgname: a\n", "orgname: [", "{}"])
def test_a_damaged_sentinel_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SENTINEL).write_text(text)
    with pytest.raises((DataDamaged, UsageError), match="mlperf-results"):
        require_owned_tree(tmp_path)


def test_a_tree_of_another_layout_is_refused(tmp_path: Path) -> None:
    claim_for("acme", tmp_path)
    text = (tmp_path / SENTINEL).read_text().replace("version: 2", "version: 9")
    (tmp_path / SENTINEL).write_text(text)
    with pytest.raises(DataDamaged, match="layout 9, not 2"):
        require_owned_tree(tmp_path)


def test_a_plain_name_comes_back() -> None:
    assert require_plain_name("fast-1.0_b", what="system's name") == "fast-1.0_b"
    with pytest.raises(UsageError, match=r"'a b' cannot be an organization's name"):
        require_plain_name("a b", what="organization's name")
    with pytest.raises(UsageError, match=r"'\.\.' cannot be a system's name"):
        require_plain_name("..", what="system's name")


def test_rehearsals_and_real_results_are_never_in_one_tree(tmp_path: Path) -> None:
    real, rehearsed = tmp_path / "real", tmp_path / "rehearsed"
    claim_for("acme", real)
    claim_tree(rehearsed, "acme", now=NOW, by="tests", is_rehearsal=True)
    assert require_owned_tree(rehearsed).is_rehearsal
    assert not claim_tree(rehearsed, "acme", now=NOW, by="tests", is_rehearsal=True).is_new
    with pytest.raises(UsageError, match="is a rehearsal's"):
        claim_for("acme", rehearsed)
    with pytest.raises(UsageError, match="must not be mixed with"):
        claim_tree(real, "acme", now=NOW, by="tests", is_rehearsal=True)
