"""`penstock checkpoint drop`: forget cached steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache_tools import Droppable


def drop(
    cache: Annotated[list[str], typer.Argument(metavar="CACHE...", help="Caches that can be reached here.")],
    *,
    step: Annotated[
        list[int] | None, typer.Option("--step", metavar="N", help="A step to drop; repeatable.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All steps.")] = False,
    durable: Annotated[
        str | None, typer.Option("--durable", metavar="RUN", help="The manager's durable folder or URI.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also steps that may be nowhere else, and open flushes.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Forget steps in CACHE: their files and parity, and what is still to be flushed of them.

    A step that is not durable in the run that --durable names is refused, and then nothing goes.

    Examples:

      penstock checkpoint drop /local/ssd/run --all --durable /pfs/run --dry-run

      penstock checkpoint drop /local/ssd/run --step 100 --durable /pfs/run

      srun --ntasks-per-node=1 penstock checkpoint drop /local/ssd/run --all --force
    """
    from penstock.checkpoint.levels import cache_tools
    from penstock.checkpoint.levels.cache_tools import cache_folder
    from penstock.errors import UsageError

    if bool(step) == every:
        raise UsageError("Which steps are to go is not clear", fix="Give --step N, or --all.")
    terminal = Terminal(as_json=as_json)
    caches = [cache_folder(path) for path in cache]
    found = cache_tools.droppable(caches, None if every else step, durable)
    if not force and not dry_run:
        cache_tools.require_durable(found)
    if not dry_run:
        cache_tools.drop(caches, [each.step for each in found])
    title = "would go" if dry_run else "dropped"
    rows = [_row(each) for each in found]
    document = {"dropped": not dry_run, "steps": [asdict(each) for each in found]}
    terminal.result(document, table(title, rows))


def _row(found: Droppable) -> dict[str, str]:
    from penstock.units import format_bytes

    return {
        "step": str(found.step),
        "size": format_bytes(found.size_bytes),
        "durable": {True: "yes", False: "no", None: "not asked"}[found.is_durable],
        "flush": "open" if found.is_ordered else "-",
    }
