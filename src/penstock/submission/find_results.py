"""Find the results in the folder of a round, a division or one submitter; only names are read.

    results/SYSTEM/training/MODEL/run/20260102_030405/        later editions (`tree_layout` has that tree)
    results/SYSTEM/WORKLOAD/run1 ... run5                     v1.0; or runs/run1, or any_name_run_1
    results/SYSTEM/WORKLOAD/mlperf_storage_report.json        next to its runs, in runs/, or some levels above

v1.0 prescribes no name other than the report's: a folder is recognized as a run by its name, or by a summary
in it or in the folders of its clients. Invariant: an unknown entry is named, either as stray in a result or
as a leftover, and is never fatal.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, UsageError
from penstock.submission.tree_layout import (
    RESULTS_FILE,
    SENTINEL,
    SUMMARY,
    Benchmark,
    SubmissionPhase,
    find_file,
    find_folder,
    is_result_dir_name,
    list_folder,
    list_links,
    list_subfolders,
)
from penstock.workload.mlperf_divisions import SubmissionDivision

V1_REPORT_FILE: Final = "mlperf_storage_report.json"
_KNOWN_FILES: Final = frozenset({RESULTS_FILE, "results.csv"})
_RUN: Final = re.compile(r"(.*[_.-])?run[_-]?(\d+)", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"(\d+)")
_RUNS: Final = "runs"
_DIVISIONS: Final = {division.value: division for division in SubmissionDivision}
_BENCHMARKS: Final = {benchmark.value: benchmark for benchmark in Benchmark}
_DESCRIPTIONS: Final = "systems"
_NEVER_RESULTS: Final = frozenset({"code", "datagen", "datasize", "generation_logs", _DESCRIPTIONS})
"""Folders whose content may look like runs: copies of the code have test data, data generation has logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """One organization's folder in one division. The division is None if the path does not name it."""

    organisation: str
    division: SubmissionDivision | None
    folder: Path

    @property
    def top(self) -> Path:
        """The folder that holds the divisions, or the submitter's own folder if no division is above it."""
        return self.folder if self.division is None else self.folder.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLocation:
    """One result: the folder of its runs. `name` is relative to the checked folder.

    `model` and the folders of phases are empty if runs are numbered.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTree:
    """The contents of a folder; all names are relative to it.

    `leftovers` are folders of results/ that belong to no result, `unreadable` has the folders that cannot be
    listed, and `without_results` the submitters without results.
    """

    submitters: tuple[Submitter, ...]
    results: tuple[ResultLocation, ...]
    leftovers: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    without_results: tuple[str, ...] = ()


def search_tree(root: Path) -> FoundTree:
    """Find all results below `root`, in order; raise `UsageError` if there is no such folder."""
    top = root.resolve()
    submitters = tuple(find_submitters(root))
    results: list[ResultLocation] = []
    leftovers: list[Path] = []
    unreadable: list[str] = []
    without_results: list[str] = []
    for submitter in submitters:
        name = submitter.folder.relative_to(top).as_posix()
        try:
            found, left = _search_submitter(submitter, top)
        except Unavailable as error:  # one submitter's folder must not stop the search in others
            unreadable.append(f"{name}: {error}")
            continue
        results += found
        if found:
            leftovers += left
        else:
            without_results.append(name)
    return FoundTree(
        submitters=submitters,
        results=tuple(results),
        leftovers=tuple(path.relative_to(top).as_posix() for path in leftovers),
        unreadable=tuple(unreadable),
        without_results=tuple(without_results),
    )


def require_results(found: FoundTree, root: Path) -> tuple[ResultLocation, ...]:
    """Return the results of a tree; raise `UsageError` if there are none."""
    if found.results:
        return found.results
    if (root / SENTINEL).is_file():
        raise Unavailable(
            "There are no results in this tree yet",
            where=str(root),
            fix=f"See what is missing with `penstock submission status {shlex.quote(str(root))}`.",
        )
    top = root.resolve()
    above = (path.parent for path in (top, *top.parents) if path.name.lower() == "results")
    submitter = next((path for path in above if find_folder(path, _DESCRIPTIONS)), None)
    raise UsageError(
        "No results found" + "".join(f"; {reason}" for reason in found.unreadable),
        where=str(root),
        fix=(
            "Give a round's folder (with closed/ or open/), or a submitter's (with results/)."
            if submitter is None
            else f"Give the submitter's folder, {submitter}: a result is judged with the other files there."
        ),
    )


def find_submitters(root: Path) -> Iterator[Submitter]:
    """Yield the submitters at or below `root`, which may also hold the folders of several rounds."""
    if not root.is_dir():
        raise UsageError("There is no such folder", where=str(root), fix="Give a round's or a submitter's.")
    top = root.resolve()
    if find_folder(top, "results"):
        folders = [top]
    elif top.name.lower() in _DIVISIONS:
        folders = list_subfolders(top)
    else:
        below = list_subfolders(top)
        divisions = [folder for folder in below if folder.name.lower() in _DIVISIONS] or [
            folder
            for round_ in below
            for folder in list_subfolders(round_)
            if folder.name.lower() in _DIVISIONS
        ]
        folders = [folder for division in divisions for folder in list_subfolders(division)]
    for folder in folders:
        division = _DIVISIONS.get(folder.parent.name.lower())
        yield Submitter(organisation=folder.name, division=division, folder=folder)


def find_result_dirs(submitter: Submitter) -> list[Path]:
    """Return all result directories of a submitter, in order, in a tree whose runs are named by time."""
    results = find_folder(submitter.folder, "results")
    return [] if results is None else sorted(walk_result_dirs(results))


def walk_result_dirs(results: Path) -> Iterator[Path]:
    """Yield the folders below `results` that are named by a time."""
    for path, folders, _ in os.walk(results):
        yield from (Path(path, name) for name in folders if is_result_dir_name(name))
        folders[:] = [name for name in folders if not is_result_dir_name(name)]


def list_benchmarks(results: Path) -> frozenset[Benchmark]:
    """Return the benchmarks that have folders in systems' results; empty if runs are not named by time."""
    return frozenset(
        benchmark
        for system in list_subfolders(results)
        for folder in list_subfolders(system)
        if (benchmark := _BENCHMARKS.get(folder.name.lower()))
    )


