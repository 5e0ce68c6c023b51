"""A complete training result: the data set's size, the data set, and all runs one after the other.

    read the tree -> plan what is missing -> add the next result directory -> read the tree again

Collective. The plan is made from the tree before each run, so an interrupted sequence continues where it was,
as long as the rules allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.errors import StorageError
from penstock.submission.authoring.result_dir import set_aside
from penstock.submission.authoring.run_sequence import RequestedResult, RunSequence, plan_run_sequence
from penstock.submission.authoring.series_state import read_series_state
from penstock.submission.authoring.write_result_dir import write_manifest, write_report
from penstock.submission.tree_layout import SubmissionPhase
from penstock.workflows.submission.training_result import (
    DataSetPlan,
    FormatLogs,
    add_datagen,
    add_datasize,
    add_run,
)

if TYPE_CHECKING:
    from penstock.bench.training.training_request import TrainingRequest
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.results.host_facts import HostFacts
    from penstock.storage import Storage
    from penstock.submission.edition import Edition
    from penstock.workflows.submission.result_draft import ResultWriter

TRIES_PER_RUN: Final = 2
"""Durations may differ so much that no run may follow another; do not repeat them forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResultPlan:
    """The result to make: one run's request, repeated as often as the edition requires, on these hosts."""

    request: TrainingRequest
    edition: Edition
    num_accelerators: int
    hosts: Sequence[HostFacts]
    generates_with: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingObserver:
    """Follows a sequence: `note` gets a sentence before each run, `format_logs` makes a run's logs."""

    progress: Progress
    note: Callable[[str], None]
    format_logs: FormatLogs


def make_training(
    writer: ResultWriter,
    plan: TrainingResultPlan,
    storage: Storage,
    *,
    comm: Comm,
    observer: TrainingObserver,
) -> RunSequence:
    """Add result directories until the result is complete; returns the final sequence."""
    requested = _requested_result(writer, plan)
    num_tries = 0
    while True:
        sequence = _plan_next(writer, requested, comm=comm, observer=observer)
        if sequence.is_complete:
            if comm.rank == 0:
                write_report(writer.series, plan.edition)
            return sequence
        phase = sequence.phases[0]
        if phase is SubmissionPhase.RUN:
            num_tries += 1
            _require_tries_left(num_tries, requested.num_runs, writer)
            observer.note(f"run {len(sequence.kept) + 1} of {requested.num_runs}")
        else:
            observer.note(f"{phase.value}: {plan.request.workload.dataset.num_files_train:,} files")
        _add(writer, plan, phase, storage, comm=comm, observer=observer)


def make_part(
    writer: ResultWriter,
    plan: TrainingResultPlan,
    storage: Storage,
    *,
    phase: SubmissionPhase,
    comm: Comm,
    observer: TrainingObserver,
) -> RunSequence:
    """Add one result directory of this phase if the result still lacks it; a run adds the data size first."""
    requested = _requested_result(writer, plan)
    if phase is SubmissionPhase.DATAGEN:  # any number of ranks may generate, whatever the runs use
        others = comm.broadcast(_num_accelerators(writer, comm), awaiting="rank 0 to read the tree")
        requested = replace(requested, num_processes=others or requested.num_processes)
    sequence = _plan_next(writer, requested, comm=comm, observer=observer)
    if phase is SubmissionPhase.RUN and SubmissionPhase.DATASIZE in sequence.phases:
        _add(writer, plan, SubmissionPhase.DATASIZE, storage, comm=comm, observer=observer)
    if phase in sequence.phases:
        observer.note(f"{phase.value}: {requested.num_files:,} files")
        _add(writer, plan, phase, storage, comm=comm, observer=observer)
        sequence = _plan_next(writer, requested, comm=comm, observer=observer)
    else:
        observer.note(f"{phase.value}: is there already")
    if sequence.is_complete and comm.rank == 0:
        write_report(writer.series, plan.edition)
    return sequence


def _num_accelerators(writer: ResultWriter, comm: Comm) -> int | None:
    """Read from the tree how many accelerators its runs use; None without runs, and on ranks but 0."""
    if comm.rank:
        return None
    state = read_series_state(writer.series)
    return next((leaf.num_processes for leaf in (*state.datasizes, *state.runs)), None)


def _requested_result(writer: ResultWriter, plan: TrainingResultPlan) -> RequestedResult:
    return RequestedResult(
        accelerator=plan.request.workload.accelerator,
        num_processes=plan.num_accelerators,
        place=writer.place,
        num_files=plan.request.workload.dataset.num_files_train,
        num_runs=plan.edition.num_runs,
        max_pause_runs=plan.edition.require_timed().max_pause_runs,
    )


def _plan_next(
    writer: ResultWriter, requested: RequestedResult, *, comm: Comm, observer: TrainingObserver
) -> RunSequence:
    """Plan what is to be done now, and set aside what no longer counts; the same on all ranks."""
    sequence = None
    if comm.rank == 0:
        sequence = plan_run_sequence(read_series_state(writer.series), requested, now=writer.clock())
        for surplus in sequence.surplus:
            target = set_aside(writer.series.claim, surplus.run_dir.folder)
            observer.note(f"{surplus.run_dir.folder.name} was set aside: {surplus.why}. It is in {target}")
        if sequence.surplus:
            _write_manifest(writer)
    planned = comm.broadcast(sequence, awaiting="rank 0 to plan what is left to do")
    assert planned is not None
    return planned


def _add(
    writer: ResultWriter,
    plan: TrainingResultPlan,
    phase: SubmissionPhase,
    storage: Storage,
    *,
    comm: Comm,
    observer: TrainingObserver,
) -> None:
    workload = plan.request.workload
    if phase is SubmissionPhase.DATASIZE:
        add_datasize(writer, workload, hosts=plan.hosts, num_accelerators=plan.num_accelerators, comm=comm)
    elif phase is SubmissionPhase.DATAGEN:
        recipe = DatasetRecipe(dataset=workload.dataset, seed=workload.train.seed, reduction=IRREDUCIBLE)
        data_set = DataSetPlan(
            workload=workload, recipe=recipe, threads=plan.generates_with, hosts=plan.hosts
        )
        add_datagen(writer, data_set, storage, comm=comm, progress=observer.progress)
    else:
        add_run(
            writer,
            plan.request,
            storage,
            comm=comm,
            progress=observer.progress,
            format_logs=observer.format_logs,
        )


def _write_manifest(writer: ResultWriter) -> None:
    by = f"penstock {writer.image.program.version}"
    write_manifest(writer.series, by=by, now=writer.clock())


def _require_tries_left(num_tries: int, num_runs: int, writer: ResultWriter) -> None:
    if num_tries > TRIES_PER_RUN * num_runs:
        raise StorageError(
            f"After {num_tries - 1} runs no {num_runs} follow one another: their durations differ too much",
            uri=str(writer.series.folder),
            fix="See what else uses this storage: `penstock submission status` lists the runs.",
        )
