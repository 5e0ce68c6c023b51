"""One parsed file of a submission, whose fields are read by path.

`result_files` reads the files, rules read their fields. Invariant: no content of a file
makes reading the file fail; reading a missing or malformed field raises `MissingFact`, which `check` turns
into `not checked`. There are no defaults.
"""

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.did_you_mean import nearest
from penstock.errors import PenstockError
from penstock.submission.bounded_files import (
    MAX_JSON_BYTES,
    MAX_METADATA_BYTES,
    MAX_YAML_BYTES,
    Parsed,
    compose_yaml,
    parse_json,
    parse_yaml,
    read_bytes,
    tree_of,
)
from penstock.submission.tree_layout import METADATA_SUFFIX

MAX_TEXT_BYTES: Final = 4 << 20
"""Only the beginning of a log is read: what rules need is printed there."""
NO_FILE: Final = "there is no such file"
_PLACEHOLDER: Final = b"PRUNED BY STAFF"
_MAX_SIMILAR: Final = 1000
"""Keys among which a similar name is searched for, which takes milliseconds a hundred."""
_BRIEF: Final = reprlib.Repr()
_BRIEF.maxlist = _BRIEF.maxdict = _BRIEF.maxstring = _BRIEF.maxother = 80

KeyPath = tuple[str, ...]
"""The keys down to a value."""


class MissingFact(PenstockError):
    """A fact that a rule needs cannot be read from the files; `where` is the file."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedFile:
    """One file: its content, or the `problem` why there is none.

    `remark` is a flaw that did not prevent reading; `repeated` are keys that one mapping has twice; `lines`
    has the line of each value in a handwritten file.
    """

    file: str
    content: Any = field(default_factory=dict)
    problem: str = ""
    remark: str = ""
    repeated: tuple[str, ...] = ()
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    @property
    def is_missing(self) -> bool:
        """Check whether there is no such file, as opposed to one that cannot be read."""
        return self.problem == NO_FILE

    def value(self, *path: str) -> Any:
        """The value at `path`, as it was read."""
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
        """Check whether something other than null is at `path`; a file that cannot be read has nothing."""
        # Not by `value`: the search for a similar name takes longer than the rest of a rule.
        here = None if self.problem else self.content
        for key in path:
            here = here.get(key) if isinstance(here, dict) else None
        return here is not None

    def number(self, *path: str) -> float:
        """A finite number, or text that contains one, as in some real reports."""
        return self._number(self.value(*path), path)

    def integer(self, *path: str) -> int:
        """A whole number."""
        number = self.number(*path)
        if number != int(number):
            raise self._wrong(path, number, "a whole number")
        return int(number)

    def numbers(self, *path: str) -> tuple[float, ...]:
        """A list of at least one finite number."""
        entries = self.value(*path)
        if not isinstance(entries, list) or not entries:
            raise self._wrong(path, entries, "a list of numbers")
        return tuple(self._number(entry, path) for entry in entries)

    def boolean(self, *path: str) -> bool:
        """True or false; DLIO's files spell them in several ways."""
        value = self.value(*path)
        word = str(value).lower() if isinstance(value, str | bool) else ""
        if word not in ("true", "false"):
            raise self._wrong(path, value, "true or false")
        return word == "true"

    def text(self, *path: str) -> str:
        """A string."""
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
    """The name of a file in findings."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def read_file(path: Path, base: Path) -> ParsedFile:
    """The values of a JSON or YAML file, or the text of another; `base` is the folder that is checked."""
    return read_named_file(str(path), relative(path, base), tree_of(path, base))


def read_named_file(path: str, file: str, tree: str) -> ParsedFile:
    """The same for a known name in findings; over thousands of files, `Path` objects are costly.

    Links are followed within `tree`, a real path.
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
        if raw.strip() == _PLACEHOLDER:  # a round's staff left it of a file that was too large to publish
            raise ValueError(f"only a placeholder is left of it: {_PLACEHOLDER.decode()}")
        return parse_json(raw)
    if lower.endswith((".yaml", ".yml")):
        return parse_yaml(read_bytes(path, tree, MAX_YAML_BYTES))
    text = read_bytes(path, tree, MAX_TEXT_BYTES, is_whole=False).decode("utf-8", errors="replace")
    return text, ()


def read_description(path: Path, base: Path) -> ParsedFile:
    """A YAML file with the line of each value, for messages to its author."""
    parsed = read_file(path, base)
    if parsed.problem:
        return parsed
    root = compose_yaml(read_bytes(str(path), tree_of(path, base), MAX_YAML_BYTES))
    lines = dict(_line_numbers(root, ())) if root is not None else {}
    return replace(parsed, lines=lines)


def _line_numbers(node: yaml.Node, above: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    yield above, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, str(key.value))
            yield from _line_numbers(value, path)
            yield path, key.start_mark.line + 1  # after its value, which may begin on a later line
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _line_numbers(value, (*above, str(index)))
