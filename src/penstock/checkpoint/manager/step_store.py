"""Where the steps of a run are kept, and the search for the one to restore.

A `StepStore` has one durable level (`DurableStore`) or caches in front of it (`levels.TieredStore`). Its
`open` and its slots are called on the manager's save thread, everything else by the manager's caller.
Invariant: copies that a store hands out were committed, and all ranks restore the same one or raise the same
error; whether a copy can be loaded is only known by loading it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.checkpoint.commit.catalog import (
    CheckpointRef,
    StepCatalog,
    apply_retention,
    local_path,
    parse_step,
)
from penstock.checkpoint.commit.protocol import WriterLease
from penstock.checkpoint.commit.transaction import SaveTransaction, begin_save, write_into
from penstock.cluster.comm import (
    Comm,
    all_gather_results,
    format_cause,
    run_on_rank0,
)
from penstock.errors import (
    ObjectNotFound,
    PenstockError,
    RankError,
    RankFailed,
    StorageError,
    UsageError,
    name_some,
)

if TYPE_CHECKING:
    from penstock.checkpoint.engine import PreparedSave, RankSaveStats, StagedSave
    from penstock.progress import Progress

Fault = Literal["checkpoint", "caller", "elsewhere"]
"""What caused a failed load: the checkpoint (an older step may work), the caller (no step will), or an error
that another rank knows."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopy:
    """The copy of a step on one level, ready to be loaded. Both calls are collective."""

    level: str
    open: Callable[[], CheckpointRef]
    """Raises on the ranks that cannot see it, as loading would."""
    localize: Callable[[], CheckpointRef]
    """The same, after making the files that each rank wrote available by a path on its node."""


@dataclass(frozen=True, slots=True)
class MissingCopy:
    """A level that cannot provide a step, and why."""

    reason: str


class StepSlot(Protocol):
    """Room for one step on all ranks, which no reader sees until it is completed."""

    def path(self, file_name: str) -> Path:
        """The path for a file that the program writes itself. Not collective."""

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[RankSaveStats, ...]]:
        """Write what is staged and commit it; its URI and the statistics of each rank. Collective."""

    def clear_up(self) -> None:
        """Remove the files of steps that are no longer kept. Not collective, and nobody waits for it."""

    def abandon(self) -> None:
        """Remove it. Not collective: call it when no rank writes any more. Safe after `complete`."""


class StepStore(Protocol):
    """Keeps the steps of a run. All but `steps` and `unreported_failures` is collective."""

    uri: str

    def steps(self) -> list[int]:
        """The committed steps that this rank can see, ascending."""

    def open(self, name: str, *, is_last: bool = False) -> StepSlot:
        """Make room for a step, or for results of another name. The last step of a job is always flushed."""

    def candidates(self, wanted: int | None) -> list[int]:
        """The steps to try, newest first, or the one wanted; `ObjectNotFound` if that does not exist."""

    def copies(self, step: int) -> Iterator[StepCopy | MissingCopy]:
        """The copies of a step, the fastest first."""

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """What failed after `save` had returned, by step; each failure is returned once."""

    def close(self) -> None:
        """Finish pending work and release everything."""


class DurableStore:
    """A `StepStore` with one durable level, on which the newest `keep` steps stay."""

    def __init__(self, catalog: StepCatalog, comm: Comm, *, keep: int | None, timeout_s: float) -> None:
        self.uri = catalog.storage.uri
        self.catalog = catalog
        self.comm = comm
        self.keep = keep
        self.timeout_s = timeout_s
        self._lease = WriterLease(catalog.storage)

    def steps(self) -> list[int]:
        """All committed steps."""
        return self.catalog.committed()

    def open(self, name: str, *, is_last: bool = False) -> DurableSlot:  # noqa: ARG002 - all are durable
        """A draft on the durable level."""
        return DurableSlot(self, begin_save(self.catalog.storage, name, self.comm, lease=self._lease))

    def candidates(self, wanted: int | None) -> list[int]:
        """The steps that rank 0 sees."""

        def select() -> list[int]:
            committed = self.catalog.committed()
            if not committed:
                # A wrong folder must not look like the beginning of a run.
                self.catalog.require_run()
            return select_steps(committed, wanted, self.uri)

        return run_on_rank0(self.comm, select, awaiting="rank 0 to list the steps")

    def copies(self, step: int) -> Iterator[StepCopy | MissingCopy]:
        """The only copy."""
        yield StepCopy(
            level="durable", open=partial(self.catalog.find, step), localize=partial(self.find_local, step)
        )

    def find_local(self, step: int) -> CheckpointRef:
        """A step whose files have paths already; `Unavailable` if the storage is not a file system."""
        checkpoint = self.catalog.find(step)
        local_path(checkpoint.storage, checkpoint.committed.folder)
        return checkpoint

    def unreported_failures(self) -> Mapping[int, BaseException]:
        """None: a save ends with its commit."""
        return {}

    def close(self) -> None:
        """Give the lease back."""
        self._lease.release()


