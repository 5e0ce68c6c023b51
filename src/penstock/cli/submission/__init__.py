"""`penstock submission`: make a submission; is it valid, and why? One module a verb."""

from __future__ import annotations

import typer

from penstock.cli.submission.check import check
from penstock.cli.submission.describe import describe
from penstock.cli.submission.init import init
from penstock.cli.submission.report import report
from penstock.cli.submission.rules import rules
from penstock.cli.submission.run import app as run_app
from penstock.cli.submission.status import status

app = typer.Typer(no_args_is_help=True, help="Make a submission; judge its files; explain the rules.")
app.command()(init)
app.command()(describe)
app.add_typer(run_app, name="run")
app.command()(status)
app.command()(check)
app.command()(report)
app.command()(rules)


@app.callback()
def submission() -> None:
    """Group the verbs of submissions."""
