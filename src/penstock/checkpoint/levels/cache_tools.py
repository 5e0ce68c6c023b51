"""Tools for operators: show the status of caches, flush the steps that are left in them, remove steps.

Status and removal work on the caches that can be reached from this node, without other ranks. Flushing runs a
rank on each node, so that lost files can be rebuilt. Invariant: status changes nothing; a flush removes
nothing from a cache; whatever becomes durable was verified first and has the same manifest as the original
save.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from penstock.checkpoint.commit.checkpoints import StepCatalog, parse_step, step_dirname
from penstock.checkpoint.commit.protocol import WriterLease
from penstock.checkpoint.formats.description import read_manifest
from penstock.checkpoint.levels.cache import RUN_NOTE, CacheLevel, NodeCache
from penstock.checkpoint.levels.flush import Flusher, FlushNote, FlushState, is_committed
from penstock.checkpoint.levels.options import Single
from penstock.checkpoint.levels.redundancy import assess
from penstock.checkpoint.tools.inspection import RemovedCheckpoint
from penstock.cluster.comm import Comm, all_gather_results, run_on_all_ranks
from penstock.errors import ObjectNotFound, RankFailed, StorageError, UsageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import find_local_paths
from penstock.storage.protocol import read_if_any
from penstock.storage.uri import find_local_paths_at, open_here

LONGEST_FLUSH_S: Final = 7 * 86400.0
"""The longest that ranks wait for the flushers of other nodes. Each flusher gives up earlier if nothing is
copied.
"""

logger = logging.getLogger(__name__)


class CachedStep(BaseModel):
    """A step's shares in the caches that were inspected."""

    step: int
    size_bytes: int
    num_shares: int
    """The number of ranks that saved the step and have a complete share in these caches."""
    num_ranks: int
    scheme: str
    losses: int
    """The number of lost shares that each group survives."""
    lost: tuple[int, ...]
    """The ranks whose shares are in none of these caches."""
    reason: str
    """The reason why these caches alone cannot provide the step; empty if they can."""


class CacheFlush(BaseModel):
    """The flusher of one cache, and the steps that await their flush."""

    cache: str
    daemon: int | None
    """The PID of the running flusher; None if there is none."""
    flushing: int | None
    """The step that the flusher is copying."""
    bytes_per_s: float
    states: Mapping[int, FlushState]


class LevelsOverview(BaseModel):
    """All levels of one run."""

    durable: tuple[int, ...]
    cached: tuple[CachedStep, ...]
    flushes: tuple[CacheFlush, ...]


def require_cache_folder(path: str) -> Path:
    """Return the folder of a cache; raise `ObjectNotFound` if it does not exist."""
    paths = find_local_paths_at(path)
    if paths is None:
        raise UsageError(
            f"{path} is not a local folder", fix="A cache is a folder of a node, such as /local/ssd/run."
        )
    folder = Path(paths.local_root)
    if not folder.is_dir():
        raise ObjectNotFound(
            "The cache does not exist",
            uri=path,
            fix="Use the path of the manager's cache= on this node; each host has its own.",
        )
    return folder


def inspect_levels(run: str, caches: Sequence[str]) -> LevelsOverview:
    """Return the levels of a run: the durable steps at `run`, and the cached steps in `caches`."""
    folders = [require_cache_folder(path) for path in caches]
    durable = open_here(run)
    paths = find_local_paths(durable)
    # The durable folder need not exist if there are caches: perhaps no step was ever flushed.
    if paths is not None and not folders and not Path(paths.local_root).exists():
        raise ObjectNotFound(
            "There is no such directory of checkpoints",
            uri=durable.uri,
            fix="Give the one that the manager was created with, or its caches with --cache.",
        )
    nodes = [NodeCache(open_here(os.fspath(folder)), (number,)) for number, folder in enumerate(folders)]
    cached = []
    for step in sorted({step for node in nodes for step in node.steps()}):
        shares = [node.shares(step_dirname(step)) for node in nodes]
        found = assess(shares)
        record = next(iter(found.records.values()), None)
        cached.append(
            CachedStep(
                step=step,
                size_bytes=sum(sum(node.sizes.values()) for node in shares),
                num_shares=len({rank for ranks in found.shares.values() for rank in ranks}),
                num_ranks=len(found.domains),
                scheme=record.scheme if record else "",
                losses=record.losses if record else 0,
                lost=found.lost,
                reason=found.reason,
            )
        )
    return LevelsOverview(
        durable=tuple(StepCatalog(durable).committed()),
        cached=tuple(cached),
        flushes=tuple(_inspect_flush(node) for node in nodes),
    )


def _inspect_flush(node: NodeCache) -> CacheFlush:
    folder, states = node.flushes, node.flushes.states()
    now = folder.progress()
    is_working = folder.is_locked()
    if not is_working:
        reason = "no flusher is running: the next job, or `penstock checkpoint flush`, flushes it"
        states = {
            step: state
            if state.phase == "failing"
            else state.model_copy(update={"phase": "given", "reason": reason})
            for step, state in states.items()
        }
    return CacheFlush(
        cache=os.fspath(folder.cache),
        daemon=now.pid if is_working else None,
        flushing=now.step if is_working else None,
        bytes_per_s=now.bytes_per_s if is_working else 0.0,
        states=states,
    )


class StepRepair(BaseModel):
    """The condition of a cached step before a flush, and whether it was rebuilt."""

    step: int
    missing: tuple[int, ...] = ()
    """The ranks that saved the step and whose shares were in no cache."""
    damaged: tuple[int, ...] = ()
    """The ranks that saved the step and whose files were damaged."""
    reason: str = ""
    """The reason why the caches cannot provide the step; empty if they can."""

    @property
    def outcome(self) -> str:
        """The outcome of the repair, in at most two words."""
        if self.reason:
            return "beyond repair"
        return "rebuilt" if self.missing or self.damaged else "whole"


