"""Bytes and values of a submitted file, within limits, because anybody may have made it.

Everything that reads a submission's files opens them here. Invariants: a read ends, whatever has the file's
name, and a path that is no file of the tree is an `OSError` that says what it is; parsing ends in bounded
time and memory, and a broken limit (nesting, size, values behind aliases) is a `ValueError` that names the
limit.
"""

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Hashable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

MAX_JSON_BYTES: Final = 16 << 20
MAX_METADATA_BYTES: Final = 64 << 20
"""Metadata of a thousand hosts are 44 MB; no other file grows with each host's disks."""
MAX_YAML_BYTES: Final = 1 << 20
"""The longest description of a published round has 84 kB; a parsed megabyte takes a second."""
LEADS_OUT: Final = "a link leads out of the tree"
_KINDS: Final = (
    (stat.S_ISDIR, "Is a directory"),
    (stat.S_ISFIFO, "this is a named pipe, and not a file"),
    (stat.S_ISSOCK, "this is a socket, and not a file"),
    (stat.S_ISCHR, "this is a device, and not a file"),
    (stat.S_ISBLK, "this is a device, and not a file"),
)
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

Parsed = tuple[Any, tuple[str, ...]]
"""The values of a file, and the keys that it gives twice in one mapping; the last one counts."""


def read_bytes(path: str, tree: str, max_bytes: int, *, is_whole: bool = True) -> bytes:
    """All bytes of a regular file in `tree` (a real path), to which links may lead.

    `OSError` if it is none, lies elsewhere, or has more than `max_bytes`; unless `is_whole`, the first bytes
    of a file that has more.
    """
    # Looked at before it is opened: opening a device may act on it, and opening a pipe waits for a writer.
    status = os.stat(path)  # noqa: PTH116 - thousands of files, where a Path costs more
    if not stat.S_ISREG(status.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(status.st_mode)), "this is not a file")
        raise OSError(errno.EINVAL, kind, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            real = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as above
        except OSError:  # without /proc
            real = os.path.realpath(path)
        if not f"{real}/".startswith(f"{tree.rstrip('/')}/"):
            raise OSError(errno.EXDEV, LEADS_OUT, path)
        if is_whole and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than the {max_bytes:,} bytes that are read", path)
        wanted = min(status.st_size, max_bytes)
        found = os.read(descriptor, wanted)
        while len(found) < wanted and (more := os.read(descriptor, wanted - len(found))):
            found += more
    finally:
        os.close(descriptor)
    return found


def tree_of(path: Path, base: Path) -> str:
    """The tree that a file must be in: the checked folder, or the file's own if it is outside of that."""
    return os.path.realpath(base if path.is_relative_to(base) else path.parent)


def leads_out(folder: Path, tree: Path) -> bool:
    """Check whether links on the way lead a folder out of `tree`."""
    return not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(tree))


def parse_json(raw: bytes, *, is_lenient: bool = False) -> Parsed:
    """Parse JSON in UTF-8; a lenient parse allows a comma before a closing bracket, as people write it."""
    if is_lenient:
        raw = _TRAILING_COMMA.sub(lambda match: match[1] or b"", raw)
    # A short text can have a value at every third byte, which would fill the memory.
    text_bytes = len(raw) if raw.isascii() else 4 * len(raw)
    values_bytes = 100 * raw.count(b",") + 64 * raw.count(b"[") + 184 * raw.count(b"{")
    if text_bytes + values_bytes > _MAX_VALUES_BYTES:
        raise ValueError(f"its values would take more than {_MAX_VALUES_BYTES >> 20} MiB")
    repeated: list[str] = []

    def keep_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            repeated.extend(_twice([key for key, _ in pairs]))
        return found

    content = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=keep_unique)
    is_deep = raw.count(b"[") + raw.count(b"{") > _MAX_LEVELS and isinstance(content, dict | list)
    level = [content] if is_deep else []
    for _ in range(_MAX_LEVELS):
        level = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)
            if isinstance(value, dict | list)
        ]
    if level:
        raise ValueError(_TOO_DEEP)
    return content, tuple(repeated)


def parse_yaml(raw: bytes) -> Parsed:
    """Parse YAML in UTF-8. The runs of a result have equal configurations, which are parsed once."""
    return _parse_yaml_text(raw.decode("utf-8-sig"))


@lru_cache(maxsize=16)
def _parse_yaml_text(text: str) -> Parsed:
    _limit_yaml(text)
    loader = _TreeLoader(text)
    try:
        return loader.get_single_data(), tuple(loader.repeated)
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


def _limit_yaml(text: str) -> None:
    """Refuse deep nesting, on which libyaml ends the process, and aliases that stand for too much.

    The values and the levels of each node are added up from the document's events, which no alias multiplies:
    with `a: &x [1, 2]` each `*x` counts as three values on two levels.
    """
    has_aliases = "*" in text and "&" in text
    # Each bracket and each column of indentation opens one level at most.
    indentation = max((len(line) - len(line.lstrip(_INDENTATION)) for line in text.splitlines()), default=0)
    if not has_aliases and text.count("[") + text.count("{") + indentation <= _MAX_LEVELS:
        return
    extents: dict[str | None, tuple[int, int]] = {}  # by anchor: values and levels
    open_nodes: list[tuple[str | None, int, int]] = [(None, 1, 1)]
    events: Iterable[Any] = yaml.parse(text, Loader=_Loader)
    for event in events:
        line, closed = event.start_mark.line + 1, None
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _, _ in open_nodes):
                raise ValueError(f"line {line}: the alias *{event.anchor} stands for what it lies in")
            closed = extents.get(event.anchor)  # an unknown one is left to the parser
        elif isinstance(event, yaml.ScalarEvent):
            closed = extents[event.anchor] = (1, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, levels = open_nodes.pop()
            closed = extents[anchor] = (values, levels)
        if closed is not None:
            anchor, values, levels = open_nodes[-1]
            open_nodes[-1] = (anchor, values + closed[0], max(levels, 1 + closed[1]))
        _, values, levels = open_nodes[-1]
        if len(open_nodes) + levels > _MAX_LEVELS:
            raise ValueError(_TOO_DEEP)
        if values > _MAX_YAML_VALUES:
            raise ValueError(f"line {line}: its aliases stand for more than {_MAX_YAML_VALUES:,} values")
