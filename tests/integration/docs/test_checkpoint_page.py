"""docs/checkpoint.md runs as it stands, and tells the limits of the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint.loading.reader import GAP_BYTES, ReadSettings
from penstock.checkpoint.plan.load_plan import LoadOptions
from penstock.checkpoint.plan.save_plan import SaveOptions

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoint.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_its_examples_run_and_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    for block in BLOCKS:
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "docs/checkpoint.md", "exec"), names)
    shown = [line.strip() for line in printed.getvalue().splitlines() if line.strip()]
    assert shown[0] == "('model.weight', 'model.bias', 'step')"
    page = [line.strip() for line in PAGE.splitlines()]
    assert all(line in page for line in shown[1:])
    assert names["step"] == 3


def test_its_limits_are_those_of_the_code() -> None:
    assert f"A region below {2 * SaveOptions().min_cut_bytes >> 10} KiB is not cut" in WORDS
    assert f"where a gap is {LoadOptions().min_gap_bytes >> 10} KiB or more" in WORDS
    assert f"less than {GAP_BYTES >> 10} KiB apart" in WORDS
    assert ReadSettings() == ReadSettings(streams=4, block_bytes=8 << 20)
    assert "four streams of 8 MiB" in WORDS
