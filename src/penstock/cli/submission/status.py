"""`penstock submission status`: how far each result of a tree is, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.submission.authoring.series_state import SeriesProgress


def status(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The tree that `penstock submission init` made.")
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Tell how far each result is: which runs count, what is missing, and what failed on the way.

    A run counts as long as the next one can still follow it as the rules ask, or once the result is whole.

    Examples:

      penstock submission status ~/results
    """
    from datetime import UTC, datetime

    from penstock.submission.authoring.ownership import require_owned_tree
    from penstock.submission.authoring.series_state import list_progress
    from penstock.submission.edition import load_edition

    claim = require_owned_tree(folder)
    found = list_progress(claim, load_edition("v3.0"), now=datetime.now(UTC))
    document = {"organisation": claim.organisation, "results": [_document(each) for each in found]}
    Terminal(as_json=as_json).result(document, lambda console: _draw(console, found))


def _document(progressed: SeriesProgress) -> dict[str, Any]:
    series = progressed.series
    return {
        "division": series.division.value,
        "system": series.system,
        "benchmark": series.benchmark.value,
        "workload": series.model,
        "accelerator": progressed.accelerator,
        "num_accelerators": progressed.num_accelerators,
        "num_runs": progressed.num_runs,
        "num_runs_wanted": progressed.num_wanted,
        "lacks": list(progressed.lacks),
        "attempts": [
            {"folder": str(each.folder), "outcome": each.outcome, "why": each.why}
            for each in progressed.attempts
        ],
        "unread": list(progressed.unread),
    }


def _draw(console: Console, found: Sequence[SeriesProgress]) -> None:
    table("Results", [_row(each) for each in found])(console)
    for each in found:
        for lack in each.lacks:
            console.print(f"{each.series.system} {each.series.model} lacks {lack}", markup=False)
        for attempt in each.attempts:
            console.print(f"{attempt.outcome}: {attempt.folder}: {attempt.why}", markup=False)
        for text in each.unread:
            console.print(f"cannot be read: {text}", markup=False)


def _row(progressed: SeriesProgress) -> dict[str, str]:
    series = progressed.series
    number = "?" if progressed.num_accelerators is None else str(progressed.num_accelerators)
    return {
        "division": series.division.value,
        "system": series.system,
        "workload": series.model,
        "accelerators": f"{number} {progressed.accelerator}".strip(),
        "runs": f"{progressed.num_runs} of {progressed.num_wanted}",
        "state": "lacks something" if progressed.lacks else "whole",
    }