def _search_submitter(submitter: Submitter, top: Path) -> tuple[list[ResultLocation], list[Path]]:
    """Find a submitter's results, and the folders that belong to none."""
    results = find_folder(submitter.folder, "results")
    if results is None:
        if (linked := find_file(submitter.folder, "results")) and linked.is_symlink():
            raise Unavailable("This is a link, and links are not searched", where=str(linked))
        return [], []
    list_folder(find_folder(submitter.folder, _DESCRIPTIONS))  # fails if they cannot be listed
    if list_benchmarks(results):
        locations, leftovers = _search_timed(submitter, results, top)
    else:
        numbered, leftovers = _search_numbered(results)
        locations = [_numbered_location(submitter, results, top, found) for found in numbered]
    links = (
        entry
        for folder in (results, *list_subfolders(results))
        for entry in list_folder(folder)
        if entry.is_symlink() and entry.is_dir()
    )
    return locations, [*leftovers, *links]


def _search_timed(submitter: Submitter, results: Path, top: Path) -> tuple[list[ResultLocation], list[Path]]:
    """Find the models' folders with result directories; systems and models without any are leftovers."""
    locations: list[ResultLocation] = []
    leftovers: list[Path] = []
    for system in list_subfolders(results):
        models = [
            (benchmark, model)
            for category in list_subfolders(system)
            if (benchmark := _BENCHMARKS.get(category.name.lower()))
            for model in _list_models(category, benchmark)
        ]
        # A result directory or a file of figures shows that a result is meant to be here.
        claimed = [
            _timed_location(submitter, system.name, benchmark, model, top)
            for benchmark, model in models
            if any(walk_result_dirs(model)) or find_file(model, RESULTS_FILE) is not None
        ]
        with_results = {location.folder for location in claimed}
        locations += claimed
        leftovers += [model for _, model in models if model not in with_results] if claimed else [system]
    return locations, leftovers


def _list_models(category: Path, benchmark: Benchmark) -> list[Path]:
    """List the folders of a benchmark's models; for vector search, these are indexes in engines' folders."""
    if benchmark is not Benchmark.VECTOR_SEARCH:
        return list_subfolders(category)
    return [
        index
        for engine in list_subfolders(category)
        for index in ([engine] if find_folder(engine, SubmissionPhase.RUN) else list_subfolders(engine))
    ]


def _timed_location(
    submitter: Submitter, system: str, benchmark: Benchmark, model: Path, top: Path
) -> ResultLocation:
    has_phases = benchmark is not Benchmark.CHECKPOINTING
    runs = find_folder(model, SubmissionPhase.RUN) if has_phases else model
    beside_runs = [entry.name for entry in list_folder(runs)]
    stray = [name for name in beside_runs if not (is_result_dir_name(name) or name in _KNOWN_FILES)]
    if has_phases:
        known = {*SubmissionPhase, *_KNOWN_FILES}
        stray += [entry.name for entry in list_folder(model) if entry.name.lower() not in known]
    run_folders, datasize_folders, datagen_folders = (
        tuple(
            folder for folder in list_subfolders(parent, with_links=True) if is_result_dir_name(folder.name)
        )
        for parent in (
            runs,
            find_folder(model, SubmissionPhase.DATASIZE),
            find_folder(model, SubmissionPhase.DATAGEN),
        )
    )
    stray += _links_inside(model, (*datasize_folders, *datagen_folders, *run_folders))
    return ResultLocation(
        submitter=submitter,
        system=system,
        folder=model,
        name=model.relative_to(top).as_posix(),
        run_folders=run_folders,
        stray=tuple(stray),
        benchmark=benchmark,
        model=model.name,
        phases=tuple(phase.name.lower() for phase in list_subfolders(model)),
        datasize_folders=datasize_folders,
        datagen_folders=datagen_folders,
    )


