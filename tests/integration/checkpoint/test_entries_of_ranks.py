"""Ranks whose states have other entries get back their own, in parts that have nothing yet when they load."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.utils._pytree import tree_map

import penstock.checkpoint as pc
from penstock.checkpoint.plan import save_plan
from penstock.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


class Loader:
    """A data loader with a buffer, whose state says so only when it has one."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def state_of(rank: int) -> dict[str, Any]:
    """Each kind of entry that only some ranks have, with lists that are of another length on each."""
    buffer = [{"document": 10 * rank + n, "tokens": torch.full((2,), rank)} for n in range(rank + 1)]
    return {
        "loader": Loader({"buffer": buffer, "worker": {"at": 1} if rank == 1 else None, "skipped": {}}),
        "best": {"loss": 0.5, "w": torch.ones(2)} if rank == 1 else None,
        "history": [torch.ones(1)] * (rank + 1),
        "metrics": {f"of {rank}": [rank]},
    }


def fresh() -> dict[str, Any]:
    return {"loader": Loader(), "best": None, "history": [], "metrics": {}}


def plain(state: dict[str, Any]) -> Any:
    return tree_map(
        lambda value: value.tolist() if isinstance(value, torch.Tensor) else value,
        {**state, "loader": state["loader"].state},
    )


def save_twice_and_load(rank: int, folder: Path) -> bool:
    with pc.Manager(folder) as manager:
        manager.save(1, state_of(rank))
        # Not planned anew.
        manager.save(2, state_of(rank))
        found = fresh()
        manager.restore(found)
    return bool(plain(found) == plain(state_of(rank)))


def test_each_rank_gets_back_its_own_entries(tmp_path: Path) -> None:
    assert all(on_gloo_ranks(3, save_twice_and_load, tmp_path))


ONE, TWO = torch.ones(1), torch.full((1,), 2.0)
STRUCTURES: dict[str, tuple[Any, Any]] = {
    "tensor and None": ({"loss": ONE, "n": 3}, {"loss": None, "n": 3}),
    "None and tensor": ({"loss": None, "n": 3}, {"loss": ONE, "n": 3}),
    "tensor and number": ({"loss": ONE}, {"loss": 0.7}),
    "own tensors": ({"of 0": ONE}, {"of 1": TWO}),
    "own experts": ({"0": {"w": ONE}}, {"1": {"w": TWO}}),
    "value and dict": ({"y": 3}, {"y": {"z": ONE}}),
    "dict and value": ({"y": {"z": ONE}}, {"y": 3}),
    "list and dict": ({"y": [ONE]}, {"y": {0: ONE}}),
    "one key of two types": ({17: 1}, {"17": 1}),
    "key types of rank 1": ({}, {"17": 1000}),
    "keys of other types": ({"a": 1}, {("a", 1): 2, None: 3}),
    "order": ({"a": 1, "b": ONE}, {"b": ONE, "a": 1}),
}


