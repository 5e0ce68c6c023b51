"""The journal of a flush daemon: a JSON line for all that must be known after a kill, fsynced when written.

The daemon appends; trainers and `status` read. Invariant: only complete lines count; what a kill cut off at
the end did not happen and is done again.
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
"""How many past outcomes stay when the journal is rewritten."""

EntryKind = Literal["begun", "copied", "marked", "failed", "durable", "superseded", "replaced"]


class JournalEntry(BaseModel):
    """One event of one save of a step."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    at_s: float
    what: EntryKind
    step: int
    save_id: str
    file: str = ""
    size_bytes: int = 0
    sum: Annotated[str, Field(pattern=r"\A([0-9a-f]{32})?\z")] = ""
    reason: str = ""
    """Of a failure; for a superseded step, by which others."""
    is_lasting: bool = False
    """Of a failure: it will not go away by itself, or has lasted for long. It is still retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """The state of one save of a step, as the journal tells it."""

    step: int
    copied: Mapping[str, JournalEntry] = field(default_factory=dict)
    """By file name: the files that are durable in the draft, with size and checksum."""
    is_marked: bool = False
    outcome: JournalEntry | None = None
    """Durable, superseded, or replaced by a newer save of the step."""
    failure: JournalEntry | None = None
    """The last failure, if nothing has succeeded since."""
    failing_since_s: float = 0.0
    num_failures: int = 0

    @property
    def copied_bytes(self) -> int:
        """The bytes of all durable files."""
        return sum(line.size_bytes for line in self.copied.values())


SaveStates = dict[tuple[int, str], SaveState]
"""By step and save ID."""


def replay(lines: Iterable[JournalEntry], before: SaveStates | None = None) -> SaveStates:
    """The states after these entries, the oldest first, and the states `before` them."""
    states = dict(before or {})
    for line in lines:
        key = line.step, line.save_id
        states[key] = _after(states.get(key, SaveState(step=line.step)), line)
    return states


def _after(state: SaveState, line: JournalEntry) -> SaveState:
    match line.what:
        case "begun":
            return replace(state, is_marked=False, outcome=None)
        case "copied":
            copied = {**state.copied, line.file: line}
            return replace(state, copied=copied, failure=None, num_failures=0)
        case "marked":
            return replace(state, is_marked=True, failure=None, num_failures=0)
        case "failed":
            since_s = state.failing_since_s if state.failure else line.at_s
            number = state.num_failures + 1
            return replace(state, failure=line, failing_since_s=since_s, num_failures=number)
        case "durable" | "superseded" | "replaced":
            return replace(state, outcome=line, failure=None, num_failures=0)


class Journal:
    """The journal of one cache, for the one process that may write it. Rewrites one that has become long."""

    def __init__(self, path: Path, *, longest_bytes: int = 1 << 20) -> None:
        self._path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        lines = parse_entries(whole)
        self.states = replay(lines)
        """The states after all entries."""
        if len(content) > longest_bytes:
            self._rewrite(_still_needed(lines, self.states))
        elif whole != content:
            # The next line would become part of an incomplete last one.
            os.truncate(path, len(whole))
        self._file = path.open("ab")

    def write(self, line: JournalEntry) -> None:
        """Append an entry; on return it survives a power cut."""
        self._file.write(_format_line(line))
        sync_open_file(self._file)
        self.states = replay([line], self.states)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewrite(self, lines: Iterable[JournalEntry]) -> None:
        write_durably(self._path, b"".join(_format_line(line) for line in lines))


class JournalReader:
    """Reads a growing journal, from any process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = 0
        self._states: SaveStates = {}

    def states(self) -> SaveStates:
        """The states after all complete lines."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._read_bytes:
                    self._inode, self._read_bytes, self._states = facts.st_ino, 0, {}
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return {}
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._states = replay(parse_entries(whole), self._states)
        return self._states


def parse_entries(content: bytes) -> list[JournalEntry]:
    """The entries of a journal, without incomplete lines and those of other versions."""
    lines = []
    for text in content.splitlines():
        try:
            lines.append(JournalEntry.model_validate_json(text))
        except ValidationError:
            continue
    return lines


def _still_needed(lines: Iterable[JournalEntry], states: SaveStates) -> list[JournalEntry]:
    """All entries of saves that are not over, and the last outcomes of those that are."""
    over = {key for key, state in states.items() if state.outcome}
    outcomes = [state.outcome for state in states.values() if state.outcome][-NUM_KEPT:]
    return [*outcomes, *(line for line in lines if (line.step, line.save_id) not in over)]


def _format_line(line: JournalEntry) -> bytes:
    return line.model_dump_json(exclude_defaults=True).encode() + b"\n"
