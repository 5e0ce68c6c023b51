"""Which steps to flush, in which order, and which no more: pure.

Invariant: a step is superseded only if so many newer ones are durable that retention would remove it as soon
as it were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


def in_order(steps: Iterable[int]) -> list[int]:
    """Newest first: the newest is what a restart wants, and may make older ones needless."""
    return sorted(steps, reverse=True)


def superseded_by(step: int, durable: Collection[int], keep: int | None) -> list[int]:
    """The durable steps that make this one needless, newest first; empty where it is to be flushed."""
    newer = sorted((each for each in durable if each > step), reverse=True)
    return newer[:keep] if keep is not None and len(newer) >= keep else []


def pause_after(num_failures: int) -> float:
    """How many seconds to wait after so many failures in a row: twice as long after each."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 16), LONGEST_PAUSE_S) if num_failures else 0.0


def look_again_s(waited_s: float) -> float:
    """How long until the next look at a shared storage: seldom where much time has passed already."""
    return min(max(0.05, waited_s / 10), 5.0)
