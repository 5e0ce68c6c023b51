"""Which checkpoints are written and read, in which order, and by which process. Pure.

All writes come before all reads, as in MLPerf Storage and DLIO; a planned read is of a checkpoint that exists
or is written before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from penstock.bench.model_state.state_layout import checkpoint_folder
from penstock.checkpoint.saving.pipeline import PlannedObject
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.bench.model_state import StateLayout

Direction = Literal["write", "read"]

EPOCH: Final = 1
"""DLIO's checkpoint-only runs have one epoch, and a step for each checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRound:
    """One checkpoint, written or read by all ranks together; the `number`-th of its direction."""

    direction: Direction
    number: int
    step: int
    epoch: int = EPOCH

    @property
    def folder(self) -> str:
        """Where its files lie, below the storage's root."""
        return checkpoint_folder(self.epoch, self.step)


def plan_rounds(*, num_writes: int, num_reads: int, there: Sequence[int]) -> tuple[CheckpointRound, ...]:
    """The rounds still to come; `there` are the steps of whole checkpoints that are kept, ascending.

    Reads take the oldest checkpoints first, as DLIO does: what was written last may still be in some cache.
    """
    missing = (step for step in range(1, num_writes + 1) if step not in there)
    writes = [CheckpointRound(direction="write", number=step, step=step) for step in missing]
    readable = sorted({*there, *(each.step for each in writes)})
    if num_reads > len(readable):
        raise UsageError(
            f"{num_reads} checkpoints are to be read, but only {len(readable)} will be there",
            where="--reads",
            fix=f"Read at most {len(readable)}, or write more: --writes {num_reads}.",
        )
    reads = [
        CheckpointRound(direction="read", number=number, step=step)
        for number, step in enumerate(readable[:num_reads], start=1)
    ]
    return (*writes, *reads)


def plan_objects(
    layout: StateLayout, process: int, step: int, *, epoch: int = EPOCH
) -> tuple[PlannedObject, ...]:
    """What one process writes of a checkpoint."""
    folder = checkpoint_folder(epoch, step)
    return tuple(
        PlannedObject(f"{folder}/{file.name}", file.size_bytes)
        for file in layout.files_of(process, epoch=epoch, step=step)
    )


def choose_source_process(process: int, *, num_processes: int, shift: int) -> int:
    """Whose files a process reads back: with a shift of a node's ranks, those of the next node."""
    return (process + shift) % num_processes


def rank_shift(hosts: Sequence[str]) -> int:
    """How far to shift so that every rank reads what another host wrote; 0 on one host.

    It is the largest number of ranks on a host. Where hosts have unlike numbers of consecutive ranks, some
    ranks of a large host still read what their own host wrote.
    """
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    return max(counts) if len(counts) > 1 else 0


def seconds_between(rounds: Sequence[CheckpointRound], interval_s: float) -> Iterator[float]:
    """How long to wait before each round: the interval between two of them, nothing before the first."""
    return (interval_s if place else 0.0 for place in range(len(rounds)))
