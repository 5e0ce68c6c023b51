"""Values of a submitted JSON or YAML file, within limits of nesting, of size, and of what aliases stand for.

Parsers do what a file asks for, so the limits are put before them. Invariant: parsing ends in bounded time
and memory, and what a limit forbids is a `ValueError` that names the limit.
"""

import json
import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import yaml

MAX_JSON_BYTES: Final = 16 << 20
MAX_METADATA_BYTES: Final = 64 << 20
"""Metadata of a thousand hosts are 44 MB; no other file grows with each host's disks."""
MAX_YAML_BYTES: Final = 1 << 20
"""The longest description of a published round has 84 kB; a parsed megabyte takes a second."""
_MAX_VALUES_BYTES: Final = 160 << 20
_MAX_LEVELS: Final = 100
_MAX_YAML_VALUES: Final = 100_000
_MAX_NUMBER_DIGITS: Final = 1000
"""YAML's base 60 takes quadratic time."""
_TOO_DEEP: Final = f"it is nested deeper than {_MAX_LEVELS} levels"
_TRAILING_COMMA: Final = re.compile(rb'("(?:[^"\\]|\\.)*+"?)|,(?=\s*[}\]])')
"""A string, to be preserved even if it does not end, or a comma that JSON does not allow."""
_INDENTATION: Final = " \t-?:"
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The values of a file, and the keys that it gives twice in one mapping; the last one counts."""

    content: Any
    repeated: tuple[str, ...] = ()


def parse_json(raw: bytes) -> Parsed:
    """The values of JSON in UTF-8."""
    _limit_values(raw)
    repeated: list[str] = []

    def keep_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            repeated.extend(_twice([key for key, _ in pairs]))
        return found

    content = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=keep_unique)
    if raw.count(b"[") + raw.count(b"{") > _MAX_LEVELS and isinstance(content, dict | list):
        _limit_levels(content)
    return Parsed(content, tuple(repeated))


def parse_lenient_json(raw: bytes) -> Parsed:
    """The values of handwritten JSON, which may have a comma before a closing bracket."""
    return parse_json(_TRAILING_COMMA.sub(lambda match: match[1] or b"", raw))


def _limit_values(raw: bytes) -> None:
    """Refuse what would fill the memory: a short text can have a value at every third byte."""
    text_bytes = len(raw) if raw.isascii() else 4 * len(raw)
    values_bytes = 100 * raw.count(b",") + 64 * raw.count(b"[") + 184 * raw.count(b"{")
    if text_bytes + values_bytes > _MAX_VALUES_BYTES:
        raise ValueError(f"its values would take more than {_MAX_VALUES_BYTES >> 20} MiB")


def _limit_levels(content: Any) -> None:
    level = [content]
    for _ in range(_MAX_LEVELS):
        level = [value for container in level for value in _containers(container)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _containers(content: Any) -> list[Any]:
    values = content.values() if isinstance(content, dict) else content
    return [value for value in values if isinstance(value, dict | list)]


def parse_yaml(raw: bytes) -> Parsed:
    """The values of YAML in UTF-8. The runs of a result have equal configurations, which are parsed once."""
    return _parse_yaml_text(raw.decode("utf-8-sig"))


@lru_cache(maxsize=16)
def _parse_yaml_text(text: str) -> Parsed:
    _limit_yaml(text)
    loader = _TreeLoader(text)
    try:
        return Parsed(loader.get_single_data(), tuple(loader.repeated))
    finally:
        loader.dispose()


def compose_yaml(raw: bytes) -> yaml.Node | None:
    """The nodes of YAML that `parse_yaml` has parsed, with their lines."""
    root: yaml.Node | None = yaml.compose(raw.decode("utf-8-sig"), Loader=_Loader)
    return root


def _twice(keys: list[str]) -> list[str]:
    return [key for key, count in Counter(keys).items() if count > 1]


class _TreeLoader(_Loader):  # type: ignore[misc]  # PyYAML has no types
    """The safe loader, which notes repeated keys, and takes no number of thousands of digits."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the loader's signature
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) != len(keys):
            self.repeated += _twice(keys)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number of YAML, which may be written in base 60."""
        if len(node.value) > _MAX_NUMBER_DIGITS:
            raise ValueError(f"line {node.start_mark.line + 1} has a number of {len(node.value):,} digits")
        is_whole = node.tag.endswith(":int")
        number: int | float = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        return number


for _kind in ("int", "float"):
    _TreeLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _TreeLoader.construct_number)


@dataclass(slots=True)
class _Extent:
    """How many values a node stands for, aliases included, and over how many levels."""

    values: int = 1
    levels: int = 1
    anchor: str | None = None

    def add(self, inner: "_Extent") -> None:
        self.values += inner.values
        self.levels = max(self.levels, 1 + inner.levels)


@dataclass(slots=True)
class _Extents:
    """Adds up the extents of a document from its events, which no alias multiplies."""

    open: list[_Extent] = field(default_factory=lambda: [_Extent()])
    known: dict[str, _Extent] = field(default_factory=dict)

    def enter(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._add_alias(event)
        elif isinstance(event, yaml.ScalarEvent):
            self._close(_Extent(anchor=event.anchor))
        elif isinstance(event, yaml.CollectionStartEvent):
            self.open.append(_Extent(anchor=event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close(self.open.pop())
        if len(self.open) + self.open[-1].levels > _MAX_LEVELS:
            raise ValueError(_TOO_DEEP)
        if self.open[-1].values > _MAX_YAML_VALUES:
            line = event.start_mark.line + 1
            raise ValueError(f"line {line}: its aliases stand for more than {_MAX_YAML_VALUES:,} values")

    def _add_alias(self, event: Any) -> None:
        if any(each.anchor == event.anchor for each in self.open):
            line = event.start_mark.line + 1
            raise ValueError(f"line {line}: the alias *{event.anchor} stands for what it lies in")
        if event.anchor in self.known:  # an unknown one is left to the parser
            self.open[-1].add(self.known[event.anchor])

    def _close(self, extent: _Extent) -> None:
        if extent.anchor is not None:
            self.known[extent.anchor] = extent
        self.open[-1].add(extent)


def _limit_yaml(text: str) -> None:
    """Refuse deep nesting, on which libyaml ends the process, and aliases that stand for too much."""
    has_aliases = "*" in text and "&" in text
    # Each bracket and each column of indentation opens one level at most.
    indentation = max((len(line) - len(line.lstrip(_INDENTATION)) for line in text.splitlines()), default=0)
    if has_aliases or text.count("[") + text.count("{") + indentation > _MAX_LEVELS:
        extents = _Extents()
        for event in yaml.parse(text, Loader=_Loader):
            extents.enter(event)
