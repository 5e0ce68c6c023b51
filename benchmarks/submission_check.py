"""Runs that `penstock submission check` judges in a CPU second: of a round of 1,000 runs, over one of 100.

No peer stands beside it: the ratio is the rate of the large round over that of the small one, near 1 as
long as time grows linearly. Of v1.0 and of v3.0, whose runs have more files and rules. Memory beyond what the
small round takes is printed, and must not grow with the round.
"""

import tempfile
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.timed_tree import valid_training

from harness import Ratio, interleave
from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.rules.rule import Validity

RUNS_OF_A_RESULT = 5
MOST_GROWTH_MIB = 32
"""Between the small and the large round, ten times as many."""


def measure(repetitions: int) -> list[Ratio]:
    """Both rounds of each edition, in turn."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        ratios = []
        for edition in ("v1.0", "v3.0"):
            top = Path(folder) / edition
            large, small = (
                Round(top / name, edition, num_runs) for name, num_runs in (("large", 1_000), ("small", 100))
            )
            ratios += interleave(large, small, repetitions=repetitions, unit="runs/CPU s")
            growth_mib = large.peak_mib() - small.peak_mib()
            print(f"{edition}: {growth_mib:.1f} MiB more for 1,000 runs than for 100")
            assert growth_mib < MOST_GROWTH_MIB
        return ratios


class Round:
    """A round of valid submissions, written once. Runs are those that count; other leaves come with them."""

    def __init__(self, root: Path, edition: str, num_runs: int) -> None:
        self._root, self._num_runs, self._edition = root, num_runs, load_edition(edition)
        for number in range(num_runs // RUNS_OF_A_RESULT):
            submission = valid_submission() if edition == "v1.0" else valid_training(edition)
            submission.organisation = f"org{number:04d}"
            submission.write(root)

    def __call__(self) -> Mapping[str, float]:
        """Judge all of it."""
        begin = time.process_time()
        num_valid = sum(judged.verdict is Validity.VALID for judged in check(self._root, self._edition))
        cpu_s = time.process_time() - begin
        assert num_valid * RUNS_OF_A_RESULT == self._num_runs
        return {f"check {self._edition.edition}": self._num_runs / cpu_s}

    def peak_mib(self) -> float:
        """The most memory that judging all of it holds, by Python's own count."""
        tracemalloc.start()
        try:
            for _ in check(self._root, self._edition):
                pass
            return tracemalloc.get_traced_memory()[1] / (1 << 20)
        finally:
            tracemalloc.stop()
