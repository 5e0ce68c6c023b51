"""Pages of runs in Chromium: wide, in the dark, on a phone and on paper, and for readers who cannot see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.page_checks import check_page
from tests.support.recorded_runs import CheckpointStory, TrainingStory, record_checkpoints, record_training

if TYPE_CHECKING:
    from tests.support.browser import Browser

RUNS: dict[str, Callable[[Path], Path]] = {
    "training": lambda parent: record_training(
        parent,
        TrainingStory(waits=lambda rank, epoch, step: 0.05 if rank == 3 or (epoch, step) > (2, 9) else 0),
    ),
    "checkpoints": lambda parent: record_checkpoints(parent, CheckpointStory()),
}


@pytest.mark.parametrize("record", RUNS.values(), ids=RUNS)
def test_a_page_of_a_run_can_be_read_everywhere(
    browser: Browser, tmp_path: Path, record: Callable[[Path], Path]
) -> None:
    check_page(browser, record(tmp_path) / "report.html")
