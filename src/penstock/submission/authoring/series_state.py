"""The state of a series: which of its result directories exist, what is missing, and which attempts failed.

Read before anything is run, and for `penstock submission status`. Invariants: every folder of the series is
understood, or is named with the reason why not; a series with nothing but failed attempts is listed, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import StorageError
from penstock.results.layout import RUN_FILE
from penstock.results.record import read_record
from penstock.submission.authoring.result_dir import HIDDEN, UNDER_WAY, Series, drafts
from penstock.submission.authoring.run_sequence import Wanted, keep_runs
from penstock.submission.parsed_file import read_description
from penstock.submission.system_description import problems
from penstock.submission.tree_layout import JUDGED, METADATA_SUFFIX, Benchmark, Phase, is_time
from penstock.workload.division_rules import SubmissionDivision

if TYPE_CHECKING:
    from penstock.submission.authoring.ownership import Claim
    from penstock.submission.edition import Edition


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """One series: how many of its runs count, of how many; `lacks` says in words what is missing."""

    series: Series
    num_accelerators: int | None
    accelerator: str
    num_runs: int
    num_wanted: int
    lacks: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    unread: tuple[str, ...]


def progress_of(claim: Claim, edition: Edition, *, now: datetime) -> tuple[Progressed, ...]:
    """All series of the tree, in order."""
    return tuple(_progressed(series, edition, now) for series in _all_series(claim))


def _all_series(claim: Claim) -> Iterator[Series]:
    found = set()
    for top in (claim.root, claim.root / HIDDEN / UNDER_WAY):
        for division in SubmissionDivision:
            results = top / division.value / claim.organisation / "results"
            for benchmark in JUDGED:
                for folder in results.glob(f"*/{benchmark.value}/*"):
                    if folder.is_dir():
                        found.add((division, folder.parts[-3], benchmark, folder.name))
    for division, system, benchmark, model in sorted(found):
        yield Series(claim=claim, division=division, system=system, benchmark=benchmark, model=model)


def _progressed(series: Series, edition: Edition, now: datetime) -> Progressed:
    standing = read_standing(series)
    last = standing.runs[-1] if standing.runs else None
    kept: tuple[Leaf, ...] = standing.runs
    num_wanted = 1
    if series.benchmark is Benchmark.TRAINING:
        num_wanted = edition.num_runs
        if last is not None:
            kept, _ = keep_runs(standing.runs, _wanted_like(last, edition), now=now)
    leaf = last or next(iter(standing.datasizes), None)
    return Progressed(
        series=series,
        num_accelerators=leaf.num_processes if leaf else None,
        accelerator=leaf.accelerator if leaf else "",
        num_runs=len(kept),
        num_wanted=num_wanted,
        lacks=tuple(_lacks(series, standing, num_missing=max(0, num_wanted - len(kept)))),
        attempts=standing.attempts,
        unread=standing.unread,
    )


def _wanted_like(leaf: Leaf, edition: Edition) -> Wanted:
    return Wanted(
        accelerator=leaf.accelerator,
        num_processes=leaf.num_processes,
        place=leaf.place,
        num_files=leaf.num_files,
        num_runs=edition.num_runs,
        max_pause_runs=edition.of_time().max_pause_runs,
    )


def _lacks(series: Series, standing: Standing, *, num_missing: int) -> Iterator[str]:
    if series.benchmark is Benchmark.TRAINING:
        if not standing.datasizes:
            yield Phase.DATASIZE.value
        if not standing.datagens:
            yield Phase.DATAGEN.value
    if num_missing:
        yield f"{num_missing} run{'s' * (num_missing > 1)}"
    yield from system_lacks(series)


def system_lacks(series: Series) -> Iterator[str]:
    """What the system's description still needs, by the lines of its file."""
    root = series.claim.root
    path = root / series.submitter / "systems" / f"{series.system}.yaml"
    if not path.is_file():
        yield f"systems/{series.system}.yaml"
    elif found := problems(read_description(path, root)):
        lines = sorted({problem.line for problem in found})
        shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > len(lines[:5]) else "")
        yield f"systems/{series.system}.yaml, line{'s' * (len(lines) > 1)} {shown}"
    if not path.with_suffix(".pdf").is_file():
        yield f"systems/{series.system}.pdf"
