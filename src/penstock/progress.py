"""How long-running work reports its progress: to a bar on a terminal, or to nothing.

The work calls `begin` once for each phase and `advance` from any thread; the command line draws.
"""

from typing import Protocol


class Progress(Protocol):
    """Receives the phases of one piece of work, one after another."""

    def begin(self, phase: str, total: float) -> None:
        """A phase begins that will advance by `total`, in the unit that the phase's name implies."""

    def advance(self, amount: float) -> None:
        """`amount` more of the current phase is done."""


class Silent:
    """Progress that is not shown."""

    def begin(self, phase: str, total: float) -> None:
        """Ignore it."""

    def advance(self, amount: float) -> None:
        """Ignore it."""
