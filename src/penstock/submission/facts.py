"""The fields of one file of a submission, asked for by path: there, or named as missing; never a default.

Place in the flow: `reading` makes documents, rules ask them. Invariant: whatever is not there, or is not
what it should be, raises `Unknown`, which the engine turns into `not checked`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
