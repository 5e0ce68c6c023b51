"""Which step is restored: the newest that all ranks can load, and the reason for each that is passed over.

Invariant: all ranks come to the same step, or to the same error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.checkpoint.commit.catalog import Steps, local_path, parse_step
from penstock.checkpoint.commit.transaction import begin, finish
from penstock.cluster.collectives import all_gather_results, format_cause, run_on_rank0
from penstock.errors import ObjectNotFound, PenstockError, RankError, RankFailed, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.checkpoint.commit.catalog import Stored
    from penstock.checkpoint.commit.transaction import Place
    from penstock.checkpoint.engine import PreparedSave, ShareStats, StagedSave
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress


logger = logging.getLogger(__name__)

Fault = Literal["checkpoint", "caller", "elsewhere"]
"""Where the fault lies: an older step may be better, no step will be, or another rank knows."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A step that could not be loaded, and why."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    fault: Fault
    reason: str
    host: str


def wanted_of(committed: Sequence[int], wanted: int | None, uri: str) -> list[int]:
    """The steps to try, in this order; `ObjectNotFound` where the one that is wanted is not committed."""
    if wanted is None:
        return sorted(committed, reverse=True)
    if wanted not in committed:
        there = ", ".join(map(str, committed[-5:])) or "none"
        raise ObjectNotFound(
            f"Step {wanted} is not committed",
            uri=uri,
            fix=f"Restore one of those that are there (the newest: {there}).",
        )
    return [wanted]


def try_step(comm: Comm, load: Callable[[], Any], step: int) -> str | None:
    """None once all ranks have loaded it; the reason where the checkpoint is at fault. Collective.

    Where the state does not fit, which no older step would mend, its error is raised on all ranks.
    """
    own_error: PenstockError | None = None

    def attempt() -> _Outcome | None:
        nonlocal own_error
        try:
            load()
        except PenstockError as error:
            own_error = error
            return _Outcome(_fault_of(error), format_cause(error), comm.host)
        return None

    outcomes = all_gather_results(comm, attempt, awaiting=f"all ranks to load step {step}")
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
    for rank, outcome in failed:
        if outcome.fault == "caller":
            if own_error is not None and _fault_of(own_error) == "caller":
                raise own_error
            raise RankFailed(rank, outcome.host, outcome.reason)
    at_fault = [outcome for _, outcome in failed if outcome.fault == "checkpoint"]
    told = at_fault or [outcome for _, outcome in failed]
    return told[0].reason if told else None


def _fault_of(error: BaseException) -> Fault:
    if isinstance(error, StorageError):
        return "checkpoint"
    if not isinstance(error, RankError):
        return "caller"
    # On the rank where it began, the failure of all has the original as its cause.
    return _fault_of(error.__cause__) if isinstance(error.__cause__, PenstockError) else "elsewhere"


def none_restorable(passed: Sequence[PassedOver], uri: str) -> StorageError:
    """The error where every step that was to be tried was passed over."""
    if len(passed) == 1:
        what = f"Step {passed[0].step} cannot be restored: {passed[0].reason}"
        return StorageError(what, uri=uri, fix="`penstock checkpoint verify` names all damage.")
    reasons = "; ".join(f"step {each.step}: {each.reason}" for each in passed)
    return StorageError(
        f"None of the {len(passed)} committed steps can be restored. {reasons}",
        uri=uri,
        fix="`penstock checkpoint verify` names all damage; copy a step back from elsewhere, or start anew.",
    )


class Search:
    """Goes through the copies of the steps to try, the best first, and keeps the reasons against them."""

    def __init__(self, keeper: Keeper, wanted: int | None, rank: int) -> None:
        self._keeper = keeper
        self._rank = rank
        self._reasons: dict[int, list[str]] = {}
        self._copies = self._go(wanted)
        self.step = -1
        """Of the copy last handed out."""

    def next_copy(self) -> Find | None:
        """The next one; None where no more are left. Collective."""
        return next(self._copies, None)

    def refuse(self, reason: str) -> None:
        """The copy last handed out is no good."""
        self._reasons.setdefault(self.step, []).append(reason)

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """The steps that were left behind, newest first. One of which a copy was taken is not among them."""
        return tuple(
            PassedOver(step, "; ".join(reasons))
            for step, reasons in self._reasons.items()
            if step != self.step
        )

    def _go(self, wanted: int | None) -> Iterator[Find]:
        for step in self._keeper.candidates(wanted):
            self.step = step
            for copy in self._keeper.finds(step):
                if isinstance(copy, str):
                    self.refuse(copy)
                else:
                    yield copy
            # Once a job is enough to be read; the others' logs have it for whoever looks there.
            level = logging.WARNING if self._rank == 0 else logging.INFO
            logger.log(level, "Step %d is passed over: %s", step, "; ".join(self._reasons.get(step, ())))
        self.step = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """One level's copy of a step, ready to be loaded. Both calls are collective."""

    level: str
    find: Callable[[], Stored]
    """Raises on the ranks that do not see it, where loading raises, too."""
    settle: Callable[[], Stored]
    """The same, once each rank can open the files that it wrote by a path of its node."""