class WithExtraState(torch.nn.Module):
    """A module whose extra state is a part of any structure."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def save_structures_and_load(rank: int, folder: Path) -> dict[str, list[str]]:
    """What comes back of each structure, as text that shows the types and the order of keys."""
    found: dict[str, list[str]] = {}
    for number, (name, of_ranks) in enumerate(STRUCTURES.items()):
        own = of_ranks[rank]
        saved = {"dict": own, "none": own, "loader": Loader(own), "model": WithExtraState(own)}
        pc.save(saved, folder / f"{number}")
        loader, model = Loader(), WithExtraState()
        state: dict[str, Any] = {"dict": {}, "none": None, "loader": loader, "model": model}
        pc.load(state, folder / f"{number}")
        found[name] = [repr(each) for each in (state["dict"], state["none"], loader.state, model.state)]
    return found


def test_each_rank_gets_back_the_structure_that_it_saved(tmp_path: Path) -> None:
    for rank, found in enumerate(on_gloo_ranks(2, save_structures_and_load, tmp_path)):
        expected = {name: [repr(of_ranks[rank])] * 4 for name, of_ranks in STRUCTURES.items()}
        assert found == expected
    # One rank gets its own structure, and the entries of all.
    for name in ("one key of two types", "order", "tensor and None"):
        state: dict[str, Any] = {"dict": {}}
        pc.load(state, tmp_path / f"{list(STRUCTURES).index(name)}")
        assert repr(state["dict"]) == repr(STRUCTURES[name][0])


def test_a_structure_with_the_same_names_is_another_one(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"q": {0: ONE}},
        {"q": [ONE]},
        {"q.0": ONE},
        {"q": {"0": ONE}},
        {"p": 1, "q": ONE},
    ]
    states.append({"q": ONE, "p": 1})
    with pc.Manager(tmp_path, keep=len(states)) as manager:
        for step, state in enumerate(states):
            manager.save(step, {"loader": Loader(state)})
        for step, state in enumerate(states):
            loader = Loader()
            manager.restore({"loader": loader}, step=step)
            assert repr(loader.state) == repr(state)


@pytest.mark.parametrize(
    ("own", "saved"),
    [({"q": []}, {"q": {"a": 1}}), ({"q": [1]}, {"q": {"a": ONE}}), ({"q": {}}, {"q": [ONE]})],
)
def test_a_list_in_place_of_a_dict_is_replaced_by_it(tmp_path: Path, own: Any, saved: Any) -> None:
    pc.save({"loader": Loader(saved)}, tmp_path / "saved")
    loader = Loader(own)
    pc.load({"loader": loader}, tmp_path / "saved")
    assert repr(loader.state) == repr(saved)


STAGES = [torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ModuleDict({"last": torch.nn.Linear(2, 2)})]


def save_stages(rank: int, folder: Path) -> None:
    pc.save({"model": STAGES[rank].state_dict()}, folder / "stages")


def test_a_module_of_one_rank_takes_the_plain_dicts_of_all_stages(tmp_path: Path) -> None:
    on_gloo_ranks(2, save_stages, tmp_path)
    model = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2), "last": torch.nn.Linear(2, 2)})
    report = pc.load({"model": model}, tmp_path / "stages")
    assert set(report.loaded) == {f"model.{name}" for name in model.state_dict()}


def load_elsewhere(rank: int, folder: Path) -> tuple[list[str], Any]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    found = fresh()
    pc.load(found, folder / "step-2")
    return told, found["metrics"]


def test_with_another_number_of_ranks_they_get_those_of_all_and_are_told(tmp_path: Path) -> None:
    on_gloo_ranks(3, save_twice_and_load, tmp_path)
    told, metrics = on_gloo_ranks(2, load_elsewhere, tmp_path)[0]
    assert "Saved by 3 ranks, which had different entries in 'best', 'history', 'loader'" in "\n".join(told)
    assert sorted(metrics) == ["of 0", "of 1", "of 2"]


def save_many_entries(rank: int, folder: Path) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    with patch.object(save_plan, "MOST_ENTRIES_BYTES", 100):
        pc.save({"part": Loader({f"{rank} {number}": 1 for number in range(20)})}, folder / "saved")
    return told


def test_too_many_entries_to_note_are_told_at_save(tmp_path: Path) -> None:
    told, others = on_gloo_ranks(2, save_many_entries, tmp_path)
    assert "Not all ranks have the same entries in 'part', and they are too many to note" in "\n".join(told)
    assert not others


MARKED: dict[str, list[dict[str, Any]]] = {
    "on all ranks": [{"x": 0, "x@rank1": 42}, {"x": 1, "x@rank1": 42}],
    "on rank 0 alone": [{"x@rank1": 42}, {"x": 1}],
    "on a rank that has nothing else": [{"x": 0}, {"x": 1}, {"x@rank1": 42}],
    "on two ranks of four": [{"x": 0}, {"x": 1}, {"x@rank1": 42}, {"x@rank1": 43}],
    "tensor": [{"x": ONE}, {"x": TWO}, {"x@rank1": ONE}],
    "tensor and value": [{"x": ONE}, {"x": TWO}, {"x@rank1": 42}],
    "in a part": [{"x": 0}, {"part": Loader({"x": 1})}, {"part": Loader({"x@rank1": ONE})}],
}


def save_names_of_a_rank(rank: int, size: int, root: Path) -> list[str]:
    found = []
    for name, states in ((name, states) for name, states in MARKED.items() if len(states) <= size):
        state, folder = dict(enumerate(states)).get(rank, {"other": 1}), root / name
        for save in (
            lambda: pc.save(state, folder),  # noqa: B023 - called at once
            lambda: pc.dry_run(state),  # noqa: B023
            lambda: stock_save(state, checkpoint_id=folder, planner=pc.SavePlanner()),  # noqa: B023
        ):
            with pytest.raises((UsageError, CheckpointException)) as caught:
                save()
            found.append(str(caught.value))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_name_that_a_rank_s_own_value_would_get_is_refused(tmp_path: Path, size: int) -> None:
    for found in on_gloo_ranks(size, save_names_of_a_rank, size, tmp_path):
        for told in found:
            assert re.search(r"The state has '(part\.)?x' and '(part\.)?x@rank1'", told)
            assert "the name of rank 1's own value of the first. Rename one of them." in told
    assert not any(path.name == ".metadata" for path in tmp_path.rglob("*"))


NAMES: dict[str, list[dict[str, Any]]] = {
    "no other": [{"x@rank1": 42}, {"z": 1}, {"x@rank1": 42}, {}],
    "own values": [{"x@rank1": rank} for rank in range(4)],
    "own tensors": [{"x@rank1": torch.full((1,), rank)} for rank in range(4)],
}


def save_names_alone(rank: int, root: Path) -> None:
    for name, states in NAMES.items():
        pc.save({"part": states[rank]}, root / name)


def load_names_alone(rank: int, root: Path) -> list[str]:
    found = []
    for name, states in NAMES.items():
        state = {"part": tree_map(lambda value: value * 0, states[rank])}
        pc.load(state, root / name)
        found.append(repr(state["part"]))
        state = {"part": {"x": -1}}
        pc.load(state, root / name, strict=False)
        found.append(repr(state["part"]))
    return found


def test_a_name_like_that_of_a_rank_s_own_value_comes_back_on_any_number_of_ranks(tmp_path: Path) -> None:
    on_gloo_ranks(4, save_names_alone, tmp_path)
    for size in (1, 2, 4):
        for rank, found in enumerate(on_gloo_ranks(size, load_names_alone, tmp_path)):
            expected = [repr(states[rank]) for states in NAMES.values()]
            assert found[::2] == expected
            assert found[1::2] == ["{'x': -1}"] * len(NAMES)
