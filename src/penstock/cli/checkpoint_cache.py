"""`penstock checkpoint status`, `flush`, `drop`, `rebuild` and `scavenge`: the steps in caches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.levels.options import Single
from penstock.cli.option_groups import FollowOptions, PageOption
from penstock.cli.options import argument, arguments, flag, group, option, repeated, required, verb
from penstock.cli.parsers import FOLDER_URI, TIME, URI, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, table
from penstock.cluster.comm import Comm, run_on_all_ranks, run_on_rank0
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage import Storage
from penstock.storage.uri import open_here
from penstock.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from penstock.checkpoint.levels import cache_tools
    from penstock.checkpoint.levels.cache import CacheLevel
    from penstock.checkpoint.levels.flush.flusher import FlushState
    from penstock.checkpoint.levels.recovery import StepRepair
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
    options.page.write(lambda: _draw_status(options.run, levels, rows), terminal)
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


def _draw_status(run: str, levels: cache_tools.LevelsOverview, rows: Sequence[Mapping[str, str]]) -> Report:
    from penstock.workflows.levels_page import make_status_page

    return make_status_page(run, levels, rows)


def _watch(caches: Sequence[str], terminal: Terminal) -> None:
    """Draw how much is left to copy until nothing is, or until only failing flushes are left."""
    from penstock.checkpoint.levels import cache_tools

    folders = [cache_tools.require_cache_folder(path) for path in caches]

    def read_states() -> list[FlushState]:
        return [state for folder in folders for state in cache_tools.inspect_flush(folder).states.values()]

    with terminal.progress() as progress:
        progress.begin("flush", sum(state.size_bytes for state in read_states()))
        copied_bytes = 0
        while True:
            states = read_states()
            progress.advance(sum(state.copied_bytes for state in states) - copied_bytes)
            copied_bytes = sum(state.copied_bytes for state in states)
            if all(state.is_over or state.phase == "failing" for state in states):
                return
            time.sleep(POLL_S)


def _describe_flush(flush_: cache_tools.CacheFlush) -> str:
    pending = [state for state in flush_.states.values() if not state.is_over]
    left_bytes = sum(state.size_bytes - state.copied_bytes for state in pending)
    work = (
        f"{format_count(len(pending), 'step')} to flush, {format_bytes(left_bytes)} to copy"
        if pending
        else "nothing to flush"
    )
    if flush_.daemon is None:
        return f"{flush_.cache}: no daemon; {work}"
    pace = "paused for a save" if flush_.is_paused else f"at {format_rate(flush_.bytes_per_s)}"
    return f"{flush_.cache}: daemon {flush_.daemon} {pace}; {work}"


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
    caches: tuple[str, ...] = arguments("CACHE...", FOLDER_URI, "Caches that are reachable from here.")
    timeout_s: float = option("--timeout", TIME, "Give up after this time without progress.", default="30min")
    following: FollowOptions = group(FollowOptions, panel="Following")


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
    from penstock.checkpoint.levels import cache_tools

    folders = [cache_tools.require_cache_folder(path) for path in options.caches]
    with terminal.progress(options.following) as progress:
        states_of_caches = cache_tools.drain_caches(folders, progress, timeout_s=options.timeout_s)
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
        "--durable", URI, "Drop only steps that are durable in this run: a directory or URI."
    )
    force: bool = flag("--force", "Drop even steps without a durable copy, and pending flushes.")
    is_dry: bool = flag("--dry-run", "Show what would be dropped, and drop nothing.")


@ranked(_DropOptions)
def drop(options: _DropOptions, comm: Comm, terminal: Terminal) -> None:
    """Drop steps from CACHE: their files, their parity and their pending flushes.

    Refuses, and drops nothing on any rank, if a step is not durable in the run that --durable names.

    Examples:

      penstock checkpoint drop /local/ssd/run --all --durable /pfs/run --dry-run

      penstock checkpoint drop /mnt/a/run /mnt/b/run --ranks 2 --step 100 --durable /pfs/run

      srun --ntasks-per-node=1 penstock checkpoint drop /local/ssd/run --all --force
    """
    from penstock.checkpoint.levels import cache_tools

    if bool(options.steps) == options.drops_all:
        raise UsageError("The steps to drop are not clear", fix="Give either --step N or --all.")

    def list_contents() -> list[tuple[Path, cache_tools.CacheContent]]:
        # One process drops from all caches that it was given, ranks each from its own.
        paths = options.caches if comm.size == 1 else [_choose_path(options.caches, comm)]
        caches = [cache_tools.require_cache_folder(path) for path in paths]
        return [(cache, cache_tools.list_content(cache, comm.rank)) for cache in caches]

    own = run_on_all_ranks(comm, list_contents, awaiting="all ranks to list their caches")
    contents = comm.gather([content for _, content in own], awaiting="all ranks to list their caches")
    # All steps of all ranks are checked before the first is dropped.
    steps = run_on_rank0(
        comm,
        lambda: _choose_droppable(options, [content for of_rank in contents for content in of_rank]),
        awaiting="rank 0 to look at the durable level",
    )
    if not options.is_dry:
        _require_no_writer([open_here(cache) for cache, _ in own], comm)
        run_on_all_ranks(
            comm,
            lambda: cache_tools.drop([cache for cache, _ in own], [entry.step for entry in steps]),
            awaiting="all ranks to drop their steps",
        )
    document = {"dropped": not options.is_dry, "steps": [asdict(entry) for entry in steps]}
    title = "would be dropped" if options.is_dry else "dropped"
    terminal.result(document, table(title, [_drop_row(entry) for entry in steps]))


def _require_no_writer(caches: Sequence[Storage], comm: Comm) -> None:
    """`RunInUse` on all ranks if a living job saves steps to one of these caches. Collective."""
    from penstock.checkpoint.commit.protocol import WriterLease

    def look() -> None:
        for cache in caches:
            WriterLease(cache).require_free()

    run_on_all_ranks(comm, look, awaiting="all ranks to see that no job saves to their caches")


def _choose_droppable(
    options: _DropOptions, contents: Sequence[cache_tools.CacheContent]
) -> list[cache_tools.DroppableStep]:
    from penstock.checkpoint.levels import cache_tools

    steps = cache_tools.find_droppable(
        contents, None if options.drops_all else list(options.steps), options.durable
    )
    if not options.force and not options.is_dry:
        cache_tools.require_durable(steps)
    return steps


def _choose_path(paths: Sequence[str], comm: Comm) -> str:
    """The cache of this rank, if one is named for all ranks or one for each."""
    if len(paths) not in (1, comm.size):
        raise UsageError(
            f"{len(paths)} caches for {comm.size} ranks",
            fix=f"Name one for all ranks, or one for each: --ranks {len(paths)}.",
        )
    return paths[0] if len(paths) == 1 else paths[comm.rank]


def _drop_row(entry: cache_tools.DroppableStep) -> dict[str, str]:
    return {
        "step": str(entry.step),
        "size": format_bytes(entry.size_bytes),
        "durable": {True: "yes", False: "no", None: "not asked"}[entry.is_durable],
        "flush": "open" if entry.is_ordered else "-",
    }


NOT_RECOVERED = 1


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The caches of all ranks, and the steps in them."""

    paths: tuple[str, ...] = arguments(
        "CACHE...", FOLDER_URI, "Cache of each rank's node: one path for all ranks, or one for each."
    )
    steps: tuple[int, ...] = repeated("--step", whole(), "Recover only this step (default: all).")

    @contextmanager
    def open(self, comm: Comm) -> Iterator[CacheLevel]:
        """The cache level of all ranks. Collective."""
        from penstock.checkpoint.levels.cache import CacheLevel

        storage = open_here(_choose_path(self.paths, comm), rank=comm.rank)
        _require_no_writer([storage], comm)
        level = CacheLevel(storage, comm, schemes=[Single()])
        try:
            yield level
        finally:
            level.close()

    def select(self, cached_steps: Sequence[int]) -> list[int]:
        """The steps to recover, in order; raises ObjectNotFound if the caches lack one."""
        if not cached_steps:
            raise ObjectNotFound(
                "No step is in these caches", fix="Name the directory of cache= on each rank's node."
            )
        absent = sorted(set(self.steps) - set(cached_steps))
        if absent:
            raise ObjectNotFound(
                f"Step {absent[0]} is in none of these caches",
                fix=f"The caches hold: {', '.join(map(str, cached_steps))}.",
            )
        return sorted(self.steps or cached_steps)


