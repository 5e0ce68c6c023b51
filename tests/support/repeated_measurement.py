"""Measurements by the clock, repeated while other programs on the machine may have spoiled them.

What other programs do comes and goes; what is wrong with the measured program is there each time. So a bound
holds if one of a few measurements keeps it, and need not be wide enough for a busy machine.
"""

from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")


def measure_until(
    measure: Callable[[int], Seen], is_right: Callable[[Seen], bool], *, attempts: int = 5
) -> Seen:
    """The first measurement that is right, or the last of all, for its test to fail by. They are numbered."""
    for attempt in range(attempts - 1):
        seen = measure(attempt)
        if is_right(seen):
            return seen
    return measure(attempts - 1)
