"""Work that every rank does on its own and that must succeed on all of them, or fail on all of them.

This is where a rank's error of any kind becomes an error of all ranks, before any of them enters the next
collective call. Built on `Comm.gather` alone, so that every communicator has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from penstock.errors import PenstockError, RankFailed

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Success(Generic[Result]):
    result: Result


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    host: str
    cause: str


def all_gather_results(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None
) -> list[Result]:
    """Call `work` on each rank; the results of all ranks, in rank order, on every rank. Collective.

    If `work` raises on any rank, every rank raises the same `RankFailed`, which names the lowest such rank;
    on that rank its cause is the original error. Ctrl-C and `SystemExit` are not caught.
    """
    own_error: Exception | None = None
    outcome: _Success[Result] | _Failure
    try:
        outcome = _Success(work())
    except Exception as error:  # noqa: BLE001 - gathered: no rank may fail alone
        own_error = error
        outcome = _Failure(comm.rank, comm.host, format_cause(error))
    results: list[Result] = []
    for rank, other in enumerate(comm.gather(outcome, awaiting=awaiting, timeout_s=timeout_s)):
        if isinstance(other, _Failure):
            original = own_error if rank == comm.rank else None
            raise RankFailed(other.rank, other.host, other.cause) from original
        results.append(other.result)
    return results


def run_on_all_ranks(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None
) -> Result:
    """Call `work` on each rank; this rank's own result, which is not sent anywhere. Collective.

    Fails as `all_gather_results` does, except that a process without other ranks raises its own error.
    """
    if comm.size == 1:
        return work()
    own_results: list[Result] = []
    all_gather_results(comm, lambda: own_results.append(work()), awaiting=awaiting, timeout_s=timeout_s)
    return own_results[0]


def run_on_rank0(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None
) -> Result:
    """Call `work` on rank 0 alone; its result, on every rank. Collective.

    Fails as `all_gather_results` does, except that a process without other ranks raises its own error.
    """
    if comm.size == 1:
        return work()

    def work_on_rank0() -> Result | None:
        return work() if comm.rank == 0 else None

    results = all_gather_results(comm, work_on_rank0, awaiting=awaiting, timeout_s=timeout_s)
    return cast("Result", results[0])


def format_cause(error: BaseException) -> str:
    """`error` as one clause: Penstock's own errors are one already, others need the name of their type."""
    text = str(error).strip()
    if isinstance(error, PenstockError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
