"""`penstock checkpoint status` and `flush`: the steps in caches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import FollowOptions, PageOption
from penstock.cli.options import argument, arguments, flag, group, option, repeated, verb
from penstock.cli.parsers import FOLDER_URI, URI, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, table
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.storage.uri import open_here
from penstock.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from penstock.checkpoint.levels import cache_tools
    from penstock.checkpoint.levels.flush import FlushState
    from penstock.reports.report import Report


POLL_S = 0.5
FLUSH_FAILS = 1
NOT_FLUSHED = 1


@dataclass(frozen=True, kw_only=True)
class _StatusOptions:
    run: str = argument("RUN", URI, "Durable directory or URI of the manager.")
    caches: tuple[str, ...] = repeated(
        "--cache", FOLDER_URI, "Include this cache, which must be reachable from here."
    )
    watches: bool = flag("--watch", "Wait until all flushes are finished.")
    page: PageOption = group(PageOption)


@verb(_StatusOptions)
def status(options: _StatusOptions, terminal: Terminal) -> int:
    """Show the steps of RUN on each level, their redundancy, and the progress of flushes.

    Caches are directories on nodes: run this on each node. Exits with 1 if a flush keeps failing.

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
    flushing = {step for flush_ in levels.flushes for step in flush_.states}
    steps = sorted({*levels.durable, *(cached.step for cached in levels.cached), *flushing})
    rows = [_step_row(levels, step) for step in steps]
    options.page.write(lambda: _report_status(options.run, levels, rows), terminal)
    terminal.result({"run": options.run, **_document(levels)}, table(options.run, rows))
    failing = [
        (step, state)
        for flush_ in levels.flushes
        for step, state in flush_.states.items()
        if state.phase == "failing"
    ]
    for step, state in failing:
        terminal.note(f"step {step}: {state.reason}")
    return FLUSH_FAILS if failing else 0


def _report_status(run: str, levels: cache_tools.LevelsOverview, rows: Sequence[Mapping[str, str]]) -> Report:
    from penstock.reports.report import Banner, Look, Report, bar_chart, table_section

    states = {step: state for flush_ in levels.flushes for step, state in flush_.states.items()}
    failing = {step: state for step, state in states.items() if state.phase == "failing"}
    left = {str(step): float(state.size_bytes - state.copied_bytes) for step, state in states.items()}
    cached = {str(one.step): float(one.size_bytes) for one in levels.cached}
    rate = sum(flush_.bytes_per_s for flush_ in levels.flushes)
    to_do = "Wait, or run `penstock checkpoint flush` on each node." if states else "Nothing."
    return Report(
        title=f"Checkpoints of {run}",
        subtitle=f"{format_count(len(rows), 'step')}, on the durable level and in "
        f"{format_count(len(levels.flushes), 'cache')}",
        banner=Banner(
            verdict="failing" if failing else "copying" if states else "durable",
            look=Look.BAD if failing else Look.DOUBT if states else Look.GOOD,
            figure=f"newest durable step {max(levels.durable, default='none')}, newest of all "
            f"{rows[-1]['step'] if rows else 'none'}; {format_bytes(int(sum(left.values())))} to copy",
            limited_by=f"flushes with {format_rate(rate)}" if rate else "no flush is under way",
            since=f"step {min(states)} is not durable yet" if states else "every pending step is durable",
            to_do="Fix what the failing flushes report; they are tried again." if failing else to_do,
            troubles=[f"Step {step}: {state.reason}" for step, state in failing.items()]
            + [f"Step {one.step}: {one.reason}" for one in levels.cached if one.reason],
        ),
        highlights=[
            bar_chart(title, run, sizes, "B")
            for title, sizes in (("Left to copy, by step", left), ("In the caches, by step", cached))
            if sizes
        ],
        sections=[table_section("steps", "All steps", rows)],
    )


def _document(levels: cache_tools.LevelsOverview) -> dict[str, Any]:
    flushes = [{**asdict(flush_), "states": _state_documents(flush_.states)} for flush_ in levels.flushes]
    return {**asdict(levels), "flushes": flushes}


def _state_documents(states: Mapping[int, FlushState]) -> dict[int, Any]:
    return {step: state.model_dump() for step, state in states.items()}


