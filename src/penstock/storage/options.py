"""Options as text (`part_bytes=16MiB`) become a frozen dataclass of the storage that understands them.

Field names carry the unit: `*_bytes` are sizes, `*_s` durations. An unknown name is an error with
the nearest one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.errors import UsageError
from penstock.suggest import did_you_mean
from penstock.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def parse_options(kind: type[T], given: Mapping[str, str], *, where: str) -> T:
    """A `kind` with the `given` values, parsed after its fields' names and types; the rest are defaults."""
    hints = get_type_hints(kind)
    known = [spec.name for spec in fields(kind) if spec.init]
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0.4, form="'{}'")
            raise UsageError(f"Unknown option {name!r}", where=where, fix=f"{hint}Known: {', '.join(known)}.")
        try:
            values[name] = _parser(name, hints[name])(text)
        except UsageError as error:
            raise UsageError(f"Option {name!r}: {error.what}", where=where, fix=error.fix) from error
    return kind(**values)


def _parser(name: str, hint: Any) -> Callable[[str], Any]:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not types.NoneType)
    if get_origin(hint) is Literal:
        return lambda text: _choice(text, get_args(hint))
    if get_origin(hint) is tuple:
        return lambda text: tuple(part for part in text.split(",") if part)
    if hint is bool:
        return _truth
    if hint is float:
        return parse_seconds if name.endswith("_s") else _number
    if hint is int:
        return parse_bytes if name.endswith("_bytes") else _whole_number
    return str


def _choice(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise UsageError(f"{text!r} is not a choice", fix=f"Choose one of {', '.join(choices)}.")
    return text


def _truth(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise UsageError(f"{text!r} is neither true nor false", fix="Write true or false.")
    return _WORDS[text.lower()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number", fix="Write a number, for example 0.5.") from error


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a whole number", fix="Write digits only.")
    return int(text)
