"""The waist between the levels of a run and whoever makes cached steps durable.

`Flush` is what the user asks for; a `Flusher` does it: threads of the trainer (`trainer_flush`), or a process
of the node that outlives it (`daemon`). Invariant: a step that was handed over stays in the caches until its
`FlushState` is over.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from penstock.checkpoint.commit.transaction import begin
from penstock.checkpoint.levels.flush.file_copy import BURST_S, Copy, Pace, copy_files
from penstock.checkpoint.manager.inflight import lasting_worker
from penstock.checkpoint.manager.step_store import DurableKeeper, retire
from penstock.cluster.collectives import all_gather_results, format_cause
from penstock.errors import StorageError, WaitTimeout
from penstock.storage.capabilities import prefer_direct_access

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.checkpoint.commit.protocol import Committed
    from penstock.checkpoint.commit.transaction import Place
    from penstock.checkpoint.levels.cache import Cached, CacheLevel
    from penstock.checkpoint.levels.options import Flush
    from penstock.checkpoint.state.process_group import Members
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage


FlushPhase = Literal["given", "copying", "waiting", "durable", "superseded", "failing"]
"""How far a step is. Waiting: for other nodes' files. Superseded: retention would remove it at once."""

OVER: Final = ("durable", "superseded")
"""The phases after which nothing more is done for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushState:
    """How far this node's share of a step is on its way."""

    phase: FlushPhase
    size_bytes: int = 0
    copied_bytes: int = 0
    reason: str = ""
    """Why it is failing, or what it waits for."""

    @property
    def is_over(self) -> bool:
        """Whether the caches may forget the step."""
        return self.phase in OVER


def require_over(flusher: Flusher, step: int) -> None:
    """After waiting: raise unless the step is durable, or superseded by one that is."""
    state = flusher.states().get(step)
    if state is not None and not state.is_over:
        raise StorageError(
            f"Step {step} is cached, but not durable: {state.reason or state.phase}",
            fix="Mend what it names; `penstock checkpoint flush` makes cached steps durable.",
        )


class Flusher(Protocol):
    """Makes cached steps durable. All ranks call `hand_over` and `close`, in the same order."""

    def saving(self) -> AbstractContextManager[None]:
        """Around each save to the caches: a flusher that was told so pauses meanwhile."""

    def hand_over(self, step: int, cached: Cached) -> None:
        """Take on a step that all caches have committed. Collective; it does not wait for the copy."""

    def states(self) -> Mapping[int, FlushState]:
        """The steps that were handed over, by this process or those before it. Not collective."""

    def untold_failures(self) -> Mapping[int, BaseException]:
        """What failed, by step; each is told once. Not collective."""

    def wait(self, timeout_s: float) -> None:
        """Return when all steps are over or their failures told; `WaitTimeout` if nothing moves so long."""

    def close(self) -> None:
        """Wait likewise, and let go."""


logger = logging.getLogger(__name__)


class TrainerFlusher:
    """A `Flusher` of threads; `members` are a group of its own. A node's ranks share its bandwidth."""

    def __init__(self, cache: CacheLevel, durable: DurableKeeper, members: Members, settings: Flush) -> None:
        self._cache = cache
        self._durable = durable
        self._members = members
        self._settings = settings
        here = next(ranks for ranks in cache.nodes if members.comm.rank in ranks)
        rate = settings.bytes_per_s
        self._pace = Pace(None if rate is None else rate / len(here), burst_s=BURST_S)
        self._flushes: dict[int, Future[None]] = {}
        self._sizes: dict[int, int] = {}
        self._told: set[int] = set()
        self._worker = lasting_worker("penstock-flush")

    def saving(self) -> AbstractContextManager[None]:
        """Nothing: threads of the same process share its disk by themselves."""
        return nullcontext()

    def hand_over(self, step: int, cached: Cached) -> None:
        """Queue it behind the steps before."""
        self._told.discard(step)
        self._sizes[step] = sum(file.size_bytes for file in cached.shares[self._members.comm.rank].files)
        self._flushes[step] = self._worker.submit(self._flush, step, cached)

    def states(self) -> Mapping[int, FlushState]:
        """By what has become of their threads."""
        return {step: self._state(step, flush) for step, flush in list(self._flushes.items())}

    def untold_failures(self) -> Mapping[int, BaseException]:
        """The failed ones not told before."""
        failed = {
            step: error
            for step, flush in list(self._flushes.items())
            if step not in self._told and flush.done() and (error := flush.exception()) is not None
        }
        self._told.update(failed)
        return failed

    def wait(self, timeout_s: float) -> None:
        """Until no flush is under way; each has so long."""
        while under_way := [flush for flush in self._flushes.values() if not flush.done()]:
            if not wait(under_way, timeout_s, FIRST_COMPLETED).done:
                steps = [step for step, flush in self._flushes.items() if not flush.done()]
                raise WaitTimeout(f"step {steps[0]} to become durable", timeout_s)

    def close(self) -> None:
        """Wait for the thread."""
        self._worker.shutdown()
        self._members.close()

    def _state(self, step: int, flush: Future[None]) -> FlushState:
        size_bytes = self._sizes[step]
        if not flush.done():
            return FlushState(phase="copying" if flush.running() else "given", size_bytes=size_bytes)
        error = flush.exception()
        if error is not None:
            return FlushState(phase="failing", size_bytes=size_bytes, reason=format_cause(error))
        return FlushState(phase="durable", size_bytes=size_bytes, copied_bytes=size_bytes)

    def _flush(self, step: int, cached: Cached) -> None:
        flush_step(
            cached,
            self._cache,
            self._durable.on_storage.storage,
            self._members.comm,
            threads=self._settings.threads,
            pace=self._pace,
            timeout_s=self._durable.timeout_s,
        )
        logger.info("Step %d is durable", step)
        if self._members.comm.rank == 0:
            retire(self._durable.on_storage, step, self._durable.keep)


def flush_step(
    cached: Cached,
    cache: CacheLevel,
    durable: Storage,
    comm: Comm,
    *,
    threads: int,
    pace: Pace,
    timeout_s: float,
) -> Committed:
    """Copy a cached step to the durable level and commit it there. Collective; it ends on all ranks alike."""
    with ExitStack() as undo:
        place = begin(durable, cached.name, comm)
        undo.callback(place.abandon)
        all_gather_results(
            comm,
            lambda: _copy_share(cached, cache, place, comm.rank, threads=threads, pace=pace),
            awaiting=f"all ranks to copy their files of {cached.name}",
            timeout_s=timeout_s,
        )
        committed = place.commit(lambda: cached.seal)
        undo.pop_all()
    return committed


def _copy_share(
    cached: Cached, cache: CacheLevel, place: Place, rank: int, *, threads: int, pace: Pace
) -> None:
    held = cache.holds(cached.name)
    copies = [
        Copy(from_key=held.key(file.name), to_key=place.key(file.name)) for file in cached.shares[rank].files
    ]
    copy_files(copies, prefer_direct_access(held.storage), place.for_data, threads=threads, pace=pace)
