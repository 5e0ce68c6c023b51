"""`penstock cluster`: what these machines are, and whether they are alike. One module a verb."""

from __future__ import annotations

import typer

from penstock.cli.cluster.check import check
from penstock.cli.cluster.collect import collect

app = typer.Typer(no_args_is_help=True, help="What are these machines, and are they alike?")


@app.callback()
def cluster() -> None:
    """Group the verbs of clusters."""


app.command()(collect)
app.command()(check)
