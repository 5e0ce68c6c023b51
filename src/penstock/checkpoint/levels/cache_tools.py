"""What operators do with caches from outside the job: status, dropping steps, flushing to the end.

Works on the caches that can be reached from here, without a process group. Invariant: status changes nothing;
a dropped step goes from all named caches with its flush orders, or the refusal names it and nothing was
removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.catalog import StepCatalog, parse_step, step_dirname
from penstock.checkpoint.levels.cache import NodeCache, identify_cache
from penstock.checkpoint.levels.flush.daemon_client import DaemonWatchdog, read_flush_states
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder, FlushOrder, JournalReader
from penstock.checkpoint.levels.flush.flusher import FlushState
from penstock.checkpoint.levels.redundancy.redundancy_record import assess
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.capabilities import find_local_paths
from penstock.storage.uri import find_local_paths_at, open_here

if TYPE_CHECKING:
    from penstock.progress import RunProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """What the inspected caches have of a step."""

    step: int
    size_bytes: int
    num_shares: int
    """How many of the ranks that saved it have a complete share here."""
    num_ranks: int
    scheme: str
    losses: int
    """How many lost shares each group survives."""
    lost: tuple[int, ...]
    """The ranks whose shares are in none of these caches."""
    reason: str
    """Why these caches alone cannot provide it; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlush:
    """The daemon of one cache and its flushes."""

    cache: str
    daemon: int | None
    """Its PID; None if none is running."""
    flushing: int | None
    """The step that it is copying."""
    bytes_per_s: float
    is_paused: bool
    states: Mapping[int, FlushState]

    @property
    def is_over(self) -> bool:
        """Whether all its steps are durable or superseded."""
        return all(state.is_over for state in self.states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelsOverview:
    """All levels of one run."""

    durable: tuple[int, ...]
    cached: tuple[CachedStep, ...]
    flushes: tuple[CacheFlush, ...]

    @property
    def steps(self) -> list[int]:
        """The steps of all levels and those being flushed, ascending."""
        flushing = {
            step for flush in self.flushes for step, state in flush.states.items() if not state.is_over
        }
        return sorted({*self.durable, *(cached.step for cached in self.cached), *flushing})

    @property
    def left_bytes(self) -> int:
        """The bytes still to be copied."""
        return sum(
            state.size_bytes - state.copied_bytes
            for flush in self.flushes
            for state in flush.states.values()
            if not state.is_over
        )


def require_cache_folder(path: str) -> Path:
    """The folder of a cache; `ObjectNotFound` if it does not exist."""
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
    """The levels of the run whose durable steps are at `run`."""
    folders = [require_cache_folder(path) for path in caches]
    durable = open_here(run)
    paths = find_local_paths(durable)
    # With caches alone, no step may ever have been flushed.
    if paths is not None and not folders and not Path(paths.local_root).exists():
        raise ObjectNotFound(
            "There is no such directory of checkpoints",
            uri=durable.uri,
            fix="Give the one that the manager was made with, or its caches with --cache.",
        )
    return LevelsOverview(
        durable=tuple(StepCatalog(durable).committed()),
        cached=tuple(_inspect_steps(folders)),
        flushes=tuple(inspect_flush(folder) for folder in folders),
    )


def inspect_flush(cache: Path) -> CacheFlush:
    """The progress of the daemon of one cache."""
    folder = FlushFolder(cache)
    daemon = folder.daemon_pid()
    now = folder.progress() if daemon is not None else None
    return CacheFlush(
        cache=os.fspath(cache),
        daemon=daemon,
        flushing=now.step if now else None,
        bytes_per_s=now.bytes_per_s if now else 0.0,
        is_paused=now.is_paused if now else False,
        states={**_read_due(folder), **read_flush_states(folder, JournalReader(folder.journal))},
    )


def _read_due(folder: FlushFolder) -> dict[int, FlushState]:
    """The steps that a trainer's threads are to flush: it does so now, or ended before."""
    steps = folder.due.all()
    if not steps:
        return {}
    if folder.trainers.any_alive():
        return dict.fromkeys(steps, FlushState(phase="given", reason="a trainer flushes it"))
    reason = (
        "it is cached, and the trainer that was to flush it has ended; the next one of its run flushes it, "
        "or `penstock checkpoint scavenge --step`"
    )
    return dict.fromkeys(steps, FlushState(phase="failing", reason=reason))


def _inspect_steps(folders: Sequence[Path]) -> list[CachedStep]:
    nodes = [_open_node(folder, number) for number, folder in enumerate(folders)]
    steps = sorted(
        {step for node in nodes for name in node.names() if (step := parse_step(name)) is not None}
    )
    return [_inspect_step(step, nodes) for step in steps]


def _inspect_step(step: int, nodes: Sequence[NodeCache]) -> CachedStep:
    shares = [node.shares(step_dirname(step)) for node in nodes]
    assessment = assess(shares)
    record = next(iter(assessment.records.values()), None)
    return CachedStep(
        step=step,
        size_bytes=sum(sum(node.sizes.values()) for node in shares),
        num_shares=len({rank for ranks in assessment.shares.values() for rank in ranks}),
        num_ranks=len(record.domains) if record else 0,
        scheme=record.scheme if record else "",
        losses=record.losses if record else 0,
        lost=assessment.lost,
        reason=assessment.reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppableStep:
    """A step in the caches."""

    step: int
    size_bytes: int
    is_durable: bool | None
    """None if no durable level was named."""
    is_ordered: bool
    """Whether it is still to be flushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContent:
    """What one cache has of which steps; ranks send this to each other."""

    identity: tuple[object, ...]
    """The same for two paths if they lead to the same folder."""
    size_bytes: Mapping[int, int]
    """By step."""
    ordered: frozenset[int]
    """The steps still to be flushed."""


def list_content(cache: Path, rank: int = 0) -> CacheContent:
    """The steps of a cache that `rank` can reach."""
    node = _open_node(cache)
    steps = [step for name in node.names() if (step := parse_step(name)) is not None]
    folder = FlushFolder(cache)
    return CacheContent(
        identity=identify_cache(node.storage, rank),
        size_bytes={step: sum(node.shares(step_dirname(step)).sizes.values()) for step in steps},
        ordered=frozenset((*folder.orders.steps(), *folder.due.all())),
    )


def find_droppable(
    contents: Sequence[CacheContent], steps: Collection[int] | None, durable: str | None
) -> list[DroppableStep]:
    """What caches have of `steps`, or of all steps, ascending; `ObjectNotFound` if one is in none."""
    caches = {content.identity: content for content in contents}.values()
    cached_steps = {step for cache in caches for step in cache.size_bytes}
    absent = sorted(set(steps or ()) - cached_steps)
    if absent:
        raise ObjectNotFound(
            f"Step {absent[0]} is in none of these caches",
            fix=f"They hold {', '.join(map(str, sorted(cached_steps))) or 'no step'}.",
        )
    known = None if durable is None else set(StepCatalog(open_here(durable)).committed())
    return [
        DroppableStep(
            step=step,
            size_bytes=sum(cache.size_bytes.get(step, 0) for cache in caches),
            is_durable=None if known is None else step in known,
            is_ordered=any(step in cache.ordered for cache in caches),
        )
        for step in sorted(cached_steps if steps is None else steps)
    ]


def require_durable(steps: Sequence[DroppableStep]) -> None:
    """`UsageError` if a step might exist nowhere else."""
    for step in steps:
        if not step.is_durable:
            doubt = "is not durable" if step.is_durable is False else "may not be durable"
            raise UsageError(
                f"Step {step.step} {doubt}; nothing was dropped",
                fix="Flush or scavenge it first and name the durable level by --durable, or give --force.",
            )


def drop(caches: Sequence[Path], steps: Collection[int]) -> None:
    """Remove steps from these caches: their orders first, so that no daemon looks for removed files."""
    for cache in caches:
        folder = FlushFolder(cache)
        flush_orders = folder.orders
        for step, order in flush_orders.all().items():
            if step in steps and isinstance(order, FlushOrder):
                flush_orders.remove(order)
        for step, save_id in folder.due.all().items():
            if step in steps:
                folder.due.remove(step, save_id)
        node = _open_node(cache)
        for step in steps:
            node.hide(step_dirname(step))()
            node.confirm(step_dirname(step))


def _open_node(cache: Path, number: int = 0) -> NodeCache:
    return NodeCache(open_here(os.fspath(cache)), ranks=(number,))


POLL_S: Final = 0.1

States = dict[int, "FlushState"]
"""By step."""


class _CacheDrain:
    """One cache whose orders are flushed to the end."""

    def __init__(self, cache: Path) -> None:
        self._folder = FlushFolder(cache)
        self._journal = JournalReader(self._folder.journal)
        self._watchdog = DaemonWatchdog(self._folder)
        self.steps = frozenset(self._folder.orders.steps())

    def states(self) -> States:
        states = read_flush_states(self._folder, self._journal)
        return {
            **_read_due(self._folder),
            **{step: state for step, state in states.items() if step in self.steps},
        }

    def is_over(self) -> bool:
        return not self.steps & set(self._folder.orders.steps())

    def ensure_running(self) -> None:
        """Start its daemon if it is not running and orders are left."""
        if not self.is_over():
            self._watchdog.ensure_running()


def drain_caches(
    caches: Sequence[Path],
    progress: RunProgress,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Path, States]:
    """Let the daemons of these caches finish all orders; the state of each step, by cache.

    Returns early if nothing has moved for `timeout_s`: a slow flush continues, one that waits for other nodes
    does not hold up the caller. What is not finished then continues without this process.
    """
    drains = {cache: _CacheDrain(cache) for cache in caches}
    num_bytes = sum(state.size_bytes for drain in drains.values() for state in drain.states().values())
    progress.begin("flush", num_bytes)
    progress.enter("working", unit="written_bytes")
    copied_bytes, num_left, moved_at_s = 0, -1, clock()
    while True:
        for drain in drains.values():
            drain.ensure_running()
        # Orders before states: an order is removed only after its outcome is in the journal.
        now_left = sum(not drain.is_over() for drain in drains.values())
        states = {cache: drain.states() for cache, drain in drains.items()}
        now_bytes = sum(state.copied_bytes for of_cache in states.values() for state in of_cache.values())
        if now_bytes != copied_bytes or now_left != num_left:
            progress.advance(max(now_bytes - copied_bytes, 0))
            copied_bytes, num_left, moved_at_s = now_bytes, now_left, clock()
        if not num_left or clock() - moved_at_s > timeout_s:
            return states
        sleep(POLL_S)
