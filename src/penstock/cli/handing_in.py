"""The options by which a run becomes part of a submission, and the session that they open."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.terminal import View
    from penstock.cluster.comm import Comm
    from penstock.submission.authoring.data_location import DataLocation
    from penstock.submission.authoring.result_dir import Series
    from penstock.submission.tree_layout import Benchmark
    from penstock.workflows.submission.session import Session
    from penstock.workload.division_rules import SubmissionDivision
    from penstock.workload.spec import Workload

Closed = Annotated[
    bool,
    typer.Option(
        "--closed", help="Refuse what MLPerf Storage's closed division forbids; pytorch loader, drop."
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Refuse what MLPerf Storage's open division forbids.")]
OptionalTree = Annotated[
    str | None,
    typer.Option(
        "--submission", metavar="DIR", help="Leave the run in this tree (`penstock submission init`)."
    ),
]
OptionalSystem = Annotated[
    str | None, typer.Option("--system", metavar="NAME", help="Of the system under test, with --submission.")
]
Tree = Annotated[
    str,
    typer.Option("--submission", metavar="DIR", help="The tree that `penstock submission init` made."),
]
System = Annotated[
    str, typer.Option("--system", metavar="NAME", help="Of the system under test: systems/NAME.yaml.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a run is handed in, and its workload with the place of its bytes."""

    series: Series
    located: DataLocation


def division_of(*, closed: bool, open_: bool) -> SubmissionDivision | None:
    """The division that two flags name, if any."""
    from penstock.workload.division_rules import SubmissionDivision

    if closed and open_:
        raise UsageError("A run is of one division", where="--closed --open", fix="Leave one of them out.")
    if closed:
        return SubmissionDivision.CLOSED
    return SubmissionDivision.OPEN if open_ else None


def series_of(
    tree: str, system: str | None, division: SubmissionDivision | None, *, benchmark: Benchmark, model: str
) -> Series:
    """Where leaves go, or what is missing to know that."""
    from pathlib import Path

    from penstock.submission.authoring.ownership import require_owned_tree
    from penstock.submission.authoring.result_dir import Series

    if division is None:
        raise UsageError(
            "Nothing says in which division the run is handed in",
            where="--submission",
            fix="Add --closed or --open.",
        )
    if system is None:
        raise UsageError(
            "Nothing says which system was run on", where="--submission", fix="Add --system NAME."
        )
    return Series(
        claim=require_owned_tree(Path(tree)),
        division=division,
        system=system,
        benchmark=benchmark,
        model=model,
    )


def locate(series: Series, workload: Workload, data: str) -> DataLocation:
    """The workload with its data at this place, where the division lets it lie."""
    from penstock.submission.authoring.data_location import locate_data
    from penstock.workload.division_rules import require_allowed

    located = locate_data(workload, data)
    paths = [tuple(key.split(".")) for key in located.changes]
    require_allowed(series.division, paths, workload=workload.name)
    return located


def require_results(results: str | None, tree: str | None) -> str:
    """The folder that results go to: one of the two must say it."""
    if (results is None) == (tree is None):
        raise UsageError(
            "Results go to one place",
            where="--results, --submission",
            fix="Give --results DIR, or --submission DIR for a run that is handed in.",
        )
    return results if results is not None else str(tree)


def open_session(entry: Entry, settings: Sequence[str] | None, *, comm: Comm) -> Session:
    """What all leaves of this command share; the program's image is in the pool then. Collective."""
    from datetime import UTC, datetime

    from penstock.environment import process_environment
    from penstock.workflows.submission.session import Session, capture_image

    def clock() -> datetime:
        return datetime.now(UTC)

    return Session(
        series=entry.series,
        image=capture_image(entry.series.claim, comm=comm, clock=clock),
        place=entry.located.place,
        changed={**changed_by(settings or ()), **entry.located.changes},
        command=("penstock", *sys.argv[1:]),
        environment=process_environment(),
        clock=clock,
    )


def changed_by(settings: Iterable[str]) -> Mapping[str, Any]:
    """What `--set` options change, under DLIO's keys."""
    from penstock.workload.dlio_keys import our_path
    from penstock.workload.layered_settings import dotted
    from penstock.workload.overrides import parse_settings

    return {dotted(our_path(each.path)): each.value for each in parse_settings(settings)}


def drawn(view: View) -> str:
    """What a view prints, as text for a log."""
    from io import StringIO

    from rich.console import Console as RichConsole

    text = StringIO()
    console: Console = RichConsole(file=text, width=110, highlight=False, soft_wrap=True)
    view(console)
    return text.getvalue()
