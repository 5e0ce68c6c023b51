"""`penstock submission rules`: list the rules, or explain one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.submission.rules.rule import Rule


def rules(
    rule_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The rule to explain.")] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """List all rules; or explain one, with an example that passes and one that fails.

    Examples:

      penstock submission rules

      penstock submission rules sizing.steps
    """
    from penstock.submission.rules import RULES, rule_by_id

    chosen = RULES if rule_id is None else (rule_by_id(rule_id),)

    def draw(console: Console) -> None:
        if rule_id is None:
            table("Rules", [{"id": rule.id, "title": rule.title} for rule in chosen])(console)
            return
        for key, value in _explained(chosen[0]).items():
            said = ", ".join(value) if isinstance(value, list) else value
            console.print(f"{key:>9}: {said}", markup=False)

    Terminal(as_json=as_json).result({"rules": [_explained(rule) for rule in chosen]}, draw)


def _explained(rule: Rule) -> dict[str, str | list[str]]:
    return {
        "id": rule.id,
        "title": rule.title,
        "editions": list(rule.editions),
        "source": rule.source,
        "formula": rule.formula,
        "passes": rule.passes,
        "fails": rule.fails,
    }
