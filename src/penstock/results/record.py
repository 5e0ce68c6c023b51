"""`run.json`: everything needed to understand or repeat a run, and how it ended.

Place in the flow: rank 0 opens a run before anything is timed and closes it with its figures. Invariant: the
file is there, whole, from before the first step on; a run whose process is gone is never called running.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock import __version__
from penstock.cluster.gates.gate_model import Preflight  # noqa: TC001 - pydantic reads the annotations
from penstock.errors import StorageError, UsageError
from penstock.results.delivery import Delivery  # noqa: TC001 - likewise
from penstock.results.durable import write_file, write_text
from penstock.results.figures import PhaseFigures  # noqa: TC001 - pydantic reads the annotations
from penstock.results.history.chapter import Chapter
from penstock.results.history.file import HistoryFile
from penstock.results.host import HostFacts  # noqa: TC001 - likewise
from penstock.results.layout import CLUSTER_FILE, RUN_FILE, make_run_folder, take_run_folder
from penstock.results.provenance import (
    GitState,
    ProcessMark,
    git_state,
    is_alive,
    mark_of_this_process,
    package_versions,
    redacted,
    redacted_settings,
)
from penstock.results.spec import spec_values
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.cluster.facts.host_facts import ClusterFacts
    from penstock.environment import Environment
    from penstock.workload.spec import Workload

FORMAT_VERSION: Final = 3
"""Raised whenever a key is added, renamed or means something else."""
_OLDER: Final = (2,)
"""Formats that lack keys of this one, and are whole without them."""

LONGEST_SILENCE_S: Final = 900.0
"""A run elsewhere that gave no sign of life for this long is taken for dead."""


class Outcome(StrEnum):
    """How a run ended, or that it has not."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What is known before a run starts.

    `plan` is what was derived from the workload, as plain values with units in their keys; of `environment`
    the user's own settings are kept, without secrets. `cluster` goes into a file of its own.
    """

    workload: Workload
    ranks: int
    hosts: Sequence[HostFacts]
    command: Sequence[str]
    environment: Environment = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    preflight: Preflight | None = None
    cluster: ClusterFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """`run.json`. Dates are ISO 8601 in UTC; `why` says in a sentence why a run did not finish.

    `workload` is the spec as asked, under DLIO's keys; nobody's secrets, and no keys that nobody set.
    `preflight` is None where no gates were looked at; `deliveries` set devices' bytes beside ours.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: int
    id: str
    name: str
    accelerator: str
    outcome: Outcome
    why: str
    started_at: str
    ended_at: str | None
    ranks: int
    command: tuple[str, ...]
    settings: Mapping[str, str]
    penstock_version: str
    python_version: str
    package_versions: Mapping[str, str]
    git: GitState | None
    process: ProcessMark
    hosts: tuple[HostFacts, ...]
    seeds: Mapping[str, int]
    remarks: tuple[str, ...]
    workload: Mapping[str, Any]
    plan: Mapping[str, Any]
    preflight: Preflight | None = None
    train: PhaseFigures | None = None
    evaluation: PhaseFigures | None = None
    deliveries: tuple[Delivery, ...] = ()