def _links_inside(result: Path, folders: Iterable[Path]) -> list[str]:
    """List symbolic links inside the folders of runs. Benchmarks create none; targets are not read."""
    return [
        f"the link {link.relative_to(result).as_posix()}" for folder in folders for link in list_links(folder)
    ]


_Numbered = tuple[Path, tuple[Path, ...], tuple[str, ...]]
"""A result of v1.0: its folder, its runs in order, and the stray entries in its folders."""


def _numbered_location(submitter: Submitter, results: Path, top: Path, found: _Numbered) -> ResultLocation:
    folder, run_folders, stray = found
    above = run_folders[0].parent if run_folders else folder
    steps = (above.parent if above.name.lower() == _RUNS else above).relative_to(results).parts
    return ResultLocation(
        submitter=submitter,
        system=steps[0] if len(steps) > 1 else "",
        folder=folder,
        name=folder.relative_to(top).as_posix(),
        run_folders=run_folders,
        stray=(*stray, *_links_inside(folder, run_folders)),
    )


def _search_numbered(folder: Path) -> tuple[list[_Numbered], list[Path]]:
    """Find v1.0's results at or below a folder, in order, and the folders that belong to none."""
    if result := _numbered_result(folder):
        return [result], []
    results: list[_Numbered] = []
    leftovers: list[Path] = []
    for entry in list_subfolders(folder):
        if entry.name.lower() == _DESCRIPTIONS:  # some submitters keep descriptions among their results
            continue
        found, left = ([], []) if entry.name.lower() in _NEVER_RESULTS else _search_numbered(entry)
        results += found
        leftovers += left if found else [entry]
    return results, leftovers


def _numbered_result(folder: Path) -> _Numbered | None:
    has_report = find_file(folder, V1_REPORT_FILE) is not None
    runs = _find_runs(folder)
    if runs and (
        has_report
        or find_file(runs[0].parent, V1_REPORT_FILE)
        or any(find_file(run, SUMMARY) or list_clients(run) for run in runs)
    ):
        return folder, runs, _list_stray(folder, runs, runs[0].parent)
    if not has_report:
        return None
    below = [result for entry in list_subfolders(folder) for result in _search_numbered(entry)[0]]
    if len(below) > 1:  # each is a result of its own, and the report above belongs to none of them
        return None
    if not below:
        return folder, (), _list_stray(folder, (), folder)
    place, runs, stray = below[0]
    on_the_way = place.relative_to(folder).parts[0]
    here = [name for name in _list_stray(folder, runs, folder) if name != on_the_way]
    return folder, runs, (*here, *stray)


def _find_runs(folder: Path) -> tuple[Path, ...]:
    """Find the runs in `folder` or in its runs/ by their names, or otherwise by the summaries in them."""
    places = [place for place in (folder, find_folder(folder, _RUNS)) if place is not None]
    for place in places:
        matches = [
            (match, run)
            for run in list_subfolders(place, with_links=True)
            if (match := _RUN.fullmatch(run.name))
        ]
        # Plain names take precedence over prefixed ones: if there is a run1, old_run_1 is not a run.
        named = [(match, run) for match, run in matches if not match[1]] or matches
        if named:
            return tuple(run for _, run in sorted(named, key=lambda pair: (int(pair[0][2]), pair[1].name)))
    for place in places:
        runs = [
            run
            for run in list_subfolders(place)
            if run.name.lower() not in _NEVER_RESULTS and find_file(run, SUMMARY)
        ]
        if runs:
            return tuple(sorted(runs, key=_natural_order))
    return ()


def _natural_order(run: Path) -> list[tuple[int, str]]:
    """Return a key for sorting that compares digits as numbers: test2 comes before test10."""
    parts = _NUMBERS.split(run.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _list_stray(folder: Path, runs: tuple[Path, ...], with_runs: Path) -> tuple[str, ...]:
    known = {run.name for run in runs} | {with_runs.name} - {folder.name}
    entries = {entry.name for place in {folder, with_runs} for entry in list_folder(place)}
    return tuple(sorted(name for name in entries - known if name.lower() not in (V1_REPORT_FILE, _RUNS)))


def list_clients(run: Path) -> list[Path]:
    """List the folders of a run's clients, each of which has a summary."""
    return [client for client in list_subfolders(run) if find_file(client, SUMMARY)]
