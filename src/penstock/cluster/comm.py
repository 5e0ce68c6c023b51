"""The protocols between ranks: collective calls (`Comm`), and bytes from one rank to another.

Every call of a `Comm` is collective: all ranks make the same calls in the same order. Every wait has a limit
and names what it awaited. Invariant: a call returns on all ranks or raises on all of them that are still
alive. Point-to-point transfers stand apart because they are not collective: two ranks move bytes while the
others do something else, and any thread may call.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar, runtime_checkable

from penstock.errors import Unavailable

T = TypeVar("T")
Number = TypeVar("Number", int, float)

Reduction = Literal["sum", "min", "max"]

DEFAULT_TIMEOUT_S = 300.0
"""The limit of a wait, where neither the call nor the job sets one."""


class Comm(Protocol):
    """One rank's view of its job. `awaiting` is a phrase for people: "all ranks to finish writing"."""

    rank: int
    size: int
    host: str
    timeout_s: float
    """The limit of waits whose call sets none."""
    carrier: str
    """The library that carries messages, and its version; "" where nothing has to."""

    def barrier(self, *, awaiting: str, timeout_s: float | None = None) -> None:
        """Return once every rank has come here."""

    def broadcast(self, value: T | None, *, awaiting: str, timeout_s: float | None = None) -> T:
        """Rank 0's `value`, on every rank; what others pass is ignored."""

    def gather(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""

    def gather_on_lead(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on rank 0; nothing elsewhere.

        For what grows with the job and only rank 0 needs.
        """

    def reduce(
        self, value: Number, op: Reduction, *, awaiting: str, timeout_s: float | None = None
    ) -> Number:
        """The sum, minimum or maximum over ranks, on every rank."""


class PendingTransfer(Protocol):
    """Bytes on their way. Their buffer belongs to the transfer until `wait` returns or raises."""

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Return when they have left, or arrived; `WaitTimeout` in the end, `RankError` if a rank is gone."""


class PointToPoint(Protocol):
    """One rank's way to all others. A message meets the receive of the same two ranks and the same tag."""

    rank: int
    size: int

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> PendingTransfer:
        """Begin to send the whole of `buffer`."""

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> PendingTransfer:
        """Begin to fill the whole of `buffer`, with a message of just that length."""

    def close(self) -> None:
        """Let go of what was made for this transfer; collective."""


@runtime_checkable
class SupportsPointToPoint(Protocol):
    """A communicator whose carrier can move bytes between two ranks."""

    def transfer(self) -> PointToPoint:
        """A transfer between the same ranks; collective."""


def open_point_to_point(comm: Comm) -> PointToPoint:
    """A transfer between the ranks of `comm`; collective."""
    if isinstance(comm, SupportsPointToPoint):
        return comm.transfer()
    raise Unavailable(
        f"{type(comm).__name__} cannot move bytes between two ranks",
        fix="Run under MPI or torch.distributed.",
    )
