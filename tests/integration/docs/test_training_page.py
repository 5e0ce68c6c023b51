"""docs/training.md: its names and limits are those of the code."""

import re
from pathlib import Path

from penstock.bench.epoch_order import Remainder
from penstock.bench.training.batch_requests import TRANSFER_BYTES
from penstock.bench.training.training_loop import FEWEST_STEPS, LONGEST_S, MOST_STEPS
from penstock.results.run_folder import STAGES_FILE

PAGE = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_limits_and_words_on_the_page_are_those_of_the_code() -> None:
    assert f"about {LONGEST_S:g} seconds ({FEWEST_STEPS} to {MOST_STEPS} steps" in PAGE
    assert f"({TRANSFER_BYTES >> 10} KiB)" in PAGE
    assert {division.value for division in Remainder} | {STAGES_FILE} <= QUOTED
