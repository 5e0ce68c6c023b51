"""What lies on the levels of a run, and how far its flushes are: for those who look from outside of the job.

Reads the durable level and whichever caches can be reached from here. Invariant: looking changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.steps import Steps, name_of, step_of
from penstock.checkpoint.tiers.assess import assess
from penstock.checkpoint.tiers.daemon.flusher import states_of
from penstock.checkpoint.tiers.daemon.folder import FlushFolder
from penstock.checkpoint.tiers.daemon.journal import JournalReader
from penstock.checkpoint.tiers.node_cache import NodeCache
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.registry import open_here
from penstock.storage.uri import FILE_SCHEMES, parse_uri

if TYPE_CHECKING:
    from penstock.checkpoint.tiers.assess import Assessment
    from penstock.checkpoint.tiers.flush import FlushState


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStep:
    """What the caches that were looked at hold of a step."""

    step: int
    size_bytes: int
    num_shares: int
    """Of ranks that saved it, whose shares are whole here."""
    num_ranks: int
    scheme: str
    losses: int
    """So many lost shares each group survives."""
    lost: tuple[int, ...]
    """The ranks whose shares are in none of these caches."""
    reason: str
    """Why these caches alone cannot give it; empty where they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlush:
    """One cache's daemon and what it was given."""

    cache: str
    daemon: int | None
    """Its process; None where none runs."""
    flushing: int | None
    """The step whose bytes it is moving."""
    bytes_per_s: float
    is_paused: bool
    states: Mapping[int, FlushState]

    @property
    def is_over(self) -> bool:
        """Whether everything it was given is durable or superseded."""
        return all(state.is_over for state in self.states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All levels of one run."""

    durable: tuple[int, ...]
    cached: tuple[CachedStep, ...]
    flushes: tuple[CacheFlush, ...]

    @property
    def steps(self) -> list[int]:
        """Of any level, and those on their way, ascending."""
        given = {step for each in self.flushes for step, state in each.states.items() if not state.is_over}
        return sorted({*self.durable, *(each.step for each in self.cached), *given})

    @property
    def left_bytes(self) -> int:
        """What is still to be copied."""
        return sum(
            state.size_bytes - state.copied_bytes
            for each in self.flushes
            for state in each.states.values()
            if not state.is_over
        )


def cache_folder(path: str) -> Path:
    """The folder of a cache; `ObjectNotFound` where there is none."""
    location = parse_uri(path)
    if location.scheme not in FILE_SCHEMES:
        raise UsageError(f"{path} is no folder", fix="A cache is a folder of a node, such as /local/ssd/run.")
    folder = Path(location.root)
    if not folder.is_dir():
        raise ObjectNotFound(
            "There is no such cache",
            uri=path,
            fix="Name the manager's cache= of this node; hosts have their own.",
        )
    return folder


def look(run: str, caches: Sequence[str]) -> Overview:
    """What lies on the levels of the run whose durable steps are at `run`."""
    folders = [cache_folder(path) for path in caches]
    return Overview(
        durable=tuple(Steps(open_here(run)).committed()),
        cached=tuple(_cached(folders)),
        flushes=tuple(look_at_flush(folder) for folder in folders),
    )


def look_at_flush(cache: Path) -> CacheFlush:
    """How far one cache's daemon is."""
    folder = FlushFolder(cache)
    daemon, speed = folder.daemon_pid(), folder.speed()
    now = speed if daemon is not None else None
    return CacheFlush(
        cache=os.fspath(cache),
        daemon=daemon,
        flushing=now.step if now else None,
        bytes_per_s=now.bytes_per_s if now else 0.0,
        is_paused=now.is_paused if now else False,
        states=states_of(folder, JournalReader(folder.journal)),
    )


def _cached(folders: Sequence[Path]) -> list[CachedStep]:
    nodes = [
        NodeCache(open_here(os.fspath(folder)), ranks=(number,)) for number, folder in enumerate(folders)
    ]
    steps = sorted({step for node in nodes for name in node.names() if (step := step_of(name)) is not None})
    return [_cached_step(step, nodes) for step in steps]


def _cached_step(step: int, nodes: Sequence[NodeCache]) -> CachedStep:
    holdings = [node.holding(name_of(step)) for node in nodes]
    found = assess(holdings)
    record = next(iter(found.records.values()), None)
    return CachedStep(
        step=step,
        size_bytes=sum(sum(holding.sizes.values()) for holding in holdings),
        num_shares=_num_shares(found),
        num_ranks=len(record.domains) if record else 0,
        scheme=record.scheme if record else "",
        losses=record.losses if record else 0,
        lost=found.lost,
        reason=found.reason,
    )


def _num_shares(found: Assessment) -> int:
    return len({rank for shares in found.shares.values() for rank in shares})
