"""`penstock checkpoint status`, `flush` and `drop`: the steps in caches, and their way to durable storage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import argument, arguments, flag, option, repeated, verb
from penstock.cli.parsers import FOLDER_URI, TIME, URI, whole
from penstock.cli.terminal import Terminal, table
from penstock.errors import UsageError
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache_tools import CachedStep, CacheFlush, DroppableStep, LevelsOverview
    from penstock.checkpoint.levels.flush.flusher import FlushState

POLL_S = 0.5
FLUSH_FAILS = 1
NOT_FLUSHED = 1


@dataclass(frozen=True, kw_only=True)
class _StatusOptions:
    run: str = argument("RUN", URI, "Durable directory or URI of the manager.")
    caches: tuple[str, ...] = repeated("--cache", FOLDER_URI, "Cache that is reachable from here.")
    watches: bool = flag("--watch", "Wait until all flushes are finished.")


@verb(_StatusOptions)
def status(options: _StatusOptions, terminal: Terminal) -> int:
    """Show the steps of RUN on each level, their redundancy, and the progress of flushes.

    Caches are directories on nodes: run this on each node, or name the caches of several simulated hosts.
    Exits with 1 if a flush keeps failing; it is tried again all the same.

    Examples:

      penstock checkpoint status /pfs/run --cache /local/ssd/run

      penstock checkpoint status /pfs/run --cache /local/ssd/run --watch

      srun --ntasks-per-node=1 penstock checkpoint status /pfs/run --cache /local/ssd/run --json
    """
    from penstock.checkpoint.levels import cache_tools

    levels = cache_tools.inspect_levels(options.run, options.caches)
    if options.watches:
        _watch(options.caches, terminal)
        levels = cache_tools.inspect_levels(options.run, options.caches)
    for flush_ in levels.flushes:
        terminal.note(_describe_flush(flush_))
    rows = [_step_row(levels, step) for step in levels.steps]
    terminal.result({"run": options.run, **asdict(levels)}, table(options.run, rows))
    failing = [
        (step, state)
        for flush_ in levels.flushes
        for step, state in flush_.states.items()
        if state.phase == "failing"
    ]
    for step, state in failing:
        terminal.note(f"step {step}: {state.reason}")
    return FLUSH_FAILS if failing else 0


def _watch(caches: Sequence[str], terminal: Terminal) -> None:
    """Draw how much is left to copy until nothing is, or until only failing flushes are left."""
    from penstock.checkpoint.levels.cache_tools import inspect_flush, require_cache_folder

    folders = [require_cache_folder(path) for path in caches]
    with terminal.progress() as progress:
        copied_bytes = 0
        progress.begin("flush", sum(_total_bytes(inspect_flush(folder)) for folder in folders))
        while True:
            flushes = [inspect_flush(folder) for folder in folders]
            now_bytes = sum(_copied_bytes(flush_) for flush_ in flushes)
            progress.advance(now_bytes - copied_bytes)
            copied_bytes = now_bytes
            states = [state for flush_ in flushes for state in flush_.states.values()]
            if all(state.is_over or state.phase == "failing" for state in states):
                return
            time.sleep(POLL_S)


def _total_bytes(flush_: CacheFlush) -> int:
    return sum(state.size_bytes for state in flush_.states.values())


def _copied_bytes(flush_: CacheFlush) -> int:
    return sum(state.copied_bytes for state in flush_.states.values())


def _describe_flush(flush_: CacheFlush) -> str:

    pending = [state for state in flush_.states.values() if not state.is_over]
    left_bytes = sum(state.size_bytes - state.copied_bytes for state in pending)
    work = (
        f"{len(pending)} steps to flush, {format_bytes(left_bytes)} to copy"
        if pending
        else "nothing to flush"
    )
    if flush_.daemon is None:
        return f"{flush_.cache}: no daemon; {work}"
    pace = "paused for a save" if flush_.is_paused else f"at {format_rate(flush_.bytes_per_s)}"
    return f"{flush_.cache}: daemon {flush_.daemon} {pace}; {work}"


def _step_row(levels: LevelsOverview, step: int) -> dict[str, str]:

    cached = next((entry for entry in levels.cached if entry.step == step), None)
    phases = dict.fromkeys(  # without repetition: all nodes flush their share of the same step
        _describe_phase(state) for flush_ in levels.flushes if (state := flush_.states.get(step)) is not None
    )
    return {
        "step": str(step),
        "durable": "yes" if step in levels.durable else "-",
        "cached": f"{cached.num_shares} of {cached.num_ranks} shares" if cached else "-",
        "in caches": format_bytes(cached.size_bytes) if cached else "-",
        "survives": _describe_redundancy(cached),
        "flush": ", ".join(phases) or "-",
    }


def _describe_phase(state: FlushState) -> str:
    if state.copied_bytes >= state.size_bytes:
        return state.phase
    return f"{state.phase} {100 * state.copied_bytes // state.size_bytes} %"


def _describe_redundancy(cached: CachedStep | None) -> str:
    """How many members of each group may be lost, and the scheme."""
    return f"{cached.losses} ({cached.scheme})" if cached else "-"


@dataclass(frozen=True, kw_only=True)
class _FlushOptions:
    caches: tuple[str, ...] = arguments("CACHE...", FOLDER_URI, "Caches that are reachable from here.")
    timeout_s: float = option("--timeout", TIME, "Give up after this time without progress.", default="30min")


@verb(_FlushOptions)
def flush(options: _FlushOptions, terminal: Terminal) -> int:
    """Flush pending checkpoints from CACHE to durable storage, after a crash or before a job ends.

    Starts the cache's flush daemon if none runs, and waits for it; Ctrl-C ends only the wait. A step of
    several nodes becomes durable when the daemons of all of them have copied their shares, so run this on
    each node. Exits with 1 if a step is not durable in the end.

    Examples:

      penstock checkpoint flush /local/ssd/run

      srun --ntasks-per-node=1 penstock checkpoint flush /local/ssd/run --timeout 2h
    """
    from penstock.checkpoint.levels.cache_tools import drain_caches, require_cache_folder

    folders = [require_cache_folder(path) for path in options.caches]
    with terminal.progress() as progress:
        states_of_caches = drain_caches(folders, progress, timeout_s=options.timeout_s)
    entries = [
        (folder, step, state) for folder, states in states_of_caches.items() for step, state in states.items()
    ]
    document = {
        str(folder): {step: asdict(state) for step, state in states.items()}
        for folder, states in states_of_caches.items()
    }
    terminal.result({"caches": document}, table("flushed", [_flush_row(*entry) for entry in entries]))
    pending = [(step, state) for _, step, state in entries if not state.is_over]
    for step, state in pending:
        terminal.note(f"step {step} is not durable: {state.reason or state.phase}")
    return NOT_FLUSHED if pending else 0


def _flush_row(folder: Path, step: int, state: FlushState) -> dict[str, str]:

    return {
        "cache": str(folder),
        "step": str(step),
        "state": state.phase,
        "size": format_bytes(state.size_bytes),
        "copied": format_bytes(state.copied_bytes),
    }


@dataclass(frozen=True, kw_only=True)
class _DropOptions:
    caches: tuple[str, ...] = arguments("CACHE...", FOLDER_URI, "Caches that are reachable from here.")
    steps: tuple[int, ...] = repeated("--step", whole(), "Drop this step.")
    drops_all: bool = flag("--all", "Drop all steps.")
    durable: str | None = option(
        "--durable", URI, "Durable directory or URI of the manager, which must have the steps."
    )
    force: bool = flag("--force", "Drop even steps without a durable copy, and pending flushes.")
    is_dry: bool = flag("--dry-run", "Show what would be dropped, and drop nothing.")


@verb(_DropOptions)
def drop(options: _DropOptions, terminal: Terminal) -> None:
    """Drop steps from CACHE: their files, their parity and their pending flushes.

    Refuses, and drops nothing, if a step is not durable in the run that --durable names.

    Examples:

      penstock checkpoint drop /local/ssd/run --all --durable /pfs/run --dry-run

      penstock checkpoint drop /local/ssd/run --step 100 --durable /pfs/run

      srun --ntasks-per-node=1 penstock checkpoint drop /local/ssd/run --all --force
    """
    from penstock.checkpoint.levels import cache_tools
    from penstock.checkpoint.levels.cache_tools import require_cache_folder

    if bool(options.steps) == options.drops_all:
        raise UsageError("The steps to drop are not clear", fix="Give either --step N or --all.")
    caches = [require_cache_folder(path) for path in options.caches]
    steps = cache_tools.find_droppable(
        caches, None if options.drops_all else list(options.steps), options.durable
    )
    if not options.force and not options.is_dry:
        cache_tools.require_durable(steps)
    if not options.is_dry:
        cache_tools.drop(caches, [entry.step for entry in steps])
    document = {"dropped": not options.is_dry, "steps": [asdict(entry) for entry in steps]}
    title = "would be dropped" if options.is_dry else "dropped"
    terminal.result(document, table(title, [_drop_row(entry) for entry in steps]))


def _drop_row(entry: DroppableStep) -> dict[str, str]:

    return {
        "step": str(entry.step),
        "size": format_bytes(entry.size_bytes),
        "durable": {True: "yes", False: "no", None: "not asked"}[entry.is_durable],
        "flush": "open" if entry.is_ordered else "-",
    }
