"""The interface to what makes cached steps durable, and the flusher that uses threads of the trainer.

A `Flusher` is threads of the trainer (`TrainerFlusher`) or a process of the node that outlives it
(`DaemonFlusher`). Invariant: a step that was handed over stays in the caches until its `FlushState` is over,
and a durable step has the same manifest as the cached one, so its checksums prove the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol

from penstock.checkpoint.commit.catalog import CheckpointRef, apply_retention, local_path
from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.commit.transaction import SaveTransaction, begin_save
from penstock.checkpoint.levels.flush.file_copy import BURST_S, FileCopy, RateLimiter, copy_files
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder
from penstock.checkpoint.manager.step_store import DurableStore, start_lasting_worker
from penstock.cluster.comm import Comm, format_cause, run_on_all_ranks
from penstock.errors import StorageError, WaitTimeout
from penstock.storage import Storage
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache import CachedSave, CacheLevel
    from penstock.checkpoint.levels.options import Flush
    from penstock.checkpoint.state.process_group import RankGroup


FlushPhase = Literal["given", "copying", "waiting", "durable", "superseded", "failing"]
"""The phase of a step. Waiting: for files of other nodes. Superseded: retention would remove it at once."""

OVER: Final = ("durable", "superseded")
"""The phases after which nothing more happens to a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushState:
    """The progress of this node's share of a step."""

    phase: FlushPhase
    size_bytes: int = 0
    copied_bytes: int = 0
    reason: str = ""
    """Why it is failing, or what it waits for."""

    @property
    def is_over(self) -> bool:
        """Whether the caches may remove the step."""
        return self.phase in OVER


def require_durable(flusher: Flusher, step: int) -> None:
    """Raise unless the step is durable or superseded by one that is."""
    state = flusher.states().get(step)
    if state is not None and not state.is_over:
        raise StorageError(
            f"Step {step} is cached, but not durable: {state.reason or state.phase}",
            fix="Fix the problem it reports, then run `penstock checkpoint flush`.",
        )


class Flusher(Protocol):
    """Makes cached steps durable. All ranks call `hand_over`, `take_over` and `close`, in the same order."""

    def saving(self) -> AbstractContextManager[None]:
        """Encloses each save to the caches, so that the flusher can pause meanwhile."""

    def hand_over(self, step: int, cached: CachedSave) -> None:
        """Accept a step that all caches have committed. Collective; does not wait for the copy."""

    def take_over(self, step: int, cached: CachedSave) -> None:
        """The same for a step of an earlier job, whose failure is only logged. Collective."""

    def states(self) -> Mapping[int, FlushState]:
        """The steps handed over, by this process or earlier ones. Not collective."""

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """What failed, by step; each failure is returned once. Not collective."""

    def wait(self, timeout_s: float) -> None:
        """Return when all steps are over or failed; `WaitTimeout` if nothing moves for `timeout_s`."""

    def close(self) -> None:
        """Wait like `wait`, then release everything."""


logger = logging.getLogger(__name__)


