"""`penstock checkpoint models`: the models that are shipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from rich.console import Console


def models(*, as_json: JsonFlag = False) -> None:
    """List the models whose checkpoints are known, with their sizes.

    Examples:

      penstock checkpoint models

      penstock checkpoint models --json
    """
    from penstock.workload.shipped_catalog import cards

    found = [_facts(name) for name in cards()]
    Terminal(as_json=as_json).result({"models": found}, lambda console: _draw(console, found))


def _facts(name: str) -> dict[str, Any]:
    from fractions import Fraction

    from penstock.cli.checkpoint.words import layout_of
    from penstock.workload.checkpoint_model import load_model
    from penstock.workload.shipped_catalog import cards

    model = load_model(name)
    layout = layout_of(model, ranks=None, scale=Fraction(1), subset=False)
    split = model.workload.model.parallelism
    return {
        "name": name,
        "also": list(cards()[name].aliases),
        "about": model.about,
        "ranks": layout.num_processes,
        "tensor": split.tensor,
        "pipeline": split.pipeline,
        "data": layout.mesh.data,
        "zero_stage": split.zero_stage,
        "parameters": layout.num_parameters,
        "files": layout.num_files,
        "total_bytes": layout.total_bytes,
    }


def _draw(console: Console, found: list[dict[str, Any]]) -> None:
    from penstock.units import format_bytes

    for model in found:
        also = f" (DLIO's {', '.join(model['also'])})" if model["also"] else ""
        console.print(f"[bold]{model['name']}[/bold]{also}")
        console.print(f"  [italic]{model['about']}[/italic]")
        console.print(
            f"  {format_bytes(model['total_bytes'])} in {model['files']:,} files of {model['ranks']:,} ranks"
        )
