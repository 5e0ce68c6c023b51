"""One parsed file of a submission, whose fields are read by path, and how its bytes are read within limits.

Files may come from anyone, so all code that reads a submission's files opens them here. `result_files` reads
the files, and rules read their fields. Invariants: a read ends even if the name is that of a pipe or a
device, and parsing takes bounded time and memory; no content makes reading a file fail; reading a missing or
malformed field raises `MissingFact`, which `check` turns into `not checked`. There are no default values.
"""

import errno
import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.did_you_mean import nearest
from penstock.errors import PenstockError
from penstock.submission.tree_layout import METADATA_SUFFIX
from penstock.workload.strict_yaml import limit_values

MAX_JSON_BYTES: Final = 16 << 20
MAX_METADATA_BYTES: Final = 64 << 20
"""The limit for metadata: a thousand hosts take 44 MB. No other file grows with the disks of each host."""
MAX_YAML_BYTES: Final = 1 << 20
"""The longest description of a published round has 84 kB; parsing a megabyte takes a second."""
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
_TOO_DEEP: Final = f"it is nested deeper than {_MAX_LEVELS} levels"
_TRAILING_COMMA: Final = re.compile(rb'("(?:[^"\\]|\\.)*+"?)|,(?=\s*[}\]])')
"""A string, which must be preserved even if it does not end, or a comma that JSON does not allow."""
_INDENTATION: Final = " \t-?:"
_Loader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Parsed = tuple[Any, tuple[str, ...]]
"""The values of a file, and the keys that occur twice in one mapping, where the last value counts."""
MAX_TEXT_BYTES: Final = 4 << 20
"""Only this much of a log is read, because everything that rules need is printed at its beginning."""
NO_FILE: Final = "there is no such file"
_PLACEHOLDER: Final = b"PRUNED BY STAFF"
_MAX_SIMILAR: Final = 1000
"""The most keys among which a similar name is searched for; a hundred take milliseconds."""
_BRIEF: Final = reprlib.Repr()
_BRIEF.maxlist = _BRIEF.maxdict = _BRIEF.maxstring = _BRIEF.maxother = 80

KeyPath = tuple[str, ...]
"""The keys that lead down to a value."""


class MissingFact(PenstockError):
    """A fact that a rule needs cannot be read from the files. `where` names the file."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedFile:
    """One file: its content, or the `problem` that explains why there is none.

    `remark` is a flaw that did not prevent reading. `repeated` has the keys that occur twice in one mapping.
    `lines` has the line of each value in a handwritten file.
    """

    file: str
    content: Any = field(default_factory=dict)
    problem: str = ""
    remark: str = ""
    repeated: tuple[str, ...] = ()
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    @property
    def is_missing(self) -> bool:
        """Check whether the file does not exist; one that exists but cannot be read is not missing."""
        return self.problem == NO_FILE

    def value(self, *path: str) -> Any:
        """Return the value at `path`, unconverted."""
        if self.problem:
            raise MissingFact(self.problem, where=self.file)
        here = self.content
        for depth, key in enumerate(path):
            if not isinstance(here, dict) or key not in here:
                is_small = isinstance(here, Mapping) and len(here) <= _MAX_SIMILAR
                similar = nearest(key, map(str, here)) if is_small else ""
                hint = f" (is {similar} meant?)" if similar else ""
                raise MissingFact(f"there is no field {'.'.join(path[: depth + 1])}{hint}", where=self.file)
            here = here[key]
        return here

    def has(self, *path: str) -> bool:
        """Check whether there is a value other than null at `path`. An unreadable file has no values."""
        # Not by `value`, whose search for a similar name takes longer than the rest of a rule.
        here = None if self.problem else self.content
        for key in path:
            here = here.get(key) if isinstance(here, dict) else None
        return here is not None

    def parts(self, *path: str) -> dict[str, "ParsedFile"]:
        """Return the entries of a mapping by key, or of a list by position, as files; otherwise nothing."""
        value = self.value(*path)
        entries = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        return {str(key): ParsedFile(file=self.file, content=entry) for key, entry in entries}

    def number(self, *path: str) -> float:
        """Return a finite number, even from a string, because some real reports quote numbers."""
        return self._number(self.value(*path), path)

    def integer(self, *path: str) -> int:
        number = self.number(*path)
        if number != int(number):
            raise self._wrong(path, number, "a whole number")
        return int(number)

    def numbers(self, *path: str) -> tuple[float, ...]:
        """Return a list of at least one finite number."""
        entries = self.value(*path)
        if not isinstance(entries, list) or not entries:
            raise self._wrong(path, entries, "a list of numbers")
        return tuple(self._number(entry, path) for entry in entries)

    def boolean(self, *path: str) -> bool:
        """Return a Boolean, which DLIO's files spell in several ways."""
        value = self.value(*path)
        word = str(value).lower() if isinstance(value, str | bool) else ""
        if word not in ("true", "false"):
            raise self._wrong(path, value, "true or false")
        return word == "true"

    def text(self, *path: str) -> str:
        value = self.value(*path)
        if not isinstance(value, str):
            raise self._wrong(path, value, "a text")
        return value

    def _number(self, value: Any, path: KeyPath) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self._wrong(path, value, "a number")
        return number

    def _wrong(self, path: KeyPath, value: object, expected: str) -> MissingFact:
        return MissingFact(f"{'.'.join(path)} is {_BRIEF.repr(value):.60}, not {expected}", where=self.file)


