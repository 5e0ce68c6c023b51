"""What a study is asked for, and what can be refused before anything is written.

Place in the flow: made by the command line, read by `run`. Invariant: two requests with one `identity` make
rows that can be compared, so a study can go on where another process of it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError
from penstock.workflows.study.configurations import chosen, configurations

if TYPE_CHECKING:
    from penstock.bench.model_state import StateLayout
    from penstock.environment import Environment
    from penstock.workflows.study.configurations import Configuration

KEPT: Final = 2
"""Checkpoints that stay on each level; one more is being written."""

DEFAULT_TOTAL_BYTES: Final = 512 << 20
"""One checkpoint of all ranks, where no scale is given: eight rows of it take a few minutes."""


class Saving(StrEnum):
    """What training waits for."""

    BLOCKING = "blocking"  # until the checkpoint is committed on the level it is saved to
    BACKGROUND = "background"  # until its tensors may change


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """One study: `layout` has the ranks and the bytes of each. Folders are absolute.

    Between two checkpoints lie `num_steps` training steps of `step_s` each. `slow_bytes_per_s` is what the
    slow level takes and gives, all ranks together; None is what it can.
    """

    model: str
    layout: StateLayout
    scale: Fraction
    fast: Path
    slow: Path
    out: Path
    names: tuple[str, ...] = ()
    slow_bytes_per_s: float | None = None
    num_checkpoints: int = 6
    num_steps: int = 10
    step_s: float = 0.1
    saving: Saving = Saving.BLOCKING
    parity_every: int = 3

    @property
    def num_ranks(self) -> int:
        """Ranks that train and save."""
        return self.layout.num_processes

    @property
    def rows(self) -> tuple[Configuration, ...]:
        """The configurations asked for, in the study's order."""
        return chosen(self.names, configurations(self.num_ranks, parity_every=self.parity_every))

    def identity(self) -> dict[str, str | int | float]:
        """All that the figures of a row follow from, as plain values."""
        return {
            "model": self.model,
            "scale": str(self.scale),
            "ranks": self.num_ranks,
            "checkpoint_bytes": self.layout.total_bytes,
            "fast": str(self.fast),
            "slow": str(self.slow),
            "slow_bytes_per_s": self.slow_bytes_per_s or 0,
            "checkpoints": self.num_checkpoints,
            "steps": self.num_steps,
            "step_s": self.step_s,
            "saving": self.saving.value,
            "parity_every": self.parity_every,
        }

    def room_bytes(self) -> Mapping[Path, list[int]]:
        """What each rank may have on each level at a time."""
        shares = [int(size) for size in self.layout.bytes_of_processes()]
        most = max(shares)
        rows = self.rows
        # Parity is as long for every member as for the largest; a group of two keeps as much again.
        parity = most if any(row.caching and row.caching.is_redundant for row in rows) else 0
        fast = any(row.level == "fast" for row in rows)
        slow = any(row.reaches_slow for row in rows)
        return {
            self.fast: [(KEPT + 1) * (share + parity) if fast else 0 for share in shares],
            self.slow: [(KEPT + 1) * share if slow else 0 for share in shares],
        }


def default_scale(total_bytes: int) -> Fraction:
    """What brings a checkpoint down to the default size; a smaller one is left as it is."""
    return Fraction(1, max(1, -(-total_bytes // DEFAULT_TOTAL_BYTES)))


def check(request: StudyRequest, environment: Environment, *, trace_variable: str) -> None:
    """Refuse what cannot be studied, before anything is made."""
    fast, slow = request.fast, request.slow
    if fast == slow or fast in slow.parents or slow in fast.parents:
        raise UsageError(
            f"The fast level {fast} and the slow level {slow} are one place",
            where="--fast, --slow",
            fix="Give two folders of which none lies in the other; --slow-bandwidth limits one of a disk.",
        )
    redundant = [row.name for row in request.rows if row.caching and row.caching.is_redundant]
    if request.num_ranks < 2 and redundant:
        raise UsageError(
            f"One rank has nobody to protect its steps, as {', '.join(redundant)} would",
            where="--ranks",
            fix="Add --ranks 4, or choose --configurations without redundancy.",
        )
    if request.parity_every > request.num_checkpoints and "interval_flushed" in redundant:
        raise UsageError(
            f"Of {request.num_checkpoints} checkpoints none would be protected with --parity-every "
            f"{request.parity_every}",
            where="--parity-every",
            fix="Take more --checkpoints, or a shorter interval.",
        )
    if environment.get(trace_variable):
        raise UsageError(
            "A study traces each row into a folder of its own",
            where="--trace",
            fix="Leave --trace away; the traces are below --out.",
        )
