"""`penstock trace`: why was it slow? One module a verb."""

from __future__ import annotations

import typer

from penstock.cli.trace import comparing, questions, record
from penstock.cli.trace.load import load
from penstock.cli.trace.sql import sql

app = typer.Typer(no_args_is_help=True, help="Why was it slow? What did the I/O really do?")


@app.callback()
def trace() -> None:
    """Group the verbs of traces."""


_PROGRAM = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

app.command(context_settings=_PROGRAM)(record.record)
app.command()(load)
app.command()(sql)
app.command()(questions.summary)
app.command()(questions.ops)
app.command(name="files")(questions.files_)
app.command()(questions.classes)
app.command()(questions.sizes)
app.command()(questions.file)
app.command()(questions.ranks)
app.command()(questions.timeline)
app.command()(questions.overlap)
app.command()(comparing.compare)
app.command()(comparing.expect)
app.command()(comparing.export)
app.command()(comparing.synthesize)
