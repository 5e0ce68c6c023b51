"""`penstock checkpoint`: can storage take checkpoints and give them back, and how fast? One module a verb."""

from __future__ import annotations

import typer

from penstock.cli.checkpoint import models, run, size

app = typer.Typer(no_args_is_help=True, help="Can it take and give back checkpoints, and how fast?")


@app.callback()
def checkpoint() -> None:
    """Group the verbs of checkpoints."""


app.command()(models.models)
app.command()(run.run)
app.command()(size.size)
