"""The steps of a run with caches: saved to the caches, flushed to durable storage, restored from either.

The `StepStore` of a manager with `cache=`. Invariants: if a step is damaged on one level, the next level is
tried before an older step; a step that awaits its flush stays in the caches until it is durable.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from penstock.checkpoint.commit.checkpoints import (
    LEFTOVERS,
    CheckpointRef,
    SaveTransaction,
    parse_step,
    remove_leftovers,
    step_dirname,
)
from penstock.checkpoint.commit.protocol import Seal, WriterLease, warning_instead
from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave, WrittenShare
from penstock.checkpoint.levels.cache import CacheLevel
from penstock.checkpoint.levels.flush import Flusher, FlushNote, copy_file, start_detached
from penstock.checkpoint.levels.options import Flush, Scheme
from penstock.checkpoint.levels.redundancy import Assessment, choose_home_rank
from penstock.checkpoint.manager import step_store
from penstock.checkpoint.manager.user_files import FinishedFiles, parse_writer_rank
from penstock.cluster.comm import all_gather_results, run_on_all_ranks
from penstock.errors import DataDamaged, RankFailed, StorageError, UsageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.capabilities import find_folder_tree, find_local_root, prefer_direct_access
from penstock.storage.uri import parse_uri

logger = logging.getLogger(__name__)


class TieredStore(step_store.StepStore):
    """A store with caches in front of its durable level; without `flush`, nothing becomes durable.

    The lead rank of each node starts the flusher of its cache, in a thread or in a detached process. The
    newest `keep_cached` steps are kept in the caches; None keeps all. A detached process opens the durable
    level again by its `uri`, which is None if an open `Storage` was given. Creating a store is collective.
    """

    def __init__(
        self,
        durable: step_store.StepStore,
        cache: Storage,
        *,
        schemes: Sequence[Scheme],
        flush: Flush | None,
        keep_cached: int | None,
        domain: str | None,
        uri: str | None,
    ) -> None:
        super().__init__(durable.catalog, durable.comm, keep=durable.keep)
        self.cache = CacheLevel(cache, self.comm, schemes=schemes, domain=domain)
        self._flush = flush
        self._flushes = self.cache.node.flushes
        self._durable_uri = self.uri if uri is None else parse_uri(uri).text
        self._keep_cached = keep_cached
        self._cache_lease = WriterLease(cache)
        self._num_saves = 0
        self._unflushed: tuple[int, str] | None = None
        """The step saved last and its save, unless it was handed to a flusher."""
        self._own_steps: set[int] = set()
        self._reported: dict[int, str] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._is_open = True
        awaiting = "all nodes to check their caches"
        obstacle = run_on_all_ranks(self.comm, partial(self._find_obstacle, uri), awaiting=awaiting)
        obstacles = [*filter(None, self.comm.gather(obstacle, awaiting=awaiting))]
        warn = partial(step_store.warn_once_per_job, logger, self.comm.rank)
        for shortfall in self.cache.shortfalls:
            warn("Redundancy: %s", shortfall)
        if obstacles:
            warn("Flushing in the trainer instead of a daemon: %s", obstacles[0])
        self._is_detached = flush is not None and flush.by == "daemon" and not obstacles
        self.resume()

    def _find_obstacle(self, uri: str | None) -> str:
        """Return why no detached process can flush this cache; "" if one can, or need not.

        Refuses a cache that is the durable folder itself: old steps would disappear from both at once.
        """
        cache, durable = self.cache.storage, self.catalog.storage
        own, shared = find_local_root(cache), find_local_root(durable)
        # The cache's folder can be examined, so a path that cannot be examined is a different one.
        with suppress(OSError):
            if own is not None and shared is not None and own.samefile(shared):
                raise UsageError(
                    f"The cache is the durable folder itself, {self.uri}",
                    where=cache.uri,
                    fix="Give a folder on the node's own disk as cache=, or leave it out.",
                )
        if self.cache.is_lead:
            self.cache.node.claim(self.uri)
        if self._flush is None or self._flush.by == "trainer":
            return ""
        if uri is None:
            return "the durable level was given as an open storage, which another process cannot use"
        if find_folder_tree(durable) is None:
            return f"{self.uri} is not a file system"
        return f"{uri!r} cannot be written as a URI" if "?" in parse_uri(uri).root else ""

    def steps(self) -> list[int]:
        """Return the durable steps and the steps in this node's cache."""
        return sorted({*self.catalog.committed(), *self.cache.node.steps()})

    def open(self, name: str) -> SaveTransaction:
        """Begin a draft: of a step in all caches, of results (any other name) on the durable level."""
        if parse_step(name) is None:
            return super().open(name)
        run_on_all_ranks(
            self.comm,
            lambda: self._cache_lease.hold() if self.cache.is_lead else None,
            awaiting="all nodes to see that no other job saves to their caches",
        )
        return self.cache.start(name)

    def complete(
        self,
        transaction: SaveTransaction,
        prepared: PreparedSave,
        staged: StagedSave,
        progress: Progress | None,
        *,
        is_last: bool,
    ) -> step_store.Completed:
        """Commit a step with the scheme due for this save's number, and flush it if its flush is due."""
        draft, step = transaction.draft, parse_step(transaction.draft.name)
        if step is None:
            return super().complete(transaction, prepared, staged, progress, is_last=is_last)
        self._num_saves += 1
        stats = self.cache.complete(
            transaction, prepared, staged, number=self._num_saves, facts={"step": step}, progress=progress
        )
        self.saved, self._unflushed = step, (step, draft.save_id)
        if self._flush and (is_last or self._num_saves % self._flush.every == 0):
            self._unflushed = None
            if self.cache.is_lead:
                self._hand_over(step, draft.save_id)
            if not self._flush.background:
                run_on_all_ranks(
                    self.comm, lambda: self._await_durable(step), awaiting=f"step {step} to be durable"
                )
        elif self.cache.is_lead:
            # An older save of this step that awaited its flush no longer exists.
            self._flushes.remove(step)
        clear_up = partial(remove_leftovers, step, self.hide_surplus())
        return f"{self.cache.storage.uri}/{draft.name}", stats, clear_up

    def cached_steps(self) -> list[int]:
        """Return the committed steps in the caches of all ranks."""
        return [step for name in self.cache.names() if (step := parse_step(name)) is not None]

    def copies(self, step: int) -> Iterator[step_store.StepCopy | StorageError]:
        """Yield the caches' copy, rebuilt if files are lost or damaged; then the durable copy."""
        name = step_dirname(step)
        found = self.cache.assess(name)
        if found.records or found.unread:
            found = self._repaired(name, found)
            if not found.reason:
                yield self._cached_copy("cache", name, found)
                # Execution resumes here because the first copy could not be loaded: damaged shares now count
                # as lost.
                if damaged := self.cache.find_damaged(name, found):
                    unread = next(filter(None, damaged.values()), "")
                    found = self._repaired(name, self.cache.assess(name, damaged=damaged))
                    found = replace(found, unread=found.unread or unread)
                    if not found.reason:
                        yield self._cached_copy("cache, rebuilt", name, found)
            if found.reason:
                message = "%s: the caches cannot provide it, other levels may: %s"
                step_store.warn_once_per_job(logger, self.comm.rank, message, name, found.reason)
                yield (StorageError if found.unread else DataDamaged)(f"caches: {found.reason}")
        yield from super().copies(step)

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """Return this job's failed flushes, whose steps are still cached; only log those of earlier jobs."""
        new_failures: dict[int, BaseException] = {}
        if self._flush is None or not self.cache.is_lead:
            return new_failures
        for step, state in self._flushes.states().items():
            if state.is_lasting and self._reported.get(step) != state.reason:
                self._reported[step] = state.reason
                if step in self._own_steps:
                    new_failures[step] = StorageError(state.reason)
                else:
                    logger.warning("Step %d of an earlier job is not durable: %s", step, state.reason)
        return new_failures

    def resume(self) -> None:
        """Let this job flush what an earlier one did not, after rebuilding files that are lost. Collective.

        If a job is killed, the note of a step may be on some nodes only, and the nodes that had its files may
        be gone. All nodes that have a share therefore receive the note.
        """
        answers = all_gather_results(
            self.comm,
            lambda: self._flushes.notes() if self.cache.is_lead else {},
            awaiting="all nodes to list what still awaits its flush",
        )
        pending = {step: note for notes in answers for step, note in notes.items()}
        for step, note in sorted(pending.items()):
            found = self._repaired(step_dirname(step), self.cache.assess(step_dirname(step)))
            message = "Step %d of an earlier job is not durable yet: %s"
            what = (
                "flushing it"
                if self._flush
                else "run `penstock checkpoint flush`, as this job flushes nothing"
            )
            if found.reason:
                what = f"it is cached, and waits for the nodes that are missing: {found.reason}"
            step_store.warn_once_per_job(logger, self.comm.rank, message, step, what)
            if found.save_id == note.save_id and not found.reason:
                self.cache.spread_note(step, note)
        if self._flush and self.cache.is_lead and self._flushes.notes():
            self._start_flusher()

    def close(self, *, flushes_newest: bool = False) -> None:
        """Wait until every pending step is durable, then release everything.

        With `flushes_newest`, which must be the same on all ranks, the step saved last is flushed as well.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._flush and self.cache.is_lead:
                if self._unflushed and flushes_newest:
                    self._hand_over(*self._unflushed)
                elif self._unflushed:
                    message = "Step %d is in the caches only: restore it or run `penstock checkpoint flush`"
                    logger.warning(message, self.saved)
                if self._thread:
                    self._thread.shutdown()
                self._run_flusher()
                # The last save kept steps that still had to be flushed.
                remove_leftovers(self.saved or 0, self.hide_surplus())
        finally:
            self.cache.close()
            self._cache_lease.release()
            super().close()

    def hide_surplus(self) -> list[Callable[[], None]]:
        """Hide the oldest steps of this node's cache, except pending ones.

        The returned calls remove their files. As on the durable level, steps newer than the one saved last do
        not count. A job that has saved no step removes none.
        """
        saved = self.saved
        if saved is None or self._keep_cached is None or not self.cache.is_lead:
            return []
        hidden: list[Callable[[], None]] = []
        with warning_instead(LEFTOVERS.format(saved)):
            pending = self._flushes.noted_steps()
            for step in [step for step in self.cache.node.steps() if step <= saved][: -self._keep_cached]:
                if step not in pending:
                    with warning_instead(LEFTOVERS.format(saved)):
                        hidden.append(self.cache.node.hide(step_dirname(step)))
        return hidden

    def _hand_over(self, step: int, save_id: str) -> None:
        """Request the flush of this node's share, and make sure that a flusher is running.

        A failure here is reported like other background failures. Raised on one rank alone, it would suggest
        that the step was not saved.
        """
        assert self._flush is not None, "something is flushed"
        self._own_steps.add(step)
        self._reported.pop(step, None)
        note = FlushNote(
            save_id=save_id,
            durable=self._durable_uri,
            keep=self.keep,
            bytes_per_s=self._flush.bytes_per_s,
            threads=self._flush.threads,
        )
        try:
            self._flushes.put(step, note)
        except OSError as error:
            logger.warning("Step %d is cached, but will not become durable: %s", step, error)
            return
        self._start_flusher()

    def _start_flusher(self) -> None:
        if self._is_detached:
            try:
                start_detached(self._flushes)
            except (OSError, subprocess.SubprocessError) as error:
                logger.warning("The detached flusher cannot be started, so the trainer flushes: %s", error)
                self._is_detached = False
        if not self._is_detached:
            self._thread = self._thread or step_store.start_lasting_worker("penstock-flush")
            self._thread.submit(self._run_flusher)

    def _run_flusher(self) -> None:
        Flusher(self.cache.storage, durable=self.catalog.storage).run(patience_s=self.comm.timeout_s)

    def _await_durable(self, step: int) -> None:
        """Flush in this thread, or follow the flusher; raise if the step cannot become durable."""
        if not self.cache.is_lead:
            return
        self._run_flusher()
        state = self._flushes.states().get(step)
        if state is not None:
            self._reported[step] = state.reason
            raise StorageError(
                f"Step {step} is cached, but not durable: {state.reason or state.phase}",
                fix="Fix the problem it reports, then run `penstock checkpoint flush`.",
            )

    def _repaired(self, name: str, found: Assessment) -> Assessment:
        """Rebuild the step if that is necessary and possible; on failure, set `reason` to the cause."""
        if not found.is_rebuildable:
            return found
        ranks = ", ".join(map(str, found.lost))
        message = "%s: rebuilding the lost files of ranks %s"
        step_store.warn_once_per_job(logger, self.comm.rank, message, name, ranks)
        try:
            self.cache.repair(name, found)
        except (StorageError, RankFailed) as error:
            reason = f"it could not be rebuilt: {error}"
            faults = self.comm.gather(
                step_store.classify_fault(error), awaiting="all ranks to learn what failed"
            )
            return replace(found, reason=reason, unread="" if "checkpoint" in faults else reason)
        return self.cache.assess(name)

    def _cached_copy(self, level: str, name: str, found: Assessment) -> step_store.StepCopy:
        return step_store.StepCopy(
            level=level,
            open=partial(self.cache.view, name, found),
            localize=partial(self.cache.relocate_shares, name, found),
        )

    def localize(self, step: int) -> CheckpointRef:
        """Copy user files from the durable level into the caches, and protect them there again."""
        name = step_dirname(step)
        files = _FetchedFiles(self.catalog.find(step), rank=self.comm.rank, num_ranks=self.comm.size)
        try:
            # Number 0 is a multiple of every interval, so the scheme with the largest one protects it.
            self.cache.complete(self.cache.start(name), files, files, number=0, facts={})
        except (StorageError, RankFailed) as error:
            logger.warning("%s is read from the durable level, as it could not be fetched: %s", name, error)
            return super().localize(step)
        return self.cache.relocate_shares(name, self.cache.assess(name))


class _FetchedFiles(FinishedFiles):
    """Stands in for a save: copies a durable step of user files to the caches, under the same manifest.

    The copied files are not verified here, because a restart verifies all files.
    """

    def __init__(self, stored: CheckpointRef, *, rank: int, num_ranks: int) -> None:
        self._stored = stored
        self._rank = rank
        manifest = stored.read_manifest()
        self._mine = [
            file
            for file in manifest.files
            if choose_home_rank(parse_writer_rank(manifest, file), manifest.world_size, num_ranks) == rank
        ]

    def count_bytes(self, storage: Storage, key_of: Callable[[str], str]) -> int:  # noqa: ARG002 - as saved
        return sum(file.size_bytes for file in self._mine)

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        """Copy this rank's files."""
        for file in self._mine:
            key = self._stored.key(file.name)
            source = prefer_direct_access(self._stored.storage, reads=key)
            copy_file(source, key, storage, key_of(file.name))
            if progress is not None:
                progress.advance(file.size_bytes)
        size_bytes = sum(file.size_bytes for file in self._mine)
        stats = RankSaveStats(rank=self._rank, payload_bytes=size_bytes, file_bytes=size_bytes)
        return WrittenShare(files=tuple(self._mine), stats=stats)

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:  # noqa: ARG002 - as saved
        """Return the manifest and metadata of the durable step."""
        _, seal = self._stored.read_seal()
        return seal
