"""What saves and loads cost is in proportion to the number of tensors."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.api import load, save


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_work_of_saves_and_loads_grows_with_the_tensors_and_no_faster(
    tmp_path: Path, *, is_nested: bool
) -> None:
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

    counts = []
    for number in (500, 4000):
        tensors = {f"w{each}": torch.ones(1) for each in range(number)}
        state: Any = {"model": tensors} if is_nested else tensors
        path = tmp_path / f"{number}"
        counts.append([count_calls(partial(act, state, path)) for act in (save, load)])
    for few, many in zip(*counts, strict=True):
        assert many < 10 * few, counts
