"""What the questions of `penstock trace` share: the lens as options, and answers in the form asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import Terminal, table
from penstock.cli.trace.opening import opened

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.trace.dimensions import Dimensions
    from penstock.trace.questions.answer import Answer
    from penstock.trace.questions.events_view import EventsView


_WIDE = 1000
_LIE_DOWN_COLUMNS = 10
"""A single row of more columns is shown as a column."""


class AnswerForm(StrEnum):
    """How an answer is printed."""

    TABLE = "table"
    CSV = "csv"
    MARKDOWN = "markdown"


Tiers = Annotated[
    list[str] | None,
    typer.Option("--tier", metavar="NAME=/PATH", help="Files below PATH are of this tier; repeatable."),
]
Classes = Annotated[
    list[str] | None,
    typer.Option(
        "--class", metavar="NAME=REGEX", help="Files whose names match are of this class; repeatable."
    ),
]
Phases = Annotated[
    list[str] | None,
    typer.Option(
        "--phase", metavar="NAME=RULE", help="As flush=name~flush,cat=POSIX; goes before the usual."
    ),
]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="COLUMN,...", help="Columns to ask by: rank, host, op, tier, ..."),
]
FormOption = Annotated[AnswerForm, typer.Option("--format", help="For people, or as CSV or Markdown.")]


def make_lens(
    tiers: Sequence[str] | None, classes: Sequence[str] | None, phases: Sequence[str] | None
) -> Dimensions:
    """The lens that options describe; without tiers, each mount point of this machine is one."""
    from pathlib import Path

    from penstock.errors import UsageError
    from penstock.trace.dimensions import (
        DEFAULT_PHASES,
        Dimensions,
        check_pattern,
        parse_phase,
        parse_tier,
        tiers_of_mounts,
    )

    named: dict[str, list[str]] = {}
    for text in tiers or ():
        name, prefix = parse_tier(text)
        named.setdefault(name, []).append(prefix)
    patterns: dict[str, str] = {}
    for text in classes or ():
        name, equals, pattern = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is not a class", fix="Write for example --class 'weights=^layer-'.")
        patterns[name] = check_pattern(pattern)
    if not named:
        mounts = Path("/proc/mounts")
        named = tiers_of_mounts(mounts.read_text(encoding="utf-8")) if mounts.exists() else {}
    rules = (*map(parse_phase, phases or ()), *DEFAULT_PHASES)
    return Dimensions(tiers=named, file_classes=patterns, phases=rules)


def columns(by: str | None, default: Sequence[str]) -> Sequence[str]:
    """The columns of `--by`."""
    return [each.strip() for each in by.split(",") if each.strip()] if by else default


@contextmanager
def asked(
    files: Sequence[str],
    terminal: Terminal,
    lens: Dimensions,
    *,
    where: str = "",
    dask: str = "",
    strict: bool = False,
) -> Iterator[EventsView]:
    """Traces opened and seen through the lens."""
    from penstock.trace.questions.events_view import view_events

    with opened(files, terminal, where=where, dask=dask, strict=strict) as traces:
        yield view_events(traces.connection, traces.relation, lens)


def show(terminal: Terminal, answers: Sequence[Answer], form: AnswerForm) -> None:
    """Print answers: the first is the main one, whose rows a JSON document has at its top."""
    from penstock.trace.questions import answer as rendering

    main, *others = answers
    if terminal.as_json:
        document: dict[str, Any] = rendering.document(main)
        if others:
            document["tables"] = {answer.name: rendering.document(answer) for answer in others}
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    elif form is AnswerForm.TABLE:
        terminal.result({}, lambda console: _draw(console, answers))
    else:
        draw: Callable[[Answer], str] = rendering.as_csv if form is AnswerForm.CSV else rendering.as_markdown
        sys.stdout.write("\n".join(map(draw, answers)))


def _draw(console: Console, answers: Sequence[Answer]) -> None:
    for answer in answers:
        draw_answer(console, answer)


def draw_answer(console: Console, answer: Answer) -> None:
    """Draw one answer as wide as it is: a number that is cut to fit a terminal is a wrong number."""
    from rich.console import Console as AnyConsole

    from penstock.trace.questions import answer as rendering

    rows = rendering.as_records(answer)
    if len(rows) == 1 and len(answer.columns) > _LIE_DOWN_COLUMNS:
        rows = [{"what": what, "value": value} for what, value in rows[0].items()]
    wide = AnyConsole(file=console.file, width=_WIDE, highlight=False, soft_wrap=True, color_system=None)
    table(answer.title, rows)(wide)
    for note in answer.notes:
        console.print(note, markup=False)
