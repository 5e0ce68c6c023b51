"""What saves and loads cost is in proportion to the number of tensors."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import penstock.checkpoint as pc
from penstock.checkpoint.api import load, save


def count_calls(work: Callable[[], object]) -> int:
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_work_of_saves_and_loads_grows_with_the_tensors_and_no_faster(
    tmp_path: Path, *, is_nested: bool
) -> None:
    counts = []
    for number in (500, 4000):
        tensors = {f"w{each}": torch.ones(1) for each in range(number)}
        state: Any = {"model": tensors} if is_nested else tensors
        path = tmp_path / f"{number}"
        counts.append([count_calls(partial(act, state, path)) for act in (save, load)])
    for few, many in zip(*counts, strict=True):
        assert many < 10 * few, counts


@pytest.mark.parametrize("key", [int, "id{}".format])
def test_the_work_of_filling_what_is_empty_grows_with_the_entries_and_no_faster(
    tmp_path: Path, key: Callable[[int], object]
) -> None:
    counts = []
    for number in (250, 2000):
        entries = {key(each): each for each in range(number)}
        save({"seen": entries}, tmp_path / f"{number}")
        found: Any = {"seen": {}}
        counts.append(count_calls(partial(load, found, tmp_path / f"{number}")))
        assert found["seen"] == entries
    assert counts[1] < 10 * counts[0]


def count_lines(work: Callable[[], object]) -> int:
    """Loops within an expression count as well: each turn is a line."""
    lines = 0

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_the_work_of_a_planner_for_torchs_load_grows_with_the_tensors_and_no_faster(tmp_path: Path) -> None:
    counts = []
    for number in (10, 100, 800):
        state = {f"w{each}": torch.ones(1) for each in range(number)}
        save(state, tmp_path / f"{number}")
        planner = pc.LoadPlanner()
        planner.set_up_planner(state, pc.Reader(tmp_path / f"{number}").read_metadata())
        counts.append(count_lines(planner.create_local_plan))
    assert counts[2] < 10 * counts[1], counts
