"""Which leaves are loaded, and under which names."""

from typing import Any

import pytest

from penstock.checkpoint.engine import LoadChoice
from penstock.checkpoint.match import LeafSelection, apply_rename, select_leaves
from penstock.errors import UsageError

STORED = ["model.a", "model.b", "opt.a", "rng", "rng@rank1"]


def selected(*names: str, rank: int = 0, **choice: Any) -> LeafSelection:
    return select_leaves(names, STORED, LoadChoice(**choice), rank=rank)


def test_by_default_all_names_are_selected() -> None:
    selection = selected("model.a", "rng")
    assert selection.stored_names == {"model.a": "model.a", "rng": "rng"}
    assert selection.left == ()
    assert selection.unused == ("model.b", "opt.a")


def test_a_rank_selects_its_own_object_and_others_are_not_unused() -> None:
    assert selected("rng", rank=1).stored_names == {"rng": "rng@rank1"}
    assert "rng@rank1" not in selected("rng", rank=0).unused


@pytest.mark.parametrize(
    ("choice", "loaded"),
    [
        ({"only": "model.*"}, {"model.a", "model.b"}),
        ({"only": ["rng", "opt.?"]}, {"opt.a", "rng"}),
        ({"exclude": "model.*"}, {"opt.a", "rng"}),
        ({"only": "model.*", "exclude": ["*.b"]}, {"model.a"}),
    ],
)
def test_patterns_select_and_exclude(choice: dict[str, Any], loaded: set[str]) -> None:
    names = ("model.a", "model.b", "opt.a", "rng")
    selection = selected(*names, **choice)
    assert set(selection.stored_names) == loaded
    assert set(selection.left) == set(names) - loaded


def test_missing_names_are_errors_unless_not_strict() -> None:
    with pytest.raises(
        UsageError, match=r"does not hold 'model.aa' and 1 more.*most similar name is 'model.a'"
    ):
        selected("model.aa", "zzz")
    assert selected("model.aa", "model.a", strict=False).left == ("model.aa",)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("net.w", "model.w"),
        ("net", "net"),
        ("head", "classifier.head"),
        ("deep.er.w", "w"),
        ("other", "other"),
    ],
)
def test_names_are_mapped_exactly_or_by_prefix(name: str, target: str) -> None:
    assert apply_rename(name, {"net.*": "model.*", "head": "classifier.head", "deep.er.*": "*"}) == target
