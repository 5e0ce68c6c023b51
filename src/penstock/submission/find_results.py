"""Where results lie: in a round's, a division's or one submitter's folder; only names are read.

Place in the flow: folders -> places -> `reading`. v1.0 numbers its runs (run1, run2), later editions name
them by time (`names` has that tree). Invariant: what is not understood is kept as stray, and is never fatal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, UsageError
from penstock.submission.code_image import DIGEST_FILE, POINTER, POOL, POOL_MARK
from penstock.submission.tree_layout import MANIFEST, PROVENANCE, SENTINEL, Benchmark, Phase, is_time
from penstock.workload.division_rules import SubmissionDivision

REPORT: Final = "mlperf_storage_report.json"
_RUN: Final = re.compile(r"run[_-]?(\d+)", re.IGNORECASE)
_KNOWN_BESIDE_RUNS: Final = frozenset({REPORT, "runs"})
_KNOWN_BESIDE_TIMES: Final = frozenset({"results.json", "results.csv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """One organisation's folder in one division; None where the path does not say which."""

    organisation: str
    division: SubmissionDivision | None
    folder: Path

    @property
    def top(self) -> Path:
        """The folder that has the divisions; the submitter's own where it lies below none."""
        return self.folder if self.division is None else self.folder.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One result: the folder that has the runs. `name` is relative to the folder that is checked.

    `model` and the folders of phases are empty where runs are numbered.
    """

    submitter: Submitter
    system: str
    folder: Path
    name: str
    run_folders: tuple[Path, ...]
    stray: tuple[str, ...]
    benchmark: Benchmark = Benchmark.TRAINING
    model: str = ""
    phases: tuple[str, ...] = ()
    datasize_folders: tuple[Path, ...] = ()
    datagen_folders: tuple[Path, ...] = ()


def find_places(root: Path) -> Iterator[Place]:
    """All results below `root`, in order; `UsageError` where there is none."""
    found = False
    for submitter in find_submitters(root):
        for place in _results_of(submitter, root.resolve()):
            found = True
            yield place
    if not found:
        raise UsageError(
            "No results are here",
            where=str(root),
            fix="Give a round's folder (with closed/ or open/), or a submitter's (with results/).",
        )


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
    top = root.resolve()
    return [
        submitter.folder.relative_to(top).as_posix()
        for submitter in find_submitters(root)
        if next(_results_of(submitter, top), None) is None
    ]


def folders_of(submitter: Submitter) -> frozenset[str]:
    """The names in a submitter's folder, in lower case."""
    return frozenset(folder.name.lower() for folder in _folders(submitter.folder))


def leaves_of(submitter: Submitter) -> list[Path]:
    """All folders of a submitter that are named by a time, in order."""
    results = _child(submitter.folder, "results")
    return [] if results is None else sorted(_leaves(results))


def edition_of(submitter: Submitter) -> str:
    """The edition that a submitter's tree looks like, by what only that edition has."""
    results = _child(submitter.folder, "results")
    if results is None or not _is_timed(results):
        return "v1.0"
    marks = (
        submitter.top / POOL,
        submitter.folder / POOL,
        submitter.top / SENTINEL,
        submitter.top / submitter.organisation / POOL_MARK,
        submitter.folder / MANIFEST,
        submitter.folder / "code" / DIGEST_FILE,
    )
    if any(mark.exists() for mark in marks):
        return "v3.0"
    stamped = any((leaf / name).exists() for leaf in _leaves(results) for name in (POINTER, PROVENANCE))
    return "v3.0" if stamped else "v2.0"


def _submitter(folder: Path) -> Submitter:
    return Submitter(organisation=folder.name, division=_division(folder.parent.name), folder=folder)


def _division(name: str) -> SubmissionDivision | None:
    return next((division for division in SubmissionDivision if division.value == name.lower()), None)


def _results_of(submitter: Submitter, top: Path) -> Iterator[Place]:
    results = _child(submitter.folder, "results")
    if results is None:
        return
    if _is_timed(results):
        yield from _timed_results(submitter, results, top)
    else:
        yield from _numbered_results(submitter, results, top)


def _is_timed(results: Path) -> bool:
    return any(_benchmark(folder.name) for system in _folders(results) for folder in _folders(system))


def _benchmark(name: str) -> Benchmark | None:
    return next((benchmark for benchmark in Benchmark if benchmark.value == name.lower()), None)


def _timed_results(submitter: Submitter, results: Path, top: Path) -> Iterator[Place]:
    for system in _folders(results):
        for category in _folders(system):
            benchmark = _benchmark(category.name)
            for model in _folders(category) if benchmark else ():
                yield _timed_place(submitter, system.name, benchmark or Benchmark.TRAINING, model, top)


def _timed_place(submitter: Submitter, system: str, benchmark: Benchmark, model: Path, top: Path) -> Place:
    runs = _child(model, Phase.RUN) if benchmark is Benchmark.TRAINING else model
    stray = [] if runs is None else [name for name in _names(runs) if not _is_known(name)]
    if benchmark is Benchmark.TRAINING:
        stray += [name for name in _names(model) if name.lower() not in set(Phase)]
    return Place(
        submitter=submitter,
        system=system,
        folder=model,
        name=model.relative_to(top).as_posix(),
        run_folders=_times(runs),
        stray=tuple(stray),
        benchmark=benchmark,
        model=model.name,
        phases=tuple(folder.name.lower() for folder in _folders(model)),
        datasize_folders=_times(_child(model, Phase.DATASIZE)),
        datagen_folders=_times(_child(model, Phase.DATAGEN)),
    )


def _is_known(name: str) -> bool:
    return is_time(name) or name in _KNOWN_BESIDE_TIMES


def _times(folder: Path | None) -> tuple[Path, ...]:
    return () if folder is None else tuple(each for each in _folders(folder) if is_time(each.name))


def _leaves(folder: Path) -> Iterator[Path]:
    for path, folders, _ in os.walk(folder):
        here = Path(path)
        yield from (here / name for name in folders if is_time(name))
        folders[:] = [name for name in folders if not is_time(name)]


def _numbered_results(submitter: Submitter, results: Path, top: Path) -> Iterator[Place]:
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
                name=here.relative_to(top).as_posix(),
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


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def _folders(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise Unavailable(f"This folder cannot be listed: {error.strerror}", where=str(folder)) from error
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _child(folder: Path, name: str) -> Path | None:
    return next((entry for entry in _folders(folder) if entry.name.lower() == name), None)
