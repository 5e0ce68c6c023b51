"""Runs that `penstock submission check` judges in a second: of a round of 1,000 runs, over one of 100.

No peer stands beside it: the ratio is the rate of the large round over that of the small one, near 1 as
long as time grows linearly.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from harness import Ratio, interleave
from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.finding import Validity
from penstock.testing.submission.tree import valid_submission

RUNS_PER_SUBMITTER = 5


def measure(repetitions: int) -> list[Ratio]:
    """Both rounds, in turn."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        large, small = Round(Path(folder) / "large", 1_000), Round(Path(folder) / "small", 100)
        return interleave(large, small, repetitions=repetitions, unit="runs/s")


class Round:
    """A round of valid submissions, written once."""

    def __init__(self, root: Path, num_runs: int) -> None:
        self._root, self._num_runs = root, num_runs
        for number in range(num_runs // RUNS_PER_SUBMITTER):
            submission = valid_submission(RUNS_PER_SUBMITTER)
            submission.organisation = f"org{number:04d}"
            submission.write(root)

    def __call__(self) -> Mapping[str, float]:
        """Judge all of it."""
        edition = load_edition("v1.0")
        begin = time.perf_counter()
        num_valid = sum(judged.verdict is Validity.VALID for judged in check(self._root, edition))
        elapsed_s = time.perf_counter() - begin
        assert num_valid * RUNS_PER_SUBMITTER == self._num_runs
        return {"check": self._num_runs / elapsed_s}
