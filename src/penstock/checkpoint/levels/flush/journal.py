"""The daemon's journal: a JSON line for everything that must be known after a kill, fsynced as it is written.

The daemon appends, trainers and `status` read. Invariant: a line is believed only if it is whole; whatever a
kill cut off at the end did not happen, and is done again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.storage.files.durable import sync_open_file, write_durably

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

NUM_KEPT: Final = 200
"""Outcomes of the past that stay when the journal is begun anew."""

What = Literal["begun", "copied", "marked", "failed", "durable", "superseded", "replaced"]


class Line(BaseModel):
    """One thing that happened to one save of a step."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    at_s: float
    what: What
    step: int
    save_id: str
    file: str = ""
    size_bytes: int = 0
    sum: Annotated[str, Field(pattern=r"\A([0-9a-f]{32})?\z")] = ""
    reason: str = ""
    """Of a failure; of a step that is superseded, by which."""
    is_lasting: bool = False
    """Of a failure: it will not mend by itself, or has gone on for long. It is tried again all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the journal says of one save of a step."""

    step: int
    copied: Mapping[str, Line] = field(default_factory=dict)
    """By name of the file: durable in the draft, with size and sum."""
    is_marked: bool = False
    outcome: Line | None = None
    """Durable, superseded, or replaced by a newer save of the step."""
    failure: Line | None = None
    """The last one, while nothing has succeeded since."""
    failing_since_s: float = 0.0
    num_failures: int = 0

    @property
    def copied_bytes(self) -> int:
        """Of all durable files."""
        return sum(line.size_bytes for line in self.copied.values())


Standings = dict[tuple[int, str], Standing]
"""By step and save id."""


def fold(lines: Iterable[Line], before: Standings | None = None) -> Standings:
    """What lines say together, the oldest first; `before` is what those before them said."""
    standings = dict(before or {})
    for line in lines:
        key = line.step, line.save_id
        standings[key] = _after(standings.get(key, Standing(step=line.step)), line)
    return standings


def _after(standing: Standing, line: Line) -> Standing:
    match line.what:
        case "begun":
            return replace(standing, is_marked=False, outcome=None)
        case "copied":
            copied = {**standing.copied, line.file: line}
            return replace(standing, copied=copied, failure=None, num_failures=0)
        case "marked":
            return replace(standing, is_marked=True, failure=None, num_failures=0)
        case "failed":
            since_s = standing.failing_since_s if standing.failure else line.at_s
            number = standing.num_failures + 1
            return replace(standing, failure=line, failing_since_s=since_s, num_failures=number)
        case "durable" | "superseded" | "replaced":
            return replace(standing, outcome=line, failure=None, num_failures=0)


class Journal:
    """The journal of one cache, for the one process that may write it. A long one is begun anew at first."""

    def __init__(self, path: Path, *, longest_bytes: int = 1 << 20) -> None:
        self._path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        lines = parse(whole)
        self.standings = fold(lines)
        """What all lines say."""
        if len(content) > longest_bytes:
            self._begin_anew(_still_needed(lines, self.standings))
        elif whole != content:
            # A torn last line would swallow the next one.
            os.truncate(path, len(whole))
        self._file = path.open("ab")

    def write(self, line: Line) -> None:
        """Add a line; it survives a power cut once this returns."""
        self._file.write(_text(line))
        sync_open_file(self._file)
        self.standings = fold([line], self.standings)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin_anew(self, lines: Iterable[Line]) -> None:
        write_durably(self._path, b"".join(_text(line) for line in lines))


class JournalReader:
    """What a cache's journal says, read by anybody as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = 0
        self._standings: Standings = {}

    def standings(self) -> Standings:
        """What its whole lines say by now."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._read_bytes:
                    self._inode, self._read_bytes, self._standings = facts.st_ino, 0, {}
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return {}
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._standings = fold(parse(whole), self._standings)
        return self._standings


def parse(content: bytes) -> list[Line]:
    """The lines of a journal that are whole; what is torn or of another version is left out."""
    lines = []
    for text in content.splitlines():
        try:
            lines.append(Line.model_validate_json(text))
        except ValidationError:
            continue
    return lines


def _still_needed(lines: Iterable[Line], standings: Standings) -> list[Line]:
    """All lines of saves that are not over, and the last outcomes of those that are."""
    over = {key for key, standing in standings.items() if standing.outcome}
    outcomes = [standing.outcome for standing in standings.values() if standing.outcome][-NUM_KEPT:]
    return [*outcomes, *(line for line in lines if (line.step, line.save_id) not in over)]


def _text(line: Line) -> bytes:
    return line.model_dump_json(exclude_defaults=True).encode() + b"\n"
