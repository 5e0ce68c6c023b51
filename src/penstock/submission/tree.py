"""Where results lie in a v1.0 tree: a round, a division or one submitter's folder; only names are read.

Place in the flow: folders -> places -> `reading`. Invariant: what is not understood is kept as stray, and is
never fatal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, UsageError
from penstock.workload.divisions import SubmissionDivision

REPORT: Final = "mlperf_storage_report.json"
_RUN: Final = re.compile(r"run[_-]?(\d+)", re.IGNORECASE)
_KNOWN_BESIDE_RUNS: Final = frozenset({REPORT, "runs"})
_LATER_EDITION: Final = re.compile(r".*_metadata\.json|mlperf-results\.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """One organisation's folder in one division; None where the path does not say which."""

    organisation: str
    division: SubmissionDivision | None
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One result: the folder that has the runs. `name` is relative to the folder that is checked."""

    submitter: Submitter
    system: str
    folder: Path
    name: str
    run_folders: tuple[Path, ...]
    stray: tuple[str, ...]


def find_places(root: Path) -> Iterator[Place]:
    """All results below `root`, in order; `UsageError` where there is none."""
    found = False
    for submitter in find_submitters(root):
        for place in _results_of(submitter, root):
            found = True
            yield place
    if not found:
        _refuse(root)


def find_submitters(root: Path) -> Iterator[Submitter]:
    """The submitters at or below `root`."""
    if not root.is_dir():
        raise UsageError("There is no such folder", where=str(root), fix="Give a round's or a submitter's.")
    top = root.resolve()
    if _child(top, "results"):
        yield _submitter(top)
    elif _division(top.name):
        yield from map(_submitter, _folders(top))
    else:
        for division in filter(lambda folder: _division(folder.name), _folders(top)):
            yield from (_submitter(folder) for folder in _folders(division))


def without_results(root: Path) -> list[str]:
    """The folders of a round or a division that hold no result: named, because nobody else would say so."""
    return [
        submitter.folder.relative_to(root.resolve()).as_posix()
        for submitter in find_submitters(root)
        if next(_results_of(submitter, root), None) is None
    ]


def folders_of(submitter: Submitter) -> frozenset[str]:
    """The names in a submitter's folder, in lower case."""
    return frozenset(folder.name.lower() for folder in _folders(submitter.folder))


def _submitter(folder: Path) -> Submitter:
    return Submitter(organisation=folder.name, division=_division(folder.parent.name), folder=folder)


def _division(name: str) -> SubmissionDivision | None:
    return next((division for division in SubmissionDivision if division.value == name.lower()), None)


def _results_of(submitter: Submitter, root: Path) -> Iterator[Place]:
    results = _child(submitter.folder, "results")
    if results is None:
        return
    for path, folders, names in os.walk(results):
        folders.sort()
        here = Path(path)
        runs = _run_folders(here) or _run_folders(here / "runs")
        if runs or REPORT in names or _has_unnamed_runs(here):
            folders.clear()
            steps = here.relative_to(results).parts
            yield Place(
                submitter=submitter,
                system=steps[0] if len(steps) > 1 else "",
                folder=here,
                name=here.relative_to(root.resolve()).as_posix(),
                run_folders=runs,
                stray=tuple(_stray(here)),
            )


def _has_unnamed_runs(folder: Path) -> bool:
    """Runs that are not named as such would be dropped silently otherwise."""
    return any((each / "summary.json").exists() for each in _folders(folder))


def _run_folders(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        return ()
    runs = [(int(match[1]), each) for each in _folders(folder) if (match := _RUN.fullmatch(each.name))]
    return tuple(each for _, each in sorted(runs))


def _stray(folder: Path) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        if entry.name not in _KNOWN_BESIDE_RUNS and not (entry.is_dir() and _RUN.fullmatch(entry.name)):
            yield entry.name


def _folders(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise Unavailable(f"This folder cannot be listed: {error.strerror}", where=str(folder)) from error
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _child(folder: Path, name: str) -> Path | None:
    return next((entry for entry in _folders(folder) if entry.name.lower() == name), None)


def _refuse(root: Path) -> None:
    for _, _, names in os.walk(root):
        if any(_LATER_EDITION.fullmatch(name) for name in names):
            raise Unavailable(
                "This looks like a tree of v2.0 or v3.0, whose rules are not there yet",
                where=str(root),
                fix="Only v1.0 can be checked so far.",
            )
    raise UsageError(
        "No results are here",
        where=str(root),
        fix="Give a round's folder (with closed/ or open/), or a submitter's (with results/).",
    )
