"""The store of a run's steps, and the search for the step to restore.

A `StepStore` has one durable level; `levels.tiered_store` puts caches in front of it. Its `open` and
`complete` are called on the manager's save thread, everything else by the manager's caller. Invariant: every
copy that a store returns was committed, and all ranks restore the same one or raise the same error. Whether a
copy can be loaded is known only after loading it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal, TypeVar

from penstock.checkpoint.commit.checkpoints import (
    CheckpointRef,
    SaveTransaction,
    StepCatalog,
    apply_retention,
    begin_save,
    local_path,
    lost_steps,
    parse_step,
    write_into,
)
from penstock.checkpoint.commit.protocol import RETRY_PAUSES_S, WriterLease
from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave
from penstock.cluster.comm import Comm, all_gather_results, blame, format_cause, run_on_rank0
from penstock.errors import (
    ObjectNotFound,
    PenstockError,
    RankError,
    RankFailed,
    StorageError,
    name_some,
    proves_damage,
)
from penstock.progress import Progress

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

Completed = tuple[str, "tuple[RankSaveStats, ...]", Callable[[], None]]
"""A committed step: its URI, the statistics of each rank, and a callable that removes the files of steps that
are no longer kept. That call is not collective, and no one waits for it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopy:
    """The copy of a step on one level, ready to be loaded. Both of its callables are collective."""

    level: str
    open: Callable[[], CheckpointRef]
    """Opens the copy. Raises on the ranks that cannot see it, as loading it would."""
    localize: Callable[[], CheckpointRef]
    """Opens the copy after giving every rank's files a path on that rank's node."""


class StepStore:
    """Keeps the newest `keep` steps of a run on one durable level.

    All methods but `steps` and `unreported_failures` are collective.
    """

    def __init__(self, catalog: StepCatalog, comm: Comm, *, keep: int | None) -> None:
        self.uri = catalog.storage.uri
        self.catalog = catalog
        self.comm = comm
        self.keep = keep
        self.saved: int | None = None
        """The step that this store committed last."""
        self.lease = WriterLease(catalog.storage)

    def steps(self) -> list[int]:
        """Return the committed steps that this rank can see, in ascending order."""
        return self.catalog.committed()

    def open(self, name: str) -> SaveTransaction:
        """Begin a step, or results, which have other names. No reader sees it before `complete`."""
        return begin_save(self.catalog.storage, name, self.comm, lease=self.lease)

    def complete(
        self,
        transaction: SaveTransaction,
        prepared: PreparedSave,
        staged: StagedSave,
        progress: Progress | None,
        *,
        is_last: bool,  # noqa: ARG002 - all are durable
    ) -> Completed:
        """Write what is staged, and commit it.

        With `is_last`, the step is also flushed if there are caches.
        """
        step = parse_step(transaction.draft.name)
        facts = {} if step is None else {"step": step}
        committed, stats = write_into(
            transaction, prepared, staged, self.comm, facts=facts, progress=progress
        )
        uri = f"{self.uri}/{committed.name}"
        self.saved = self.saved if step is None else step
        if step is None or self.comm.rank > 0:
            return uri, stats, lambda: None
        return uri, stats, apply_retention(self.catalog, step, self.keep)

    def candidates(self) -> list[int]:
        """Return the committed steps that any rank can see, in ascending order.

        Raises `StorageError` if there are none, but this job has saved some, or `latest` names one.
        """
        awaiting, saved = "rank 0 to list the steps", self.saved
        steps = sorted(
            {*self.cached_steps(), *run_on_rank0(self.comm, self.catalog.committed, awaiting=awaiting)}
        )
        if steps:
            if saved is not None and saved > steps[-1]:
                message = "Step %d, which this job saved, is gone; the newest that is left is step %d"
                warn_once_per_job(logger, self.comm.rank, message, saved, steps[-1])
            return steps
        if saved is not None:
            raise lost_steps(f"this job saved step {saved}", self.uri)
        # A mistyped folder must not look like a run that has not saved yet.
        run_on_rank0(self.comm, self.catalog.require_run, awaiting=awaiting)
        return []

    def cached_steps(self) -> list[int]:
        """Return the committed steps in the caches of all ranks."""
        return []

    def copies(self, step: int) -> Iterator[StepCopy | StorageError]:
        """Yield the copies of a step, fastest first.

        An error in place of a copy is the reason why a level has none.
        """
        yield StepCopy(
            level="durable", open=partial(self.catalog.find, step), localize=partial(self.localize, step)
        )

    def localize(self, step: int) -> CheckpointRef:
        """Return a durable step to be read by paths; raise `Unavailable` if it is not on a file system."""
        checkpoint = self.catalog.find(step)
        local_path(checkpoint.storage, checkpoint.committed.folder)
        return checkpoint

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """Return failures that occurred after `save` had returned, by step; each only once."""
        return {}

    def close(self, *, flushes_newest: bool = False) -> None:  # noqa: ARG002 - for caches
        """Finish pending work and release everything."""
        self.lease.release()


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that could not be loaded, and the reason."""

    step: int
    reason: str


Fault = Literal["checkpoint", "storage", "caller", "elsewhere"]
"""The cause of a failed load.