class DurableSlot:
    """A `StepSlot` on a level that all ranks reach."""

    def __init__(self, store: DurableStore, transaction: SaveTransaction) -> None:
        self._store = store
        self._transaction = transaction
        self._remove_hidden: Callable[[], None] = lambda: None

    def path(self, file_name: str) -> Path:
        """A path in the draft itself."""
        return local_path(self._transaction.storage, self._transaction.key(file_name))

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[RankSaveStats, ...]]:
        """Write and commit, then hide the steps that are no longer kept."""
        store, step = self._store, parse_step(self._transaction.draft.name)
        write = partial(
            write_into,
            self._transaction,
            prepared,
            staged,
            store.comm,
            facts={} if step is None else {"step": step},
            timeout_s=store.timeout_s,
            progress=progress,
        )
        if step is None or store.comm.rank:
            committed, stats = write()
        else:
            with store.catalog.pointing_to(step) as show_latest:
                committed, stats = write()
                self._remove_hidden = apply_retention(store.catalog, step, store.keep, show_latest)
        return f"{store.uri}/{committed.name}", stats

    def clear_up(self) -> None:
        """Remove what is hidden now."""
        self._remove_hidden()

    def abandon(self) -> None:
        """Remove the draft."""
        self._transaction.abandon()


def warn_once_per_job(own_logger: logging.Logger, rank: int, message: str, *values: object) -> None:
    """Log a warning on rank 0; the other ranks' logs have it as information."""
    own_logger.log(logging.WARNING if rank == 0 else logging.INFO, message, *values)


def require_number_kept(**options: Any) -> None:
    """`UsageError` for an option that says how many steps stay, and cannot."""
    for name, number in options.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise UsageError(
                f"{name} must be a whole number from 1 or None, not {number!r}", fix="None keeps all steps."
            )


