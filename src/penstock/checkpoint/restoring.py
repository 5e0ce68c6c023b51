"""Which step is restored: the newest that all ranks can load, and the reason for each that is passed over.

Invariant: all ranks come to the same step, or to the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.cluster.collectives import all_gather_results, format_cause
from penstock.errors import ObjectNotFound, PenstockError, RankError, RankFailed, StorageError

if TYPE_CHECKING:
    from penstock.checkpoint.keeping import Find, Keeper
    from penstock.cluster.comm import Comm

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
