"""One file of a submission, parsed: its fields are asked for by path, and a missing one is named.

`result_files` and `tree_context` read the files, rules ask for their fields. Invariant: reading raises for
nothing that a file holds; asking for what is not there, or is not what it should be, raises the error that
`check` turns into `not checked`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml

from penstock.errors import PenstockError
from penstock.suggest import nearest

Steps = tuple[str, ...]
"""The keys down to a value."""


class Unknown(PenstockError):
    """A fact that a rule needs cannot be read from the files; `where` is the file."""

    exit_code: ClassVar[int] = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file: its values, or the `problem` why there are none; `remark` is a flaw that hid nothing.

    `lines` has the line of each value, where people write the file by hand.
    """

    file: str
    tree: Any = field(default_factory=dict)
    problem: str = ""
    remark: str = ""
    lines: Mapping[Steps, int] = field(default_factory=dict)

    def value(self, *path: str) -> Any:
        """What stands at `path`, as it was read."""
        if self.problem:
            raise Unknown(self.problem, where=self.file)
        here = self.tree
        for depth, step in enumerate(path):
            if not isinstance(here, dict) or step not in here:
                raise Unknown(_missing(path, depth, here), where=self.file)
            here = here[step]
        return here

    def number(self, *path: str) -> float:
        """A finite number; text that spells one will do, because real reports hold such."""
        return self._number(self.value(*path), path)

    def whole(self, *path: str) -> int:
        """A whole number."""
        found = self.number(*path)
        if found != int(found):
            raise Unknown(f"{'.'.join(path)} is {found!r}, not a whole number", where=self.file)
        return int(found)

    def numbers(self, *path: str) -> tuple[float, ...]:
        """A list of finite numbers that has at least one."""
        found = self.value(*path)
        if not isinstance(found, list) or not found:
            raise Unknown(f"{'.'.join(path)} is {found!r:.60}, not a list of numbers", where=self.file)
        return tuple(self._number(entry, path) for entry in found)

    def has(self, *path: str) -> bool:
        """Whether something other than null stands at `path`; a file that cannot be read has nothing."""
        try:
            return self.value(*path) is not None
        except Unknown:
            return False

    def flag(self, *path: str) -> bool:
        """True or false; DLIO's files spell them in several ways."""
        found = self.value(*path)
        said = str(found).lower()
        if said not in ("true", "false"):
            raise Unknown(f"{'.'.join(path)} is {found!r:.60}, not true or false", where=self.file)
        return said == "true"

    def text(self, *path: str) -> str:
        """A text."""
        found = self.value(*path)
        if not isinstance(found, str):
            raise Unknown(f"{'.'.join(path)} is {found!r:.60}, not a text", where=self.file)
        return found

    def _number(self, found: Any, path: tuple[str, ...]) -> float:
        try:
            number = math.nan if isinstance(found, bool) else float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise Unknown(f"{'.'.join(path)} is {found!r:.60}, not a number", where=self.file)
        return number


def _missing(path: tuple[str, ...], depth: int, here: Any) -> str:
    name = ".".join(path[: depth + 1])
    known = [str(key) for key in here] if isinstance(here, Mapping) else []
    meant = nearest(path[depth], known)
    return f"there is no field {name}" + (f" (is {meant} meant?)" if meant else "")


MOST_TEXT_BYTES: Final = 4 << 20
"""So much of a log is read; what a rule looks for stands at its beginning."""
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def relative(path: Path, base: Path) -> str:
    """How findings name a file."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def read_document(path: Path, base: Path) -> Document:
    """The file as values, or as one text where it is neither JSON nor YAML."""
    return read_file(str(path), relative(path, base))


def read_file(path: str, file: str) -> Document:
    """The same, where its name is known."""
    try:
        return Document(file=file, tree=_parse(path))
    except FileNotFoundError:
        return Document(file=file, problem="there is no such file")
    except OSError as error:
        return Document(file=file, problem=f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Document(file=file, problem=f"cannot be understood: {first}")


def read_description(path: Path, base: Path) -> Document:
    """A YAML file with the line of each of its values, for those who wrote it by hand."""
    document = read_document(path, base)
    if document.problem:
        return document
    root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=_LOADER)
    lines = dict(_lines(root, ())) if root is not None else {}
    return Document(file=document.file, tree=document.tree, lines=lines)


def _lines(node: yaml.Node, above: Steps) -> Iterator[tuple[Steps, int]]:
    yield above, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*above, str(key.value))
            yield from _lines(value, here)
            yield here, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _lines(value, (*above, str(number)))


def _parse(path: str) -> Any:
    if path.endswith(".json"):
        with open(path, encoding="utf-8-sig") as stream:  # noqa: PTH123 - thousands of files: a Path costs more
            return json.loads(stream.read())
    if path.endswith((".yaml", ".yml")):
        with open(path, encoding="utf-8-sig") as stream:  # noqa: PTH123 - likewise
            return yaml.load(stream.read(), Loader=_LOADER)  # noqa: S506 - both are safe
    with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 - likewise
        return stream.read(MOST_TEXT_BYTES)
