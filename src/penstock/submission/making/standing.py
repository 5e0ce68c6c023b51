"""How far a series is: its leaves as they lie in the tree, and attempts that came to nothing.

Place in the flow: read before anything is run, and by `penstock submission status`. Invariant: every folder
of the series is a leaf that is understood, or is named with the reason why not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import StorageError
from penstock.results.layout import RUN_FILE
from penstock.results.record import read_record
from penstock.submission.making.leaf import drafts
from penstock.submission.names import METADATA_SUFFIX, Benchmark, Phase, is_time

if TYPE_CHECKING:
    from penstock.submission.making.leaf import Series


class _Stated(BaseModel):
    """What is needed of a leaf's metadata; all else is for judges."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    accelerator: str
    num_processes: int
    exit_status: int
    invocation_start_time: datetime
    invocation_end_time: datetime
    parameters: dict[str, Any]
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf of a series; `place` is that of its data or checkpoints."""

    folder: Path
    began: datetime
    ended: datetime
    accelerator: str
    num_processes: int
    num_files: int
    place: str
    is_success: bool

    @property
    def duration(self) -> timedelta:
        """How long it took, by its own clock."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What failed, was stopped, or is under way; never part of the result."""

    folder: Path
    outcome: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All there is of a series, each in the order of time."""

    datasizes: tuple[Leaf, ...]
    datagens: tuple[Leaf, ...]
    runs: tuple[Leaf, ...]
    attempts: tuple[Attempt, ...]
    unread: tuple[str, ...]


def read_standing(series: Series) -> Standing:
    """Read the series as it lies in its tree."""
    unread: list[str] = []
    found = {phase: _leaves(series, phase, unread) for phase in _phases(series)}
    return Standing(
        datasizes=found.get(Phase.DATASIZE, ()),
        datagens=found.get(Phase.DATAGEN, ()),
        runs=found[Phase.RUN],
        attempts=tuple(map(_attempt, drafts(series))),
        unread=tuple(unread),
    )


def _phases(series: Series) -> tuple[Phase, ...]:
    return tuple(Phase) if series.benchmark is Benchmark.TRAINING else (Phase.RUN,)


def _leaves(series: Series, phase: Phase, unread: list[str]) -> tuple[Leaf, ...]:
    parent = series.claim.root / series.folder_of(phase)
    found = []
    for folder in sorted(parent.glob("*")):
        if folder.is_dir() and is_time(folder.name):
            try:
                found.append(_read(folder))
            except (OSError, ValueError, LookupError, TypeError) as error:
                first = str(error).splitlines()[0]
                unread.append(f"{folder.relative_to(series.claim.root)}: {first}")
    return tuple(found)


def _read(folder: Path) -> Leaf:
    files = sorted(folder.glob(f"*{METADATA_SUFFIX}"))
    if len(files) != 1:
        raise ValueError(f"it has {len(files)} files of metadata, not one")
    try:
        stated = _Stated.model_validate(json.loads(files[0].read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    place = stated.args.get("data_dir") or stated.args.get("checkpoint_folder")
    return Leaf(
        folder=folder,
        began=stated.invocation_start_time,
        ended=stated.invocation_end_time,
        accelerator=stated.accelerator,
        num_processes=stated.num_processes,
        num_files=int(stated.parameters.get("dataset", {}).get("num_files_train", 0)),
        place=str(place),
        is_success=stated.exit_status == 0,
    )


def _attempt(folder: Path) -> Attempt:
    if not (folder / RUN_FILE).exists():
        return Attempt(folder=folder, outcome="interrupted", why="It left nothing.")
    try:
        record = read_record(folder)
    except StorageError as error:
        return Attempt(folder=folder, outcome="unreadable", why=str(error))
    return Attempt(folder=folder, outcome=record.outcome.value, why=record.why)
