"""Option values as text: sizes, lists, assignments. A bad value is wrong usage that names its option."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import UsageError
from penstock.units import parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Division
    from penstock.bench.loader.sample_decoder import ContentCheck

T = TypeVar("T")


def size(option: str, text: str) -> int:
    """Bytes: `2GiB`."""
    return _read(option, parse_bytes, text)


def sizes(option: str, text: str) -> tuple[int, ...]:
    """Several sizes: `1MiB,8MiB`."""
    return tuple(size(option, part) for part in text.split(","))


def rate(option: str, text: str) -> float:
    """Bytes per second: `40GiB/s`."""
    return _read(option, parse_rate, text)


def counts(option: str, text: str) -> tuple[int, ...]:
    """Several counts: `1,8`."""
    return tuple(_read(option, _count, part) for part in text.split(","))


def seconds(option: str, text: str) -> float:
    """A duration: `5min`."""
    return _read(option, parse_seconds, text)


def assignments(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Several `name=value`; the last of a name wins."""
    return dict(_read(option, _assignment, text) for text in texts)


def division(option: str, text: str) -> Division:
    """What happens to a remainder: `rotate`, `drop`, `pad` or `error`."""
    from penstock.bench.epoch_order import Division

    words = ", ".join(each.value for each in Division)
    if text not in set(Division):
        raise UsageError(f"{text!r} is no way to divide", where=option, fix=f"Choose of: {words}.")
    return Division(text)


def content_check(option: str, text: str) -> ContentCheck:
    """How much of what is read is checked: `off`, `sample` or `full`."""
    from penstock.bench.loader.sample_decoder import ContentCheck

    words = ", ".join(each.value for each in ContentCheck)
    if text not in set(ContentCheck):
        raise UsageError(f"{text!r} is no extent of a check", where=option, fix=f"Choose of: {words}.")
    return ContentCheck(text)


def _read(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(error.what, where=option, fix=error.fix) from error


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise UsageError(f"{text!r} is not a whole number", fix="Write digits, several separated by commas.")
    return int(text)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"{text!r} sets nothing", fix="Write NAME=VALUE.")
    return name, value
