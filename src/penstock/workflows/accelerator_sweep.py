"""Find how many accelerators a storage can feed: double their number until a run fails, then bisect.

Each try is a complete run with its own folder of results. Invariant: the answer passed, and one more failed
or exceeds the limit; only that utilization falls as accelerators are added is assumed.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final

from penstock.errors import PenstockError, UsageError

_LEAVE_S: Final = 15.0
"""How long an interrupted run may take to exit: its ranks have their own, shorter limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of the sweep. AU is in percent."""

    accelerators: int
    meets_threshold: bool
    au_compat: float
    samples_per_s: float
    bottleneck: str | None
    results_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """All tries in order; `accelerators` is the largest number that was fed, 0 if none was."""

    accelerators: int
    is_most: bool
    tries: tuple[SweepRun, ...]


def find_most_accelerators(run: Callable[[int], SweepRun], *, most: int) -> SweepResult:
    """Search up to `most` accelerators; `is_most` says that all of them were fed."""
    if most < 1:
        raise UsageError(
            f"A sweep needs at least one accelerator, not {most}", where="--most", fix="Give at least 1."
        )
    tries: dict[int, SweepRun] = {}

    def passes(accelerators: int) -> bool:
        tries[accelerators] = run(accelerators)
        return tries[accelerators].meets_threshold

    answer = largest_passing(passes, most=most)
    return SweepResult(accelerators=answer, is_most=answer == most, tries=tuple(tries.values()))


def largest_passing(passes: Callable[[int], bool], *, most: int) -> int:
    """The largest number up to `most` that passes, trying each number at most once; 0 if 1 does not."""
    good, candidate = 0, 1
    while passes(candidate):
        good = candidate
        if good == most:
            return most
        candidate = min(2 * candidate, most)
    bad = candidate
    while bad - good > 1:
        middle = (good + bad) // 2
        if passes(middle):
            good = middle
        else:
            bad = middle
    return good


def run_command(words: Sequence[str]) -> Callable[[int], SweepRun]:
    """Run `penstock training run` with `words` for each try, on as many ranks as accelerators."""

    def run(accelerators: int) -> SweepRun:
        command = [sys.executable, "-m", "penstock", "training", "run", *words]
        command += ["--ranks", str(accelerators), "--json"]
        document = json.loads(_capture_output(command, accelerators))
        return SweepRun(**{field.name: document[field.name] for field in fields(SweepRun)})

    return run


def _capture_output(command: Sequence[str], accelerators: int) -> str:
    """Run a command and return its standard output; standard error is passed through."""
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = running.communicate()
    except KeyboardInterrupt:
        running.send_signal(signal.SIGINT)
        running.wait(_LEAVE_S)
        raise
    if running.returncode != 0:
        raise PenstockError(
            f"The run with {accelerators} accelerators failed with exit code {running.returncode}",
            fix="Its own message is above. A larger sweep needs more files: see `penstock training size`.",
        )
    return output
