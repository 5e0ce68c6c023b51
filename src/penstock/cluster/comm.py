"""The narrow waist between ranks: what processes of one job say to each other, whoever carries it.

Every call is collective: all ranks make the same calls in the same order. Every wait has a limit and says
what it awaited. Invariant: a call returns on all ranks or raises on all of them that are still alive.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

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