"checkpoint": it is damaged or incomplete, so an older step may work. "storage": storage failed or the process
reached a limit, so the step may be intact. "caller": no step will work. "elsewhere": another rank knows the
cause.
"""


_MOST_LISTINGS = 10
"""The number of times that a restore lists the steps again because the one it has chosen was removed."""


class RestoreSearch:
    """Goes through the copies of the candidate steps, best first, and remembers why each was rejected.

    >>> for copy in search.copies:
    ...     with search:
    ...         load(copy.open())
    ...     if search.has_loaded:
    ...         break

    All ranks enter the block. When it ends, one of three things happens on all of them: they have loaded the
    copy; they reject it, because the checkpoint or the storage is at fault on some rank; or they raise,
    because no other copy would help. Invariant: an older step is tried only if all copies of the newer one
    are damaged, incomplete or gone. After a mere storage failure, restoring an older step would discard a
    newer one that is intact.
    """

    def __init__(self, store: StepStore, wanted: int | None, comm: Comm) -> None:
        self._store = store
        self._comm = comm
        self._reasons: dict[int, list[str]] = {}
        self._unproven: BaseException | None = None
        """A failure despite which the step tried last may be intact."""
        self.copies = self._find_copies(wanted)
        """The remaining copies. Advancing this iterator is collective."""
        self.step = -1
        """The step of the copy returned last."""
        self.has_loaded = False

    def reject(self, reason: str) -> None:
        """Reject the copy returned last."""
        self.has_loaded = False
        self._reasons.setdefault(self.step, []).append(reason)

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The steps of which every copy was rejected, newest first."""
        return tuple(
            SkippedStep(step, "; ".join(reasons))
            for step, reasons in self._reasons.items()
            if step > self.step
        )

    def require_any(self) -> None:
        """Raise if steps were committed and all candidates were rejected."""
        if skipped := self.skipped_steps:
            raise StorageError(
                "; ".join(f"Step {each.step} cannot be restored: {each.reason}" for each in skipped),
                uri=self._store.uri,
                fix="`penstock checkpoint verify` lists all damage; copy a step back, or begin again.",
            )

    def __enter__(self) -> None:
        self.has_loaded = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is not None and not issubclass(kind, Exception):
            return False  # Ctrl-C: the other ranks notice that this one ends

        def report() -> tuple[Fault, RankFailed] | None:
            if error is None:
                return None
            if not isinstance(error, PenstockError):
                raise error
            return classify_fault(error), blame(self._comm, error)

        try:
            answers = all_gather_results(self._comm, report, awaiting=f"all ranks to load step {self.step}")
        except RankError as parting:
            if isinstance(error, RankError) and not isinstance(parting, RankFailed):
                return False  # it has cut this rank off from the others, and says more
            raise
        failures = [answer for answer in answers if answer is not None]
        for fault, failure in failures:
            if fault == "caller":
                if error is not None and classify_fault(error) == "caller":
                    return False
                raise failure
        # The rank at fault knows the cause; the others know only that some rank failed.
        for kind_of_fault in ("checkpoint", "storage"):
            for fault, failure in failures:
                if fault == kind_of_fault:
                    self._unproven = error or failure if fault == "storage" else self._unproven
                    self.reject(failure.cause)
                    return True
        if failures:
            # A rank died or left; trying an older step would not bring it back.
            if error is not None:
                return False
            raise failures[0][1]
        self.has_loaded = True
        return False

    def _find_copies(self, wanted: int | None) -> Iterator[StepCopy]:
        list_steps = partial(repeat_while_storage_fails, self._store.candidates, self._comm, self._store.uri)
        committed = list_steps()
        if wanted is not None and wanted not in committed:
            newest = ", ".join(map(str, committed[-5:])) or "none"
            raise ObjectNotFound(
                f"Step {wanted} is not committed",
                uri=self._store.uri,
                fix=f"Restore a committed step (the newest: {newest}).",
            )
        steps, listings_left = list(committed) if wanted is None else [wanted], _MOST_LISTINGS
        while steps:
            step = self.step = steps.pop()
            for pause_s in (*RETRY_PAUSES_S, None):
                self._unproven = None
                self._reasons.pop(step, None)
                for copy in self._store.copies(step):
                    if isinstance(copy, StorageError):
                        self._unproven = copy if classify_fault(copy) == "storage" else self._unproven
                        self.reject(copy.what)
                    else:
                        yield copy
                reasons = "; ".join(self._reasons.get(step, ()))
                if self._unproven is None:
                    break
                if pause_s is None:
                    older = [each for each in committed if each < step][-1:]
                    raise StorageError(
                        f"Step {step} could not be read, but may be intact: {reasons}",
                        uri=self._store.uri,
                        fix="Repair the storage, and start again"
                        + "".join(
                            f"; or give up step {step} on purpose: restore(step={each})" for each in older
                        )
                        + ".",
                    ) from self._unproven
                _pause(f"Step {step} could not be read", reasons, pause_s, self._comm.rank)
            if wanted is None and listings_left:
                committed = list_steps()
                if committed and step not in committed:
                    # A job that still saves has removed this step, and perhaps all that were listed with it.
                    listings_left -= 1
                    steps = [each for each in committed if each not in self._reasons]
                    self._reasons.pop(step)
                    continue
            warn_once_per_job(logger, self._comm.rank, "Skipping step %d: %s", step, reasons)
        self.step = -1