class TrainerFlusher:
    """A `Flusher` of threads; `members` is its own process group. The ranks of a node share its bandwidth.

    Each rank copies its files on a thread; all commit them together as one checkpoint.
    """

    def __init__(self, cache: CacheLevel, durable: DurableStore, members: RankGroup, settings: Flush) -> None:
        self._cache = cache
        self._durable = durable
        self._members = members
        self._settings = settings
        here = next(ranks for ranks in cache.nodes if members.comm.rank in ranks)
        rate = settings.bytes_per_s
        self._pace = RateLimiter(None if rate is None else rate / len(here), burst_s=BURST_S)
        self._flushes: dict[int, Future[None]] = {}
        self._sizes: dict[int, int] = {}
        self._reported: set[int] = set()
        self._worker = start_lasting_worker("penstock-flush")
        self._is_lead = cache.is_lead
        self._folder = FlushFolder(local_path(cache.storage, ""))
        self._undo = ExitStack()
        self._undo.callback(members.close)
        if self._is_lead:
            self._undo.enter_context(self._folder.trainers.present())

    def saving(self) -> AbstractContextManager[None]:
        """Do nothing: this flusher does not pause."""
        return nullcontext()

    def hand_over(self, step: int, cached: CachedSave) -> None:
        """Queue the step, and note it on each node for the next job, should this one not finish."""
        self._reported.discard(step)
        if self._is_lead:
            with _tolerating_notes(step):
                self._folder.due.put(step, cached.save_id)
        self._sizes[step] = sum(cached.files[self._members.comm.rank].values())
        self._flushes[step] = self._worker.submit(self._flush, step, cached)

    def take_over(self, step: int, cached: CachedSave) -> None:
        """Queue the step; a failure must not keep this job from restoring."""
        self.hand_over(step, cached)
        self._reported.add(step)
        self._flushes[step].add_done_callback(partial(_warn_of_failure, step))

    def states(self) -> Mapping[int, FlushState]:
        """The states of the queued copies."""
        return {step: self._state(step, flush) for step, flush in list(self._flushes.items())}

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """The failures not returned before."""
        failed = {
            step: error
            for step, flush in list(self._flushes.items())
            if step not in self._reported and flush.done() and (error := flush.exception()) is not None
        }
        self._reported.update(failed)
        return failed

    def wait(self, timeout_s: float) -> None:
        """Wait until no flush is pending, for at most `timeout_s` each."""
        while pending := [flush for flush in self._flushes.values() if not flush.done()]:
            if not wait(pending, timeout_s, FIRST_COMPLETED).done:
                steps = [step for step, flush in self._flushes.items() if not flush.done()]
                raise WaitTimeout(f"step {steps[0]} to become durable", timeout_s)

    def close(self) -> None:
        """Wait for the thread."""
        with self._undo:
            self._worker.shutdown()

    def _state(self, step: int, flush: Future[None]) -> FlushState:
        size_bytes = self._sizes[step]
        if not flush.done():
            return FlushState(phase="copying" if flush.running() else "given", size_bytes=size_bytes)
        error = flush.exception()
        if error is not None:
            return FlushState(phase="failing", size_bytes=size_bytes, reason=format_cause(error))
        return FlushState(phase="durable", size_bytes=size_bytes, copied_bytes=size_bytes)

    def _flush(self, step: int, cached: CachedSave) -> None:
        comm = self._members.comm
        flush_step(
            cached.name,
            cached.seal,
            self._durable.catalog.storage,
            comm,
            partial(self._copy_share, cached),
            timeout_s=self._durable.timeout_s,
        )
        logger.info("Step %d is durable", step)
        if self._is_lead:
            with _tolerating_notes(step):
                self._folder.due.remove(step, cached.save_id)
        if comm.rank == 0:
            apply_retention(self._durable.catalog, step, self._durable.keep)()

    def _copy_share(self, cached: CachedSave, transaction: SaveTransaction) -> None:
        names = list(cached.files[self._members.comm.rank])
        share = self._cache.node.find(cached.name)
        copy_share(share, names, transaction, threads=self._settings.threads, pace=self._pace)


def _warn_of_failure(step: int, flush: Future[None]) -> None:
    if not flush.cancelled() and (error := flush.exception()) is not None:
        logger.warning("Step %d of an earlier job is not durable: %s", step, format_cause(error))


@contextmanager
def _tolerating_notes(step: int) -> Iterator[None]:
    """A warning in place of an `OSError`: the step is cached, and is flushed all the same."""
    try:
        yield
    except OSError as error:
        logger.warning("The note that step %d is to become durable: %s", step, error)


def flush_step(
    name: str,
    seal: Seal | None,
    durable: Storage,
    comm: Comm,
    copy: Callable[[SaveTransaction], None],
    *,
    timeout_s: float | None = None,
) -> None:
    """Let each rank `copy` its files of a step to the durable level, and commit it there. Collective.

    Rank 0 has the seal.
    """

    def sealed() -> Seal:
        assert seal is not None, "rank 0 commits"
        return seal

    with ExitStack() as undo:
        transaction = begin_save(durable, name, comm)
        undo.callback(transaction.abandon)
        run_on_all_ranks(
            comm,
            lambda: copy(transaction),
            awaiting=f"all ranks to copy their files of {name}",
            timeout_s=timeout_s,
        )
        transaction.commit(sealed)
        undo.pop_all()


def copy_share(
    share: CheckpointRef,
    names: Sequence[str],
    transaction: SaveTransaction,
    *,
    threads: int = 2,
    pace: RateLimiter | None = None,
) -> None:
    """Copy files of a share in a cache into a draft on the durable level."""
    copies = [FileCopy(from_key=share.key(name), to_key=transaction.key(name)) for name in names]
    # A cache is written anyway, and its files are not opened once more than they must be.
    source = prefer_direct_access(share.storage)
    copy_files(copies, source, transaction.data_storage, threads=threads, pace=pace or RateLimiter(None))
