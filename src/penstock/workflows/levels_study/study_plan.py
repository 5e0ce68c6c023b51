"""The request of a levels study and the rows it expands to; pure.

Requests with the same `identity` produce comparable rows, so an interrupted study can be continued. Row names
are stable: they name folders, runs in `runs.yaml` and values of command line options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Final

from penstock.bench.state_layout import StateLayout
from penstock.checkpoint.levels.options import Scheme, Single, Xor
from penstock.did_you_mean import did_you_mean
from penstock.environment import Environment
from penstock.errors import UsageError

LARGEST_GROUP: Final = 8


class StudyLevel(StrEnum):
    """The two places of a study, and the tiers of its comparison."""

    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """Steps go to the fast level, protected by `schemes`, and from there to the slow one if flushed."""

    schemes: tuple[Scheme, ...]
    is_flushed: bool

    @property
    def is_redundant(self) -> bool:
        """Whether it needs several failure domains."""
        return any(scheme.losses for scheme in self.schemes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One row. `level` is where training's own saves go.

    A bare row writes plain files, as a training loop without a checkpoint engine does.
    """

    name: str
    says: str
    level: StudyLevel
    is_bare: bool = False
    caching: Caching | None = None

    @property
    def reaches_slow(self) -> bool:
        """Whether every checkpoint ends on the slow level."""
        return self.level is StudyLevel.SLOW or (self.caching is not None and self.caching.is_flushed)


def list_rows(num_ranks: int, *, parity_every: int) -> tuple[StudyRow, ...]:
    """All rows for this number of ranks, the baseline first; `parity_every` is used by the last row."""
    parity = Xor(group=max(2, min(LARGEST_GROUP, num_ranks)))

    def cached(*schemes: Scheme, is_flushed: bool) -> Caching:
        return Caching(schemes=schemes, is_flushed=is_flushed)

    return (
        StudyRow(
            name="direct_slow", says="plain files on the slow level", level=StudyLevel.SLOW, is_bare=True
        ),
        StudyRow(
            name="direct_fast", says="plain files on the fast level", level=StudyLevel.FAST, is_bare=True
        ),
        StudyRow(
            name="cached_flushed",
            says="cached, protected by parity, flushed in the background",
            level=StudyLevel.FAST,
            caching=cached(parity, is_flushed=True),
        ),
        StudyRow(
            name="cached",
            says="cached and protected by parity, never flushed",
            level=StudyLevel.FAST,
            caching=cached(parity, is_flushed=False),
        ),
        StudyRow(
            name="bypass", says="the engine's checkpoints, straight to the slow level", level=StudyLevel.SLOW
        ),
        StudyRow(
            name="single",
            says="cached in a single copy, never flushed",
            level=StudyLevel.FAST,
            caching=cached(Single(), is_flushed=False),
        ),
        StudyRow(
            name="single_flushed",
            says="cached in a single copy, flushed in the background",
            level=StudyLevel.FAST,
            caching=cached(Single(), is_flushed=True),
        ),
        StudyRow(
            name="interval_flushed",
            says=f"flushed in the background, cached, one of {parity_every} protected by parity",
            level=StudyLevel.FAST,
            caching=cached(Single(), replace(parity, every=parity_every), is_flushed=True),
        ),
    )


def choose_rows(names: Sequence[str], rows: Sequence[StudyRow]) -> tuple[StudyRow, ...]:
    """The named rows, or all without names, in the study's order."""
    known = {row.name: row for row in rows}
    for name in names:
        if name not in known:
            raise UsageError(
                f"The study has no configuration {name!r}",
                where="--configurations",
                fix=f"{did_you_mean(name, known)}Known: {', '.join(known)}.",
            )
    return tuple(row for row in rows if not names or row.name in names)


NUM_KEPT: Final = 2
"""Checkpoints retained on each level; one more may be in progress."""

DEFAULT_TOTAL_BYTES: Final = 512 << 20
"""The default size of a checkpoint over all ranks: eight rows of it take a few minutes."""


class SaveMode(StrEnum):
    """What training waits for."""

    BLOCKING = "blocking"  # until the checkpoint is committed on the level it is saved to
    BACKGROUND = "background"  # until its tensors may change


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """One study: `layout` has the ranks and the bytes of each. Folders are absolute.

    Between two checkpoints are `num_steps` training steps of `step_s` each. `slow_bytes_per_s` limits the
    slow level, all ranks together; None is no limit.
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
    saving: SaveMode = SaveMode.BLOCKING
    parity_every: int = 3

    @property
    def num_ranks(self) -> int:
        """Ranks that train and save."""
        return self.layout.num_processes

    @property
    def rows(self) -> tuple[StudyRow, ...]:
        """The requested configurations, in the study's order."""
        return choose_rows(self.names, list_rows(self.num_ranks, parity_every=self.parity_every))

    def identity(self) -> dict[str, str | int | float]:
        """Everything that determines the figures of a row, as plain values."""
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
        """The most that each rank has on each level at a time."""
        shares = [int(size) for size in self.layout.bytes_of_processes()]
        most = max(shares)
        rows = self.rows
        # Every member's parity is as long as the largest member; in a group of two it is a full copy.
        parity = most if any(row.caching and row.caching.is_redundant for row in rows) else 0
        fast = any(row.level == "fast" for row in rows)
        slow = any(row.reaches_slow for row in rows)
        return {
            self.fast: [(NUM_KEPT + 1) * (share + parity) if fast else 0 for share in shares],
            self.slow: [(NUM_KEPT + 1) * share if slow else 0 for share in shares],
        }


def default_scale(total_bytes: int) -> Fraction:
    """The scale that reduces a checkpoint to the default size; 1 for a smaller one."""
    return Fraction(1, max(1, -(-total_bytes // DEFAULT_TOTAL_BYTES)))


def check_request(request: StudyRequest, environment: Environment, *, trace_variable: str) -> None:
    """Refuse a request that cannot be run, before anything is created."""
    fast, slow = request.fast, request.slow
    if fast == slow or fast in slow.parents or slow in fast.parents:
        raise UsageError(
            f"The fast level {fast} and the slow level {slow} overlap",
            where="--fast, --slow",
            fix="Give two folders, none inside the other; --slow-bandwidth limits one of the same disk.",
        )
    redundant = [row.name for row in request.rows if row.caching and row.caching.is_redundant]
    if request.num_ranks < 2 and redundant:
        raise UsageError(
            f"Redundancy, as in {', '.join(redundant)}, needs at least two ranks",
            where="--ranks",
            fix="Add --ranks 4, or choose --configurations without redundancy.",
        )
    if request.parity_every > request.num_checkpoints and "interval_flushed" in redundant:
        raise UsageError(
            f"None of {request.num_checkpoints} checkpoints would be protected with --parity-every "
            f"{request.parity_every}",
            where="--parity-every",
            fix="Take more --checkpoints, or a shorter interval.",
        )
    if environment.get(trace_variable):
        raise UsageError(
            "A study traces each row into a folder of its own",
            where="--trace",
            fix="Leave out --trace; the traces are below --out.",
        )


SAVE_EVENT: Final = "Checkpoint.save"
STEP_EVENT: Final = "train.step"
DRAIN_EVENT: Final = "Checkpoint.drain"
