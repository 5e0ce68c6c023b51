"""Find how many accelerators a storage location can feed: double their number until a run fails, then bisect.

Each try is a complete run with its own folder of results. Invariant: the run with the answer passed, and a
run with one more accelerator failed or would exceed the limit. The only assumption is that utilization falls
as accelerators are added.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final

from penstock.errors import PenstockError
from penstock.reports.report import Banner, Chart, Kind, Look, Report, Series, table_section
from penstock.results.phase_figures import Bottleneck
from penstock.units import format_count

_ACCELERATORS: Final = attrgetter("accelerators")
_LEAVE_S: Final = 15.0
"""The time that an interrupted run may take to exit; its ranks have their own, shorter limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of the sweep. AU is in percent.

    A run passes if its AU is at least what the workload requires. A run that failed for a reason other than
    its storage was still fed by the storage.
    """

    accelerators: int
    meets_threshold: bool
    au_compat: float
    samples_per_s: float
    bottleneck: str | None
    results_dir: str

    @property
    def is_fed(self) -> bool:
        """True if the storage delivered in time, whether or not this client kept up."""
        return self.meets_threshold or self.bottleneck not in (None, Bottleneck.STORAGE)


def sum_up(passed: int, tries: Sequence[SweepRun]) -> tuple[int, str | None]:
    """Return the number of accelerators that the storage feeds, and what set the limit, or None for no limit.

    If the limit is the client's, the storage feeds at least that number.
    """
    failed = min((one for one in tries if not one.meets_threshold), default=None, key=_ACCELERATORS)
    if failed is None or not failed.is_fed:
        return passed, (failed.bottleneck or "not known") if failed else None
    return max(one.accelerators for one in tries if one.is_fed), "client"


def say_answer(passed: int, tries: Sequence[SweepRun]) -> str:
    """Put the answer into a sentence."""
    fed, limit = sum_up(passed, tries)
    if fed and limit is None:
        return f"The storage feeds at least {format_count(fed, 'accelerator')}: all that were tried"
    if limit == "client":
        reached = f"this client keeps {passed} busy" if passed else "this client keeps none busy"
        return f"The storage feeds at least {format_count(fed, 'accelerator')}; {reached} and is the limit"
    return f"The storage feeds {format_count(fed, 'accelerator')}" if fed else "Too slow for one accelerator"


def find_most_accelerators(run: Callable[[int], SweepRun], *, most: int) -> tuple[int, list[SweepRun]]:
    """Return the most accelerators, up to `most`, whose run passes (0 if none does), and all tries."""
    tries: dict[int, SweepRun] = {}

    def passes(accelerators: int) -> bool:
        tries[accelerators] = run(accelerators)
        return tries[accelerators].meets_threshold

    return largest_passing(passes, most=most), list(tries.values())


def largest_passing(passes: Callable[[int], bool], *, most: int) -> int:
    """Return the largest number up to `most` that passes, or 0 if 1 fails. Tries no number twice."""
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
    """Return a function that runs `penstock training run` with `words`, on as many ranks as accelerators."""

    def run(accelerators: int) -> SweepRun:
        command = [sys.executable, "-P", "-m", "penstock", "training", "run", *words]
        command += ["--ranks", str(accelerators), "--json"]
        # Standard error is passed through.
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            output, _ = running.communicate()
        except KeyboardInterrupt:
            running.send_signal(signal.SIGINT)
            running.wait(_LEAVE_S)
            raise
        # Exit status 1 with a result: the run was measured, and failed.
        if running.returncode not in (0, 1) or not output.strip():
            raise PenstockError(
                f"The run with {format_count(accelerators, 'accelerator')} failed with exit code "
                f"{running.returncode}",
                fix="See its own message above. A larger sweep needs more files (`penstock training size`).",
            )
        document = json.loads(output)
        return SweepRun(**{field.name: document[field.name] for field in fields(SweepRun)})

    return run


def try_rows(tries: Sequence[SweepRun]) -> list[dict[str, str]]:
    """Return a row for each run: whether it passed, whether its storage kept up, and what limited it."""
    return [
        {
            "accelerators": str(one.accelerators),
            "AU %": f"{one.au_compat:.2f}",
            "samples/s": f"{one.samples_per_s:,.1f}",
            "AU reached": "yes" if one.meets_threshold else "no",
            "fed by storage": "yes" if one.is_fed else "no",
            "limit": one.bottleneck or "-",
            "folder": one.results_dir,
        }
        for one in tries
    ]


def make_sweep_page(fed: int, tries: Sequence[SweepRun], workload: str, storage: str) -> Report:
    """Make the page of all tries, each of which has its own page."""
    tries = sorted(tries, key=_ACCELERATORS)
    _, limit = sum_up(fed, tries)
    names = [str(one.accelerators) for one in tries]
    failed = next((one for one in tries if not one.meets_threshold), None)
    return Report(
        title=f"Accelerators of {workload} that {storage} feeds",
        subtitle=f"{format_count(len(tries), 'run')}, from {names[0]} to {names[-1]} accelerators",
        banner=Banner(
            verdict="passed" if fed else "failed",
            look=Look.GOOD if fed else Look.BAD,
            figure=say_answer(fed, tries),
            limited_by="nothing up to there" if failed is None else limit or "not known",
            since="every run reached the required utilization"
            if failed is None
            else f"{format_count(failed.accelerators, 'accelerator')}: AU {failed.au_compat:.1f} %",
            to_do=(
                "Try more with --most: all that were tried are fed."
                if failed is None
                else "Run it on more hosts, or with fewer ranks for each: `-- --hosts a:8,b:8`."
                if limit == "client"
                else f"Look at the first run that failed: {failed.results_dir}/report.html"
            ),
        ),
        highlights=[
            Chart(
                kind=Kind.LINES,
                title="AU by accelerators",
                run=storage,
                unit="%",
                names=names,
                series=[Series(y=[one.au_compat for one in tries])],
                y_end=100,
            ),
            Chart(
                kind=Kind.LINES,
                title="Samples per second by accelerators",
                run=storage,
                names=names,
                series=[Series(y=[one.samples_per_s for one in tries])],
            ),
        ],
        sections=[table_section("tries", "All runs", try_rows(tries), bars="AU %")],
    )