def flush_caches(
    storage: Storage,
    comm: Comm,
    *,
    steps: Sequence[int] = (),
    durable: str | None = None,
    timeout_s: float,
    progress: Progress,
) -> tuple[list[StepRepair], dict[int, FlushState]]:
    """Make pending steps, and the newest one that can be restored, durable from the caches of all ranks.

    If `steps` are given, flush exactly those. Every file is verified first, and lost files are rebuilt.
    Collective; returns the condition of each step examined, and the state of each step in this rank's cache.
    """
    run_on_all_ranks(
        comm, WriterLease(storage).require_free, awaiting="all ranks to see that no job saves to their caches"
    )
    level = CacheLevel(storage, comm, schemes=[Single()])
    try:
        node, looked_at, has_newest = level.node, list[StepRepair](), bool(steps)
        own = run_on_all_ranks(
            comm, lambda: (node.steps(), node.flushes.notes()), awaiting="all nodes to list their caches"
        )
        answers = comm.gather(own, awaiting="all nodes to list their caches")
        cached = sorted({step for there, _ in answers for step in there}, reverse=True)
        pending = {step: note for _, notes in answers for step, note in notes.items()}
        absent = sorted(set(steps) - set(cached))
        if absent or not cached:
            raise ObjectNotFound(
                f"Step {absent[0]} is in none of these caches" if absent else "No step is in these caches",
                fix=f"They hold {', '.join(map(str, reversed(cached))) or 'no step'}; "
                "name the directory of cache= on each rank's node.",
            )
        for step in cached:
            if step not in (steps or pending) and has_newest:
                continue
            note, is_durable = _make_note(level, step, pending.get(step), durable)
            if is_durable:
                has_newest = True
                continue
            looked_at.append(_repair(level, step))
            if note and not looked_at[-1].reason:
                has_newest = True
                spread = partial(level.spread_note, step, note)
                run_on_all_ranks(comm, spread, awaiting="all nodes to note the step")
        states = run_on_all_ranks(
            comm,
            lambda: Flusher(storage, progress=progress).run(patience_s=timeout_s) if level.is_lead else {},
            awaiting="all nodes to flush their caches",
            timeout_s=LONGEST_FLUSH_S,
        )
        return looked_at, states
    finally:
        level.close()


def _make_note(
    level: CacheLevel, step: int, note: FlushNote | None, durable: str | None
) -> tuple[FlushNote | None, bool]:
    """Return the note for a step, the same on all ranks, and whether this save of it is already durable.

    There is no note if no cache has the step's manifest undamaged and its flush was not pending.
    """
    name = step_dirname(step)

    def look() -> tuple[FlushNote | None, bool]:
        node = level.node
        if not level.is_lead or step not in node.steps():
            return None, False
        if (seal := node.seal(name)) is None:
            return None, False
        run = durable or (note.durable if note else _read_run(node.storage))
        save_id = read_manifest(seal.manifest, name).save_id
        found = (note or FlushNote(save_id=save_id, durable=run)).model_copy(update={"durable": run})
        return found, is_committed(open_here(run), name, seal.manifest)

    answers = all_gather_results(level.comm, look, awaiting="all nodes to look at the durable level")
    found = next((each for each, _ in answers if each is not None), note)
    return found, any(is_durable for _, is_durable in answers)


def _repair(level: CacheLevel, step: int) -> StepRepair:
    """Rebuild a step's files that are lost or differ from their checksums. Collective."""
    name = step_dirname(step)
    found = level.assess(name)
    repaired = StepRepair(step=step, missing=found.lost, reason=found.reason)
    if found.reason:
        return repaired
    if damaged := level.find_damaged(name, found):
        found = level.assess(name, damaged=damaged)
        repaired = repaired.model_copy(update={"damaged": tuple(damaged), "reason": found.reason})
    if found.is_rebuildable:
        try:
            level.repair(name, found)
        except (StorageError, RankFailed) as error:
            return repaired.model_copy(update={"reason": f"it could not be rebuilt: {error}"})
    return repaired


def remove_cached(storage: Storage, name: str, *, even_last: bool) -> RemovedCheckpoint:
    """Remove a step from this cache, together with the note that requests its flush.

    Raises `UsageError` if this save of the step is not durable, unless `even_last` is set, or if a running
    job saves to the cache.
    """
    node, step = NodeCache(storage, (0,)), parse_step(name)
    WriterLease(storage).require_free()
    share, run = node.find(name), _read_run(storage)
    seal = node.seal(name)
    is_durable = seal is not None and is_committed(open_here(run), name, seal.manifest)
    if not (is_durable or even_last):
        raise UsageError(
            f"{name} is not durable in {run}; nothing was removed",
            where=storage.uri,
            fix="Run `penstock checkpoint flush` first, or give --even-last to lose it.",
        )
    sizes = share.sizes()
    if step is not None:
        node.flushes.remove(step)
    node.hide(name)()
    node.confirm(name)
    return RemovedCheckpoint(
        uri=share.uri,
        step=step,
        size_bytes=sum(sizes.values()),
        num_files=len(sizes),
        stays=f"{run}/{name}" if is_durable else "",
    )


def _read_run(storage: Storage) -> str:
    run = read_if_any(storage, RUN_NOTE)
    if run is None:
        raise ObjectNotFound(
            "The cache does not name the run that its steps belong to",
            uri=storage.uri,
            fix="Give the durable directory or URI of its manager with --to.",
        )
    return run.decode()