class OpenRun:
    """A run that goes on, in the hands of rank 0. Leaving its block without `finish` says how it ended.

    Ctrl-C makes it interrupted, any error failed; a killed process leaves "running", and readers see that.
    """

    def __init__(self, folder: Path, record: RunRecord, chapter: Chapter | None = None) -> None:
        self.folder = folder
        self.record = record
        self._chapter = chapter
        self._write()

    @classmethod
    def start(cls, parent: Path, request: RunRequest) -> Self:
        """Enter the run in the history of `parent`, and make its folder there, with its `run.json`."""
        now = datetime.now(UTC)
        chapter = Chapter.begin(HistoryFile(parent), request, now)
        folder = parent / chapter.folder_name
        with chapter.starting():
            make_run_folder(folder)
            return cls._begun(folder, request, now, chapter)

    @classmethod
    def start_in(cls, folder: Path, request: RunRequest, *, results: Path | None = None) -> Self:
        """The same in a folder that its user named. An earlier run there gives way, unless it goes on.

        It is entered in the history of `results`, somewhere above it; of its parent only where that has one
        already, because a folder elsewhere gets no neighbours.
        """
        if (folder / RUN_FILE).is_file() and read_record(folder).outcome is Outcome.RUNNING:
            raise UsageError("A run is under way here", where=str(folder), fix="Name another folder.")
        now = datetime.now(UTC)
        chapter = Chapter.begin_in(folder, request, now, results=results or folder.parent)
        with chapter.starting() if chapter else nullcontext():
            take_run_folder(folder)
            return cls._begun(folder, request, now, chapter)

    @classmethod
    def _begun(cls, folder: Path, request: RunRequest, now: datetime, chapter: Chapter | None) -> Self:
        run = cls(folder, _first_record(request, folder.name, now), chapter)
        if request.cluster is not None:
            write_text(folder, CLUSTER_FILE, request.cluster.model_dump_json(indent=2) + "\n")
        return run

    def sign_of_life(self) -> None:
        """Tell readers on other hosts that the run goes on; cheap, for every few seconds."""
        os.utime(self.folder / RUN_FILE)

    def finish(
        self,
        *,
        train: PhaseFigures | None = None,
        evaluation: PhaseFigures | None = None,
        deliveries: Sequence[Delivery] = (),
    ) -> None:
        """Close the run with its figures; times rank by rank stay with the step events."""
        self.record = replace(
            self.record,
            train=_brief(train),
            evaluation=_brief(evaluation),
            deliveries=tuple(deliveries),
        )
        self._end(Outcome.FINISHED, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.record.outcome is not Outcome.RUNNING:
            return
        if isinstance(error, KeyboardInterrupt):
            self._end(Outcome.INTERRUPTED, "Stopped: by its user, or because another rank failed.")
        elif kind is not None:
            self._end(Outcome.FAILED, f"{kind.__name__}: {error}")
        else:
            self._end(Outcome.FAILED, "It ended without figures.")

    def _end(self, outcome: Outcome, why: str) -> None:
        ended_at = datetime.now(UTC).isoformat(timespec="microseconds")
        self.record = replace(self.record, outcome=outcome, why=why, ended_at=ended_at)
        self._write()
        if self._chapter is not None:
            self._chapter.end(outcome.value, why)

    def _write(self) -> None:
        write_file(self.folder, RUN_FILE, format_record(self.record))


def format_record(record: RunRecord) -> bytes:
    """The record as the text of `run.json`."""
    return _adapter().dump_json(record, indent=2) + b"\n"


def read_record(folder: Path) -> RunRecord:
    """The record in a run's folder, its outcome as it is now: a dead run counts as interrupted."""
    path = folder / RUN_FILE
    try:
        content = path.read_bytes()
        silence_s = time.time() - path.stat().st_mtime
        found = json.loads(content)
        _check_format(found, path)
        record = _adapter().validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StorageError(
            f"run.json is not as Penstock writes it: {place} {first['msg']}", uri=str(path)
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"Cannot read this run: {error}", uri=str(path)) from error
    return as_of_now(record, silence_s)


def as_of_now(record: RunRecord, silence_s: float) -> RunRecord:
    """The record of a run that said it was running `silence_s` ago, seen from here and now."""
    if record.outcome is not Outcome.RUNNING:
        return record
    alive = is_alive(record.process)
    if alive or (alive is None and silence_s < LONGEST_SILENCE_S):
        return record
    why = (
        "Its process is gone."
        if alive is False
        else f"No sign of life from its host for {format_seconds(silence_s)}."
    )
    return replace(record, outcome=Outcome.INTERRUPTED, why=why)


def _check_format(found: Any, path: Path) -> None:
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT_VERSION and version not in _OLDER:
        raise StorageError(
            f"This run has format {version}, not {FORMAT_VERSION}",
            uri=str(path),
            fix="Read it with the version of Penstock that wrote it.",
        )


def _first_record(request: RunRequest, run_id: str, now: datetime) -> RunRecord:
    return RunRecord(
        format=FORMAT_VERSION,
        id=run_id,
        name=request.workload.name,
        accelerator=request.workload.accelerator,
        outcome=Outcome.RUNNING,
        why="",
        started_at=now.isoformat(timespec="microseconds"),
        ended_at=None,
        ranks=request.ranks,
        command=redacted(request.command),
        settings=redacted_settings(request.environment),
        penstock_version=__version__,
        python_version=platform.python_version(),
        package_versions=package_versions(),
        git=git_state(Path.cwd()),
        process=mark_of_this_process(),
        hosts=tuple(request.hosts),
        seeds=request.seeds,
        remarks=tuple(request.remarks),
        workload=spec_values(request.workload),
        plan=request.plan,
        preflight=request.preflight,
    )


def _brief(figures: PhaseFigures | None) -> PhaseFigures | None:
    if figures is None or figures.times is None:
        return figures
    return replace(figures, times=replace(figures.times, by_rank={}))


@cache
def _adapter() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)
