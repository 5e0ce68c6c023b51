"""Nested states as flat lists of leaves, and back into their places."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import pytest

from penstock.checkpoint.state.walk import Leaf, Owner, walk
from penstock.errors import UsageError


class Tensor:
    """A stand-in: the caller decides what a tensor is."""


class Colour(Enum):
    RED = 1


class Part:
    """An object with a state of its own, as a data loader."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def leaves_of(state: Mapping[Any, Any], owner: Owner = Owner.FIXED) -> list[Leaf]:
    return walk(state, lambda value: isinstance(value, Tensor), lambda _: owner)[0]


def key_types_of(state: Mapping[Any, Any], owner: Owner = Owner.PLAIN) -> dict[str, str]:
    return walk(state, lambda value: isinstance(value, Tensor), lambda _: owner)[1]


def test_names_are_the_keys_joined_by_dots() -> None:
    state = {
        "a": {"b": 1, 2: Tensor()},
        "list": [Tensor(), {"c": 3}, [Tensor()]],
        "plain": [1, 2],
        "t": (Tensor(),),
    }
    names = [leaf.name for leaf in leaves_of(state)]
    assert names == ["a.b", "a.2", "list.0", "list.1.c", "list.2.0", "plain", "t"]


def test_paths_distinguish_list_indices_from_keys() -> None:
    leaves = leaves_of({"a": [{"1": 0}], 7: {"x": 1}})
    assert [leaf.path for leaf in leaves] == [("a", 0, "1"), ("7", "x")]


def test_a_leaf_is_put_back_under_its_own_key() -> None:
    state: dict[Any, Any] = {"opt": {0: {"lr": 0.1}}, "list": [Tensor(), 5]}
    for leaf in leaves_of(state):
        leaf.put(f"new {leaf.name}")
    assert state == {"opt": {0: {"lr": "new opt.0.lr"}}, "list": ["new list.0", "new list.1"]}


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"Two parts of the state have the name 'a\.b'"):
        leaves_of({"a": {"b": 1}, "a.b": 2})


def test_a_leaf_in_an_immutable_mapping_is_an_error() -> None:
    (leaf,) = leaves_of({"fixed": MappingProxyType({"x": 1})})
    with pytest.raises(UsageError, match=r"'fixed\.x' is in a mappingproxy, which cannot be changed"):
        leaf.require_place()


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UsageError, match="'self' contains itself"):
        leaves_of(state)


def test_stateful_parts_are_replaced_by_their_state() -> None:
    leaves = leaves_of({"part": Part({"x": 1}), "step": 2})
    assert {leaf.name: leaf.value for leaf in leaves} == {"part.x": 1, "step": 2}


@pytest.mark.parametrize(
    ("owner", "kept"),
    [
        (Owner.PLAIN, ["a", "b.state.0.slots"]),
        (Owner.STATEFUL, ["b.state.0.slots"]),
        (Owner.OPTIMIZER, ["b.state.0.slots"]),
        (Owner.MODULE, ["b.x_extra_state"]),
        (Owner.FIXED, []),
    ],
)
def test_empty_dicts_are_leaves_where_a_load_does_not_know_them(owner: Owner, kept: list[str]) -> None:
    state: dict[str, Any] = {"a": {}, "b": {"state": {0: {"slots": {}}}}}
    if owner is Owner.MODULE:
        state["b"] = {"x_extra_state": {}, "w": {}}
    assert [leaf.name for leaf in leaves_of(state, owner)] == kept


def test_an_extra_state_has_another_owner_than_the_rest_of_a_module() -> None:
    leaves = leaves_of({"m": {"w": Tensor(), "x_extra_state": 1}}, Owner.MODULE)
    assert [leaf.owner for leaf in leaves] == [Owner.MODULE, Owner.EXTRA]


def test_buffers_that_are_copied_have_an_owner_of_their_own() -> None:
    state = {"m": {"w": Tensor(), "running_mean": Tensor()}}
    leaves, _ = walk(
        state,
        lambda value: isinstance(value, Tensor),
        lambda _: Owner.MODULE,
        lambda _: frozenset({"running_mean"}),
    )
    assert [leaf.owner for leaf in leaves] == [Owner.MODULE, Owner.COPY]


def test_key_types_are_recorded_where_text_hides_them() -> None:
    state = {
        "text": {"1": 0},
        "number": {1: 0},
        "pair": {(1, 2): 0},
        "enum": {Colour.RED: 0},
        "name": {"x": 0},
    }
    kinds = {"text": "text", "number": "number", "pair": "literal", "enum": "unknown"}
    assert key_types_of(state) == kinds
    assert key_types_of(state, Owner.FIXED) == {}
    assert key_types_of({"list": [{"0": Tensor()}]}) == {"list.0": "text"}
