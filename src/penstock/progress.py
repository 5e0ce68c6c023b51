"""How long-running work reports its progress: to a bar on a terminal, to files, or to nothing.

The work calls `begin` once for each phase and `advance` from any thread; the command line draws. A benchmark
says more of itself (`RunProgress`), so that it can be followed from other processes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


class Progress(Protocol):
    """Receives the phases of one piece of work, one after another."""

    def begin(self, phase: str, total: float) -> None:
        """A phase begins that will advance by `total`, in the unit that the phase's name implies."""

    def advance(self, amount: float) -> None:
        """`amount` more of the current phase is done."""


Activity = Literal["working", "computing", "reading", "moving"]
"""What rank 0 does: `reading` awaits one batch, whatever makes it; `moving` is I/O and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """Which run it is, for those who follow it: its folder, and what is measured with what."""

    folder: Path
    kind: str
    workload: str
    ranks: int


class RunProgress(Progress, Protocol):
    """Receives what rank 0 of a benchmark says of itself as it runs; cheap enough for every step."""

    def attach(self, run: RunName) -> None:
        """The run has a folder, in which it can be followed from now on."""

    def settle(self, outcome: str, why: str, exit_code: int) -> None:
        """The run has ended, and its command will exit with this code."""

    def expect(self, total: float, *units: str) -> None:
        """The counts of these units together will reach `total` at the end of the run."""

    def count(self, **amounts: float) -> None:
        """Add to the run's totals, by unit: `steps=1, read_bytes=4096`."""

    def enter(self, activity: Activity, *, unit: str = "", times: int = 1) -> None:
        """What this rank does now. Until the next phase `advance` counts `unit`, `times` ranks alike."""

    def remark(self, text: str) -> None:
        """A sentence about the present moment; "" withdraws it."""


class Silent:
    """Progress that is not shown."""

    def begin(self, phase: str, total: float) -> None:
        """Ignore it."""

    def advance(self, amount: float) -> None:
        """Ignore it."""

    def attach(self, run: RunName) -> None:
        """Ignore it."""

    def settle(self, outcome: str, why: str, exit_code: int) -> None:
        """Ignore it."""

    def expect(self, total: float, *units: str) -> None:
        """Ignore it."""

    def count(self, **amounts: float) -> None:
        """Ignore it."""

    def enter(self, activity: Activity, *, unit: str = "", times: int = 1) -> None:
        """Ignore it."""

    def remark(self, text: str) -> None:
        """Ignore it."""


class PhasesOnly(Silent):
    """Passes on the phases of work that is part of a run but does not count for it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self, phase: str, total: float) -> None:
        """Pass it on."""
        self._progress.begin(phase, total)

    def advance(self, amount: float) -> None:
        """Pass it on."""
        self._progress.advance(amount)
