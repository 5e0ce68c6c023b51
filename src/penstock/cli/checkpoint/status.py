"""`penstock checkpoint status`: which steps lie on which level, how protected, and how far flushes are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache_tools import CachedStep, CacheFlush, Overview

LOOK_S = 0.5
FLUSH_FAILS = 1


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The manager's durable folder or URI.")],
    *,
    cache: Annotated[
        list[str] | None,
        typer.Option("--cache", metavar="DIR", help="A cache that can be reached from here; repeatable."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait until all flushes are over.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Say which steps of RUN lie on which level, how they are protected, and how far flushes are.

    Caches are folders of nodes: look at each node's own, or name those of several simulated hosts. Exits
    with 1 where a flush keeps failing; it is tried again all the same.

    Examples:

      penstock checkpoint status /pfs/run --cache /local/ssd/run

      penstock checkpoint status /pfs/run --cache /local/ssd/run --watch

      srun --ntasks-per-node=1 penstock checkpoint status /pfs/run --cache /local/ssd/run --json
    """
    from dataclasses import asdict

    from penstock.checkpoint.levels import cache_tools

    terminal = Terminal(as_json=as_json)
    caches = cache or []
    found = cache_tools.look(run, caches)
    if watch:
        _watch(terminal, caches)
        found = cache_tools.look(run, caches)
    for each in found.flushes:
        terminal.note(_said_of(each))
    terminal.result({"run": run, **asdict(found)}, table(run, [_row(found, step) for step in found.steps]))
    failing = [
        (step, state)
        for each in found.flushes
        for step, state in each.states.items()
        if state.phase == "failing"
    ]
    for step, state in failing:
        terminal.note(f"step {step}: {state.reason}")
    if failing:
        raise typer.Exit(FLUSH_FAILS)


def _watch(terminal: Terminal, caches: list[str]) -> None:
    """Draw how much is left to copy until nothing is, or until a flush fails."""
    from penstock.checkpoint.levels.cache_tools import cache_folder, look_at_flush

    folders = [cache_folder(path) for path in caches]
    with terminal.progress() as progress:
        done_bytes = 0
        progress.begin("flush", sum(_sizes(look_at_flush(folder))[0] for folder in folders))
        while True:
            flushes = [look_at_flush(folder) for folder in folders]
            now_bytes = sum(_sizes(each)[1] for each in flushes)
            progress.advance(now_bytes - done_bytes)
            done_bytes = now_bytes
            states = [state for each in flushes for state in each.states.values()]
            if all(state.is_over or state.phase == "failing" for state in states):
                return
            time.sleep(LOOK_S)


def _sizes(flush: CacheFlush) -> tuple[int, int]:
    """Bytes of all steps that the journal knows, and those of them that are copied."""
    states = flush.states.values()
    return sum(state.size_bytes for state in states), sum(state.copied_bytes for state in states)


def _said_of(flush: CacheFlush) -> str:
    from penstock.units import format_bytes, format_rate

    num_left = sum(not state.is_over for state in flush.states.values())
    left_bytes = sum(
        state.size_bytes - state.copied_bytes for state in flush.states.values() if not state.is_over
    )
    todo = (
        f"{num_left} steps to flush, {format_bytes(left_bytes)} to copy" if num_left else "nothing to flush"
    )
    if flush.daemon is None:
        return f"{flush.cache}: no daemon; {todo}"
    doing = f"at {format_rate(flush.bytes_per_s)}"
    if flush.is_paused:
        doing = "paused for a save"
    return f"{flush.cache}: daemon {flush.daemon} {doing}; {todo}"


def _row(found: Overview, step: int) -> dict[str, str]:
    from penstock.units import format_bytes

    cached = next((each for each in found.cached if each.step == step), None)
    return {
        "step": str(step),
        "durable": "yes" if step in found.durable else "-",
        "cached": f"{cached.num_shares} of {cached.num_ranks} shares" if cached else "-",
        "in caches": format_bytes(cached.size_bytes) if cached else "-",
        "survives": _survives(cached),
        "flush": ", ".join(
            dict.fromkeys(
                f"{state.phase} {_percent(state.copied_bytes, state.size_bytes)}".strip()
                for each in found.flushes
                if (state := each.states.get(step)) is not None
            )
        )
        or "-",
    }


def _survives(cached: CachedStep | None) -> str:
    """So many lost members of each group, by which scheme."""
    return f"{cached.losses} ({cached.scheme})" if cached else "-"


def _percent(copied_bytes: int, size_bytes: int) -> str:
    return f"{100 * copied_bytes // size_bytes} %" if copied_bytes < size_bytes else ""