@dataclass(frozen=True, kw_only=True)
class _RebuildOptions:
    caches: CacheOptions = group(CacheOptions)
    no_verify: bool = flag("--no-verify", "Check only names and sizes; skip checksums.")


@ranked(_RebuildOptions)
def rebuild(options: _RebuildOptions, comm: Comm, terminal: Terminal) -> int:
    """Rebuild lost or damaged files of cached steps, as far as each step's redundancy allows.

    Run it on the nodes that own the caches, replaced nodes included, with one rank on each. Exits with 1 if a
    step cannot be rebuilt; nothing of it is removed.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint rebuild /local/ssd/run

      penstock checkpoint rebuild /mnt/a/run /mnt/b/run /mnt/c/run --ranks 3 --step 100 --json
    """
    from penstock.checkpoint.levels.recovery import list_cached_steps, repair_step

    reports = []
    with options.caches.open(comm) as level, terminal.progress() as progress:
        steps = options.caches.select(list_cached_steps(level, comm))
        progress.begin("steps", len(steps))
        for step in steps:
            reports.append(repair_step(level, comm, step, verified=not options.no_verify))
            progress.advance(1)
    terminal.result(
        {"steps": _documents(reports)}, table("caches", [_repair_row(report) for report in reports])
    )
    _note_reasons(reports, terminal)
    return NOT_RECOVERED if any(report.reason for report in reports) else 0


