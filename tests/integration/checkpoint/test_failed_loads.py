"""Loads that fail after all bytes have arrived: which objects have changed, and which ranks raise."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.api import load, save
from penstock.errors import RankFailed, UsageError


class Position:
    """A part with a state of its own, which may refuse to load it."""

    def __init__(self, position: int, *, refuses: bool = False) -> None:
        self.position = position
        self._refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._refuses:
            raise ValueError("no such position")
        self.position = state_dict["position"]


def grouped(sizes: list[int]) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def state_of(value: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"before": Position(value), "step": value, "nested": {"step": value}, "opt": optimizer}


def test_groups_of_other_sizes_are_refused_before_anything_changes(tmp_path: Path) -> None:
    save(state_of(7, grouped([2, 2])), tmp_path / "step")
    state = state_of(0, grouped([3, 1]))
    with pytest.raises(UsageError, match="different parameters"):
        load(state, tmp_path / "step")
    assert (state["before"].position, state["step"], state["nested"]["step"]) == (0, 0, 0)


def test_named_groups_of_other_sizes_are_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = grouped([2, 2])
    for parameter in (each for group in saved.param_groups for each in group["params"]):
        parameter.grad = torch.ones(2)
    saved.step()
    save(state_of(7, saved), tmp_path / "step")
    options = saved.state_dict()["param_groups"][0]
    groups = [{**options, "lr": 0.5, "params": names} for names in (["a", "b", "c"], ["d"])]
    named = {"state": {name: {"momentum_buffer": torch.zeros(2)} for name in "abcd"}, "param_groups": groups}
    position = Position(0)
    state = {"before": position, "step": 0, "opt": named}
    with pytest.raises(UsageError, match="different parameters"):
        load(state, tmp_path / "step")
    assert (position.position, state["step"], groups[0]["lr"]) == (0, 0, 0.5)


def load_differently(rank: int, root: Path) -> tuple[str, int, int]:
    """Load into an optimizer that fits, except on rank 1."""
    state = state_of(0, grouped([3, 1] if rank == 1 else [2, 2]))
    with pytest.raises(RankFailed) as caught:
        load(state, root / "step")
    return caught.value.cause, state["before"].position, state["nested"]["step"]


def test_one_rank_that_cannot_take_its_part_leaves_all_ranks_unchanged(tmp_path: Path) -> None:
    save(state_of(7, grouped([2, 2])), tmp_path / "step")
    for cause, *values in on_gloo_ranks(2, load_differently, tmp_path):
        assert "different parameters" in cause
        assert values == [0, 0]


def refuse(rank: int, root: Path) -> tuple[str, int, int]:
    """Load into a part that refuses its state on rank 1."""
    state = {"step": 0, "nested": {"step": 0}, "last": Position(0, refuses=rank == 1)}
    with pytest.raises(RankFailed) as caught:
        load(state, root / "step")
    return caught.value.cause, state["step"], state["nested"]["step"]  # type: ignore[index, return-value]


def test_a_part_that_refuses_its_state_fails_the_load_on_all_ranks(tmp_path: Path) -> None:
    save({"step": 7, "nested": {"step": 7}, "last": Position(7)}, tmp_path / "step")
    for cause, *values in on_gloo_ranks(2, refuse, tmp_path):
        assert cause == "ValueError: no such position"
        assert values == [0, 0]