def _watch(caches: Sequence[str], terminal: Terminal) -> None:
    """Draw how much is left to copy until nothing is, no flusher works, or only failures are left."""
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


def _describe_flush(flush_: cache_tools.CacheFlush) -> str:
    left_bytes = sum(state.size_bytes - state.copied_bytes for state in flush_.states.values())
    work = f"{format_count(len(flush_.states), 'step')} to flush, {format_bytes(left_bytes)} to copy"
    if not flush_.states:
        work = "nothing to flush"
    if flush_.daemon is None:
        return f"{flush_.cache}: no daemon; {work}"
    return f"{flush_.cache}: daemon {flush_.daemon} at {format_rate(flush_.bytes_per_s)}; {work}"


def _step_row(levels: cache_tools.LevelsOverview, step: int) -> dict[str, str]:
    cached = next((entry for entry in levels.cached if entry.step == step), None)
    phases = dict.fromkeys(  # without repetition: all nodes flush their share of the same step
        _describe_phase(state) for flush_ in levels.flushes if (state := flush_.states.get(step)) is not None
    )
    return {
        "step": str(step),
        "durable": "yes" if step in levels.durable else "-",
        "cached": f"{cached.num_shares} of {cached.num_ranks} shares" if cached else "-",
        "in caches": format_bytes(cached.size_bytes) if cached else "-",
        "survives": f"{cached.losses} ({cached.scheme})" if cached else "-",
        "flush": ", ".join(phases) or "-",
    }


def _describe_phase(state: FlushState) -> str:
    if state.copied_bytes >= state.size_bytes:
        return state.phase
    return f"{state.phase} {100 * state.copied_bytes // state.size_bytes} %"


@dataclass(frozen=True, kw_only=True)
class _FlushOptions:
    caches: tuple[str, ...] = arguments(
        "CACHE...", FOLDER_URI, "Cache of each rank's node: one path for all ranks, or one for each."
    )
    steps: tuple[int, ...] = repeated("--step", whole(), "Flush only this step.")
    durable: str | None = option(
        "--to", URI, "Durable directory or URI of the run (default: the run that the cache belongs to)."
    )
    following: FollowOptions = group(FollowOptions, panel="Following")


@ranked(_FlushOptions)
def flush(options: _FlushOptions, comm: Comm, terminal: Terminal) -> int:
    """Make durable what CACHE still has: all pending steps, and the newest step that can be restored.

    Run one rank on each node, after a crash or before a job ends. Files are verified, and lost or damaged
    ones are rebuilt if the step's redundancy allows. Gives up if nothing moves for --timeout, and exits with
    1 if a step is not durable in the end.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint flush /local/ssd/run

      penstock checkpoint flush /mnt/a/run /mnt/b/run --ranks 2 --step 100 --to /pfs/run
    """
    from penstock.checkpoint.levels import cache_tools

    if len(options.caches) not in (1, comm.size):
        raise UsageError(
            f"{len(options.caches)} caches for {format_count(comm.size, 'rank')}",
            fix=f"Name one for all ranks, or one for each: --ranks {len(options.caches)}.",
        )
    path = options.caches[comm.rank if len(options.caches) > 1 else 0]
    folder = cache_tools.require_cache_folder(path)
    with terminal.progress(options.following.followers) as progress:
        progress.begin("flush", 0)
        progress.enter("working", unit="written_bytes")
        looked_at, states = cache_tools.flush_caches(
            open_here(path, rank=comm.rank),
            comm,
            steps=options.steps,
            durable=options.durable,
            timeout_s=comm.timeout_s,
            progress=progress,
        )
    flushed = comm.gather((str(folder), states), awaiting="all nodes to report")
    document = {
        "caches": {cache: _state_documents(of_cache) for cache, of_cache in flushed},
        "steps": [{**asdict(repair), "outcome": repair.outcome} for repair in looked_at],
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
    for repair in looked_at:
        if repair.reason:
            terminal.note(f"step {repair.step}: {repair.reason}")
    for step, state in pending.items():
        terminal.note(f"step {step} is not durable: {state.reason or state.phase}")
    is_lost = bool(looked_at) and all(repair.reason for repair in looked_at)
    return NOT_FLUSHED if pending or is_lost else 0
