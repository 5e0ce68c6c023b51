"""What the bytes of a line must hold if its event is wanted: derived from an expression in SQL. Pure.

Invariant: a necessary condition only. Whatever of the expression isn't understood asks nothing of the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.trace.operation import spellings


@dataclass(frozen=True, slots=True)
class Needles:
    """A wanted line has one of `naming` and one of `placing`, where there are any."""

    naming: tuple[bytes, ...] = ()
    placing: tuple[bytes, ...] = ()

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to search for."""
        return bool(self.naming or self.placing)


NO_NEEDLES: Final = Needles()
_SAFE: Final = re.compile(r"[A-Za-z0-9_.:+-]{2,}")
"""Letters that no writer of JSON escapes."""


def derive(where: Mapping[str, Any]) -> Needles:
    """Needles of an expression, as `json_serialize_sql` tells it."""
    naming: tuple[bytes, ...] = ()
    placing: tuple[bytes, ...] = ()
    for term in _terms(where):
        column, values = _compared(term)
        if column == "path":
            placing = placing or _pieces(values)
        elif column == "op":
            naming = naming or _quoted([each for value in values for each in spellings(value)])
        elif column in ("name", "cat"):
            naming = naming or _quoted(values)
    return Needles(naming, placing)


def _terms(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What must hold all together."""
    if node.get("type") == "CONJUNCTION_AND":
        for child in node.get("children", ()):
            yield from _terms(child)
    else:
        yield node


def _compared(term: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The column and the texts of which it must be or hold one; no column if it says something else."""
    kind = term.get("type")
    if kind == "COMPARE_EQUAL":
        sides = [term.get("left", {}), term.get("right", {})]
        sides.sort(key=lambda side: side.get("class") != "COLUMN_REF")
        return _column(sides[0]), _texts(sides[1:])
    if kind == "COMPARE_IN":
        children = term.get("children", [])
        return (_column(children[0]), _texts(children[1:])) if children else ("", [])
    if term.get("class") == "FUNCTION" and term.get("function_name") in (
        "~~",
        "contains",
        "starts_with",
        "prefix",
    ):
        sides = [each.get("expression", each) for each in term.get("arguments", term.get("children", ()))]
        if len(sides) != 2 or _column(sides[0]) != "path":
            return "", []
        texts = _texts(sides[1:])
        if term["function_name"] == "~~":
            texts = [max(re.split(r"[%_]", text), key=len) for text in texts]
        return "path", texts
    return "", []


def _column(node: Mapping[str, Any]) -> str:
    names = node.get("column_names") or [""]
    return str(names[-1]) if node.get("class") == "COLUMN_REF" else ""


def _texts(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The literals; empty if one of the nodes is none."""
    texts = [_literal(node) for node in nodes]
    return [] if None in texts else [text for text in texts if text is not None]


def _literal(node: Mapping[str, Any]) -> str | None:
    literal, value = node.get("literal"), node.get("value")
    if node.get("class") != "CONSTANT":
        return None
    if isinstance(literal, dict) and isinstance(literal.get("text"), str):
        return str(literal["text"])
    return str(value["value"]) if isinstance(value, dict) and isinstance(value.get("value"), str) else None


def _pieces(values: Sequence[str]) -> tuple[bytes, ...]:
    """Of each text the longest piece that stands in a line as it is; nothing if one has none."""
    pieces = [max(_SAFE.findall(value), key=len, default="") for value in values]
    return tuple(piece.encode() for piece in pieces) if all(pieces) else ()


def _quoted(values: Sequence[str]) -> tuple[bytes, ...]:
    """Each text between quotes; nothing if one is not plain."""
    plain = [value for value in values if _SAFE.fullmatch(value)]
    return tuple(f'"{value}"'.encode() for value in plain) if len(plain) == len(values) else ()
