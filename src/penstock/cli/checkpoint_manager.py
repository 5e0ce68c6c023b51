"""`penstock checkpoint status`, `flush` and `halt`: the saved steps of a checkpoint manager, and its job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from getpass import getuser
from socket import gethostname
from typing import TYPE_CHECKING, Final

from penstock.cli.options import argument, arguments, flag, option, refuse_ignored, repeated, verb
from penstock.cli.parsers import FOLDER_URI, TEXT, URI, whole
from penstock.cli.rank_options import followed
from penstock.cli.terminal import Terminal, table
from penstock.cluster.comm import Comm
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.capabilities import find_local_root
from penstock.storage.uri import open_here
from penstock.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from penstock.checkpoint.manager.policies import StopRequest


POLL_S = 0.5
FLUSH_FAILS = 1
NOT_FLUSHED = 1
_RUN: Final = argument("RUN", URI, "Directory or URI to which the manager saves.")


@verb
def status(
    terminal: Terminal,
    *,
    run: str = _RUN,
    caches: tuple[str, ...] = repeated(
        "--cache", FOLDER_URI, "Include this cache, which must be reachable from here."
    ),
    watches: bool = flag("--watch", "Wait until all flushes are finished."),
) -> int:
    """Show the steps of RUN in durable storage and caches, their redundancy, and the progress of flushes.

    Each node sees only its own cache: run the command on every node. Exits with 1 if a flush keeps failing.

    Examples:

      penstock checkpoint status /pfs/run --cache /local/ssd/run

      penstock checkpoint status /pfs/run --cache /local/ssd/run --watch

      srun --ntasks-per-node=1 penstock checkpoint status /pfs/run --cache /local/ssd/run --json
    """
    from penstock.checkpoint.levels import cache_tools

    if not caches:
        refuse_ignored(("--watch",), "flushes are those of caches", fix="Name a cache with --cache.")
    levels = cache_tools.inspect_levels(run, caches)
    if watches:
        _watch(caches, terminal)
        levels = cache_tools.inspect_levels(run, caches)
    for flush_ in levels.flushes:
        left_bytes = sum(state.size_bytes - state.copied_bytes for state in flush_.states.values())
        work = f"{format_count(len(flush_.states), 'step')} to flush, {format_bytes(left_bytes)} to copy"
        daemon = "no daemon"
        if flush_.daemon is not None:
            daemon = f"daemon {flush_.daemon} at {format_rate(flush_.bytes_per_s)}"
        terminal.note(f"{flush_.cache}: {daemon}; {work if flush_.states else 'nothing to flush'}")
    cached = {entry.step: entry for entry in reversed(levels.cached)}
    flushing = {step for flush_ in levels.flushes for step in flush_.states}
    rows = []
    for step in sorted({*levels.durable, *cached, *flushing}):
        entry = cached.get(step)
        phases = dict.fromkeys(  # without repetition, because all nodes flush their share of the same step
            state.phase
            if state.copied_bytes >= state.size_bytes
            else f"{state.phase} {100 * state.copied_bytes // state.size_bytes} %"
            for flush_ in levels.flushes
            if (state := flush_.states.get(step)) is not None
        )
        rows.append(
            {
                "step": str(step),
                "durable": "yes" if step in levels.durable else "-",
                "cached": f"{entry.num_shares} of {entry.num_ranks} shares" if entry else "-",
                "in caches": format_bytes(entry.size_bytes) if entry else "-",
                "survives": f"{entry.losses} ({entry.scheme})" if entry else "-",
                "flush": ", ".join(phases) or "-",
            }
        )
    terminal.result({"run": run, **levels.model_dump()}, table(run, rows))
    failing = [
        f"step {step}: {state.reason}"
        for flush_ in levels.flushes
        for step, state in flush_.states.items()
        if state.phase == "failing"
    ]
    terminal.notes(failing)
    return FLUSH_FAILS if failing else 0


def _watch(caches: Sequence[str], terminal: Terminal) -> None:
    """Show how much is left to copy, until no flusher is running or all remaining flushes are failing."""
    from penstock.checkpoint.levels import cache_tools
    from penstock.checkpoint.levels.flush import FlushFolder

    folders = [FlushFolder(cache_tools.require_cache_folder(path)) for path in caches]
    with terminal.progress() as progress:
        progress.begin("flush", sum(state.size_bytes for each in folders for state in each.states().values()))
        copied_bytes = 0
        while True:
            states = [state for folder in folders for state in folder.states().values()]
            now_bytes = sum(state.copied_bytes for state in states)
            progress.advance(max(now_bytes - copied_bytes, 0))
            copied_bytes = now_bytes
            is_working = any(folder.is_locked() for folder in folders)
            if not is_working or all(state.phase == "failing" for state in states):
                return
            time.sleep(POLL_S)


@followed
def flush(
    comm: Comm,
    terminal: Terminal,
    *,
    caches: tuple[str, ...] = arguments(
        "CACHE...", FOLDER_URI, "Path of the cache on each rank's node: one for all ranks, or one for each."
    ),
    steps: tuple[int, ...] = repeated("--step", whole(), "Flush only this step."),
    durable: str | None = option(
        "--to", URI, "Copy to this directory or URI (default: that of the run to which the cache belongs)."
    ),
) -> int:
    """Copy pending steps, and the newest step that can be restored, from CACHE to durable storage.

    Run it with one rank on each node, after a crash or before a job ends. Files are verified; lost or damaged
    ones are rebuilt if the step's redundancy allows it. Gives up if no data is copied within --timeout, and
    exits with 1 if any step is still not durable at the end.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint flush /local/ssd/run

      penstock checkpoint flush /mnt/a/run /mnt/b/run --ranks 2 --step 100 --to /pfs/run
    """
    from penstock.checkpoint.levels import cache_tools

    if len(caches) not in (1, comm.size):
        raise UsageError(
            f"{len(caches)} caches for {format_count(comm.size, 'rank')}",
            fix=f"Name one for all ranks, or one for each: --ranks {len(caches)}.",
        )
    path = caches[comm.rank if len(caches) > 1 else 0]
    folder = cache_tools.require_cache_folder(path)
    with terminal.progress() as progress:
        progress.begin("flush", 0)
        progress.enter("working", unit="written_bytes")
        looked_at, states = cache_tools.flush_caches(
            open_here(path, rank=comm.rank),
            comm,
            steps=steps,
            durable=durable,
            timeout_s=comm.timeout_s,
            progress=progress,
        )
    flushed = comm.gather((str(folder), states), awaiting="all nodes to report")
    document = {
        "caches": {
            cache: {step: state.model_dump() for step, state in of_cache.items()}
            for cache, of_cache in flushed
        },
        "steps": [{**repair.model_dump(), "outcome": repair.outcome} for repair in looked_at],
    }
    rows = [
        {
            "cache": cache,
            "step": str(step),
            "state": state.phase,
            "size": format_bytes(state.size_bytes),
            "copied": format_bytes(state.copied_bytes),
        }
        for cache, of_cache in flushed
        for step, state in of_cache.items()
    ]
    terminal.result(document, table("flushed", rows))
    pending = {
        step: state for _, of_cache in flushed for step, state in of_cache.items() if not state.is_over
    }
    terminal.notes(f"step {repair.step}: {repair.reason}" for repair in looked_at if repair.reason)
    terminal.notes(
        f"step {step} is not durable: {state.reason or state.phase}" for step, state in pending.items()
    )
    is_lost = bool(looked_at) and all(repair.reason for repair in looked_at)
    return NOT_FLUSHED if pending or is_lost else 0


@verb
def halt(
    terminal: Terminal,
    *,
    run: str = _RUN,
    reason: str = option("--reason", TEXT, "Write this reason into the job's log.", default=""),
    cancels: bool = flag("--cancel", "Withdraw the request, if no job has obeyed it yet."),
    shows_status: bool = flag("--status", "Show whether a stop has been requested, without requesting one."),
) -> None:
    """Request a graceful stop of the job that saves to RUN: it saves once more, flushes and exits.

    The request is the file RUN/halt.json. The job finds it within seconds, when its training loop next asks
    the manager whether to save. All ranks stop at the same step, and the job removes the file when it exits.
    A job that starts later obeys the request when it starts.

    Examples:

      penstock checkpoint halt /pfs/run --reason "maintenance at 18:00"

      penstock checkpoint halt /pfs/run --status --json

      penstock checkpoint halt /pfs/run --cancel
    """
    from penstock.checkpoint.manager import policies

    if sum((cancels, shows_status, bool(reason))) > 1:
        raise UsageError(
            "--reason, --cancel and --status are mutually exclusive", fix="Give one of them, or none to halt."
        )
    storage = open_here(run)
    if cancels:
        was_requested = policies.cancel_stop_request(storage)
        text = "withdrawn" if was_requested else "no stop was requested"
        terminal.result({"cancelled": was_requested}, [f"halt {run}: {text}"])
        return
    if shows_status:
        request = policies.find_stop_request(storage)
    else:
        root = find_local_root(storage)
        if root is not None and not root.is_dir():
            raise ObjectNotFound(
                "There is no such directory of checkpoints, so no job would see the request",
                uri=storage.uri,
                fix="Give the manager's own directory; create it if its job has not saved yet.",
            )
        request = policies.StopRequest(
            asked_by=f"{getuser()}@{gethostname()}", asked_at_s=time.time(), reason=reason
        )
        policies.request_stop(storage, request)
    terminal.result(
        {"asked": request is not None, "order": request.model_dump() if request else None},
        [f"halt {run}: {_describe_stop(request)}"],
    )


def _describe_stop(request: StopRequest | None) -> str:
    if request is None:
        return "no stop is requested"
    when = datetime.fromtimestamp(request.asked_at_s).astimezone().isoformat(timespec="seconds")
    reason = f": {request.reason}" if request.reason else ""
    return f"requested by {request.asked_by} at {when}{reason}"
