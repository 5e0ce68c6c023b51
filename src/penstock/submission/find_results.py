"""Find the results in a round's, a division's or one submitter's folder; only names are read.

Later editions than v1.0 name runs by time (`tree_layout` has that tree; `find_numbered_results` the older).
Invariant: an unknown entry is named, as stray beside a result or as a leftover, and is never fatal.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable, UsageError
from penstock.submission.find_numbered_results import NumberedResult, find_numbered_results
from penstock.submission.folder_listing import (
    find_file,
    find_folder,
    list_folder,
    list_linked_subfolders,
    list_links,
    list_subfolders,
)
from penstock.submission.tree_layout import (
    RESULTS_FILE,
    SENTINEL,
    Benchmark,
    SubmissionPhase,
    is_result_dir_name,
)
from penstock.workload.mlperf_divisions import SubmissionDivision

_KNOWN_BESIDE_TIMES: Final = frozenset({RESULTS_FILE, "results.csv"})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTree:
    """What lies below a folder; names are relative to it.

    `leftovers` are folders of results/ that belong to no result, `unreadable` folders that cannot be listed,
    and `without_results` submitters that hand in none.
    """

    submitters: tuple[Submitter, ...]
    results: tuple[ResultLocation, ...]
    leftovers: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    without_results: tuple[str, ...] = ()


def search_tree(root: Path) -> FoundTree:
    """All results below `root`, in order; `UsageError` if there is no such folder."""
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
        except Unavailable as error:  # one submitter's folder must not stop the others
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
    """The results of a tree; `UsageError` if there are none."""
    if not found.results and (root / SENTINEL).is_file():
        raise Unavailable(
            "There are no results in this tree yet",
            where=str(root),
            fix=f"See what is missing with `penstock submission status {root}`.",
        )
    if not found.results:
        above = _find_submitter_above(root.resolve())
        raise UsageError(
            "No results found" + "".join(f"; {reason}" for reason in found.unreadable),
            where=str(root),
            fix=(
                "Give a round's folder (with closed/ or open/), or a submitter's (with results/)."
                if above is None
                else f"Give the submitter's folder, {above}: a result is judged with the files beside it."
            ),
        )
    return found.results


def _find_submitter_above(folder: Path) -> Path | None:
    """The submitter whose results/ has this folder."""
    inside = (path.parent for path in (folder, *folder.parents) if path.name.lower() == "results")
    return next((path for path in inside if find_folder(path, "systems")), None)


def find_submitters(root: Path) -> Iterator[Submitter]:
    """The submitters at or below `root`, which may also hold the folders of several rounds."""
    if not root.is_dir():
        raise UsageError("There is no such folder", where=str(root), fix="Give a round's or a submitter's.")
    top = root.resolve()
    if find_folder(top, "results"):
        yield _submitter(top)
    elif _division(top.name):
        yield from map(_submitter, list_subfolders(top))
    else:
        here = _list_divisions(top)
        for division in here or [each for round_ in list_subfolders(top) for each in _list_divisions(round_)]:
            yield from (_submitter(folder) for folder in list_subfolders(division))


def _list_divisions(top: Path) -> list[Path]:
    return [folder for folder in list_subfolders(top) if _division(folder.name)]


def list_folders(submitter: Submitter) -> frozenset[str]:
    """The names in a submitter's folder, in lower case."""
    return frozenset(folder.name.lower() for folder in list_subfolders(submitter.folder))


def find_result_dirs(submitter: Submitter) -> list[Path]:
    """All result directories of a submitter in a tree with runs named by time, in order."""
    results = find_folder(submitter.folder, "results")
    return [] if results is None else sorted(walk_result_dirs(results))


def walk_result_dirs(results: Path) -> Iterator[Path]:
    """The folders below `results` that are named by a time."""
    for path, folders, _ in os.walk(results):
        yield from (Path(path, name) for name in folders if is_result_dir_name(name))
        folders[:] = [name for name in folders if not is_result_dir_name(name)]


def list_benchmarks(results: Path) -> frozenset[Benchmark]:
    """The benchmarks by which systems sort their results; none where runs are not named by time."""
    return frozenset(
        benchmark
        for system in list_subfolders(results)
        for folder in list_subfolders(system)
        if (benchmark := _benchmark(folder.name))
    )


