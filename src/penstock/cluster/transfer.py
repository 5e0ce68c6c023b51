"""Bytes from one rank to another, from buffer to buffer: for what is too large, or too busy, for a gather.

Apart from `Comm`, because these calls are not collective: two ranks move bytes while all others do something
else, and any thread may call. Making a transfer is collective. Every wait has a limit and says what it was
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from penstock.errors import Unavailable

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm


class Moving(Protocol):
    """Bytes on their way. Their buffer belongs to the transfer until `wait` returns or raises."""

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Return when they have left, or arrived; `WaitTimeout` in the end, `RankError` if a rank is gone."""


class Transfer(Protocol):
    """One rank's way to all others. A message meets the receive of the same two ranks and the same tag."""

    rank: int
    size: int

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> Moving:
        """Begin to send the whole of `buffer`."""

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> Moving:
        """Begin to fill the whole of `buffer`, with a message of just that length."""

    def close(self) -> None:
        """Let go of what was made for this transfer; collective."""


@runtime_checkable
class SupportsTransfer(Protocol):
    """A communicator whose carrier can move bytes between two ranks."""

    def transfer(self) -> Transfer:
        """A transfer between the same ranks; collective."""


def open_transfer(comm: Comm) -> Transfer:
    """A transfer between the ranks of `comm`; collective."""
    if isinstance(comm, SupportsTransfer):
        return comm.transfer()
    raise Unavailable(
        f"{type(comm).__name__} cannot move bytes between two ranks",
        fix="Run under MPI or torch.distributed.",
    )
