"""How far all results of a tree are: what is there, what is missing, and what to do next.

Place in the flow: a claimed tree -> its series -> a view for `penstock submission status`. Invariant: a
series that has nothing but failed attempts is shown, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.submission.documents import read_description
from penstock.submission.making.cadence import Wanted, keep_runs
from penstock.submission.making.leaf import HIDDEN, UNDER_WAY, Series
from penstock.submission.making.standing import Attempt, read_standing
from penstock.submission.names import JUDGED, Benchmark, Phase
from penstock.submission.system import problems
from penstock.workload.divisions import SubmissionDivision

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.making.claim import Claim
    from penstock.submission.making.standing import Leaf, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """One series: how many of its runs count, of how many; `lacks` says in words what is missing."""

    series: Series
    num_accelerators: int | None
    accelerator: str
    num_runs: int
    num_wanted: int
    lacks: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    unread: tuple[str, ...]


def progress_of(claim: Claim, edition: Edition, *, now: datetime) -> tuple[Progressed, ...]:
    """All series of the tree, in order."""
    return tuple(_progressed(series, edition, now) for series in _all_series(claim))


def _all_series(claim: Claim) -> Iterator[Series]:
    found = set()
    for top in (claim.root, claim.root / HIDDEN / UNDER_WAY):
        for division in SubmissionDivision:
            results = top / division.value / claim.organisation / "results"
            for benchmark in JUDGED:
                for folder in results.glob(f"*/{benchmark.value}/*"):
                    if folder.is_dir():
                        found.add((division, folder.parts[-3], benchmark, folder.name))
    for division, system, benchmark, model in sorted(found):
        yield Series(claim=claim, division=division, system=system, benchmark=benchmark, model=model)


def _progressed(series: Series, edition: Edition, now: datetime) -> Progressed:
    standing = read_standing(series)
    last = standing.runs[-1] if standing.runs else None
    kept: tuple[Leaf, ...] = standing.runs
    num_wanted = 1
    if series.benchmark is Benchmark.TRAINING:
        num_wanted = edition.num_runs
        if last is not None:
            kept, _ = keep_runs(standing.runs, _wanted_like(last, edition), now=now)
    leaf = last or next(iter(standing.datasizes), None)
    return Progressed(
        series=series,
        num_accelerators=leaf.num_processes if leaf else None,
        accelerator=leaf.accelerator if leaf else "",
        num_runs=len(kept),
        num_wanted=num_wanted,
        lacks=tuple(_lacks(series, standing, num_missing=max(0, num_wanted - len(kept)))),
        attempts=standing.attempts,
        unread=standing.unread,
    )


def _wanted_like(leaf: Leaf, edition: Edition) -> Wanted:
    return Wanted(
        accelerator=leaf.accelerator,
        num_processes=leaf.num_processes,
        place=leaf.place,
        num_files=leaf.num_files,
        num_runs=edition.num_runs,
        max_pause_runs=edition.of_time().max_pause_runs,
    )


def _lacks(series: Series, standing: Standing, *, num_missing: int) -> Iterator[str]:
    if series.benchmark is Benchmark.TRAINING:
        if not standing.datasizes:
            yield Phase.DATASIZE.value
        if not standing.datagens:
            yield Phase.DATAGEN.value
    if num_missing:
        yield f"{num_missing} run{'s' * (num_missing > 1)}"
    yield from system_lacks(series)


def system_lacks(series: Series) -> Iterator[str]:
    """What the system's description still needs, by the lines of its file."""
    root = series.claim.root
    path = root / series.submitter / "systems" / f"{series.system}.yaml"
    if not path.is_file():
        yield f"systems/{series.system}.yaml"
    elif found := problems(read_description(path, root)):
        lines = sorted({problem.line for problem in found})
        shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > len(lines[:5]) else "")
        yield f"systems/{series.system}.yaml, line{'s' * (len(lines) > 1)} {shown}"
    if not path.with_suffix(".pdf").is_file():
        yield f"systems/{series.system}.pdf"
