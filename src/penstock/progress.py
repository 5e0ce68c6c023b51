"""Progress of long-running work: to a bar on a terminal, to files, or to nothing.

There are three kinds in the whole project. `Progress` is what a piece of work reports, in this process. The
status file of a run (`results.run_status`) shows it to other processes. The progress board of a checkpoint
(`bench.checkpoint.checkpoint_rounds`) adds up what all ranks of a host have moved.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Activity = Literal["working", "computing", "reading", "moving"]
"""What rank 0 does: `reading` awaits one batch, whatever makes it; `moving` is I/O and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """The name of a run for those who follow it: its folder, kind, workload and ranks."""

    folder: Path
    kind: str
    workload: str
    ranks: int


class Progress:
    """Receives what a piece of work reports, from any thread. This one shows it to nobody.

    Work calls `begin` once for each phase, and `advance`. The other methods are for rank 0 of a benchmark, so
    that it can be followed from other processes; they are cheap enough for every step.
    """

    def begin(self, phase: str, total: float) -> None:
        """Begin a phase that will advance by `total`, in the unit that the phase's name implies."""

    def advance(self, amount: float) -> None:
        """Advance the current phase by `amount`."""

    def attach(self, run: RunName) -> None:
        """Show the run in its folder from now on, where it can be followed."""

    def settle(self, outcome: str, why: str, exit_code: int) -> None:
        """End the run, whose command will exit with this code."""

    def expect(self, total: float, *units: str, pauses_s: float = 0.0) -> None:
        """Announce that the counts of these units together will reach `total` at the end of the run.

        Between them it counts nothing for `pauses_s`, evenly spread.
        """

    def count(self, **amounts: float) -> None:
        """Add to the run's totals, by unit: `steps=1, read_bytes=4096`."""

    def enter(self, activity: Activity, *, unit: str = "", times: int = 1) -> None:
        """Report what this rank does now.

        Until the next phase, `advance` counts in `unit`, once for each of `times` ranks that do the same.
        """

    def remark(self, text: str) -> None:
        """Show a sentence about the current moment; "" withdraws it."""


class PhasesOnly(Progress):
    """Passes on the phases of work that is part of a run but does not count for it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self, phase: str, total: float) -> None:
        """Pass it on."""
        self._progress.begin(phase, total)

    def advance(self, amount: float) -> None:
        """Pass it on."""
        self._progress.advance(amount)
