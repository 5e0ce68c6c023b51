"""The files of a report: planned as names and texts, then written, each in one step.

    FOLDER/report.html results.csv results.json      all results
    FOLDER/RESULT/results.json results.csv           one of them, below the same path as in its tree
    FOLDER/RESULT/mlperf_storage_report.json         of v1.0

Invariant: a file in a submitter's tree is only ever added or, where it is our own, replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.results.durable import write_text
from penstock.submission.find_results import V1_REPORT_FILE
from penstock.submission.reports.figures_page import figures_page
from penstock.submission.reports.findings_export import to_csv
from penstock.submission.reports.result_report import (
    CSV_FILE,
    FORMAT_VERSION,
    RESULT_COLUMNS,
    report_document,
    reports_document,
)
from penstock.submission.tree_layout import CHECKED_BENCHMARKS, RESULTS_FILE

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.reports.result_report import ResultReport

PAGE_FILE: Final = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file that is to be written."""

    path: Path
    text: str


def plan_folder(folder: Path, reported: Sequence[ResultReport], edition: Edition) -> Iterator[PlannedFile]:
    """All files of a report in a folder of its own."""
    yield PlannedFile(path=folder / PAGE_FILE, text=figures_page(reported, edition.edition))
    yield PlannedFile(path=folder / CSV_FILE, text=_rows(reported))
    yield PlannedFile(path=folder / RESULTS_FILE, text=_json(reports_document(reported, edition)))
    for each in reported:
        here = folder / each.judged.name
        yield PlannedFile(path=here / CSV_FILE, text=_rows([each]))
        yield PlannedFile(path=here / RESULTS_FILE, text=_json(report_document(each)))
        if each.v1 is not None:
            yield PlannedFile(path=here / V1_REPORT_FILE, text=_json(each.v1))


def plan_tree(reported: Sequence[ResultReport]) -> tuple[list[PlannedFile], list[str]]:
    """Files beside the runs in the tree itself, and a sentence for each that stays as it is."""
    planned: list[PlannedFile] = []
    kept: list[str] = []
    by_place: dict[Path, list[ResultReport]] = {}
    for each in reported:
        by_place.setdefault(each.place, []).append(each)
    for place, here in by_place.items():
        content = _content(here)
        if content is None or not any(each.figures.found for each in here):
            kept.append(f"{here[0].judged.name}: its report cannot be made: {'; '.join(_missing(here))}")
        elif place.exists() and not _is_ours(place):
            kept.append(f"{place}: is there already, and not from here; it stays as it is")
        else:
            planned.append(PlannedFile(path=place, text=_json(content)))
            if place.name == RESULTS_FILE:
                planned.append(PlannedFile(path=place.with_name(CSV_FILE), text=_rows(here)))
    return planned, kept


def write_files(files: Sequence[PlannedFile]) -> list[str]:
    """Write them; the names of what was written."""
    for file in files:
        write_text(file.path.parent, file.path.name, file.text)
    return [str(file.path) for file in files]


def _content(here: Sequence[ResultReport]) -> Mapping[str, Any] | None:
    """What stands in the one file of a place, which may hold results of several accelerators."""
    if here[0].place.name == V1_REPORT_FILE:
        return here[0].v1
    if len(here) == 1:
        return report_document(here[0])
    return {"format": FORMAT_VERSION, "results": [report_document(each) for each in here]}


def _missing(here: Sequence[ResultReport]) -> list[str]:
    if here[0].benchmark not in CHECKED_BENCHMARKS:
        return [f"results of {here[0].benchmark.value} are not judged here"]
    return [text for each in here for text in each.figures.missing] or ["a field of a summary is missing"]


def _is_ours(place: Path) -> bool:
    """v1.0 has a report of its own form, so nobody can tell whose it is: those stay."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT_VERSION


def _rows(reported: Sequence[ResultReport]) -> str:
    return to_csv(RESULT_COLUMNS, (each.row for each in reported))


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
