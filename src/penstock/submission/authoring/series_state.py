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
from penstock.results.run_folder import RUN_FILE
from penstock.results.run_record import read_record
from penstock.submission.authoring.result_dir import HIDDEN, UNDER_WAY, Series, list_drafts
from penstock.submission.authoring.run_sequence import RequestedResult, select_runs
from penstock.submission.parsed_file import read_description
from penstock.submission.system_description import find_schema_problems
from penstock.submission.tree_layout import (
    CHECKED_BENCHMARKS,
    METADATA_SUFFIX,
    Benchmark,
    SubmissionPhase,
    is_result_dir_name,
)
from penstock.workload.division_rules import SubmissionDivision

if TYPE_CHECKING:
    from penstock.submission.authoring.ownership import OwnedTree
    from penstock.submission.edition import Edition


class _Stated(BaseModel):
    """The fields of the metadata that are needed here; the rules judge the others."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    accelerator: str
    num_processes: int
    exit_status: int
    invocation_start_time: datetime
    invocation_end_time: datetime
    parameters: dict[str, Any]
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDir:
    """One published result directory; `place` is that of its data or checkpoints."""

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
        """How long it took, by the clock of its own host."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A draft whose run failed, was stopped, or is still running; never part of the result."""

    folder: Path
    outcome: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesState:
    """Everything that a series has, in the order of time."""

    datasizes: tuple[PublishedDir, ...]
    datagens: tuple[PublishedDir, ...]
    runs: tuple[PublishedDir, ...]
    attempts: tuple[Attempt, ...]
    unread: tuple[str, ...]


def read_series_state(series: Series) -> SeriesState:
    """Read the series from its tree."""
    unread: list[str] = []
    dirs = {phase: _published(series, phase, unread) for phase in _phases(series)}
    return SeriesState(
        datasizes=dirs.get(SubmissionPhase.DATASIZE, ()),
        datagens=dirs.get(SubmissionPhase.DATAGEN, ()),
        runs=dirs[SubmissionPhase.RUN],
        attempts=tuple(map(_attempt, list_drafts(series))),
        unread=tuple(unread),
    )


def _phases(series: Series) -> tuple[SubmissionPhase, ...]:
    return tuple(SubmissionPhase) if series.benchmark is Benchmark.TRAINING else (SubmissionPhase.RUN,)


def _published(series: Series, phase: SubmissionPhase, unread: list[str]) -> tuple[PublishedDir, ...]:
    parent = series.claim.root / series.folder_of(phase)
    published = []
    for folder in sorted(parent.glob("*")):
        if folder.is_dir() and is_result_dir_name(folder.name):
            try:
                published.append(_read(folder))
            except (OSError, ValueError, LookupError, TypeError) as error:
                first = str(error).splitlines()[0]
                unread.append(f"{folder.relative_to(series.claim.root)}: {first}")
    return tuple(published)


def _read(folder: Path) -> PublishedDir:
    files = sorted(folder.glob(f"*{METADATA_SUFFIX}"))
    if len(files) != 1:
        raise ValueError(f"it has {len(files)} files of metadata, not one")
    try:
        stated = _Stated.model_validate(json.loads(files[0].read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    place = stated.args.get("data_dir") or stated.args.get("checkpoint_folder")
    return PublishedDir(
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
class SeriesProgress:
    """One series: how many of its runs count, how many it needs, and in `lacks` what is missing."""

    series: Series
    num_accelerators: int | None
    accelerator: str
    num_runs: int
    num_wanted: int
    lacks: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    unread: tuple[str, ...]


def list_progress(claim: OwnedTree, edition: Edition, *, now: datetime) -> tuple[SeriesProgress, ...]:
    """The progress of all series of the tree, in order."""
    return tuple(_progressed(series, edition, now) for series in _all_series(claim))


def _all_series(claim: OwnedTree) -> Iterator[Series]:
    found = set()
    for top in (claim.root, claim.root / HIDDEN / UNDER_WAY):
        for division in SubmissionDivision:
            results = top / division.value / claim.organisation / "results"
            for benchmark in CHECKED_BENCHMARKS:
                for folder in results.glob(f"*/{benchmark.value}/*"):
                    if folder.is_dir():
                        found.add((division, folder.parts[-3], benchmark, folder.name))
    for division, system, benchmark, model in sorted(found):
        yield Series(claim=claim, division=division, system=system, benchmark=benchmark, model=model)


def _progressed(series: Series, edition: Edition, now: datetime) -> SeriesProgress:
    state = read_series_state(series)
    last = state.runs[-1] if state.runs else None
    kept: tuple[PublishedDir, ...] = state.runs
    num_wanted = 1
    if series.benchmark is Benchmark.TRAINING:
        num_wanted = edition.num_runs
        if last is not None:
            kept, _ = select_runs(state.runs, _request_like(last, edition), now=now)
    run_dir = last or next(iter(state.datasizes), None)
    return SeriesProgress(
        series=series,
        num_accelerators=run_dir.num_processes if run_dir else None,
        accelerator=run_dir.accelerator if run_dir else "",
        num_runs=len(kept),
        num_wanted=num_wanted,
        lacks=tuple(_lacks(series, state, num_missing=max(0, num_wanted - len(kept)))),
        attempts=state.attempts,
        unread=state.unread,
    )


def _request_like(run_dir: PublishedDir, edition: Edition) -> RequestedResult:
    return RequestedResult(
        accelerator=run_dir.accelerator,
        num_processes=run_dir.num_processes,
        place=run_dir.place,
        num_files=run_dir.num_files,
        num_runs=edition.num_runs,
        max_pause_runs=edition.require_timed().max_pause_runs,
    )


def _lacks(series: Series, state: SeriesState, *, num_missing: int) -> Iterator[str]:
    if series.benchmark is Benchmark.TRAINING:
        if not state.datasizes:
            yield SubmissionPhase.DATASIZE.value
        if not state.datagens:
            yield SubmissionPhase.DATAGEN.value
    if num_missing:
        yield f"{num_missing} run{'s' * (num_missing > 1)}"
    yield from missing_system_files(series)


def missing_system_files(series: Series) -> Iterator[str]:
    """The files of the system's description that are missing, or the lines that need correction."""
    root = series.claim.root
    path = root / series.submitter / "systems" / f"{series.system}.yaml"
    if not path.is_file():
        yield f"systems/{series.system}.yaml"
    elif problems := find_schema_problems(read_description(path, root)):
        lines = sorted({problem.line for problem in problems})
        shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > len(lines[:5]) else "")
        yield f"systems/{series.system}.yaml, line{'s' * (len(lines) > 1)} {shown}"
    if not path.with_suffix(".pdf").is_file():
        yield f"systems/{series.system}.pdf"
