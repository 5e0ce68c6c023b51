"""The structure of plain values, data loaders and extra states comes back: keys, order, empty dicts."""

from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from penstock.checkpoint.api import load, save
from penstock.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Whole:
    """A part that is nothing but its state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


def odd_structure() -> dict[str, Any]:
    """What names alone do not tell: empty dicts, and keys that do not look like what they are."""
    return {
        "empty": {},
        "text": {"0": {"skipped": {}}, "12": 1},
        "numbers": {3: {"7": {}}, 4: [{}, {"at": torch.ones(2)}]},
        "others": {-1: 0, 0.5: {None: {}}, (1, "a"): True, "a": 2, False: 3},
        "counts": defaultdict(int),
        "seen": [torch.ones(2), {}],
        "": {"": {5: {"": {6: {}}}}, "0": {"": {7: {}}}},
    }


@pytest.mark.parametrize("grown", [False, True], ids=["new", "grown"])
def test_part_gets_back_empty_dicts_and_keys_of_any_plain_type(tmp_path: Path, *, grown: bool) -> None:
    save({"part": Whole(odd_structure())}, tmp_path / "step")
    stock_load({"part": {"text": {"12": None}}}, checkpoint_id=tmp_path / "step", no_dist=True)
    fresh: dict[str, Any] = {"counts": defaultdict(int), "seen": []}
    if grown:
        fresh = odd_structure() | {"empty": {1: 2}, "counts": defaultdict(int, a=1), "seen": [{}] * 3}
        fresh["text"]["13"], fresh["numbers"][5] = 1, {"at": 1}
    part = Whole(fresh)
    load({"part": part}, tmp_path / "step")
    assert in_order(part.state) == in_order(odd_structure())
    assert type(part.state["counts"]) is defaultdict


SHAPES = {
    "dict": {"a": 1, "b": torch.ones(2)},
    "numbered": {0: 1, 1: torch.ones(2)},
    "list": [1, torch.ones(2)],
    "list of values": [1, 2],
    "tuple": (1, torch.ones(2)),
    "number": 5,
    "None": None,
    "tensor": torch.ones(2),
}
"""States of all shapes."""


@pytest.mark.parametrize("fresh", [*SHAPES.values(), {}], ids=[*SHAPES, "empty"])
@pytest.mark.parametrize("saved", SHAPES.values(), ids=SHAPES)
def test_part_gets_a_state_of_the_shape_that_was_saved_or_names_what_is_missing(
    tmp_path: Path, saved: Any, fresh: Any
) -> None:
    save({"part": Whole(saved)}, tmp_path / "step")
    part = Whole(fresh)
    state = {"part": part}
    # Only a dict with names of its own asks for these.
    if isinstance(saved, dict) and isinstance(fresh, dict) and "a" in fresh and "a" not in saved:
        with pytest.raises(UsageError, match=r"Missing key in checkpoint: it does not hold 'part\.a'"):
            load(state, tmp_path / "step")
        assert part.state is fresh
        return
    load(state, tmp_path / "step")
    assert in_order(part.state) == in_order(saved)


@pytest.mark.parametrize("own", [SHAPES["number"], SHAPES["tuple"]], ids=["number", "tuple"])
def test_part_of_which_nothing_is_loaded_keeps_a_state_without_names(tmp_path: Path, own: Any) -> None:
    save({"part": Whole(1), "other": 2}, tmp_path / "step")
    part = Whole(own)
    part.load_state_dict = None  # type: ignore[method-assign, assignment]  # a call would fail
    load({"part": part, "other": 0}, tmp_path / "step", exclude="part")


@pytest.mark.parametrize("params", [5, None, [{"a": 1}], {"a": 1}], ids=str)
def test_a_dict_with_the_keys_of_an_optimizer_but_not_its_shape_is_any_dict(
    tmp_path: Path, params: Any
) -> None:
    for saved in (
        {"state": {}, "param_groups": [{"params": params}]},
        {"state": {"w": 1}, "param_groups": params},
        {"state": params, "param_groups": []},
    ):
        save({"part": saved}, tmp_path / "step")
        state = {"part": None}
        load(state, tmp_path / "step")
        load(state, tmp_path / "step")
        assert state == {"part": saved}


@pytest.mark.parametrize("name", [None, "w"], ids=["optimizer", "named"])
def test_saved_groups_without_a_list_of_parameters_are_refused(tmp_path: Path, name: str | None) -> None:
    for params in (5, None, [{"a": 1}]):
        save({"part": {"state": {0: {"a": 1}}, "param_groups": [{"params": params}]}}, tmp_path / "step")
        part: Any = torch.optim.SGD([torch.ones(2)])
        if name:
            part = {"state": {name: {"a": 0}}, "param_groups": [{"params": [name]}]}
        with pytest.raises(UsageError, match=r"part"):
            load({"part": part}, tmp_path / "step", strict=False)


@pytest.mark.parametrize("fresh", [None, {}], ids=["None", "empty"])
def test_plain_dict_gets_back_empty_dicts_and_keys_of_any_plain_type(tmp_path: Path, fresh: Any) -> None:
    saved = {"nested": odd_structure(), "padded": {"00": 1, "01": {}}, "list": [{}, 1], "nothing": {}}
    save({**saved, "top": {}}, tmp_path / "step")
    state = {"nested": fresh, "padded": {}, "list": [], "nothing": fresh, "top": fresh}
    load(state, tmp_path / "step")
    assert in_order(state) == in_order({**saved, "top": {}})


@pytest.mark.parametrize("value", [5, (1, 2), [3, 4], "text"], ids=repr)
def test_an_empty_dict_takes_whatever_was_saved_there(tmp_path: Path, value: Any) -> None:
    save({"x": value, "n": {"x": value}}, tmp_path / "step")
    state: dict[str, Any] = {"x": {}, "n": {"x": {}}}
    load(state, tmp_path / "step")
    assert state == {"x": value, "n": {"x": value}}


def test_an_empty_dict_that_was_empty_stays_the_same_one(tmp_path: Path) -> None:
    save({"x": {}, "n": {"x": {}}}, tmp_path / "step")
    own: dict[str, Any] = {}
    state: dict[str, Any] = {"x": {}, "n": {"x": own}}
    load(state, tmp_path / "step")
    assert state["n"]["x"] is own


@pytest.mark.parametrize("writers", [1, 3])
def test_new_dicts_have_their_keys_in_the_order_that_they_had(tmp_path: Path, writers: int) -> None:
    sources = {"wiki": 10, "code": torch.ones(2), "books": [1], "arxiv": {"z": 1, "a": torch.ones(1)}}
    save({"part": Whole({"sources": sources}), "plain": sources}, tmp_path / "step", writers=writers)
    part = Whole({})
    state: dict[str, Any] = {"part": part, "plain": None}
    load(state, tmp_path / "step")
    for found in (part.state["sources"], state["plain"]):
        assert list(found) == list(sources)
        assert list(found["arxiv"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ({"b": 1, "a": 2, "t": torch.ones(2)}, {"t": torch.zeros(2), "a": 0, "b": 0}),
        ({"d": {7: 1, 2: 2}}, {"d": {"2": 0}}),
        ({"d": {"7": 1, "2": torch.ones(1)}}, {"d": {2: torch.zeros(1), 7: 0}}),
        ({"d": {None: 1, (1, 2): {"z": 1, "a": {}}}}, {"d": {"None": 0, "(1, 2)": {"a": {}, "z": 0}}}),
        ({"d": {"1": 1, 0: 2}}, {"d": {0: 0, "1": 0}}),
    ],
    ids=["order", "numbers", "text", "literals", "mixed"],
)
def test_part_with_entries_of_these_names_gets_the_saved_order_and_types_of_keys(
    tmp_path: Path, saved: Any, own: Any
) -> None:
    extra, fresh = Counting(2, 2), Counting(2, 2)
    extra.seen, fresh.seen = saved, deepcopy(own)
    save({"part": Whole(saved), "model": extra, "5": Whole(saved)}, tmp_path / "step")
    tensor = own.get("t")
    parts = Whole(own), Whole(deepcopy(own))
    load({"part": parts[0], "model": fresh, "5": parts[1]}, tmp_path / "step")
    assert repr(parts[0].state) == repr(parts[1].state) == repr(fresh.seen) == repr(saved)
    assert parts[0].state.get("t") is tensor


def test_values_that_are_excluded_stay_where_keys_get_other_types(tmp_path: Path) -> None:
    save({"part": Whole({"d": {3: 1, 2: 2, 1: 3}})}, tmp_path / "step")
    part = Whole({"d": {"1": 7, "2": 8}})
    load({"part": part}, tmp_path / "step", exclude="part.d.[13]")
    assert part.state == {"d": {2: 2, 1: 7}}


def in_order(value: Any) -> str:
    """Values without the order of keys, which a checkpoint does not have."""
    if isinstance(value, dict):
        return repr(sorted((repr(key), in_order(inner)) for key, inner in value.items()))
    return repr([in_order(inner) for inner in value]) if isinstance(value, list) else repr(value)


def test_keys_that_no_literal_tells_are_told_at_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"part": Whole({"x": {torch.float32: 1}})}, tmp_path / "step")
    assert "Keys of 'part.x' are saved as text" in caplog.text
    save({"part": Whole({"x": {"é": 1, "0": 2, 2: 3}})}, tmp_path / "step")
    part = Whole({})
    load({"part": part}, tmp_path / "step")
    assert part.state == {"x": {"é": 1, 0: 2, 2: 3}}
    assert "gets text keys, and whole numbers for text that looks like one" in caplog.text


@pytest.mark.parametrize(
    ("one", "other", "is_told"),
    [
        ({"0": 1}, {3: 1}, True),
        ({3: 1}, {"0": 1}, True),
        ({True: 1}, {3: 1}, False),
        ({"0": 1}, {"x": 1}, False),
    ],
)
def test_two_dicts_of_one_name_get_back_the_types_of_their_keys_or_are_told_at_save(
    one: Any, other: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_told: bool
) -> None:
    saved = {"x.y": one, "x": {"y": other}}
    save({"part": Whole(saved)}, tmp_path / "step")
    assert ("Keys of 'part.x.y' are saved as text" in caplog.text) == is_told
    part = Whole({})
    load({"part": part}, tmp_path / "step")
    assert (in_order(part.state) == in_order(saved)) != is_told


class Counting(torch.nn.Linear):
    """A module whose extra state grows."""

    seen: dict[int, Any]

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("before", [{}, {9: {}}], ids=["new", "grown"])
def test_module_gets_its_extra_state_in_the_structure_that_was_saved(
    tmp_path: Path, before: dict[int, Any]
) -> None:
    saved, fresh = Counting(2, 2), Counting(2, 2)
    saved.seen, fresh.seen = {1: torch.ones(2), 3: {}}, before
    save({"model": torch.nn.Sequential(saved)}, tmp_path / "step")
    load({"model": torch.nn.Sequential(fresh)}, tmp_path / "step")
    assert in_order(fresh.seen) == in_order(saved.seen)
