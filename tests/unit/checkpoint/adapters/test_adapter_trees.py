from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from penstock.checkpoint.adapters.tree import TREE_NAME, join, load_tree, save_tree, split
from penstock.checkpoint.saver import Saver
from penstock.errors import UsageError

_KEYS = some.one_of(some.text("ab.1", max_size=3), some.integers(0, 3))
_TENSORS = some.sampled_from(
    [torch.arange(6.0).reshape(2, 3), torch.tensor(3), torch.zeros(0, 2), torch.ones(2, dtype=torch.bfloat16)]
)
_LEAVES = some.one_of(_TENSORS, some.none(), some.booleans(), some.integers(), some.text(max_size=3))
_TREES = some.recursive(
    _LEAVES,
    lambda inner: some.one_of(
        some.lists(inner, max_size=3),
        some.lists(inner, max_size=3).map(tuple),
        some.dictionaries(_KEYS, inner, max_size=3),
        some.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(_TREES)
def test_a_split_state_joins_to_the_same_state(state: Any) -> None:
    tree, tensors, paths = split(state)
    assert TREE_NAME not in tensors
    assert same(join(tree, tensors, paths), state)


def test_splitting_leaves_the_state_unchanged() -> None:
    weights = torch.ones(2)
    state = {"a": [weights, {"b": (weights, 1)}]}
    split(state)
    assert state["a"][0] is weights
    assert state["a"][1] == {"b": (weights, 1)}


@given(_TREES)
@settings(max_examples=6)
def test_a_saved_tree_loads_unchanged(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("trees") / "one"
    save_tree({"state": state}, path, Saver())
    assert same(load_tree(path), {"state": state})


def test_metadata_of_a_module_state_is_restored(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    save_tree({"model": state}, tmp_path / "one", Saver())
    loaded = load_tree(tmp_path / "one")["model"]
    assert loaded._metadata == state._metadata  # type: ignore[attr-defined]


def test_objects_other_than_plain_data_need_trust(tmp_path: Path) -> None:
    save_tree({"where": Path("/data"), "weights": torch.ones(1)}, tmp_path / "one", Saver())
    with pytest.raises(UsageError, match="trust=True"):
        load_tree(tmp_path / "one")
    assert load_tree(tmp_path / "one", trust=True)["where"] == Path("/data")


def test_a_checkpoint_without_a_tree_is_refused(tmp_path: Path) -> None:
    import penstock.checkpoint as pc

    pc.save({"weights": torch.ones(1)}, tmp_path / "one")
    with pytest.raises(UsageError, match="without the structure of its state"):
        load_tree(tmp_path / "one")
