"""`penstock checkpoint diff`: two checkpoints, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.checkpoint.compare import Compared, Comparison

DIFFERENT = 1


def diff(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A checkpoint of any format.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another one, of any format.")],
    *,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Names to compare, as in 'model.*'; repeatable."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell how two checkpoints differ, whatever their formats and however their tensors were cut.

    Exits with 0 if nothing differs and with 1 otherwise. What equal checksums vouch for is not read.

    Examples:

      penstock checkpoint diff /pfs/run/step-100 /pfs/run/step-200

      penstock checkpoint diff /pfs/run/step-100 model.safetensors --only 'model.*' --json
    """
    from dataclasses import asdict

    from penstock.checkpoint import compare

    terminal = Terminal(as_json=as_json)
    with terminal.progress() as progress:
        found = compare.compare(first, second, only=tuple(only or ()), progress=progress)
    document = {**asdict(found), "are_same": found.are_same}
    terminal.result(document, lambda console: _draw(console, found))
    if not found.are_same:
        raise typer.Exit(DIFFERENT)


def _draw(console: Console, found: Comparison) -> None:
    from penstock.checkpoint.compare import Outcome

    unlike = [part for part in found.parts if part.outcome is not Outcome.SAME]
    if unlike:
        table(f"{found.first} and {found.second}", [_row(part) for part in unlike])(console)
    num_same = len(found.parts) - len(unlike)
    console.print(f"{num_same} of {len(found.parts)} parts are the same, {len(unlike)} are not")


def _row(part: Compared) -> dict[str, str]:
    largest = part.largest_difference
    return {
        "name": part.name,
        "outcome": part.outcome.value,
        "first": part.first,
        "second": part.second,
        "elements": str(part.different_elements) if part.different_elements else "",
        "largest": "" if largest is None else f"{largest:.3g}",
    }
