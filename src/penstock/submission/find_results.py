"""Find the results in a round's, a division's or one submitter's folder; only names are read.

v1.0 numbers its runs (run1, run2), later editions name them by time (`tree_layout` has that tree).
Invariant: an unknown entry is reported as stray, and is never fatal.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, UsageError
from penstock.submission.code_image import DIGEST_FILE, POINTER, POOL, POOL_MARK
from penstock.submission.tree_layout import (
    MANIFEST,
    PROVENANCE,
    SENTINEL,
    Benchmark,
    SubmissionPhase,
    is_result_dir_name,
)
from penstock.workload.mlperf_divisions import SubmissionDivision

V1_REPORT_FILE: Final = "mlperf_storage_report.json"
_RUN: Final = re.compile(r"run[_-]?(\d+)", re.IGNORECASE)
_KNOWN_BESIDE_RUNS: Final = frozenset({V1_REPORT_FILE, "runs"})
_KNOWN_BESIDE_TIMES: Final = frozenset({"results.json", "results.csv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """One organisation's folder in one division; None if the path does not name the division."""

    organisation: str
    division: SubmissionDivision | None
    folder: Path

    @property
    def top(self) -> Path:
        """The folder of the divisions; the submitter's own if it is below none."""
        return self.folder if self.division is None else self.folder.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLocation:
    """One result: the folder of its runs. `name` is relative to the checked folder.

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


def find_results(root: Path) -> Iterator[ResultLocation]:
    """All results below `root`, in order; `UsageError` if there are none."""
    is_empty = True
    for submitter in find_submitters(root):
        for location in _find_in(submitter, root.resolve()):
            is_empty = False
            yield location
    if is_empty:
        raise UsageError(
            "No results found",
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


def submitters_without_results(root: Path) -> list[str]:
    """The folders of a round or a division without results, which no finding would mention."""
    top = root.resolve()
    return [
        submitter.folder.relative_to(top).as_posix()
        for submitter in find_submitters(root)
        if next(_find_in(submitter, top), None) is None
    ]


def list_folders(submitter: Submitter) -> frozenset[str]:
    """The names in a submitter's folder, in lower case."""
    return frozenset(folder.name.lower() for folder in _folders(submitter.folder))


def find_result_dirs(submitter: Submitter) -> list[Path]:
    """All result directories of a submitter in a tree with runs named by time, in order."""
    results = _child(submitter.folder, "results")
    return [] if results is None else sorted(_walk_result_dirs(results))


def detect_edition(submitter: Submitter) -> str:
    """Detect the edition of a submitter's tree by files that only that edition has."""
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
    has_provenance = any(
        (folder / name).exists() for folder in _walk_result_dirs(results) for name in (POINTER, PROVENANCE)
    )
    return "v3.0" if has_provenance else "v2.0"


def _submitter(folder: Path) -> Submitter:
    return Submitter(organisation=folder.name, division=_division(folder.parent.name), folder=folder)


def _division(name: str) -> SubmissionDivision | None:
    return next((division for division in SubmissionDivision if division.value == name.lower()), None)


def _benchmark(name: str) -> Benchmark | None:
    return next((benchmark for benchmark in Benchmark if benchmark.value == name.lower()), None)


def _find_in(submitter: Submitter, top: Path) -> Iterator[ResultLocation]:
    results = _child(submitter.folder, "results")
    if results is None:
        return
    if _is_timed(results):
        yield from _find_timed(submitter, results, top)
    else:
        yield from _find_numbered(submitter, results, top)


def _is_timed(results: Path) -> bool:
    """Whether runs are named by time: such trees group the results of a system by benchmark."""
    return any(_benchmark(folder.name) for system in _folders(results) for folder in _folders(system))


def _find_timed(submitter: Submitter, results: Path, top: Path) -> Iterator[ResultLocation]:
    for system in _folders(results):
        for category in _folders(system):
            if benchmark := _benchmark(category.name):
                for model in _folders(category):
                    yield _timed_location(submitter, system.name, benchmark, model, top)


def _timed_location(
    submitter: Submitter, system: str, benchmark: Benchmark, model: Path, top: Path
) -> ResultLocation:
    is_training = benchmark is Benchmark.TRAINING
    runs = _child(model, SubmissionPhase.RUN) if is_training else model
    stray = [name for name in _names(runs) if not (is_result_dir_name(name) or name in _KNOWN_BESIDE_TIMES)]
    if is_training:
        stray += [name for name in _names(model) if name.lower() not in set(SubmissionPhase)]
    return ResultLocation(
        submitter=submitter,
        system=system,
        folder=model,
        name=model.relative_to(top).as_posix(),
        run_folders=_timed_folders(runs),
        stray=tuple(stray),
        benchmark=benchmark,
        model=model.name,
        phases=tuple(phase.name.lower() for phase in _folders(model)),
        datasize_folders=_timed_folders(_child(model, SubmissionPhase.DATASIZE)),
        datagen_folders=_timed_folders(_child(model, SubmissionPhase.DATAGEN)),
    )


def _timed_folders(parent: Path | None) -> tuple[Path, ...]:
    return tuple(folder for folder in _folders(parent) if is_result_dir_name(folder.name)) if parent else ()


def _walk_result_dirs(results: Path) -> Iterator[Path]:
    for path, folders, _ in os.walk(results):
        yield from (Path(path, name) for name in folders if is_result_dir_name(name))
        folders[:] = [name for name in folders if not is_result_dir_name(name)]


def _find_numbered(submitter: Submitter, results: Path, top: Path) -> Iterator[ResultLocation]:
    for path, folders, names in os.walk(results):
        folders.sort()
        folder = Path(path)
        runs = _numbered_runs(folder) or _numbered_runs(folder / "runs")
        if runs or V1_REPORT_FILE in names or _has_unnamed_runs(folder):
            folders.clear()
            steps = folder.relative_to(results).parts
            yield ResultLocation(
                submitter=submitter,
                system=steps[0] if len(steps) > 1 else "",
                folder=folder,
                name=folder.relative_to(top).as_posix(),
                run_folders=runs,
                stray=tuple(
                    entry.name
                    for entry in sorted(folder.iterdir())
                    if entry.name not in _KNOWN_BESIDE_RUNS
                    and not (entry.is_dir() and _RUN.fullmatch(entry.name))
                ),
            )


def _has_unnamed_runs(folder: Path) -> bool:
    """Whether runs have other names: their result is found, so that rules report the names."""
    return any((run / "summary.json").exists() for run in _folders(folder))


def _numbered_runs(folder: Path) -> tuple[Path, ...]:
    """The folders of runs, in the order of their numbers."""
    if not folder.is_dir():
        return ()
    runs = [(int(match[1]), run) for run in _folders(folder) if (match := _RUN.fullmatch(run.name))]
    return tuple(run for _, run in sorted(runs))


def _names(folder: Path | None) -> list[str]:
    return (
        sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(".")) if folder else []
    )


def _folders(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise Unavailable(f"This folder cannot be listed: {error.strerror}", where=str(folder)) from error
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _child(folder: Path, name: str) -> Path | None:
    return next((entry for entry in _folders(folder) if entry.name.lower() == name), None)
