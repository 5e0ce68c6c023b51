"""`penstock training`: whether a storage can feed N accelerators. One module a verb, or two of one kind."""

from __future__ import annotations

import typer

from penstock.cli.training.data import generate, verify
from penstock.cli.training.plan import plan
from penstock.cli.training.run import run
from penstock.cli.training.size import size, whatif
from penstock.cli.training.sweep import sweep

app = typer.Typer(no_args_is_help=True, help="Can this storage feed N accelerators?")
for _verb in (size, whatif, generate, verify, plan, run, sweep):
    app.command()(_verb)
