"""How many accelerators can this storage feed? Found by runs: twice as many until it fails, then in between.

Each try is a whole run of its own, with its own folder of results. Invariant: the answer passed, and one more
failed or was not asked for; nothing is inferred beyond that utilization falls as accelerators are added.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import PenstockError, UsageError

_LEAVE_S: Final = 15.0
"""How long an interrupted run may take to leave: its ranks have their own, shorter limits."""


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
    """All tries in their order; `accelerators` is the largest number that was fed, 0 if none was."""

    accelerators: int
    is_most: bool
    tries: tuple[SweepRun, ...]


def find_most_accelerators(run: Callable[[int], SweepRun], *, most: int) -> SweepResult:
    """Search up to `most` accelerators; `is_most` says that all of them were fed."""
    if most < 1:
        raise UsageError(
            f"A sweep up to {most} accelerators has none", where="--most", fix="Give at least 1."
        )
    tries: dict[int, SweepRun] = {}

    def passes(accelerators: int) -> bool:
        tries[accelerators] = run(accelerators)
        return tries[accelerators].meets_threshold

    answer = largest_passing(passes, most=most)
    return SweepResult(accelerators=answer, is_most=answer == most, tries=tuple(tries.values()))


def largest_passing(passes: Callable[[int], bool], *, most: int) -> int:
    """The largest number up to `most` that passes, asking each number at most once; 0 if 1 does not."""
    good, asked = 0, 1
    while passes(asked):
        good = asked
        if good == most:
            return most
        asked = min(2 * asked, most)
    bad = asked
    while bad - good > 1:
        middle = (good + bad) // 2
        if passes(middle):
            good = middle
        else:
            bad = middle
    return good


def run_command(words: Sequence[str]) -> Callable[[int], SweepRun]:
    """Tries as processes: `penstock training run` with `words`, on as many ranks as accelerators."""

    def run(accelerators: int) -> SweepRun:
        command = [sys.executable, "-m", "penstock", "training", "run", *words]
        command += ["--ranks", str(accelerators), "--json"]
        document = json.loads(_output_of(command, accelerators))
        return _as_try(document)

    return run


def _output_of(command: Sequence[str], accelerators: int) -> str:
    """What a run prints; its own words on standard error are passed on."""
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
            fix="Its own words are above. A larger sweep needs more files: see `penstock training size`.",
        )
    return output


def _as_try(document: dict[str, Any]) -> SweepRun:
    return SweepRun(
        accelerators=document["accelerators"],
        meets_threshold=document["meets_threshold"],
        au_compat=document["au_compat"],
        samples_per_s=document["samples_per_s"],
        bottleneck=document["bottleneck"],
        results_dir=document["results_dir"],
    )
