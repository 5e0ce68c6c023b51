"""The runs of a series: which result directories it has, which of them count, and what is still missing.

    read_series_state    what is published below the series' folder, and which attempts failed
    plan_run_sequence    what is left to run, and which finished runs no longer count
    list_progress        both for all series of a tree, for `penstock submission status`

Invariants: the runs that count follow one another as the rules require. Every other run is named with the
reason why it does not count, so that it can be set aside; a folder that cannot be read is named too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import UsageError, name_some
from penstock.submission import parsed_file, system_description
from penstock.submission.authoring.owned_tree import (
    HIDDEN,
    UNDER_WAY,
    Attempt,
    OwnedTree,
    RunSeries,
    list_drafts,
    read_attempt,
)
from penstock.submission.edition import Edition
from penstock.submission.tree_layout import (
    METADATA_SUFFIX,
    RUNNABLE_BENCHMARKS,
    Benchmark,
    SubmissionPhase,
    is_result_dir_name,
)
from penstock.units import format_count
from penstock.workload.mlperf_divisions import SubmissionDivision


class PublishedDir(BaseModel):
    """One published result directory, with the fields of its metadata that are needed here.

    `data_path` is where its data or checkpoints are. The numbers of checkpoints are 0 for training.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    folder: Path
    started_at: datetime = Field(validation_alias="invocation_start_time")
    ended_at: datetime = Field(validation_alias="invocation_end_time")
    accelerator: str
    num_processes: int
    num_files: int = Field(default=0, validation_alias=AliasPath("parameters", "dataset", "num_files_train"))
    data_path: str = Field(
        validation_alias=AliasChoices(AliasPath("args", "data_dir"), AliasPath("args", "checkpoint_folder"))
    )
    exit_status: int
    num_writes: int = Field(default=0, validation_alias=AliasPath("args", "num_checkpoints_write"))
    num_reads: int = Field(default=0, validation_alias=AliasPath("args", "num_checkpoints_read"))

    @property
    def duration(self) -> timedelta:
        """The time that the run took, by its host's clock."""
        return self.ended_at - self.started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesState:
    """All result directories and attempts of a series, in the order of time."""

    datasizes: tuple[PublishedDir, ...]
    datagens: tuple[PublishedDir, ...]
    runs: tuple[PublishedDir, ...]
    attempts: tuple[Attempt, ...]
    unreadable: tuple[str, ...]


def read_series_state(series: RunSeries) -> SeriesState:
    unreadable: list[str] = []
    dirs: dict[SubmissionPhase, list[PublishedDir]] = {phase: [] for phase in SubmissionPhase}
    is_training = series.benchmark is Benchmark.TRAINING
    for phase in SubmissionPhase if is_training else (SubmissionPhase.RUN,):
        for folder in sorted((series.tree.root / series.folder_of(phase)).glob("*")):
            if folder.is_dir() and is_result_dir_name(folder.name):
                try:
                    dirs[phase].append(_read(folder))
                except (OSError, ValueError, LookupError, TypeError) as error:
                    first = str(error).splitlines()[0]
                    unreadable.append(f"{folder.relative_to(series.tree.root)}: {first}")
    return SeriesState(
        datasizes=tuple(dirs[SubmissionPhase.DATASIZE]),
        datagens=tuple(dirs[SubmissionPhase.DATAGEN]),
        runs=tuple(dirs[SubmissionPhase.RUN]),
        attempts=tuple(map(read_attempt, list_drafts(series))),
        unreadable=tuple(unreadable),
    )


def _read(folder: Path) -> PublishedDir:
    files = sorted(folder.glob(f"*{METADATA_SUFFIX}"))
    if len(files) != 1:
        raise ValueError(f"it has {len(files)} files of metadata, not one")
    stated = json.loads(files[0].read_text(encoding="utf-8"))
    try:
        return PublishedDir.model_validate({**stated, "folder": folder})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSequence:
    """The `phases` to run, in this order, and the runs that count.

    If the result is complete, there are no phases. The `excluded` runs, each with its reason, have to be set
    aside before the next run.
    """

    phases: tuple[SubmissionPhase, ...]
    counted: tuple[PublishedDir, ...]
    excluded: tuple[tuple[PublishedDir, str], ...]


