"""Parse and print bytes, seconds and rates: the only module that converts text to numbers and back.

GiB is 2**30 bytes and GB is 10**9 bytes. A bare `G` is refused, because it may mean either.
"""

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

from penstock.errors import UsageError

SIZE_LIMITS: Final = ("1B", "7EiB")
TIME_LIMITS: Final = ("1ns", "36500d")
"""The shortest and the longest time, so that no sleep, quotient or sum overflows; 0 may be valid, too."""
_BYTE_UNITS: Final = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTPE", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTPE", start=1)},
    "KB": 1000,
}
_BYTE_UNITS_FOLDED: Final = {unit.lower(): scale for unit, scale in _BYTE_UNITS.items()}
_SECOND_UNITS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
_QUANTITY: Final = re.compile(
    r"\s*([0-9][0-9_]{0,99}(?:\.[0-9]{0,99})?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-zµ]*)\s*"
)
_GROUPED: Final = re.compile(r"\s*[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_BETWEEN_TIMES: Final = re.compile(r"(?<=[A-Za-zµ])\s+(?=[0-9])")
_BINARY_STEPS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def join_groups(text: str) -> str:
    """Drop the commas between groups of three digits, with which numbers are printed: 12,766,928."""
    match = _GROUPED.match(text)
    return match[0].replace(",", "") + text[match.end() :] if match else text


def _split(text: str, kind: str, example: str) -> tuple[str, str]:
    match = _QUANTITY.fullmatch(join_groups(text))
    if match is None:
        raise UsageError(f"{text!r} is not {kind}", fix=f"Write a number and a unit, for example {example}.")
    return match[1].replace("_", ""), match[2]


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: `4MiB`, `1,047.02 GiB`, `4096`. Case is ignored.

    Fractions of a larger unit are rounded to whole bytes, so that every printed size can be parsed.
    """
    number, unit = _split(text, "a size", "4MiB or 4MB")
    if len(unit) == 1 and unit.lower() in "kmgtpe":
        big = unit.upper()
        raise UsageError(
            f"{text!r} has an ambiguous unit", fix=f"Write {big}iB (1024-based) or {big}B (1000-based)."
        )
    scale = _BYTE_UNITS_FOLDED.get(unit.lower() or "b")
    if scale is None:
        known = ", ".join(_BINARY_STEPS)
        raise UsageError(
            f"{text!r} has an unknown unit {unit!r}", fix=f"Use {known}, or kB, MB, GB, TB, PB, EB."
        )
    exact = _exact_product(number, scale)
    size = 0 if exact is None else round(exact)
    if exact is None or (size != exact and (scale == 1 or not size)):
        raise UsageError(f"{text!r} is not a whole number of bytes", fix="Round it to whole bytes.")
    return size


def _exact_product(number: str, scale: int) -> Fraction | None:
    """Return the exact product, so that 9007199254740993B keeps all its digits; None for absurd exponents."""
    _, _, exponent = number.lower().partition("e")
    return Fraction(number) * scale if abs(int(exponent or 0)) < 40 else None


def parse_seconds(text: str) -> float:
    """Parse seconds: `250ms`, `5s`, `1.5h`, `26 min 38 s`. A bare number is in seconds."""
    return sum(map(_parse_one_time, _BETWEEN_TIMES.split(text)))


def _parse_one_time(text: str) -> float:
    number, unit = _split(text, "a duration", "5s or 250ms")
    scale = _SECOND_UNITS.get(unit or "s")
    if scale is None:
        raise UsageError(
            f"{text!r} has an unknown unit {unit!r}", fix=f"Use one of {', '.join(_SECOND_UNITS)}."
        )
    return float(number) * scale


def parse_rate(text: str) -> float:
    """Parse bytes per second: `2GiB/s`, `100 MB/s`."""
    amount, slash, per = text.partition("/")
    if not slash or per.strip() != "s" or not amount.strip()[-1:].isalpha():
        raise UsageError(
            f"{text!r} is not a rate", fix="Write bytes per second, for example 2GiB/s or 100MB/s."
        )
    if amount.strip().endswith("b"):
        raise UsageError(f"{text!r} may mean bits", fix="Write bytes, with B: 100Gb/s is 12.5GB/s.")
    return float(parse_bytes(amount))


def _three_digits(value: float) -> str:
    """Format with at least three significant digits and no exponent: 1.25, 12.5, 1023."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_bytes(size_bytes: float, *, at_least: bool = False) -> str:
    """Format bytes in binary units: `1.50 GiB`, `512 B`. A number below 100 without decimals is exact.

    `at_least` rounds up, so that a printed requirement is enough.
    """
    if size_bytes < 0:
        return f"-{format_bytes(-size_bytes)}"
    if at_least:
        padded = float(math.ceil(size_bytes))
        while parse_bytes(format_bytes(padded)) < size_bytes:
            padded *= 1.0005  # less than one in the third digit
        return format_bytes(padded)
    scaled, step = float(size_bytes), 0
    while scaled >= 1023.5 and step < len(_BINARY_STEPS) - 1:
        scaled, step = scaled / 1024, step + 1
    digits = f"{scaled:.0f}" if scaled.is_integer() else _three_digits(scaled)
    return f"{digits} {_BINARY_STEPS[step]}"


def format_rate(rate_bytes_per_s: float, *, at_least: bool = False) -> str:
    """Format a rate in binary units per second: `1.12 GiB/s`, rounded up if `at_least`."""
    return f"{format_bytes(rate_bytes_per_s, at_least=at_least)}/s"


def format_seconds(elapsed_s: float) -> str:
    """Format seconds in a readable unit: `35 us`, `12.5 s`, `3 min 20 s`, `2 h 05 min`."""
    if elapsed_s < 0:
        return f"-{format_seconds(-elapsed_s)}"
    if math.isnan(elapsed_s):
        return "unknown"
    if elapsed_s < 100:
        return _format_subminute(elapsed_s)
    minutes, seconds = divmod(round(elapsed_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _format_subminute(elapsed_s: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if elapsed_s >= scale:
            return f"{_three_digits(elapsed_s / scale)} {unit}"
    return f"{elapsed_s * 1e9:.0f} ns"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers as ranges: `0-3, 7`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def format_number(value: float | None, style: str) -> str:
    """Return `value` in the format `style`, or a dash for None."""
    return "-" if value is None else format(value, style)
