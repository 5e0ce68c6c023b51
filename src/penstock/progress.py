"""Report the progress of long-running work to a bar on a terminal, to files, or to nothing.

There are three kinds of progress in this project. `Progress` is what a piece of work reports, in this
process. The status file of a run (`results.run_status`) shows it to other processes. The progress board of a
checkpoint (`bench.checkpoint.checkpoint_rounds`) adds up the bytes that all ranks have transferred.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Activity = Literal["working", "computing", "reading", "moving"]
"""What rank 0 does: `reading` is waiting for a batch, however it is produced; `moving` is only I/O."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """The identity of a run for those who follow it: its folder, kind, workload and ranks."""

    folder: Path
    kind: str
    workload: str
    ranks: int


class Progress:
    """Receives reports on a piece of work, from any thread. This class itself ignores them.

    The work calls `begin` once for each phase, and `advance` as it proceeds. Rank 0 of a benchmark calls the
    other methods, so that the run can be followed from other processes; they are cheap enough to call in
    every step.
    """

    def begin(self, phase: str, total: float) -> None:
        """Begin a phase that will advance by `total`, in the unit given by the phase's name."""

    def advance(self, amount: float) -> None:
        """Advance the current phase by `amount`."""

    def attach(self, run: RunName) -> None:
        """From now on, record the progress in the run's folder, where others can follow it."""

    def settle(self, outcome: str, why: str, exit_code: int) -> None:
        """Report that the run has ended. Its command will exit with `exit_code`."""

    def expect(self, total: float, *units: str, pauses_s: float = 0.0) -> None:
        """Announce that the counts of these units together will reach `total` at the end of the run.

        The run spends `pauses_s` of its time without counting anything, evenly spread.
        """

    def count(self, **amounts: float) -> None:
        """Add to the run's totals, by unit: `steps=1, read_bytes=4096`."""

    def enter(self, activity: Activity, *, unit: str = "", times: int = 1) -> None:
        """Report what this rank is doing now.

        Until the next phase, `advance` also adds its amount to the total of `unit`, multiplied by `times`,
        the number of ranks that do the same.
        """

    def remark(self, text: str) -> None:
        """Show a sentence about the current state; "" removes it."""


class PhasesOnly(Progress):
    """Passes on the phases of work that is part of a run, but not what the work counts."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self, phase: str, total: float) -> None:
        """Pass the phase on."""
        self._progress.begin(phase, total)

    def advance(self, amount: float) -> None:
        """Pass the progress on."""
        self._progress.advance(amount)
