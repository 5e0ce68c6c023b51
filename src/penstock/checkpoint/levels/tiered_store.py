"""The steps of a run with caches: saved to the caches, flushed to durable storage, restored from either.

The `StepStore` of a manager with `cache=`. Invariant: a step that is damaged on one level is tried on the
next before an older step is; a step that is to become durable stays in the caches until it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.catalog import (
    CheckpointRef,
    local_path,
    parse_step,
    remove_leftovers,
    step_dirname,
    tolerating_leftovers,
)
from penstock.checkpoint.commit.protocol import Draft, WriterLease
from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave
from penstock.checkpoint.levels.cache import CachedSave, CacheLevel
from penstock.checkpoint.levels.flush.daemon_client import DaemonFlusher
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder
from penstock.checkpoint.levels.flush.flusher import Flusher, TrainerFlusher, require_durable
from penstock.checkpoint.levels.options import Flush, Scheme
from penstock.checkpoint.levels.recovery import FetchedFiles, find_damaged_shares, resume_flushes
from penstock.checkpoint.levels.redundancy import gf256
from penstock.checkpoint.levels.redundancy.redundancy_record import Assessment
from penstock.checkpoint.manager import step_store
from penstock.cluster.comm import run_on_all_ranks, run_on_rank0
from penstock.errors import RankFailed, StorageError, UsageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import find_folder_tree, find_local_root
from penstock.storage.uri import has_option, parse_uri

if TYPE_CHECKING:
    from penstock.checkpoint.state.process_group import RankGroup


logger = logging.getLogger(__name__)


def _open_flusher(
    cache: CacheLevel,
    durable: step_store.DurableStore,
    members: RankGroup,
    settings: Flush,
    *,
    path: str | None,
) -> Flusher:
    """The flusher for these settings: the daemon of each node if it can, else the trainer. Collective.

    `path` is the path or URI of the durable level, if it was given as one: the daemon opens it again. All
    ranks choose alike, and log why it is not the daemon.
    """
    if settings.by == "daemon":
        obstacle = _explain_no_daemon(durable, path)
        answers = members.comm.gather(obstacle, awaiting="all ranks to check whether a daemon can flush")
        obstacles = [answer for answer in answers if answer]
        if not obstacles and path is not None:
            return DaemonFlusher(cache, durable, _build_daemon_uri(path), members, settings)
        step_store.warn_once_per_job(
            logger, members.comm.rank, "Flushing in the trainer instead of a daemon: %s", obstacles[0]
        )
    return TrainerFlusher(cache, durable, members, settings)


def _explain_no_daemon(durable: step_store.DurableStore, path: str | None) -> str:
    if path is None:
        return "the durable level was given as an open storage, which another process cannot use"
    if find_folder_tree(durable.catalog.storage) is None:
        return f"{durable.uri} is not a file system"
    if "?" in parse_uri(path).root:
        return f"{path!r} cannot be written as a URI"
    return ""


def _build_daemon_uri(path: str) -> str:
    """The absolute URI of a path, with two writes in flight: one block is read while another is written."""
    location = parse_uri(path)
    if "writes_in_flight" not in location.options and has_option(path, "writes_in_flight"):
        location = location.with_options(writes_in_flight="2")
    return location.text


def _require_apart(cache: Storage, durable: Storage) -> None:
    """`UsageError` if the cache, which exists, is the durable folder: old steps would leave both at once."""
    own, shared = find_local_root(cache), find_local_root(durable)
    if own is None or shared is None:
        return
    with suppress(OSError):
        # What cannot be looked at is not the cache, which could.
        if own.samefile(shared):
            raise UsageError(
                f"The cache is the durable folder itself, {durable.uri}",
                where=cache.uri,
                fix="Give a folder of the node's own as cache=, or none.",
            )


def open_tiered_store(
    durable: step_store.DurableStore,
    cache: Storage,
    flushers: RankGroup,
    *,
    schemes: Sequence[Scheme],
    flush: Flush | None,
    keep_cached: int | None,
    domain: str | None,
    path: str | None,
) -> TieredStore:
    """The step store of a run with caches in front of its durable steps at `path`. Collective."""
    if any(scheme.losses > 1 for scheme in schemes):
        # Compiled now, while the run starts, and not in its first save.
        gf256.load_loops()
    flushers.comm.timeout_s = durable.timeout_s
    level = CacheLevel(cache, durable.comm, schemes=schemes, domain=domain)
    run_on_all_ranks(
        durable.comm,
        lambda: _require_apart(cache, durable.catalog.storage),
        awaiting="all ranks to see that their caches are not the durable folder",
    )
    level.claim(durable.uri)
    for shortfall in level.shortfalls:
        step_store.warn_once_per_job(logger, durable.comm.rank, "Redundancy: %s", shortfall)
    flusher = None if flush is None else _open_flusher(level, durable, flushers, flush, path=path)
    if flusher is not None:
        resume_flushes(level, durable.comm, flusher, durable.catalog)
    return TieredStore(level, durable, flusher, flush=flush, keep_cached=keep_cached)


class TieredStore:
    """A `StepStore` with caches in front of a durable level.

    Saving and restoring use the group of the `durable` store; without a `flusher` nothing becomes durable.
    The newest `keep_cached` steps stay in the caches; None keeps all.
    """

    def __init__(
        self,
        cache: CacheLevel,
        durable: step_store.DurableStore,
        flusher: Flusher | None,
        *,
        flush: Flush | None,
        keep_cached: int | None,
    ) -> None:
        self.uri = cache.storage.uri
        self._cache = cache
        self._durable = durable
        self._catalog = durable.catalog
        self._comm = durable.comm
        self._flusher = flusher
        self._flush = flush
        self._keep_cached = keep_cached
        self._lease = WriterLease(cache.storage)
        self._due = FlushFolder(local_path(cache.storage, "")).due
        self._num_saves = 0
        self._saved: int | None = None
        self._is_open = True

    def steps(self) -> list[int]:
        """The durable steps and those in this node's cache."""
        return sorted({*self._catalog.committed(), *self._local_steps()})

    def open(self, name: str, *, is_last: bool = False) -> step_store.StepSlot:
        """A draft in all caches; results, which are not steps, go to the durable level at once."""
        if parse_step(name) is None:
            return self._durable.open(name)
        run_on_all_ranks(
            self._comm,
            lambda: self._lease.hold() if self._cache.is_lead else None,
            awaiting="all nodes to see that no other job saves to their caches",
        )
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
    ) -> CachedSave:
        """Complete a draft with the redundancy for this save's number, and hand it to the flusher."""
        self._num_saves += 1
        step = parse_step(draft.name)
        assert step is not None, "only steps are saved to caches"
        cached = self._cache.complete(
            draft, prepared, staged, number=self._num_saves, facts={"step": step}, progress=progress
        )
        if self._flusher and self._flush and (is_last or self._num_saves % self._flush.every == 0):
            self._flusher.hand_over(step, cached)
            if not self._flush.background:
                self._flusher.wait(self._durable.timeout_s)
                require_durable(self._flusher, step)
        self._saved = step
        return cached

    def candidates(self, wanted: int | None) -> list[int]:
        """The steps of all levels."""
        cached = {step for name in self._cache.names() if (step := parse_step(name)) is not None}
        durable = run_on_rank0(
            self._comm, self._catalog.committed, awaiting="rank 0 to list the durable steps"
        )
        return step_store.select_steps(sorted({*cached, *durable}), wanted, self._catalog.storage.uri)

    def copies(self, step: int) -> Iterator[step_store.StepCopy | step_store.MissingCopy]:
        """The caches' copy, rebuilt if files are lost or damaged; then that of the durable level."""
        assessment = self._cache.assess(step_dirname(step))
        if assessment.records:
            yield from self._cached(step, assessment)
        is_durable = run_on_rank0(
            self._comm,
            lambda: step in self._catalog.committed(),
            awaiting="rank 0 to look for the durable step",
        )
        if is_durable:
            yield step_store.StepCopy(
                level="durable",
                open=partial(self._catalog.find, step),
                localize=partial(self._fetch, step),
            )
        elif not assessment.records:
            yield step_store.MissingCopy("no level has it")

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """Failed flushes: their steps are still in the caches."""
        return self._flusher.unreported_failures() if self._flusher else {}

    def close(self) -> None:
        """Wait until everything that is to become durable is, then release everything."""
        if self._is_open:
            self._is_open = False
            if self._flusher:
                self._flusher.close()
                # The last save kept what was still to be flushed.
                remove_leftovers(self._saved or 0, self.hide_surplus())
            self._cache.close()
            self._lease.release()
            self._durable.close()

    def hide_surplus(self) -> list[Callable[[], None]]:
        """Hide the oldest steps of this node's cache, except those still to be flushed; what removes them.

        As on the durable level, steps beyond the one saved last do not count; who saved none removes none.
        """
        saved = self._saved
        if saved is None or self._keep_cached is None or not self._cache.is_lead:
            return []
        states = self._flusher.states() if self._flusher else {}
        flushing = {step for step, state in states.items() if not state.is_over}
        surplus = [step for step in self._local_steps() if step <= saved][: -self._keep_cached]
        due = self._due.all() if surplus else {}
        hidden = []
        for step in surplus:
            if step not in flushing:
                with tolerating_leftovers(saved):
                    hidden.append(self._cache.node.hide(step_dirname(step)))
                if step in due:
                    logger.warning(
                        "Step %d leaves the cache %s before it is durable: its trainer ended first, and none "
                        "could flush it since",
                        step,
                        self.uri,
                    )
                    self._due.remove(step, due[step])
        return hidden

    def _local_steps(self) -> list[int]:
        return sorted(step for name in self._cache.node.names() if (step := parse_step(name)) is not None)

    def _cached(
        self, step: int, assessment: Assessment
    ) -> Iterator[step_store.StepCopy | step_store.MissingCopy]:
        name = step_dirname(step)
        assessment = self._repaired(name, assessment)
        if assessment.reason:
            yield self._report_missing(name, assessment.reason)
            return
        yield self._describe_copy("cache", name, assessment)
        # Resumed, because the first copy could not be loaded: damaged shares count as lost ones from here.
        damaged = find_damaged_shares(self._cache, self._comm, name, assessment)
        if not damaged:
            return
        assessment = self._repaired(name, self._cache.assess(name, damaged=damaged))
        if assessment.reason:
            yield self._report_missing(name, assessment.reason)
            return
        yield self._describe_copy("cache, rebuilt", name, assessment)

    def _repaired(self, name: str, assessment: Assessment) -> Assessment:
        """Rebuild the step if that is needed and possible; on failure, `reason` says why not."""
        if not assessment.is_rebuildable:
            return assessment
        step_store.warn_once_per_job(
            logger,
            self._comm.rank,
            "%s: rebuilding the lost files of ranks %s",
            name,
            ", ".join(map(str, assessment.lost)),
        )
        try:
            self._cache.repair(name, assessment)
        except (StorageError, RankFailed) as error:
            return replace(assessment, reason=f"it could not be rebuilt: {error}")
        return self._cache.assess(name)

    def _report_missing(self, name: str, reason: str) -> step_store.MissingCopy:
        step_store.warn_once_per_job(
            logger, self._comm.rank, "%s: the caches cannot provide it, other levels may: %s", name, reason
        )
        return step_store.MissingCopy(f"caches: {reason}")

    def _describe_copy(self, level: str, name: str, assessment: Assessment) -> step_store.StepCopy:
        return step_store.StepCopy(
            level=level,
            open=partial(self._cache.view, name, assessment),
            localize=partial(self._cache.relocate_shares, name, assessment),
        )

    def _fetch(self, step: int) -> CheckpointRef:
        """Copy user files from the durable level into the caches, and protect them there again."""
        files = FetchedFiles(self._catalog.find(step), rank=self._comm.rank, num_ranks=self._comm.size)
        try:
            # Number 0 is a multiple of every interval, so the scheme with the largest one protects it.
            draft = self._cache.start(step_dirname(step))
            self._cache.complete(draft, files, files, number=0, facts={})
        except (StorageError, RankFailed) as error:
            logger.warning(
                "%s is read from the durable level, as it could not be fetched: %s", step_dirname(step), error
            )
            return self._durable.find_local(step)
        return self._cache.relocate_shares(step_dirname(step), self._cache.assess(step_dirname(step)))


class CachedSlot:
    """A `StepSlot` in all caches. Flushing may pause until it is completed or abandoned."""

    def __init__(
        self, store: TieredStore, cache: CacheLevel, draft: Draft, *, is_last: bool, until: ExitStack
    ) -> None:
        self._store = store
        self._cache = cache
        self._draft = draft
        self._is_last = is_last
        self._until = until
        self._hidden: list[Callable[[], None]] = []

    def path(self, file_name: str) -> Path:
        """A path in this node's draft."""
        return local_path(self._cache.storage, self._draft.key(file_name))

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[RankSaveStats, ...]]:
        """Protect and commit it, and hand it to the flusher if its turn has come."""
        with self._until:
            cached = self._store.save(self._draft, prepared, staged, progress, is_last=self._is_last)
            self._hidden = self._store.hide_surplus()
        self._draft = replace(self._draft, folder="")
        return f"{self._store.uri}/{cached.name}", cached.stats

    def clear_up(self) -> None:
        """Remove what is hidden now of this node's cache."""
        remove_leftovers(parse_step(self._draft.name) or 0, self._hidden)

    def abandon(self) -> None:
        """Remove this node's draft."""
        with self._until:
            self._cache.drop(self._draft)
