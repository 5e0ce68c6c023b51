"""Ticks of axes: round values of time, bytes and counts, and the names of lanes, as texts at their places."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_TIME_UNITS: Final = ((1.0, "µs"), (1e3, "ms"), (1e6, "s"), (60e6, "min"), (3600e6, "h"))


@dataclass(frozen=True, slots=True)
class Tick:
    """A text on an axis, at so many percent of it from the left or the top."""

    text: str
    percent: float


def time_ticks(span_us: float, *, num: int = 8) -> tuple[list[Tick], str]:
    """Ticks of an axis from 0 to `span_us`, and the unit they are in."""
    scale, unit = next(
        ((scale, unit) for scale, unit in reversed(_TIME_UNITS) if span_us >= 2 * scale), _TIME_UNITS[0]
    )
    end = max(span_us, 1.0) / scale
    return [Tick(f"{tick:,.6g}", 100 * tick / end) for tick in choose_ticks(0, end, num)], unit


def value_ticks(end: float, text: str, *, step: float = 1.0, num: int = 3) -> list[Tick]:
    """Ticks from the bottom at 0 to the top at `end`; `text` formats a value in units of `step`."""
    if end <= 0:
        return []
    ticks = choose_ticks(0, end / step, num)
    return [Tick(text.format(tick) if tick else "0", 100 - 100 * tick * step / end) for tick in ticks]


def byte_ticks(end: float, suffix: str = "", *, num: int = 3) -> list[Tick]:
    """Ticks of bytes, round in the unit that they are printed in."""
    power = max(0, min(int(math.log2(end) // 10), 6)) if end > 0 else 0
    unit = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[power] + suffix
    return value_ticks(end, "{:,.6g} " + unit, step=1024.0**power, num=num)


def lane_ticks(names: Sequence[str], most: int = 24) -> list[Tick]:
    """Names in the middle of lanes of the same height; of many lanes, every second, third, ... has one."""
    every = -(-len(names) // most)
    return [
        Tick(name, 100 * (number + 0.5) / len(names))
        for number, name in enumerate(names)
        if number % every == 0
    ]


def choose_ticks(low: float, high: float, num: int = 4) -> list[float]:
    """Round numbers from `low` to `high`, which is above it: about `num` of them."""
    exact = (high - low) / num
    magnitude = 10.0 ** math.floor(math.log10(exact))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= exact)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