def relative(path: Path, base: Path) -> str:
    """Return the name of a file as findings show it."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def read_file(path: Path, base: Path) -> ParsedFile:
    """Read the values of a JSON or YAML file, or the text of another. `base` is the checked folder."""
    return read_named_file(str(path), relative(path, base), tree_of(path, base))


def read_named_file(path: str, file: str, tree: str) -> ParsedFile:
    """Read a file like `read_file`, but take its name for findings from `file`.

    For thousands of files, `Path` objects are costly. Links are followed within `tree`, a real path.
    """
    try:
        content, repeated = _parse(path, tree)
    except FileNotFoundError:
        return ParsedFile(file=file, problem=NO_FILE)
    except OSError as error:
        return ParsedFile(file=file, problem=f"cannot be read: {error.strerror}")
    except (ValueError, ArithmeticError, RecursionError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ParsedFile(file=file, problem=f"cannot be understood: {first}")
    return ParsedFile(file=file, content=content, repeated=repeated)


def _parse(path: str, tree: str) -> Parsed:
    lower = path.lower()  # some submitters write .JSON
    if lower.endswith(".json"):
        max_bytes = MAX_METADATA_BYTES if lower.endswith(METADATA_SUFFIX) else MAX_JSON_BYTES
        raw = read_bytes(path, tree, max_bytes)
        if raw.strip() == _PLACEHOLDER:  # left by a round's staff for a file too large to publish
            raise ValueError(f"only a placeholder is left of it: {_PLACEHOLDER.decode()}")
        return parse_json(raw)
    if lower.endswith((".yaml", ".yml")):
        return parse_yaml(read_bytes(path, tree, MAX_YAML_BYTES))
    text = read_bytes(path, tree, MAX_TEXT_BYTES, is_whole=False).decode("utf-8", errors="replace")
    return text, ()


def read_description(path: Path, base: Path) -> ParsedFile:
    """Read a YAML file with the line of each value, for messages to its author."""
    parsed = read_file(path, base)
    if parsed.problem:
        return parsed
    raw = read_bytes(str(path), tree_of(path, base), MAX_YAML_BYTES)
    root = yaml.compose(raw.decode("utf-8-sig"), Loader=_Loader)
    return parsed if root is None else replace(parsed, lines=dict(_line_numbers(root, ())))


def _line_numbers(node: yaml.Node, above: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    yield above, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, str(key.value))
            yield from _line_numbers(value, path)
            yield path, key.start_mark.line + 1  # after the key's value, which may begin on a later line
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _line_numbers(value, (*above, str(index)))


def read_bytes(path: str, tree: str, max_bytes: int, *, is_whole: bool = True) -> bytes:
    """Return all bytes of a regular file in `tree` (a real path), to which links may lead.

    Raises `OSError` if it is not a regular file, lies outside the tree, or has more than `max_bytes`. Unless
    `is_whole`, returns the first `max_bytes` of a longer file instead.
    """
    # The file is examined before it is opened: opening a device may act on it, and opening a pipe waits for a
    # writer.
    status = os.stat(path)  # noqa: PTH116 - thousands of files, where a Path costs more
    if not stat.S_ISREG(status.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(status.st_mode)), "this is not a file")
        raise OSError(errno.EINVAL, kind, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        real = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as above
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
    """Return the tree that must hold a file: the checked folder, or the file's own if the file is outside."""
    return os.path.realpath(base if path.is_relative_to(base) else path.parent)


def parse_json(raw: bytes, *, is_lenient: bool = False) -> Parsed:
    """Parse JSON in UTF-8. If lenient, allow a comma before a closing bracket, as people write it."""
    if is_lenient:
        raw = _TRAILING_COMMA.sub(lambda match: match[1] or b"", raw)
    # Even a short document can have a value at every third byte, which would fill the memory.
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


@lru_cache(maxsize=16)
def parse_yaml(raw: bytes) -> Parsed:
    """Parse YAML in UTF-8. Results are cached, because the runs of a result have equal configurations."""
    text = raw.decode("utf-8-sig")
    _limit_yaml(text)
    loader = _TreeLoader(text)
    try:
        return loader.get_single_data(), tuple(loader.repeated)
    finally:
        loader.dispose()


def _twice(keys: list[str]) -> list[str]:
    return [key for key, count in Counter(keys).items() if count > 1]


class _TreeLoader(_Loader):  # type: ignore[misc]  # PyYAML has no types
    """PyYAML's safe loader; it also notes repeated keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - the loader's signature
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        self.repeated += _twice(keys)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


limit_values(_TreeLoader)


def _limit_yaml(text: str) -> None:
    """Refuse deep nesting, on which libyaml crashes, and aliases that stand for too many values.

    The values and levels of each node are added up from the document's events, which aliases do not multiply.
    With `a: &x [1, 2]`, each `*x` counts as three values on two levels.
    """
    has_aliases = "*" in text and "&" in text
    # Each bracket and each column of indentation opens at most one level.
    indentation = max((len(line) - len(line.lstrip(_INDENTATION)) for line in text.splitlines()), default=0)
    if not has_aliases and text.count("[") + text.count("{") + indentation <= _MAX_LEVELS:
        return
    extents: dict[str | None, tuple[int, int]] = {}  # by anchor: the numbers of values and levels
    open_nodes: list[tuple[str | None, int, int]] = [(None, 1, 1)]
    events: Iterable[Any] = yaml.parse(text, Loader=_Loader)
    for event in events:
        line, closed = event.start_mark.line + 1, None
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _, _ in open_nodes):
                raise ValueError(f"line {line}: the alias *{event.anchor} stands for what it lies in")
            closed = extents.get(event.anchor)  # unknown aliases are left to the parser
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