def plan_run_sequence(
    state: SeriesState,
    request: Mapping[str, object],
    num_runs: int,
    max_pause_runs: float,
    *,
    now: datetime,
) -> RunSequence:
    """Plan the rest of a result at this time.

    `request` has the values that all result directories share: accelerator, num_processes, num_files and
    data_path. Raises `UsageError` if the series belongs to another result. A series with only a recorded size
    holds no result yet, so a size that was recorded for another request is excluded.
    """
    resized: tuple[PublishedDir, ...] = ()
    if not (state.datagens or state.runs):
        resized = tuple(each for each in state.datasizes if any(_differences(each, request)))
    for run_dir in (*state.datasizes, *state.datagens, *state.runs):
        for what, present, requested in () if run_dir in resized else _differences(run_dir, request):
            raise UsageError(
                f"Another result is under way here: its {what}: {present}, requested: {requested}",
                where=str(run_dir.folder),
                fix="Request the same, name another --system, or move that result's folder away.",
            )
    counted, excluded = select_runs(state.runs, num_runs, max_pause_runs, now=now)
    phases = [] if len(state.datasizes) > len(resized) else [SubmissionPhase.DATASIZE]
    phases += [] if state.datagens else [SubmissionPhase.DATAGEN]
    phases += [SubmissionPhase.RUN] * (num_runs - len(counted))
    excluded += tuple((run_dir, "nothing was generated or run for this size") for run_dir in resized)
    return RunSequence(phases=tuple(phases), counted=counted, excluded=excluded)


def _differences(
    run_dir: PublishedDir, request: Mapping[str, object]
) -> Iterator[tuple[str, object, object]]:
    """Compare a result directory with the request: yield each key whose values differ, with both values.

    A series holds one result: a different accelerator, number of processes or data set needs another series.
    """
    is_datagen = (
        run_dir.folder.parent.name == SubmissionPhase.DATAGEN
    )  # any number of ranks may generate data
    for what, field in (
        ("accelerator", "accelerator"),
        ("accelerators", "num_processes"),
        ("files", "num_files"),
        ("data", "data_path"),
    ):
        present, requested = getattr(run_dir, field), request[field]
        if present != requested and not (is_datagen and what.startswith("accelerator")):
            yield what, present, requested


def select_runs(
    runs: Sequence[PublishedDir], num_runs: int, max_pause_runs: float, *, now: datetime
) -> tuple[tuple[PublishedDir, ...], tuple[tuple[PublishedDir, str], ...]]:
    """Divide runs into those that count, at most `num_runs`, and those that do not, each with the reason.

    A complete sequence always counts, an unfinished one only while the next run may still follow.
    """
    sequences: list[list[PublishedDir]] = [[]]  # each without a failure, a long pause or an overlap
    for run_dir in sorted(runs, key=lambda run_dir: run_dir.started_at):
        longer = [*sequences[-1], run_dir]
        if run_dir.exit_status != 0:
            sequences.append([])
        elif len(longer) == 1 or (
            may_follow(sequences[-1], run_dir.started_at, max_pause_runs)
            and may_follow(longer, run_dir.ended_at, max_pause_runs)
        ):
            sequences[-1] = longer
        else:
            sequences.append([run_dir])
    counted, why = (
        sequences[-1],
        "the next run did not follow within the time that one run takes, or it failed",
    )
    if complete := next((each for each in sequences if len(each) >= num_runs), None):
        counted, why = complete[:num_runs], "the result is complete without it"
    elif counted and not may_follow(counted, now, max_pause_runs):
        counted, why = [], f"no run followed by {now:%H:%M:%S}, within the time that one run takes"
    return tuple(counted), tuple((run_dir, why) for run_dir in runs if run_dir not in counted)