def classify_fault(error: BaseException) -> Fault:
    """Name the cause of a failure, as far as its error proves it."""
    if isinstance(error, StorageError):
        return "checkpoint" if proves_damage(error) else "storage"
    if not isinstance(error, RankError):
        return "caller"
    # On the rank where the failure began, the error's cause is the original exception.
    return "elsewhere" if error.__cause__ is None else classify_fault(error.__cause__)


def repeat_while_storage_fails(look: Callable[[], Result], comm: Comm, uri: str) -> Result:
    """Return the result of the collective call `look`, repeated while storage fails on any rank."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return look()
        except (StorageError, RankFailed) as error:
            faults = comm.gather(classify_fault(error), awaiting="all ranks to learn what failed")
            if "storage" not in faults:
                raise
            _pause(f"{uri} could not be listed", format_cause(error), pause_s, comm.rank)
    return look()


def _pause(what: str, reason: str, pause_s: float, rank: int) -> None:
    warn_once_per_job(logger, rank, "%s; trying again in %g s: %s", what, pause_s, reason)
    time.sleep(pause_s)


def warn_once_per_job(own_logger: logging.Logger, rank: int, message: str, *values: object) -> None:
    """Log a message as a warning on rank 0, and as information on the other ranks."""
    own_logger.log(logging.WARNING if rank == 0 else logging.INFO, message, *values)


def warn_of_newer_steps(store: StepStore, step: int) -> None:
    """At a job's first save, warn if the folder has newer steps, which an abandoned run must have left."""
    try:
        newer = [str(each) for each in store.steps() if each > step]
    except StorageError as error:
        logger.warning("The steps of %s could not be listed: %s", store.uri, error)
        return
    if newer:
        logger.warning(
            "Saving step %d to %s, which already contains newer steps (%s). A restart will restore the "
            "newest of those, not this one: remove them (`penstock checkpoint rm`), or use another folder",
            step,
            store.uri,
            name_some(newer),
        )


def start_lasting_worker(name: str, at_end: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """Return a pool of one thread that finishes its work before the program ends, and then calls `at_end`.

    When Python begins to exit, it stops all thread pools; a pending save could then start none of its threads
    and would be lost. Exit callbacks run in reverse order of registration, and thread pools registered theirs
    on import. The callback registered here therefore runs first, and waits while all other pools still work.
    """
    worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    def finish() -> None:
        worker.shutdown()
        at_end()

    threading._register_atexit(finish)  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public comes in time
    return worker
