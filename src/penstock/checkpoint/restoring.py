"""Which step is restored: the newest that all ranks can load, and the reason for each that is passed over.

Invariant: all ranks come to the same step, or to the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.cluster.collect import cause_of, collect
from penstock.errors import ObjectNotFound, PenstockError, RankError, RankFailed, StorageError

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

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
            return _Outcome(_fault_of(error), cause_of(error), comm.host)
        return None

    outcomes = collect(comm, attempt, awaiting=f"all ranks to load step {step}")
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
