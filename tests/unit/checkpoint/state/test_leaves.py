"""Nested states as flat lists of leaves, and back into their places."""

from types import MappingProxyType
from typing import Any

import pytest

from penstock.checkpoint.state.leaves import expand_stateful, flatten_state
from penstock.errors import UsageError


class Tensor:
    """Stands for one: what a tensor is, the caller says."""


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def names_of(state: dict[Any, Any]) -> list[str]:
    return [leaf.name for leaf in flatten_state(state, is_tensor)]


def test_names_are_the_keys_joined_by_dots() -> None:
    state = {
        "a": {"b": 1, 2: Tensor()},
        "list": [Tensor(), {"c": 3}, [Tensor()]],
        "plain": [1, 2],
        "t": (Tensor(),),
    }
    assert names_of(state) == ["a.b", "a.2", "list.0", "list.1.c", "list.2.0", "plain", "t"]


def test_paths_distinguish_list_indices_from_keys() -> None:
    leaves = flatten_state({"a": [{"1": 0}], 7: {"x": 1}}, is_tensor)
    assert [leaf.path for leaf in leaves] == [("a", 0, "1"), ("7", "x")]


def test_a_leaf_is_put_back_under_its_own_key() -> None:
    state: dict[Any, Any] = {"opt": {0: {"lr": 0.1}}, "list": [Tensor(), 5]}
    for leaf in flatten_state(state, is_tensor):
        leaf.put(f"new {leaf.name}")
    assert state == {"opt": {0: {"lr": "new opt.0.lr"}}, "list": ["new list.0", "new list.1"]}


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"Two parts of the state have the name 'a\.b'"):
        names_of({"a": {"b": 1}, "a.b": 2})


def test_a_leaf_in_an_immutable_mapping_is_an_error() -> None:
    (leaf,) = flatten_state({"fixed": MappingProxyType({"x": 1})}, is_tensor)
    with pytest.raises(UsageError, match=r"'fixed\.x' is in a mappingproxy, which cannot be changed"):
        leaf.put(2)


class Part:
    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def test_stateful_parts_save_their_own_state() -> None:
    assert expand_stateful({"part": Part(), "step": 1}) == {"part": {"x": 1}, "step": 1}
