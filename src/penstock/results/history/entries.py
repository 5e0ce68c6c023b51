"""The lines of a history: a run began, it ended, its folder was moved.

Place in the flow: `file` writes and reads them. Invariant: a line is never changed once it is written; what
happens later is another line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from penstock.results.provenance import ProcessMark  # noqa: TC001 - pydantic reads the annotations

FORMAT_VERSION: Final = 1
"""Raised whenever a key is added, renamed or means something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """A run is about to make its folder. `run` is its id: six or more hexadecimal digits, for good.

    `command` and `settings` are without secrets; `is_named` where its user chose the folder.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    event: Literal["began"] = "began"
    run: str
    at: str
    folder: str
    is_named: bool
    workload: str
    ranks: int
    command: tuple[str, ...]
    working_folder: str
    settings: Mapping[str, str]
    process: ProcessMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run closed its record: its outcome there, and why."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    event: Literal["ended"] = "ended"
    run: str
    at: str
    outcome: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A folder was published under its last name, went into the trash, came back, or was deleted for good.

    `folder` is its name below the results folder, `run` the same if it has no id.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    event: Literal["published", "removed", "restored", "deleted"]
    run: str
    at: str
    folder: str
    batch: str


Entry = Began | Ended | Moved


def format_entry(entry: Entry) -> bytes:
    """The entry as one line."""
    return json.dumps({"format": FORMAT_VERSION, **asdict(entry)}, separators=(",", ":")).encode() + b"\n"


def parse_entry(line: bytes) -> Entry:
    """The entry of a line; `ValueError` says what is wrong with it."""
    found: Any = json.loads(line.decode())
    version = found.pop("format", None) if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format {version}, not {FORMAT_VERSION}")
    try:
        return _adapter().validate_python(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@cache
def _adapter() -> TypeAdapter[Entry]:
    return TypeAdapter(Annotated[Entry, Field(discriminator="event")])
