"""The steps of one run on all its levels: saved to caches, flushed to durable storage, found on either.

The keeper of a manager that has a cache. Invariant: a step that is bad on one level is tried on the next, and
only then is an older step tried; a step stays in the caches until it is durable, if it is to become so.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.catalog import local_path, parse_step, step_dirname
from penstock.checkpoint.levels.cache import Cached, CacheLevel
from penstock.checkpoint.levels.flush.daemon_flusher import DaemonFlusher
from penstock.checkpoint.levels.flush.flusher import TrainerFlusher, require_over
from penstock.checkpoint.levels.recovery import Fetched, damaged_shares
from penstock.checkpoint.manager.step_store import DurableKeeper, Find, wanted_of
from penstock.cluster.collectives import all_gather_results
from penstock.errors import RankFailed, StorageError, UsageError
from penstock.storage.capabilities import find_folder_tree
from penstock.storage.uri import parse_uri

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.checkpoint.commit.catalog import Stored
    from penstock.checkpoint.commit.protocol import Draft
    from penstock.checkpoint.engine import PreparedSave, ShareStats, StagedSave
    from penstock.checkpoint.levels.flush.flusher import Flusher
    from penstock.checkpoint.levels.options import Flush, Scheme
    from penstock.checkpoint.levels.redundancy.recoverability import Assessment
    from penstock.checkpoint.manager.step_store import Slot
    from penstock.checkpoint.state.process_group import Members
    from penstock.progress import Progress
    from penstock.storage import Storage


def open_flusher(
    cache: CacheLevel, durable: DurableKeeper, members: Members, settings: Flush, *, path: str | None
) -> Flusher:
    """The flusher that `settings` ask for. Collective.

    `path` is the durable level's path or URI, where it was given as one: another process opens it again.
    """
    if settings.by == "daemon":
        reason = _why_no_daemon(durable, path)
        told = members.comm.gather(reason, awaiting="all ranks to say whether a daemon can flush")
        reasons = [each for each in told if each]
        if not reasons and path is not None:
            return DaemonFlusher(cache, durable, _whole_uri(path), members, settings)
        level = logging.WARNING if members.comm.rank == 0 else logging.INFO
        logger.log(level, "The trainer flushes, and not a daemon: %s", reasons[0])
    return TrainerFlusher(cache, durable, members, settings)


def _why_no_daemon(durable: DurableKeeper, path: str | None) -> str:
    if path is None:
        return "the durable level was handed over as an open storage, which no other process has"
    if find_folder_tree(durable.on_storage.storage) is None:
        return f"{durable.uri} is no file system"
    if "?" in parse_uri(path).root:
        return f"{path!r} cannot be written as a URI"
    return ""


def _whole_uri(path: str) -> str:
    """A path as the URI that means the same in any folder; a file is read while its last block is written."""
    location = parse_uri(path)
    options = {"writes_in_flight": "2", **location.options}
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{location.scheme}://{location.root}?{query}"


logger = logging.getLogger(__name__)


def leveled(
    plain: DurableKeeper,
    cache: Storage,
    flushers: Members,
    *,
    schemes: Sequence[Scheme],
    flush: Flush | None,
    keep_cached: int | None,
    domain: str | None,
    path: str | None,
) -> LeveledKeeper:
    """The keeper of a run with caches before its durable steps, which lie at `path`. Collective."""
    if keep_cached is not None and keep_cached < 1:
        raise UsageError(f"keep_cached={keep_cached} keeps nothing", fix="Keep one or more, or None for all.")
    flushers.comm.timeout_s = plain.timeout_s
    level = CacheLevel(cache, plain.comm, schemes=schemes, domain=domain)
    flusher = None if flush is None else open_flusher(level, plain, flushers, flush, path=path)
    return LeveledKeeper(level, plain, flusher, flush=flush, keep_cached=keep_cached)


class LeveledKeeper:
    """A `Keeper` of steps in caches and on a durable level.

    Saving and finding speak over the group of the `plain` keeper; without a `flusher` nothing becomes
    durable. The newest `keep_cached` steps stay in the caches; None keeps all.
    """

    def __init__(
        self,
        cache: CacheLevel,
        plain: DurableKeeper,
        flusher: Flusher | None,
        *,
        flush: Flush | None,
        keep_cached: int | None,
    ) -> None:
        self.uri = cache.storage.uri
        self._cache = cache
        self._plain = plain
        self._durable = plain.on_storage
        self._comm = plain.comm
        self._flusher = flusher
        self._flush = flush
        self._keep_cached = keep_cached
        self._num_saves = 0
        self._is_open = True

    def steps(self) -> list[int]:
        """The durable steps, and those of this node's cache."""
        return sorted({*self._durable.committed(), *self._cached_here()})

    def open(self, name: str, *, is_last: bool = False) -> Slot:
        """Room in all caches; results, which are no steps, go to the durable level at once."""
        if parse_step(name) is None:
            return self._plain.open(name)
        with ExitStack() as undo:
            if self._flusher:
                undo.enter_context(self._flusher.saving())
            return CachedSlot(
                self, self._cache, self._cache.start(name), is_last=is_last, until=undo.pop_all()
            )

    def save(
        self,
        draft: Draft,
        prepared: PreparedSave,
        staged: StagedSave,
        progress: Progress,
        *,
        is_last: bool,
    ) -> Cached:
        """Complete a draft, protected as the number of this save wants; the flush goes on behind."""
        self._num_saves += 1
        step = parse_step(draft.name)
        assert step is not None, "only steps are saved to caches"
        cached = self._cache.complete(
            draft, prepared, staged, number=self._num_saves, facts={"step": step}, progress=progress
        )
        if self._flusher and self._flush and (is_last or self._num_saves % self._flush.every == 0):
            self._flusher.hand_over(step, cached)
            if not self._flush.background:
                self._flusher.wait(self._plain.timeout_s)
                require_over(self._flusher, step)
        self._retire_cached()
        return cached

    def candidates(self, wanted: int | None) -> list[int]:
        """Every step of any level."""
        cached = {step for name in self._cache.names() if (step := parse_step(name)) is not None}
        durable = all_gather_results(
            self._comm,
            lambda: self._durable.committed() if self._comm.rank == 0 else [],
            awaiting="rank 0 to list the durable steps",
        )[0]
        return wanted_of(sorted({*cached, *durable}), wanted, self._durable.storage.uri)

    def finds(self, step: int) -> Iterator[Find | str]:
        """From the caches, rebuilt where something is lost or damaged; then from the durable level."""
        found = self._cache.assess(step_dirname(step))
        if found.records:
            yield from self._cached(step, found)
        is_durable = all_gather_results(
            self._comm,
            lambda: self._comm.rank == 0 and step in self._durable.committed(),
            awaiting="rank 0 to look for the durable step",
        )[0]
        if is_durable:
            yield Find(
                level="durable",
                find=partial(self._durable.find, step),
                settle=partial(self._fetch, step),
            )
        elif not found.records:
            yield "no level has it"

    def untold_failures(self) -> Mapping[int, BaseException]:
        """Flushes that failed: the step is still in the caches."""
        return self._flusher.untold_failures() if self._flusher else {}

    def close(self) -> None:
        """Wait until everything that is to be durable is, and let go."""
        if self._is_open:
            self._is_open = False
            if self._flusher:
                self._flusher.close()
            self._cache.close()

    def _retire_cached(self) -> None:
        """Remove the oldest steps of this node's cache, but none that is still to be flushed."""
        if self._keep_cached is None or not self._cache.leads:
            return
        states = self._flusher.states() if self._flusher else {}
        flushing = {step for step, state in states.items() if not state.is_over}
        for step in self._cached_here()[: -self._keep_cached]:
            if step not in flushing:
                self._cache.remove(step_dirname(step))

    def _cached_here(self) -> list[int]:
        return sorted(step for name in self._cache.names_here() if (step := parse_step(name)) is not None)

    def _cached(self, step: int, found: Assessment) -> Iterator[Find | str]:
        name = step_dirname(step)
        found = self._repaired(name, found)
        if found.reason:
            yield self._beyond(name, found.reason)
            return
        yield self._find("cache", name, found)
        # Asked for another copy: the first one was bad. Whose files are damaged is as good as lost.
        damaged = damaged_shares(self._cache, self._comm, name, found)
        if not damaged:
            return
        found = self._repaired(name, self._cache.assess(name, damaged=damaged))
        if found.reason:
            yield self._beyond(name, found.reason)
            return
        yield self._find("cache, rebuilt", name, found)

    def _repaired(self, name: str, found: Assessment) -> Assessment:
        """The step after a rebuild, where one is needed and possible; else with the reason why it is not."""
        if not found.is_rebuildable:
            return found
        self._say("%s: rebuilding what ranks %s have lost", name, _listed(found.lost))
        try:
            self._cache.repair(name, found)
        except RankFailed as error:
            return replace(found, reason=f"it could not be rebuilt: {error}")
        return self._cache.assess(name)

    def _beyond(self, name: str, reason: str) -> str:
        self._say("%s: the caches cannot give it, other levels may: %s", name, reason)
        return f"caches: {reason}"

    def _say(self, text: str, *values: object) -> None:
        """Once a job is enough to be read; the other ranks' logs have it for whoever looks there."""
        logger.log(logging.WARNING if self._comm.rank == 0 else logging.INFO, text, *values)

    def _find(self, level: str, name: str, found: Assessment) -> Find:
        return Find(
            level=level,
            find=partial(self._cache.view, name, found),
            settle=partial(self._cache.bring_home, name, found),
        )

    def _fetch(self, step: int) -> Stored:
        """Files of one's own, copied from the durable level into the caches, and protected there again."""
        stored = self._durable.find(step)
        files = Fetched(stored, rank=self._comm.rank, num_ranks=self._comm.size)
        try:
            # Of several schemes the one of the largest interval protects it: 0 is a multiple of each.
            self._cache.save(step_dirname(step), files, files, number=0, facts={})
        except (StorageError, RankFailed) as error:
            logger.warning("%s is read where it lies, not fetched: %s", step_dirname(step), error)
            return self._plain.in_place(step)
        return self._cache.bring_home(step_dirname(step), self._cache.assess(step_dirname(step)))


class CachedSlot:
    """A `Slot` in all caches. Flushing pauses, if it was told to, until it is completed or abandoned."""

    def __init__(
        self, keeper: LeveledKeeper, cache: CacheLevel, draft: Draft, *, is_last: bool, until: ExitStack
    ) -> None:
        self._keeper = keeper
        self._cache = cache
        self._draft = draft
        self._is_last = is_last
        self._until = until

    def path(self, file_name: str) -> Path:
        """In the draft of this node."""
        return local_path(self._cache.storage, self._draft.key(file_name))

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[ShareStats, ...]]:
        """Protect and commit it, and hand it to be flushed if its turn has come."""
        with self._until:
            cached = self._keeper.save(self._draft, prepared, staged, progress, is_last=self._is_last)
        self._draft = replace(self._draft, folder="")
        return f"{self._keeper.uri}/{cached.name}", cached.stats

    def abandon(self) -> None:
        """Remove this node's draft."""
        with self._until:
            self._cache.drop(self._draft)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
