"""A run in progress: rank 0 opens it before anything is timed, and closes it with its figures.

`run.json` exists, complete, before the first step. Before the run's folder is created, the run is also
entered in the history of its results folder.
"""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Self

from penstock import __version__
from penstock.cluster.comm import format_cause
from penstock.errors import PenstockError, StorageError, UsageError
from penstock.progress import Progress, RunName
from penstock.results import provenance, published_files, run_folder, run_record, run_status
from penstock.results.counter_files import IoReconciliation
from penstock.results.history import HistoryFile
from penstock.results.phase_figures import PhaseFigures
from penstock.results.run_page import Pages, leave_run_page
from penstock.workload.spec import Workload, write_workload


class ActiveRun:
    """A run in progress, on rank 0. Leaving its `with` block without `finish` records how the run ended.

    Ctrl-C is recorded as "interrupted", any error as "failed". The record of a killed process still says
    "running"; `read_record` finds out whether the run is active.
    """

    def __init__(
        self,
        folder: Path,
        request: run_record.RunRequest,
        now: datetime,
        make_folder: Callable[[Path], object],
        *,
        history: HistoryFile,
        run_id: str,
        pages: Pages | None = None,
    ) -> None:
        """Create the run's folder and record.

        The run has been entered in `history` under `run_id`, unless `run_id` is "". If `pages` is None, the
        run has no page.
        """
        self.folder = folder
        self._history, self._run_id = history, run_id
        self._pages = pages
        self._progress = Progress()
        self._exit_code = 1
        try:
            make_folder(folder)
            if request.cluster is not None:
                text = request.cluster.model_dump_json(indent=2) + "\n"
                published_files.write_text(folder, run_folder.CLUSTER_FILE, text)
            self.record = run_record.RunRecord(
                format=run_record.FORMAT_VERSION,
                id=folder.name,
                name=request.workload.name,
                accelerator=request.workload.accelerator,
                outcome=run_record.RunOutcome.RUNNING,
                why="",
                started_at=now.isoformat(timespec="microseconds"),
                ended_at=None,
                ranks=request.ranks,
                command=provenance.redact(request.command),
                settings=provenance.redact_settings(request.environment),
                penstock_version=__version__,
                python_version=platform.python_version(),
                package_versions=provenance.package_versions(),
                git=provenance.git_state(Path.cwd()),
                process=provenance.identify_this_process(),
                hosts=tuple(request.hosts),
                seeds=request.seeds,
                remarks=tuple(provenance.redact_uris(request.remarks)),
                workload=provenance.redact_uris(write_workload(request.workload, only_set=True)),
                plan=provenance.redact_uris(request.plan),
                preflight=request.preflight,
            )
            self._write()
        except StorageError as error:
            if run_id:
                history.end(run_id, "failed", str(error))
            raise

    @classmethod
    def start(
        cls, parent: Path, request: run_record.RunRequest, *, pages: Pages = MappingProxyType({})
    ) -> Self:
        """Record the run in the history of `parent`, and create its folder there, with its `run.json`.

        When the run ends, a page is written into its folder.
        """
        now, history = datetime.now(UTC), HistoryFile(parent)
        entry = history.begin(request, now)
        folder = parent / entry["folder"]
        make = run_folder.make_run_folder
        return cls(folder, request, now, make, history=history, run_id=entry["run"], pages=pages)

    @classmethod
    def start_in(cls, folder: Path, request: run_record.RunRequest, *, results: Path | None = None) -> Self:
        """Start a run in a folder that the user named; replace an earlier run there unless it is active.

        The run is entered in the history of `results`, a folder above `folder`. Without `results`, it is
        entered in the history of its parent folder, but only if that history already exists, because the
        parent may be a folder of any kind.
        """
        if (folder / run_folder.RUN_FILE).is_file() and run_record.read_record(
            folder
        ).outcome is run_record.RunOutcome.RUNNING:
            raise UsageError("A run is active in this folder", where=str(folder), fix="Name another folder.")
        now, place = datetime.now(UTC), folder.absolute()
        history = HistoryFile((results or folder.parent).absolute())
        run_id, take = "", run_folder.take_run_folder
        if place.is_relative_to(history.parent) and (place.parent != history.parent or history.exists()):
            named = place.relative_to(history.parent).as_posix()
            run_id = history.begin(request, now, named=named)["run"]
        return cls(folder, request, now, take, history=history, run_id=run_id)

    def heartbeat(self) -> None:
        """Show readers on other hosts that the run is active. A call every few seconds costs little."""
        os.utime(self.folder / run_folder.RUN_FILE)

    def show_in_folder(self, progress: Progress) -> None:
        """Show in the run's folder what `progress` receives, so that the run can be followed there."""
        self._progress = progress
        kind = str(self.record.plan.get("kind", "training"))
        name = "_".join(filter(None, (self.record.name, self.record.accelerator)))
        progress.attach(RunName(folder=self.folder, kind=kind, workload=name, ranks=self.record.ranks))

    def finish(
        self,
        *,
        train: PhaseFigures | None = None,
        evaluation: PhaseFigures | None = None,
        deliveries: Sequence[IoReconciliation] = (),
        workload: Workload | None = None,
        is_right: bool = True,
    ) -> None:
        """Close the run with its figures, except times by rank, which stay with the step events.

        `is_right` is false if the run measured something that failed, which the command reports by its exit
        code. `workload` is the workload that was really run, if it could not be known before.
        """
        self._exit_code = 0 if is_right else 1
        values = self.record.workload if workload is None else write_workload(workload, only_set=True)
        self.record = replace(
            self.record,
            workload=provenance.redact_uris(values),
            train=_without_rank_times(train),
            evaluation=_without_rank_times(evaluation),
            deliveries=tuple(deliveries),
        )
        self._end(run_record.RunOutcome.FINISHED, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self.record.outcome is not run_record.RunOutcome.RUNNING:
            return
        if isinstance(error, KeyboardInterrupt):
            why = str(error) or "Stopped by its user, or because another rank failed."
            self._exit_code = 130
            self._end(run_record.RunOutcome.INTERRUPTED, why)
        elif error is not None:
            self._exit_code = error.exit_code if isinstance(error, PenstockError) else 70
            self._end(run_record.RunOutcome.FAILED, format_cause(error))
        else:
            self._end(run_record.RunOutcome.FAILED, "It ended without figures.")

    def _end(self, outcome: run_record.RunOutcome, why: str) -> None:
        ended_at, why = datetime.now(UTC).isoformat(timespec="microseconds"), provenance.redact_uris(why)
        self.record = replace(self.record, outcome=outcome, why=why, ended_at=ended_at)
        self._write()
        if self._run_id:
            self._history.end(self._run_id, outcome.value, why)
        if self._pages is not None:
            leave_run_page(self.folder, self._pages)
        self._progress.settle(outcome.value, why, self._exit_code)
        if self._pages is None and outcome is run_record.RunOutcome.FINISHED:
            # Readers of DLIO's files and of submissions do not expect this file, so their folders do not keep
            # it.
            (self.folder / run_status.STATUS_FILE).unlink(missing_ok=True)

    def _write(self) -> None:
        published_files.write_file(self.folder, run_folder.RUN_FILE, run_record.format_record(self.record))


def _without_rank_times(figures: PhaseFigures | None) -> PhaseFigures | None:
    if figures is None or figures.times is None:
        return figures
    return replace(figures, times=replace(figures.times, by_rank={}))
