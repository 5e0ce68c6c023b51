"""Options and texts that the verbs of results share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from penstock.results.history.kept import KeptRun

Parent = Annotated[
    Path, typer.Option("--results", metavar="FOLDER", help="Where names of runs are looked up.")
]
Status = Annotated[
    str,
    typer.Option(
        metavar="OUTCOME,...",
        help="Only those that ended so: finished, failed, interrupted, running, unreadable, unknown, or "
        "incomplete (nobody saw their end).",
    ),
]
Workload = Annotated[
    str, typer.Option(metavar="TEXT", help="Only those whose workload has this in its name.")
]
OlderThan = Annotated[
    str, typer.Option("--older-than", metavar="AGE|DATE", help="Only those begun before: 2w, 7d, 2026-01-31.")
]


def without_settings(run: dict[str, Any]) -> dict[str, Any]:
    """A run's figures without the values that it was asked for."""
    return {key: value for key, value in run.items() if key != "settings"}


def number(value: float | None, style: str) -> str:
    """A number in its style, or a dash."""
    return "-" if value is None else format(value, style)


def document(run: KeptRun) -> dict[str, Any]:
    """What is known of a run beside its figures, as JSON."""
    return {
        "run": run.id,
        "folder": str(run.path) if run.path else None,
        "name": run.folder,
        "where": run.where.value,
        "batch": run.batch or None,
        "outcome": run.outcome,
        "why": run.why,
        "workload": run.workload,
        "started": run.started.isoformat() if run.started else None,
        "has_entry": run.began is not None,
        "command": list(run.began.command) if run.began else None,
        "working_folder": run.began.working_folder if run.began else None,
    }


def line(run: KeptRun) -> str:
    """A run in one line: its id, unless its name ends with that, its name and its end."""
    name = run.folder if run.folder.endswith(run.id) else f"{run.id}  {run.folder}"
    return f"{name}  {run.outcome}: {run.why}" if run.why else f"{name}  {run.outcome}"
