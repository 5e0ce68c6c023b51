"""Users' choices for levels: redundancy schemes for the caches, and which steps are flushed.

Pure settings, imported by every `Manager`; `redundancy` derives groups and layouts from a scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal

from penstock.errors import UsageError
from penstock.units import parse_rate

LARGEST_GROUP = 128
"""The largest group, far below what the code allows: larger ones only make rebuilding slower and riskier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to protect a step: ranks protect each other in groups."""

    every: int = 1
    """Protects every N-th checkpoint, except those that a scheme with a larger N protects."""
    group: int = 8
    """The number of members of a group."""
    strict: bool = False
    """Refuse a job with too few failure domains for this, instead of warning and using another scheme."""

    name: ClassVar[str]
    losses: ClassVar[int]
    """The number of members that a group can always lose."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"every must be at least 1, not {self.every}", where=self.name)
        if not self.losses < self.group <= LARGEST_GROUP:
            raise UsageError(
                f"Invalid group of {self.group}",
                where=self.name,
                fix=f"A group has {self.losses + 1} to {LARGEST_GROUP} members.",
            )

    def substitutes(self) -> Iterator[Scheme]:
        """Yield the schemes to use if this one does not fit, best first.

        First larger groups that survive as many losses per group as this scheme, then single parity, then a
        single copy.
        """
        if self.strict or not self.losses:
            return
        for group in range(self.group + 1, min(2 * self.group, LARGEST_GROUP + 1)):
            yield replace(self, group=group)
        if self.losses > 1:
            one_parity = Xor(group=self.group, every=self.every)
            yield one_parity
            yield from one_parity.substitutes()
        else:
            yield Single(every=self.every)

    def __str__(self) -> str:
        return f"{self.name} in groups of {self.group}" if self.losses else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(Scheme):
    """A single copy, where it was written: survives the end of a process, but not the loss of its host."""

    group: int = field(default=1, init=False)
    strict: bool = field(default=False, init=False)

    name: ClassVar[str] = "single"
    losses: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Xor(Scheme):
    """One parity, distributed over the group: survives the loss of any one member."""

    name: ClassVar[str] = "xor"
    losses: ClassVar[int] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleParity(Scheme):
    """Two independent parities, distributed over the group: survives the loss of any two members."""

    name: ClassVar[str] = "double-parity"
    losses: ClassVar[int] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner(Scheme):
    """A second copy of each member's bytes on the next member: fails if two adjacent members are lost."""

    group: int = 2

    name: ClassVar[str] = "partner"
    losses: ClassVar[int] = 1


def scheme_for(number: int, schemes: Sequence[Scheme]) -> Scheme:
    """Return the scheme of checkpoint `number` (from 1): the one with the largest `every` that divides it.

    There is one: `check_schemes` has found a scheme with every=1.
    """
    fitting = [scheme for scheme in schemes if number % scheme.every == 0]
    return max(fitting, key=lambda scheme: scheme.every)


def check_schemes(schemes: Sequence[Scheme]) -> None:
    """Refuse schemes if some checkpoint would have no scheme, or if two have the same interval."""
    intervals = sorted(scheme.every for scheme in schemes)
    if not intervals or intervals[0] != 1:
        raise UsageError(
            "No redundancy scheme applies to every checkpoint",
            fix="Add one with every=1, such as Single(every=1).",
        )
    twice = {interval for interval in intervals if intervals.count(interval) > 1}
    if twice:
        raise UsageError(
            f"Two redundancy schemes have every={min(twice)}", fix="Use a different interval for each."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """The checkpoints that become durable, and how fast: `Flush(every=10, bandwidth="2GiB/s", threads=4)`.

    Whatever `every` says, closing the manager flushes the newest checkpoint.

    `bandwidth` limits how fast each node writes, as text or in bytes per second; None means no limit. A node
    copies `threads` files at once. With background=False, a save returns only when its step is durable.

    Files are copied `by` a "daemon", a process on each node that continues if the trainer dies, or by a
    thread of the "trainer", which ends with it. Only the trainer can flush to object storage.
    """

    every: int = 1
    background: bool = True
    bandwidth: str | float | None = None
    threads: int = 2
    by: Literal["daemon", "trainer"] = "daemon"

    def __post_init__(self) -> None:
        if self.every < 1 or self.threads < 1:
            raise UsageError(
                f"every and threads must be at least 1, not {self.every} and {self.threads}", where="Flush"
            )
        if self.by not in ("daemon", "trainer"):
            raise UsageError(f"Invalid by={self.by!r}", where="Flush", fix='Choose "daemon" or "trainer".')
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise UsageError(f"bandwidth must be positive or None, not {self.bandwidth!r}", where="Flush")

    @property
    def bytes_per_s(self) -> float | None:
        return parse_rate(self.bandwidth) if isinstance(self.bandwidth, str) else self.bandwidth


EACH: Final = Flush()
"""Flush every checkpoint as fast as possible."""


def require_cache_for(redundancy: Scheme | Sequence[Scheme], flush: Flush | None, *, is_cached: bool) -> None:
    """Raise `UsageError` if options for caches are given without a cache: they would have no effect."""
    if not is_cached and (redundancy or flush not in (EACH, None)):
        raise UsageError("redundancy= and flush= apply to caches, but cache= is not given")
