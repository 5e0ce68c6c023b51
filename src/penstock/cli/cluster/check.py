"""`penstock cluster check`: whether the hosts of a collected cluster are alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.cluster.facts.likeness import Check

_COLOURS = {"pass": "green", "warning": "yellow", "not checked": "yellow", "fail": "red"}
_EXIT_CODES = {"pass": 0, "warning": 0, "not checked": 3, "fail": 1}


def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `penstock cluster collect` has written.")
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Compare the hosts: memory, cores, kernel, versions, mounts, settings, clocks.

    Exits with 1 where hosts differ, with 3 where something could not be compared.

    Examples:

      penstock cluster check cluster.json

      penstock cluster check cluster.json --json
    """
    from dataclasses import asdict

    from penstock.cluster.facts.likeness import check_likeness, overall
    from penstock.cluster.facts.model import read_cluster

    facts = read_cluster(file)
    checks = check_likeness(facts)
    verdict = overall(checks)
    document = {
        "verdict": verdict,
        "is_partial": facts.is_partial,
        "hosts": [each.host for each in facts.present],
        "checks": [asdict(each) for each in checks],
    }
    Terminal(as_json=as_json).result(document, lambda console: _draw(console, checks))
    if _EXIT_CODES[verdict]:
        raise typer.Exit(_EXIT_CODES[verdict])


def _draw(console: Console, checks: Sequence[Check]) -> None:
    """One line a check; what is not as it should be is followed by its fix."""
    from rich.markup import escape

    width = max(len(each.subject) for each in checks)
    for each in checks:
        verdict = f"[{_COLOURS[each.verdict]}]{each.verdict:<11}[/]"
        console.print(f"{verdict} {each.subject:<{width}}  {escape(each.found)}")
        if each.fix:
            console.print(f"{'':<11} {'':<{width}}  [italic]{escape(each.fix)}[/italic]")