class Slot(Protocol):
    """Room for one step on all ranks, which nobody sees until it is completed."""

    def path(self, file_name: str) -> Path:
        """Where whoever writes files of their own puts the one of that name. Not collective."""

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[ShareStats, ...]]:
        """Write what is staged and commit all; where it lies, and what each rank spent. Collective."""

    def abandon(self) -> None:
        """Leave nothing of it. Not collective: once no rank writes any more. Safe after `complete`."""


class Keeper(Protocol):
    """Where the steps of a run are kept. All but `steps` and `untold_failures` is collective."""

    uri: str

    def steps(self) -> list[int]:
        """The committed steps that this rank can see, ascending."""

    def open(self, name: str, *, is_last: bool = False) -> Slot:
        """Make room for a step, or for results of another name. The last one of a job is always flushed."""

    def candidates(self, wanted: int | None) -> list[int]:
        """The steps to try, newest first, or the one wanted; `ObjectNotFound` where that is nowhere."""

    def finds(self, step: int) -> Iterator[Find | str]:
        """The copies of a step, the fastest first; a text where a level cannot give it."""

    def untold_failures(self) -> Mapping[int, BaseException]:
        """What failed after `save` had returned, by step; each is told once."""

    def close(self) -> None:
        """Finish what is under way, and let go of it."""


class DurableKeeper:
    """Steps on one durable level, of which the newest `keep` stay."""

    def __init__(self, steps: Steps, comm: Comm, *, keep: int | None, timeout_s: float) -> None:
        self.uri = steps.storage.uri
        self.on_storage = steps
        self.comm = comm
        self.keep = keep
        self.timeout_s = timeout_s

    def steps(self) -> list[int]:
        """All committed steps."""
        return self.on_storage.committed()

    def open(self, name: str, *, is_last: bool = False) -> DurableSlot:  # noqa: ARG002 - all are durable
        """A draft on the one level."""
        return DurableSlot(self, begin(self.on_storage.storage, name, self.comm))

    def candidates(self, wanted: int | None) -> list[int]:
        """What rank 0 sees."""
        return run_on_rank0(
            self.comm,
            lambda: wanted_of(self.on_storage.committed(), wanted, self.uri),
            awaiting="rank 0 to list the steps",
        )

    def finds(self, step: int) -> Iterator[Find | str]:
        """The one copy."""
        yield Find(
            level="durable", find=partial(self.on_storage.find, step), settle=partial(self.in_place, step)
        )

    def in_place(self, step: int) -> Stored:
        """A step whose files have paths where they lie; `Unavailable` where the storage has none."""
        stored = self.on_storage.find(step)
        local_path(stored.storage, stored.committed.folder)
        return stored

    def untold_failures(self) -> Mapping[int, BaseException]:
        """None: a save ends with its commit."""
        return {}

    def close(self) -> None:
        """Nothing is under way."""


class DurableSlot:
    """A `Slot` of one level that all ranks reach."""

    def __init__(self, keeper: DurableKeeper, place: Place) -> None:
        self._keeper = keeper
        self._place = place

    def path(self, file_name: str) -> Path:
        """In the draft itself."""
        return local_path(self._place.storage, self._place.key(file_name))

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[ShareStats, ...]]:
        """Write and commit; then the steps beyond those that are to be kept go."""
        keeper, step = self._keeper, parse_step(self._place.draft.name)
        facts = {} if step is None else {"step": step}
        committed, stats = finish(
            self._place,
            prepared,
            staged,
            keeper.comm,
            facts=facts,
            timeout_s=keeper.timeout_s,
            progress=progress,
        )
        if step is not None and keeper.comm.rank == 0:
            retire(keeper.on_storage, step, keeper.keep)
        return f"{keeper.uri}/{committed.name}", stats

    def abandon(self) -> None:
        """Remove the draft."""
        self._place.abandon()


def retire(steps: Steps, step: int, keep: int | None) -> None:
    """Point to the newest step and remove the surplus. The step is committed, whatever fails here."""
    try:
        if step == max(steps.committed(), default=None):
            steps.point_to(step)
        for removed in steps.surplus(keep):
            logger.info("Removing step %d: the newest %s are kept", removed, keep)
            steps.remove(removed)
    except StorageError as error:
        logger.warning("Step %d is committed, but old steps could not all be removed: %s", step, error)