def may_follow(runs: Sequence[PublishedDir], started_at: datetime, max_pause_runs: float) -> bool:
    """Check whether a run that begins at this time may follow these runs under rule 2.1.18.

    Each pause must be shorter than `max_pause_runs` times the duration of the shortest run.
    """
    shortest = min(run_dir.duration for run_dir in runs)
    pauses = [after.started_at - before.ended_at for before, after in pairwise(runs)]
    pauses.append(started_at - runs[-1].ended_at)
    return all(timedelta(0) <= pause < max_pause_runs * shortest for pause in pauses)


def list_progress(tree: OwnedTree, edition: Edition, *, now: datetime) -> list[dict[str, Any]]:
    """Return the progress of all series of the tree, in order, as `submission status --json` prints it."""
    keys = {
        (division, folder.parts[-3], benchmark, folder.name)
        for top in (tree.root, tree.root / HIDDEN / UNDER_WAY)
        for division in SubmissionDivision
        for benchmark in RUNNABLE_BENCHMARKS
        for folder in (top / division.value / tree.organisation / "results").glob(f"*/{benchmark.value}/*")
        if folder.is_dir()
    }
    return [
        _measure_progress(
            RunSeries(tree=tree, division=division, system=system, benchmark=benchmark, model=model),
            edition,
            now,
        )
        for division, system, benchmark, model in sorted(keys)
    ]


def _measure_progress(series: RunSeries, edition: Edition, now: datetime) -> dict[str, Any]:
    state, missing = read_series_state(series), []
    counted, num_required = state.runs, 1
    if series.benchmark is Benchmark.TRAINING:
        num_required = edition.num_runs
        max_pause_runs = edition.timed.max_pause_runs
        counted, _ = select_runs(state.runs, num_required, max_pause_runs, now=now)
        phases = {SubmissionPhase.DATASIZE: state.datasizes, SubmissionPhase.DATAGEN: state.datagens}
        missing = [phase.value for phase, there in phases.items() if not there]
    elif state.runs:
        missing = [f"{num} {what}" for what, num in missing_checkpoints(state, edition).items() if num]
    if num_missing := max(0, num_required - len(counted)):
        missing.append(format_count(num_missing, "run"))
    run_dir = next((each for each in (*reversed(state.runs), *state.datasizes)), None)
    return {
        "division": series.division.value,
        "system": series.system,
        "benchmark": series.benchmark.value,
        "workload": series.model,
        "accelerator": run_dir.accelerator if run_dir else "",
        "num_accelerators": run_dir.num_processes if run_dir else None,
        "num_runs": len(counted),
        "num_runs_wanted": num_required,
        "lacks": [*missing, *missing_system_files(series)],
        "attempts": [asdict(attempt) | {"folder": str(attempt.folder)} for attempt in state.attempts],
        "unread": list(state.unreadable),
    }


def missing_checkpoints(state: SeriesState, edition: Edition) -> dict[str, int]:
    required, runs = edition.checkpoints.num_checkpoints, state.runs
    return {
        "writes": max(0, required - sum(run_dir.num_writes for run_dir in runs)),
        "reads": max(0, required - sum(run_dir.num_reads for run_dir in runs)),
    }


def missing_system_files(series: RunSeries) -> Iterator[str]:
    """Yield the missing files of the system's description, or the lines that need correction."""
    root = series.tree.root
    path = root / series.submitter / "systems" / f"{series.system}.yaml"
    if not path.is_file():
        yield f"systems/{series.system}.yaml"
    elif problems := system_description.find_schema_problems(parsed_file.read_description(path, root)):
        lines = sorted({problem.line for problem in problems})
        yield f"systems/{series.system}.yaml, line{'s' * (len(lines) > 1)} {name_some(lines, 5)}"
    if not path.with_suffix(".pdf").is_file():
        yield f"systems/{series.system}.pdf"
