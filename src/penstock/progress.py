"""How long work tells how far it is, without knowing who looks: a bar on a terminal, or nobody.

Whoever works calls `begin` once a phase and `advance` from any thread; drawing is up to the command line.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the phases of one piece of work, one after another."""

    def begin(self, phase: str, total: float) -> None:
        """A phase starts that will advance by `total` (bytes, files, steps: the phase's name says which)."""

    def advance(self, amount: float) -> None:
        """`amount` more of the current phase is done."""


class Silent:
    """Progress that nobody looks at."""

    def begin(self, phase: str, total: float) -> None:
        """Take no notice."""

    def advance(self, amount: float) -> None:
        """Take no notice."""