def _submitter(folder: Path) -> Submitter:
    return Submitter(organisation=folder.name, division=_division(folder.parent.name), folder=folder)


def _division(name: str) -> SubmissionDivision | None:
    return next((division for division in SubmissionDivision if division.value == name.lower()), None)


def _benchmark(name: str) -> Benchmark | None:
    return next((benchmark for benchmark in Benchmark if benchmark.value == name.lower()), None)


def _search_submitter(submitter: Submitter, top: Path) -> tuple[list[ResultLocation], list[Path]]:
    results = find_folder(submitter.folder, "results")
    if results is None:
        if (linked := find_file(submitter.folder, "results")) and linked.is_symlink():
            raise Unavailable("This is a link, and links are not searched", where=str(linked))
        return [], []
    list_folder(find_folder(submitter.folder, "systems"))  # which is read for every result
    if list_benchmarks(results):
        locations, leftovers = _search_timed(submitter, results, top)
    else:
        numbered = find_numbered_results(results)
        locations = [_numbered_location(submitter, results, found, top) for found in numbered.results]
        leftovers = list(numbered.leftovers)
    links = (
        entry
        for folder in (results, *list_subfolders(results))
        for entry in list_folder(folder)
        if entry.is_symlink() and entry.is_dir()
    )
    return locations, [*leftovers, *links]


def _search_timed(submitter: Submitter, results: Path, top: Path) -> tuple[list[ResultLocation], list[Path]]:
    """Every folder of a model with a result directory; a system or a model without any is a leftover."""
    locations: list[ResultLocation] = []
    leftovers: list[Path] = []
    for system in list_subfolders(results):
        models = [
            (benchmark, model)
            for category in list_subfolders(system)
            if (benchmark := _benchmark(category.name))
            for model in _list_models(category, benchmark)
        ]
        found = [(benchmark, model) for benchmark, model in models if _is_claimed(model)]
        locations += [
            _timed_location(submitter, system.name, benchmark, model, top) for benchmark, model in found
        ]
        with_results = {model for _, model in found}
        leftovers += [model for _, model in models if model not in with_results] if found else [system]
    return locations, leftovers


def _is_claimed(model: Path) -> bool:
    """Whether somebody says that a result is here: by a result directory, or by its figures."""
    return any(walk_result_dirs(model)) or find_file(model, RESULTS_FILE) is not None


def _list_models(category: Path, benchmark: Benchmark) -> list[Path]:
    """The folders of a benchmark's models; vector search has an engine's folder above its indexes."""
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
    stray = [name for name in beside_runs if not (is_result_dir_name(name) or name in _KNOWN_BESIDE_TIMES)]
    if has_phases:
        known = {*SubmissionPhase, *_KNOWN_BESIDE_TIMES}
        stray += [entry.name for entry in list_folder(model) if entry.name.lower() not in known]
    run_folders = _timed_folders(runs)
    datasize_folders = _timed_folders(find_folder(model, SubmissionPhase.DATASIZE))
    datagen_folders = _timed_folders(find_folder(model, SubmissionPhase.DATAGEN))
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


def _timed_folders(parent: Path | None) -> tuple[Path, ...]:
    return tuple(folder for folder in list_linked_subfolders(parent) if is_result_dir_name(folder.name))


def _numbered_location(
    submitter: Submitter, results: Path, found: NumberedResult, top: Path
) -> ResultLocation:
    steps = found.above_runs.relative_to(results).parts
    return ResultLocation(
        submitter=submitter,
        system=steps[0] if len(steps) > 1 else "",
        folder=found.folder,
        name=found.folder.relative_to(top).as_posix(),
        run_folders=found.run_folders,
        stray=(*found.stray, *_links_inside(found.folder, found.run_folders)),
    )


def _links_inside(result: Path, folders: Iterable[Path]) -> list[str]:
    """Links within the folders of runs: no benchmark writes any, and a folder behind one is not read."""
    return [
        f"the link {link.relative_to(result).as_posix()}" for folder in folders for link in list_links(folder)
    ]
