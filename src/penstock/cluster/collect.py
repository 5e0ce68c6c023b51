"""A step that each rank does alone and all must survive: everyone gets all results, or everyone the failure.

The place where a rank's error of any kind becomes an error of all ranks before the next barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.errors import PenstockError, RankFailed

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Done(Generic[Result]):
    result: Result


@dataclass(frozen=True, slots=True)
class _Failed:
    rank: int
    host: str
    cause: str


def collect(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None
) -> list[Result]:
    """Call `work` on each rank; its results in rank order, on every rank.

    Collective. Where `work` raises on some rank, all ranks raise the same `RankFailed`, for the lowest such
    rank; there it has the original error as its cause. Ctrl-C and exits are not caught.
    """
    own_error: Exception | None = None
    outcome: _Done[Result] | _Failed
    try:
        outcome = _Done(work())
    except Exception as error:  # noqa: BLE001 - gathered: no rank may fail alone
        own_error = error
        outcome = _Failed(comm.rank, comm.host, cause_of(error))
    outcomes = comm.gather(outcome, awaiting=awaiting, timeout_s=timeout_s)
    results: list[Result] = []
    for rank, each in enumerate(outcomes):
        if isinstance(each, _Failed):
            raise RankFailed(each.rank, each.host, each.cause) from (own_error if rank == comm.rank else None)
        results.append(each.result)
    return results


def cause_of(error: BaseException) -> str:
    """`error` as one clause: our own errors already are; others need their kind's name to make sense."""
    text = str(error).strip()
    if isinstance(error, PenstockError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