@dataclass(frozen=True, kw_only=True)
class _ScavengeOptions:
    caches: CacheOptions = group(CacheOptions)
    durable: str = required("--to", URI, "Copy to this run: the durable directory or URI of its manager.")


@ranked(_ScavengeOptions)
def scavenge(options: _ScavengeOptions, comm: Comm, terminal: Terminal) -> int:
    """Copy the newest step that the surviving caches can restore or rebuild to durable storage.

    Run it after a crash on the nodes that are left, with one rank on each. Every file is verified before it
    is copied, and the step is committed as a flush would commit it. Exits with 1 if no step can be recovered.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint scavenge /local/ssd/run --to /pfs/run

      penstock checkpoint scavenge /mnt/a/run /mnt/b/run --ranks 2 --to /pfs/run --step 100
    """
    from penstock.checkpoint.commit.catalog import StepCatalog
    from penstock.checkpoint.levels import recovery

    with options.caches.open(comm) as level, terminal.progress():
        steps = options.caches.select(recovery.list_cached_steps(level, comm))
        durable = StepCatalog(open_here(options.durable, rank=comm.rank))
        scavenged = recovery.scavenge(level, comm, durable, steps)
    step = scavenged.step
    text = "nothing to scavenge" if step is None else f"step {step} is durable: {scavenged.uri}"
    document = {"step": step, "uri": scavenged.uri, "looked_at": _documents(scavenged.looked_at)}
    terminal.result(document, [text])
    _note_reasons(scavenged.looked_at, terminal)
    return NOT_RECOVERED if step is None else 0


def _documents(reports: Sequence[StepRepair]) -> list[dict[str, Any]]:
    return [{**asdict(report), "outcome": report.outcome} for report in reports]


def _repair_row(report: StepRepair) -> dict[str, str]:
    return {
        "step": str(report.step),
        "outcome": report.outcome,
        "missing": ", ".join(map(str, report.missing)) or "-",
        "damaged": ", ".join(map(str, report.damaged)) or "-",
    }


def _note_reasons(reports: Sequence[StepRepair], terminal: Terminal) -> None:
    for report in reports:
        if report.reason:
            terminal.note(f"step {report.step}: {report.reason}")
