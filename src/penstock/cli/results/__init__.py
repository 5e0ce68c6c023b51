"""`penstock results`: what runs have left."""

from __future__ import annotations

import typer

from penstock.cli.results.compare import compare
from penstock.cli.results.ls import list_runs
from penstock.cli.results.remove import remove, restore
from penstock.cli.results.rerun import rerun
from penstock.cli.results.show import show

app = typer.Typer(
    no_args_is_help=True, help="What runs have left: list, show, compare, repeat, remove, restore."
)
app.command("ls")(list_runs)
app.command()(show)
app.command()(compare)
app.command()(rerun)
app.command("rm")(remove)
app.command()(restore)


@app.callback()
def results() -> None:
    """Group the verbs of results."""
