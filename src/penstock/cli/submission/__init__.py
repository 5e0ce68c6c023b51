"""`penstock submission`: is a result valid, and why."""

from __future__ import annotations

import typer

from penstock.cli.submission.check import check
from penstock.cli.submission.rules import rules

app = typer.Typer(no_args_is_help=True, help="Is a submission valid: judge its files, explain the rules.")
app.command()(check)
app.command()(rules)


@app.callback()
def submission() -> None:
    """Group the verbs of submissions."""
