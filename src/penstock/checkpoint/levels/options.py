"""The ways to protect what lies in node-local caches: what each survives, what it costs, when it applies.

Schemes are what a user asks for; `groups.py` derives who protects whom, `stripes.py` which bytes lie where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from penstock.errors import UsageError
from penstock.units import parse_rate

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a step is protected. It applies to every `every`-th checkpoint."""

    every: int = 1

    name: ClassVar[str]
    losses: ClassVar[int]
    """How many members a group can lose, always."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"{self.name}: every={self.every}", fix="Give an interval of 1 or more.")

    @property
    def members(self) -> int:
        """How many ranks a group has, if there are enough failure domains."""
        return 1

    def kept_share(self, members: int) -> float:
        """Bytes kept by a member of a group of so many, its own included, over its own bytes."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(Scheme):
    """One copy, where it was written: survives the end of a process, not the loss of its host."""

    name: ClassVar[str] = "single"
    losses: ClassVar[int] = 0

    def kept_share(self, members: int) -> float:
        """Its own bytes and nothing else."""
        del members
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner(Scheme):
    """A second copy of each member's bytes on the next member: survives any loss but of two neighbours."""

    group: int = 2

    name: ClassVar[str] = "partner"
    losses: ClassVar[int] = 1

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_group(self.name, self.group, smallest=2)

    @property
    def members(self) -> int:
        """The group as asked for."""
        return self.group

    def kept_share(self, members: int) -> float:
        """Its own bytes and its neighbour's."""
        del members
        return 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Xor(Scheme):
    """One parity, dealt out over the group: survives the loss of any one member."""

    group: int = 8

    name: ClassVar[str] = "xor"
    losses: ClassVar[int] = 1

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_group(self.name, self.group, smallest=2)

    @property
    def members(self) -> int:
        """The group as asked for."""
        return self.group

    def kept_share(self, members: int) -> float:
        """Its own bytes and one parity chunk."""
        return members / (members - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleParity(Scheme):
    """Two independent parities, dealt out over the group: survives the loss of any two members."""

    group: int = 8

    name: ClassVar[str] = "double-parity"
    losses: ClassVar[int] = 2

    def __post_init__(self) -> None:
        Scheme.__post_init__(self)
        _check_group(self.name, self.group, smallest=3)

    @property
    def members(self) -> int:
        """The group as asked for."""
        return self.group

    def kept_share(self, members: int) -> float:
        """Its own bytes and two parity chunks."""
        return members / (members - 2)


LARGEST_GROUP = 128
"""Far below what the code could take; a larger group only makes rebuilding slower and likelier to fail."""


def scheme_for(number: int, schemes: Sequence[Scheme]) -> Scheme:
    """The scheme of checkpoint `number` (from 1): of all whose interval divides it, that of the largest."""
    fitting = [scheme for scheme in schemes if number % scheme.every == 0]
    if not fitting:
        raise UsageError(
            f"no redundancy is given for checkpoint {number}",
            fix="Give one scheme with every=1, such as Single(every=1).",
        )
    return max(fitting, key=lambda scheme: scheme.every)


def check_schemes(schemes: Sequence[Scheme]) -> None:
    """Refuse schemes that leave a checkpoint without one, or of which two claim the same checkpoints."""
    intervals = sorted(scheme.every for scheme in schemes)
    if not intervals or intervals[0] != 1:
        raise UsageError(
            "one redundancy scheme must apply to every checkpoint",
            fix="Give one of them every=1, such as Single(every=1).",
        )
    twice = {interval for interval in intervals if intervals.count(interval) > 1}
    if twice:
        raise UsageError(
            f"two redundancy schemes have every={min(twice)}", fix="Give each an interval of its own."
        )


def _check_group(name: str, group: int, *, smallest: int) -> None:
    if not smallest <= group <= LARGEST_GROUP:
        raise UsageError(
            f"{name}: a group of {group}", fix=f"Give a group of {smallest} to {LARGEST_GROUP} members."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Which checkpoints become durable, and how fast: `Flush(every=10, bandwidth="2GiB/s", threads=4)`.

    `bandwidth` is what one node may write, as a rate or in bytes a second; None is no limit. Without
    `background`, a save returns only when its step is durable. `pause_while_saving` leaves the disks to a
    save to the caches, as long as it lasts.

    The copying is done `by` a daemon, a process of each node that goes on when the trainer dies, or by
    threads of the trainer, which end with it. Object services are written to by the trainer.
    """

    every: int = 1
    background: bool = True
    bandwidth: str | float | None = None
    threads: int = 2
    pause_while_saving: bool = False
    by: Literal["daemon", "trainer"] = "daemon"

    def __post_init__(self) -> None:
        if self.every < 1 or self.threads < 1:
            raise UsageError(f"Flush(every={self.every}, threads={self.threads})", fix="Both are 1 or more.")
        if self.by not in ("daemon", "trainer"):
            raise UsageError(f"Flush(by={self.by!r})", fix='It is "daemon" or "trainer".')
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise UsageError(f"Flush(bandwidth={self.bandwidth!r})", fix="Give a rate above 0, or None.")

    @property
    def bytes_per_s(self) -> float | None:
        """The cap as a number."""
        return parse_rate(self.bandwidth) if isinstance(self.bandwidth, str) else self.bandwidth


EACH: Final = Flush()
"""Every checkpoint becomes durable, as fast as it can."""
