"""A run in progress: rank 0 opens it before anything is timed, and closes it with its figures.

`run.json` exists, complete, before the first step. The run is also entered in the history of its
results folder, before its folder is made.
"""

import os
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from penstock import __version__
from penstock.errors import UsageError
from penstock.results.history.history_file import HistoryFile, RunEntry
from penstock.results.io_reconciliation import IoReconciliation
from penstock.results.phase_figures import PhaseFigures
from penstock.results.provenance import (
    git_state,
    identify_this_process,
    package_versions,
    redact,
    redact_settings,
)
from penstock.results.published_files import write_file, write_text
from penstock.results.run_folder import CLUSTER_FILE, RUN_FILE, make_run_folder, take_run_folder
from penstock.results.run_record import (
    FORMAT_VERSION,
    RunOutcome,
    RunRecord,
    RunRequest,
    format_record,
    read_record,
    workload_values,
)


class ActiveRun:
    """A run in progress, on rank 0. Leaving its `with` block without `finish` records how the run ended.

    Ctrl-C is recorded as interrupted, any error as failed. A killed process leaves "running" behind;
    `read_record` finds out whether that is still true.
    """

    def __init__(self, folder: Path, record: RunRecord, entry: RunEntry | None = None) -> None:
        self.folder = folder
        self.record = record
        self._entry = entry
        self._write()

    @classmethod
    def start(cls, parent: Path, request: RunRequest) -> Self:
        """Enter the run in the history of `parent`, and make its folder there, with its `run.json`."""
        now = datetime.now(UTC)
        entry = RunEntry.begin(HistoryFile(parent), request, now)
        folder = parent / entry.folder_name
        with entry.starting():
            make_run_folder(folder)
            return cls._create(folder, request, now, entry)

    @classmethod
    def start_in(cls, folder: Path, request: RunRequest, *, results: Path | None = None) -> Self:
        """The same in a folder that the user named; replaces an earlier run there unless it is active.

        The run is entered in the history of `results`, a folder above it; without `results` in its parent's,
        but only if that exists already: a folder of unknown use gets no history beside it.
        """
        if (folder / RUN_FILE).is_file() and read_record(folder).outcome is RunOutcome.RUNNING:
            raise UsageError("A run is active in this folder", where=str(folder), fix="Name another folder.")
        now = datetime.now(UTC)
        entry = RunEntry.begin_in(folder, request, now, results=results or folder.parent)
        with entry.starting() if entry else nullcontext():
            take_run_folder(folder)
            return cls._create(folder, request, now, entry)

    @classmethod
    def _create(cls, folder: Path, request: RunRequest, now: datetime, entry: RunEntry | None) -> Self:
        run = cls(folder, _first_record(request, folder.name, now), entry)
        if request.cluster is not None:
            write_text(folder, CLUSTER_FILE, request.cluster.model_dump_json(indent=2) + "\n")
        return run

    def heartbeat(self) -> None:
        """Show readers on other hosts that the run is active; cheap enough for every few seconds."""
        os.utime(self.folder / RUN_FILE)

    def finish(
        self,
        *,
        train: PhaseFigures | None = None,
        evaluation: PhaseFigures | None = None,
        deliveries: Sequence[IoReconciliation] = (),
    ) -> None:
        """Close the run with its figures; times rank by rank stay with the step events."""
        self.record = replace(
            self.record,
            train=_without_rank_times(train),
            evaluation=_without_rank_times(evaluation),
            deliveries=tuple(deliveries),
        )
        self._end(RunOutcome.FINISHED, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.record.outcome is not RunOutcome.RUNNING:
            return
        if isinstance(error, KeyboardInterrupt):
            self._end(RunOutcome.INTERRUPTED, "Stopped by its user, or because another rank failed.")
        elif kind is not None:
            self._end(RunOutcome.FAILED, f"{kind.__name__}: {error}")
        else:
            self._end(RunOutcome.FAILED, "It ended without figures.")

    def _end(self, outcome: RunOutcome, why: str) -> None:
        ended_at = datetime.now(UTC).isoformat(timespec="microseconds")
        self.record = replace(self.record, outcome=outcome, why=why, ended_at=ended_at)
        self._write()
        if self._entry is not None:
            self._entry.end(outcome.value, why)

    def _write(self) -> None:
        write_file(self.folder, RUN_FILE, format_record(self.record))


def _first_record(request: RunRequest, run_id: str, now: datetime) -> RunRecord:
    return RunRecord(
        format=FORMAT_VERSION,
        id=run_id,
        name=request.workload.name,
        accelerator=request.workload.accelerator,
        outcome=RunOutcome.RUNNING,
        why="",
        started_at=now.isoformat(timespec="microseconds"),
        ended_at=None,
        ranks=request.ranks,
        command=redact(request.command),
        settings=redact_settings(request.environment),
        penstock_version=__version__,
        python_version=platform.python_version(),
        package_versions=package_versions(),
        git=git_state(Path.cwd()),
        process=identify_this_process(),
        hosts=tuple(request.hosts),
        seeds=request.seeds,
        remarks=tuple(request.remarks),
        workload=workload_values(request.workload),
        plan=request.plan,
        preflight=request.preflight,
    )


def _without_rank_times(figures: PhaseFigures | None) -> PhaseFigures | None:
    if figures is None or figures.times is None:
        return figures
    return replace(figures, times=replace(figures.times, by_rank={}))
