"""`penstock checkpoint`: can storage take checkpoints and give them back, and how fast? One module a verb."""

from __future__ import annotations

import typer

from penstock.cli.checkpoint import (
    convert,
    diff,
    drop,
    flush,
    halt,
    ls,
    models,
    plan,
    rebuild,
    rm,
    run,
    show,
    size,
    status,
    study,
    verify,
)

app = typer.Typer(no_args_is_help=True, help="Can it take and give back checkpoints, and how fast?")


@app.callback()
def checkpoint() -> None:
    """Group the verbs of checkpoints."""


app.command()(convert.convert)
app.command()(diff.diff)
app.command()(drop.drop)
app.command()(flush.flush)
app.command()(halt.halt)
app.command("ls")(ls.list_checkpoints)
app.command()(models.models)
app.command()(plan.plan)
app.command()(rebuild.rebuild)
app.command("rm")(rm.remove)
app.command()(run.run)
app.command()(rebuild.scavenge)
app.command()(show.show)
app.command()(size.size)
app.command()(status.status)
app.command()(study.study)
app.command()(verify.verify)