def warn_of_newer_steps(store: StepStore, step: int) -> None:
    """Say at a job's first save that the folder has steps beyond it, of a run that was left."""
    try:
        newer = [str(each) for each in store.steps() if each > step]
    except StorageError as error:
        logger.warning("The steps of %s could not be listed: %s", store.uri, error)
        return
    if newer:
        logger.warning(
            "Step %d is saved to %s, which has newer steps: %s. A restart restores the newest, not this one:"
            " remove them (`penstock checkpoint rm`), or use another folder",
            step,
            store.uri,
            name_some(newer),
        )


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that could not be loaded, and why."""

    step: int
    reason: str


class RestoreSearch:
    """Goes through the copies of the candidate steps, the best first, and remembers why each was rejected."""

    def __init__(self, store: StepStore, wanted: int | None, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._reasons: dict[int, list[str]] = {}
        self._copies = self._find_copies(wanted)
        self.step = -1
        """The step of the copy last returned."""

    def next_copy(self) -> StepCopy | None:
        """The next copy; None if no more are left. Collective."""
        return next(self._copies, None)

    def reject(self, reason: str) -> None:
        """Reject the copy last returned."""
        self._reasons.setdefault(self.step, []).append(reason)

    @property
    def skipped_steps(self) -> tuple[SkippedStep, ...]:
        """The steps none of whose copies was accepted, newest first."""
        return tuple(
            SkippedStep(step, "; ".join(reasons))
            for step, reasons in self._reasons.items()
            if step != self.step
        )

    def _find_copies(self, wanted: int | None) -> Iterator[StepCopy]:
        for step in self._store.candidates(wanted):
            self.step = step
            for copy in self._store.copies(step):
                if isinstance(copy, MissingCopy):
                    self.reject(copy.reason)
                else:
                    yield copy
            reasons = "; ".join(self._reasons.get(step, ()))
            warn_once_per_job(logger, self._rank, "Skipping step %d: %s", step, reasons)
        self.step = -1


def select_steps(committed: Sequence[int], wanted: int | None, uri: str) -> list[int]:
    """The steps to try, in this order; `ObjectNotFound` if the one wanted is not committed."""
    if wanted is None:
        return sorted(committed, reverse=True)
    if wanted not in committed:
        newest = ", ".join(map(str, committed[-5:])) or "none"
        raise ObjectNotFound(
            f"Step {wanted} is not committed",
            uri=uri,
            fix=f"Restore a committed step (the newest: {newest}).",
        )
    return [wanted]


@dataclass(frozen=True, slots=True)
class _LoadFailure:
    fault: Fault
    rank: int
    host: str
    reason: str


def load_on_all_ranks(comm: Comm, load: Callable[[], Any], step: int) -> str | None:
    """None if all ranks have loaded the step; the reason if the checkpoint is at fault. Collective.

    If the state does not fit, which no older step would change, all ranks raise.
    """
    own_error: PenstockError | None = None

    def attempt() -> _LoadFailure | None:
        nonlocal own_error
        try:
            load()
        except PenstockError as error:
            own_error = error
            # A failure of all ranks says itself on which one it began.
            if isinstance(error, RankFailed):
                return _LoadFailure(_classify_fault(error), error.rank, error.host, error.cause)
            return _LoadFailure(_classify_fault(error), comm.rank, comm.host, format_cause(error))
        return None

    awaiting = f"all ranks to load step {step}"
    outcomes = all_gather_results(comm, attempt, awaiting=awaiting)
    failures = [outcome for outcome in outcomes if outcome is not None]
    for failure in failures:
        if failure.fault == "caller":
            if own_error is not None and _classify_fault(own_error) == "caller":
                raise own_error
            raise RankFailed(failure.rank, failure.host, failure.reason)
    # The rank at fault knows the reason; the others only know that some rank failed.
    reasons = [failure.reason for failure in failures if failure.fault == "checkpoint"]
    if failures and not reasons:
        # A rank that died or was left, which no older step would bring back.
        raise own_error or RankFailed(failures[0].rank, failures[0].host, failures[0].reason)
    return reasons[0] if reasons else None


_LIMITS_OF_PROCESSES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""With these, an older step that happens to load would replace a newer one that is whole."""


def _classify_fault(error: BaseException) -> Fault:
    if isinstance(error, StorageError):
        return "caller" if error.errno in _LIMITS_OF_PROCESSES else "checkpoint"
    if not isinstance(error, RankError):
        return "caller"
    # On the rank where it began, the failure of all ranks has the original error as its cause.
    return "elsewhere" if error.__cause__ is None else _classify_fault(error.__cause__)


def build_restore_error(skipped: Sequence[SkippedStep], uri: str) -> StorageError:
    """The error for a search that skipped all candidate steps."""
    if len(skipped) == 1:
        message = f"Step {skipped[0].step} cannot be restored: {skipped[0].reason}"
        return StorageError(message, uri=uri, fix="`penstock checkpoint verify` lists all damage.")
    reasons = "; ".join(f"step {step.step}: {step.reason}" for step in skipped)
    return StorageError(
        f"None of the {len(skipped)} committed steps can be restored. {reasons}",
        uri=uri,
        fix="`penstock checkpoint verify` lists all damage; copy a step back from elsewhere, or start anew.",
    )


def start_lasting_worker(name: str, at_end: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """A pool of one thread whose work is finished before the program ends; `at_end` is called after that.

    Python stops all thread pools at the beginning of its exit, after which a pending save could start none of
    its threads and would be lost. Callbacks run in reverse order of registration, and the pools registered
    theirs on import: so this one runs before them, and waits while all other pools still work.
    """
    worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    def finish() -> None:
        worker.shutdown()
        at_end()

    threading._register_atexit(finish)  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public comes in time
    return worker
