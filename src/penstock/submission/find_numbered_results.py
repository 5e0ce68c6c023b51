"""Find the results of v1.0 below a submitter's results/, where no name but the report's is prescribed.

    SYSTEM/WORKLOAD/run1 ... run5              most submitters; or runs/run1, or any_name_run_1
    SYSTEM/WORKLOAD/mlperf_storage_report.json beside the runs, in runs/, or one level or more above them

A folder is a run by its name or by a summary in it, or in its clients' folders. Invariant: what is neither a
result nor part of one is a leftover, and is named once.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.submission.folder_listing import (
    find_file,
    find_folder,
    list_folder,
    list_linked_subfolders,
    list_subfolders,
)
from penstock.submission.tree_layout import SUMMARY

V1_REPORT_FILE: Final = "mlperf_storage_report.json"
_RUN: Final = re.compile(r"(.*[_.-])?run[_-]?(\d+)", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"(\d+)")
_RUNS: Final = "runs"
_DESCRIPTIONS: Final = "systems"
_NEVER_RESULTS: Final = frozenset({"code", "datagen", "datasize", "generation_logs", _DESCRIPTIONS})
"""Copies of the benchmark's code have test data that look like runs, and so has what made the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedResult:
    """A result: the folder that is called so, its runs in order, and what else lies beside them."""

    folder: Path
    run_folders: tuple[Path, ...]
    stray: tuple[str, ...]

    @property
    def above_runs(self) -> Path:
        """The folder that holds the runs, as far as it has a name of its own."""
        above = self.run_folders[0].parent if self.run_folders else self.folder
        return above.parent if above.name.lower() == _RUNS else above


@dataclass(frozen=True, slots=True)
class NumberedResults:
    """All results below a folder, and the folders that belong to none."""

    results: tuple[NumberedResult, ...] = ()
    leftovers: tuple[Path, ...] = ()


def find_numbered_results(folder: Path) -> NumberedResults:
    """The results at or below `folder`, in order."""
    if result := _result_at(folder):
        return NumberedResults((result,))
    below = [
        (entry, NumberedResults() if _is_never_result(entry) else find_numbered_results(entry))
        for entry in list_subfolders(folder)
        if entry.name.lower() != _DESCRIPTIONS  # which some keep among their results
    ]
    return NumberedResults(
        results=tuple(result for _, found in below for result in found.results),
        leftovers=tuple(
            path for entry, found in below for path in (found.leftovers if found.results else (entry,))
        ),
    )


def _is_never_result(folder: Path) -> bool:
    return folder.name.lower() in _NEVER_RESULTS


def _result_at(folder: Path) -> NumberedResult | None:
    has_report = find_file(folder, V1_REPORT_FILE) is not None
    runs = _find_runs(folder)
    if runs and (has_report or find_file(runs[0].parent, V1_REPORT_FILE) or any(map(_has_summary, runs))):
        return NumberedResult(
            folder=folder, run_folders=runs, stray=_list_stray(folder, runs, with_runs=runs[0].parent)
        )
    if not has_report:
        return None
    below = [result for entry in list_subfolders(folder) for result in find_numbered_results(entry).results]
    if len(below) > 1:  # each is a result of its own, and the report above them none of theirs
        return None
    runs = below[0].run_folders if below else ()
    on_the_way = frozenset(below[0].folder.relative_to(folder).parts[:1] if below else ())
    return NumberedResult(
        folder=folder,
        run_folders=runs,
        stray=(
            *(name for name in _list_stray(folder, runs, with_runs=folder) if name not in on_the_way),
            *(below[0].stray if below else ()),
        ),
    )


def _find_runs(folder: Path) -> tuple[Path, ...]:
    """The runs in `folder` or its runs/, by their names, else by the summaries in them."""
    places = [place for place in (folder, find_folder(folder, _RUNS)) if place is not None]
    for place in places:
        if runs := _named_runs(place):
            return runs
    for place in places:
        runs = tuple(
            run for run in list_subfolders(place) if not _is_never_result(run) and find_file(run, SUMMARY)
        )
        if runs:
            return tuple(sorted(runs, key=lambda run: _natural_order(run.name)))
    return ()


def _named_runs(folder: Path) -> tuple[Path, ...]:
    """The folders that are named as runs, in the order of their numbers; plain names before prefixed ones."""
    matches = [(match, run) for run in list_linked_subfolders(folder) if (match := _RUN.fullmatch(run.name))]
    plain = [(match, run) for match, run in matches if not match[1]]
    return tuple(run for _, run in sorted(plain or matches, key=lambda pair: (int(pair[0][2]), pair[1].name)))


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Digits compare as numbers: test2 is before test10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBERS.split(name)]


def _list_stray(folder: Path, runs: tuple[Path, ...], *, with_runs: Path) -> tuple[str, ...]:
    known = {run.name for run in runs} | {with_runs.name} - {folder.name}
    entries = {entry.name for place in {folder, with_runs} for entry in list_folder(place)}
    return tuple(sorted(name for name in entries - known if name.lower() not in (V1_REPORT_FILE, _RUNS)))


def _has_summary(run: Path) -> bool:
    return find_file(run, SUMMARY) is not None or bool(list_clients(run))


def list_clients(run: Path) -> list[Path]:
    """The folders of a run's clients: each has a summary."""
    return [client for client in list_subfolders(run) if find_file(client, SUMMARY)]
