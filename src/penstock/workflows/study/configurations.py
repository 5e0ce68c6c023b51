"""The rows of a study: where each sends its checkpoints, how it protects them, whether it flushes them.

Pure. Invariant: names are stable, as they name folders, runs in `runs.yaml` and options of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.levels.options import Single, Xor
from penstock.errors import UsageError
from penstock.suggest import did_you_mean

if TYPE_CHECKING:
    from penstock.checkpoint.levels.options import Scheme

LARGEST_GROUP: Final = 8


class Level(StrEnum):
    """The two places of a study, and the tiers of its comparison."""

    SLOW = "slow"
    FAST = "fast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """Steps go to the fast level first, protected by `schemes`, and on to the slow one if flushed."""

    schemes: tuple[Scheme, ...]
    is_flushed: bool

    @property
    def is_redundant(self) -> bool:
        """Whether it takes several failure domains."""
        return any(scheme.losses for scheme in self.schemes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One row. `level` is where training's own saves go.

    A bare one writes plain files, as a training loop without a checkpoint engine does.
    """

    name: str
    says: str
    level: Level
    is_bare: bool = False
    caching: Caching | None = None

    @property
    def reaches_slow(self) -> bool:
        """Whether every checkpoint ends on the slow level."""
        return self.level is Level.SLOW or (self.caching is not None and self.caching.is_flushed)


def configurations(num_ranks: int, *, parity_every: int) -> tuple[Configuration, ...]:
    """All rows for so many ranks, the baseline first; `parity_every` is the longer interval of the last."""
    parity = Xor(group=max(2, min(LARGEST_GROUP, num_ranks)))

    def cached(*schemes: Scheme, is_flushed: bool) -> Caching:
        return Caching(schemes=schemes, is_flushed=is_flushed)

    return (
        Configuration(
            name="direct_slow", says="plain files on the slow level", level=Level.SLOW, is_bare=True
        ),
        Configuration(
            name="direct_fast", says="plain files on the fast level", level=Level.FAST, is_bare=True
        ),
        Configuration(
            name="cached_flushed",
            says="cached, protected by parity, flushed in the background",
            level=Level.FAST,
            caching=cached(parity, is_flushed=True),
        ),
        Configuration(
            name="cached",
            says="cached and protected by parity, never flushed",
            level=Level.FAST,
            caching=cached(parity, is_flushed=False),
        ),
        Configuration(
            name="bypass", says="the engine's checkpoints, straight to the slow level", level=Level.SLOW
        ),
        Configuration(
            name="single",
            says="cached in a single copy, never flushed",
            level=Level.FAST,
            caching=cached(Single(), is_flushed=False),
        ),
        Configuration(
            name="single_flushed",
            says="cached in a single copy, flushed in the background",
            level=Level.FAST,
            caching=cached(Single(), is_flushed=True),
        ),
        Configuration(
            name="interval_flushed",
            says=f"flushed in the background, cached, one of {parity_every} protected by parity",
            level=Level.FAST,
            caching=cached(Single(), replace(parity, every=parity_every), is_flushed=True),
        ),
    )


def chosen(names: Sequence[str], of: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """Those that are named, in the study's order; all where none is. `UsageError` names the nearest."""
    known = {each.name: each for each in of}
    for name in names:
        if name not in known:
            raise UsageError(
                f"The study has no configuration {name!r}",
                where="--configurations",
                fix=f"{did_you_mean(name, known)}Known: {', '.join(known)}.",
            )
    return tuple(each for each in of if not names or each.name in names)
