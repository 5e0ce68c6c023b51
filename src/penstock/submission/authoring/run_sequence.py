"""The runs of a series: which result directories it has, which of them count, and what is still missing.

    read_series_state    what is published below the series' folder, and which attempts failed
    plan_run_sequence    what is left to run, and which finished runs no longer count
    list_progress        the same for all series of a tree, for `penstock submission status`

Invariants: the runs that count follow one another as the rules require, and each other run is named with the
reason, so that it can be set aside; a folder that cannot be read is named, too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import UsageError, name_some
from penstock.submission import parsed_file, system_description, tree_layout
from penstock.submission.authoring.attempt import Attempt, read_attempt
from penstock.submission.authoring.result_dir import HIDDEN, UNDER_WAY, Series, list_drafts
from penstock.submission.authoring.tree_owner import OwnedTree
from penstock.submission.edition import Edition
from penstock.workload.mlperf_divisions import SubmissionDivision


class _Metadata(BaseModel):
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
    """One published result directory; `data_path` is the place of its data or checkpoints.

    The numbers of checkpoints are 0 in training.
    """

    folder: Path
    started_at: datetime
    ended_at: datetime
    accelerator: str
    num_processes: int
    num_files: int
    data_path: str
    is_success: bool
    num_writes: int = 0
    num_reads: int = 0

    @property
    def duration(self) -> timedelta:
        """How long it took, by the clock of its own host."""
        return self.ended_at - self.started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesState:
    """Everything that a series has, in the order of time."""

    datasizes: tuple[PublishedDir, ...]
    datagens: tuple[PublishedDir, ...]
    runs: tuple[PublishedDir, ...]
    attempts: tuple[Attempt, ...]
    unreadable: tuple[str, ...]


def read_series_state(series: Series) -> SeriesState:
    """Read the series from its tree."""
    unreadable: list[str] = []
    dirs = {phase: _read_published(series, phase, unreadable) for phase in _phases(series)}
    return SeriesState(
        datasizes=dirs.get(tree_layout.SubmissionPhase.DATASIZE, ()),
        datagens=dirs.get(tree_layout.SubmissionPhase.DATAGEN, ()),
        runs=dirs[tree_layout.SubmissionPhase.RUN],
        attempts=tuple(map(read_attempt, list_drafts(series))),
        unreadable=tuple(unreadable),
    )


def _phases(series: Series) -> tuple[tree_layout.SubmissionPhase, ...]:
    return (
        tuple(tree_layout.SubmissionPhase)
        if series.benchmark is tree_layout.Benchmark.TRAINING
        else (tree_layout.SubmissionPhase.RUN,)
    )


def _read_published(
    series: Series, phase: tree_layout.SubmissionPhase, unreadable: list[str]
) -> tuple[PublishedDir, ...]:
    parent = series.tree.root / series.folder_of(phase)
    published = []
    for folder in sorted(parent.glob("*")):
        if folder.is_dir() and tree_layout.is_result_dir_name(folder.name):
            try:
                published.append(_read(folder))
            except (OSError, ValueError, LookupError, TypeError) as error:
                first = str(error).splitlines()[0]
                unreadable.append(f"{folder.relative_to(series.tree.root)}: {first}")
    return tuple(published)


def _read(folder: Path) -> PublishedDir:
    files = sorted(folder.glob(f"*{tree_layout.METADATA_SUFFIX}"))
    if len(files) != 1:
        raise ValueError(f"it has {len(files)} files of metadata, not one")
    try:
        stated = _Metadata.model_validate(json.loads(files[0].read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    data_path = stated.args.get("data_dir") or stated.args.get("checkpoint_folder")
    return PublishedDir(
        folder=folder,
        started_at=stated.invocation_start_time,
        ended_at=stated.invocation_end_time,
        accelerator=stated.accelerator,
        num_processes=stated.num_processes,
        num_files=int(stated.parameters.get("dataset", {}).get("num_files_train", 0)),
        data_path=str(data_path),
        is_success=stated.exit_status == 0,
        num_writes=int(stated.args.get("num_checkpoints_write", 0)),
        num_reads=int(stated.args.get("num_checkpoints_read", 0)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedResult:
    """The result to make, and how its runs must follow one another."""

    accelerator: str
    num_processes: int
    data_path: str
    num_files: int
    num_runs: int
    max_pause_runs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSequence:
    """Run `phases` in this order, after the `excluded` runs, each with the reason, were set aside."""

    phases: tuple[tree_layout.SubmissionPhase, ...]
    counted: tuple[PublishedDir, ...]
    excluded: tuple[tuple[PublishedDir, str], ...]

    @property
    def is_complete(self) -> bool:
        """Whether no phase is left to run."""
        return not self.phases


def plan_run_sequence(state: SeriesState, request: RequestedResult, *, now: datetime) -> RunSequence:
    """What is left to do at this time; `UsageError` where the series is of another result.

    A size alone is no result yet: one of another request is excluded.
    """
    resized = () if state.datagens or state.runs else _find_resized(state.datasizes, request)
    for run_dir in (*state.datasizes, *state.datagens, *state.runs):
        if run_dir not in resized:
            _require_same(run_dir, request)
    kept = tuple(run_dir for run_dir in state.datasizes if run_dir not in resized)
    phases = _missing_preparations(replace(state, datasizes=kept))
    counted, excluded = select_runs(state.runs, request, now=now)
    phases += [tree_layout.SubmissionPhase.RUN] * (request.num_runs - len(counted))
    excluded += tuple((run_dir, "nothing was generated or run for this size") for run_dir in resized)
    return RunSequence(phases=tuple(phases), counted=counted, excluded=excluded)


def _find_resized(datasizes: Sequence[PublishedDir], request: RequestedResult) -> tuple[PublishedDir, ...]:
    return tuple(run_dir for run_dir in datasizes if any(_differences(run_dir, request)))


def _missing_preparations(state: SeriesState) -> list[tree_layout.SubmissionPhase]:
    present = {
        tree_layout.SubmissionPhase.DATASIZE: state.datasizes,
        tree_layout.SubmissionPhase.DATAGEN: state.datagens,
    }
    return [phase for phase, result_dirs in present.items() if not result_dirs]


SplitRuns = tuple[tuple[PublishedDir, ...], tuple[tuple[PublishedDir, str], ...]]
"""The runs that count, and the others, each with the reason."""


def select_runs(runs: Sequence[PublishedDir], request: RequestedResult, *, now: datetime) -> SplitRuns:
    """The runs that count, and those that no longer do.

    A complete sequence counts whenever it was made; an unfinished one only while the next run may follow.
    """
    sequences = _find_sequences(runs, request)
    complete = next((sequence for sequence in sequences if len(sequence) >= request.num_runs), None)
    if complete is not None:
        return _split_runs(runs, complete[: request.num_runs], "the result is complete without it")
    last = sequences[-1] if sequences else []
    if last and not may_follow(last, now, request):
        return _split_runs(runs, [], f"no run followed by {now:%H:%M:%S}, within the time that one run takes")
    return _split_runs(
        runs, last, "the next run did not follow within the time that one run takes, or it failed"
    )


def may_follow(runs: Sequence[PublishedDir], started_at: datetime, request: RequestedResult) -> bool:
    """Whether a run that begins at this time follows these, as rule 2.1.18 is judged.

    Each pause must be shorter than `max_pause_runs` times the shortest run.
    """
    shortest = min(run_dir.duration for run_dir in runs)
    pauses = [after.started_at - before.ended_at for before, after in pairwise(runs)]
    pauses.append(started_at - runs[-1].ended_at)
    return all(timedelta(0) <= pause < request.max_pause_runs * shortest for pause in pauses)


def _find_sequences(runs: Sequence[PublishedDir], request: RequestedResult) -> list[list[PublishedDir]]:
    """The runs as sequences without a failure, a long pause or an overlap; the last may be empty."""
    sequences: list[list[PublishedDir]] = [[]]
    for run_dir in sorted(runs, key=lambda run_dir: run_dir.started_at):
        if not run_dir.is_success:
            sequences.append([])
        elif not sequences[-1] or _is_sequence([*sequences[-1], run_dir], request):
            sequences[-1].append(run_dir)
        else:
            sequences.append([run_dir])
    return sequences


def _is_sequence(run_dirs: Sequence[PublishedDir], request: RequestedResult) -> bool:
    *before, last = run_dirs
    return may_follow(before, last.started_at, request) and may_follow(run_dirs, last.ended_at, request)


def _split_runs(runs: Sequence[PublishedDir], counted: Sequence[PublishedDir], why: str) -> SplitRuns:
    return tuple(counted), tuple((run_dir, why) for run_dir in runs if run_dir not in counted)


def _require_same(run_dir: PublishedDir, request: RequestedResult) -> None:
    """A series holds one result: another accelerator, number or data set needs another series."""
    for what, present, requested in _differences(run_dir, request):
        raise UsageError(
            f"Another result is under way here: its {what}: {present}, requested: {requested}",
            where=str(run_dir.folder),
            fix="Request the same, name another --system, or move that result's folder away.",
        )


def _differences(run_dir: PublishedDir, request: RequestedResult) -> Iterator[tuple[str, object, object]]:
    """What a result directory has otherwise than the request: the name, its value, the requested one."""
    if run_dir.folder.parent.name == tree_layout.SubmissionPhase.DATAGEN:
        pairs: list[tuple[str, object, object]] = [
            ("files", run_dir.num_files, request.num_files),
            ("data", run_dir.data_path, request.data_path),
        ]
    else:
        pairs = [
            ("accelerator", run_dir.accelerator, request.accelerator),
            ("accelerators", run_dir.num_processes, request.num_processes),
            ("files", run_dir.num_files, request.num_files),
            ("data", run_dir.data_path, request.data_path),
        ]
    yield from (pair for pair in pairs if pair[1] != pair[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesProgress:
    """One series: how many of its runs count, how many it needs, and what is missing."""

    series: Series
    num_accelerators: int | None
    accelerator: str
    num_runs: int
    num_required: int
    missing: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    unreadable: tuple[str, ...]


def list_progress(tree: OwnedTree, edition: Edition, *, now: datetime) -> tuple[SeriesProgress, ...]:
    """The progress of all series of the tree, in order."""
    return tuple(_measure_progress(series, edition, now) for series in _list_series(tree))


def _list_series(tree: OwnedTree) -> Iterator[Series]:
    keys = set()
    for top in (tree.root, tree.root / HIDDEN / UNDER_WAY):
        for division in SubmissionDivision:
            results = top / division.value / tree.organisation / "results"
            for benchmark in tree_layout.RUNNABLE_BENCHMARKS:
                for folder in results.glob(f"*/{benchmark.value}/*"):
                    if folder.is_dir():
                        keys.add((division, folder.parts[-3], benchmark, folder.name))
    for division, system, benchmark, model in sorted(keys):
        yield Series(tree=tree, division=division, system=system, benchmark=benchmark, model=model)


def _measure_progress(series: Series, edition: Edition, now: datetime) -> SeriesProgress:
    state = read_series_state(series)
    last = state.runs[-1] if state.runs else None
    counted: tuple[PublishedDir, ...] = state.runs
    num_required = 1
    if series.benchmark is tree_layout.Benchmark.TRAINING:
        num_required = edition.num_runs
        if last is not None:
            counted, _ = select_runs(state.runs, _request_like(last, edition), now=now)
    run_dir = last or next(iter(state.datasizes), None)
    return SeriesProgress(
        series=series,
        num_accelerators=run_dir.num_processes if run_dir else None,
        accelerator=run_dir.accelerator if run_dir else "",
        num_runs=len(counted),
        num_required=num_required,
        missing=tuple(_list_missing(series, state, edition, num_missing=max(0, num_required - len(counted)))),
        attempts=state.attempts,
        unreadable=state.unreadable,
    )


def _request_like(run_dir: PublishedDir, edition: Edition) -> RequestedResult:
    return RequestedResult(
        accelerator=run_dir.accelerator,
        num_processes=run_dir.num_processes,
        data_path=run_dir.data_path,
        num_files=run_dir.num_files,
        num_runs=edition.num_runs,
        max_pause_runs=edition.require(edition.timed).max_pause_runs,
    )


def _list_missing(series: Series, state: SeriesState, edition: Edition, *, num_missing: int) -> Iterator[str]:
    if series.benchmark is tree_layout.Benchmark.TRAINING:
        yield from (phase.value for phase in _missing_preparations(state))
    if num_missing:
        yield f"{num_missing} run{'s' * (num_missing > 1)}"
    if series.benchmark is tree_layout.Benchmark.CHECKPOINTING and state.runs:
        for what, missing in missing_checkpoints(state, edition).items():
            if missing:
                yield f"{missing} {what}"
    yield from missing_system_files(series)


def missing_checkpoints(state: SeriesState, edition: Edition) -> dict[str, int]:
    """How many writes and reads of checkpoints the result lacks."""
    required, runs = edition.require(edition.checkpoints).num_checkpoints, state.runs
    return {
        "writes": max(0, required - sum(run_dir.num_writes for run_dir in runs)),
        "reads": max(0, required - sum(run_dir.num_reads for run_dir in runs)),
    }


def missing_system_files(series: Series) -> Iterator[str]:
    """The files of the system's description that are missing, or the lines that need correction."""
    root = series.tree.root
    path = root / series.submitter / "systems" / f"{series.system}.yaml"
    if not path.is_file():
        yield f"systems/{series.system}.yaml"
    elif problems := system_description.find_schema_problems(parsed_file.read_description(path, root)):
        lines = sorted({problem.line for problem in problems})
        yield f"systems/{series.system}.yaml, line{'s' * (len(lines) > 1)} {name_some(lines, 5)}"
    if not path.with_suffix(".pdf").is_file():
        yield f"systems/{series.system}.pdf"
