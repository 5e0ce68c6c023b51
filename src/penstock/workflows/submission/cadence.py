"""A whole result of training: data set's size, data set, and all its runs one after the other.

Place in the flow: what lies in the tree -> plan -> the next leaf -> what lies in the tree. Collective.
Invariant: the plan is made anew from the tree before each leaf, so an interrupted cadence goes on where it
was as long as the rules let it.
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
from penstock.workflows.submission.training import DataSet, Tell, add_datagen, add_datasize, add_run

if TYPE_CHECKING:
    from penstock.bench.training.training_request import TrainingRequest
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.results.host import HostFacts
    from penstock.storage import Storage
    from penstock.submission.edition import Edition
    from penstock.workflows.submission.session import Session

TRIES_FOR_EACH_RUN: Final = 2
"""Runs whose durations differ so much that none may follow another are not repeated for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResultPlan:
    """The result that is to be made: one run's request, as often as the edition asks, on these hosts."""

    request: TrainingRequest
    edition: Edition
    num_accelerators: int
    hosts: Sequence[HostFacts]
    generates_with: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Onlooker:
    """Who is told how far it is: `progress` of a leaf, `note` in words, `tell` makes a run's logs."""

    progress: Progress
    note: Callable[[str], None]
    tell: Tell


def make_training(
    session: Session, plan: TrainingResultPlan, storage: Storage, *, comm: Comm, onlooker: Onlooker
) -> RunSequence:
    """Add leaves until the result is whole; what it came to."""
    wanted = _wanted(session, plan)
    num_tries = 0
    while True:
        cadence = _next(session, wanted, comm=comm, onlooker=onlooker)
        if cadence.is_complete:
            if comm.rank == 0:
                write_report(session.series, plan.edition)
            return cadence
        phase = cadence.phases[0]
        if phase is SubmissionPhase.RUN:
            num_tries += 1
            _require_tries_left(num_tries, wanted.num_runs, session)
            onlooker.note(f"run {len(cadence.kept) + 1} of {wanted.num_runs}")
        else:
            onlooker.note(f"{phase.value}: {plan.request.workload.dataset.num_files_train:,} files")
        _add(session, plan, phase, storage, comm=comm, onlooker=onlooker)


def make_part(
    session: Session,
    plan: TrainingResultPlan,
    storage: Storage,
    *,
    phase: SubmissionPhase,
    comm: Comm,
    onlooker: Onlooker,
) -> RunSequence:
    """Add one leaf of this phase, if the result still lacks it; a run brings its data set's size with it."""
    wanted = _wanted(session, plan)
    if phase is SubmissionPhase.DATAGEN:  # made by any number of ranks, whatever the runs are of
        others = comm.broadcast(_num_accelerators(session, comm), awaiting="rank 0 to read the tree")
        wanted = replace(wanted, num_processes=others or wanted.num_processes)
    cadence = _next(session, wanted, comm=comm, onlooker=onlooker)
    if phase is SubmissionPhase.RUN and SubmissionPhase.DATASIZE in cadence.phases:
        _add(session, plan, SubmissionPhase.DATASIZE, storage, comm=comm, onlooker=onlooker)
    if phase in cadence.phases:
        onlooker.note(f"{phase.value}: {wanted.num_files:,} files")
        _add(session, plan, phase, storage, comm=comm, onlooker=onlooker)
        cadence = _next(session, wanted, comm=comm, onlooker=onlooker)
    else:
        onlooker.note(f"{phase.value}: is there already")
    if cadence.is_complete and comm.rank == 0:
        write_report(session.series, plan.edition)
    return cadence


def _num_accelerators(session: Session, comm: Comm) -> int | None:
    """What the leaves that are there are of; None where there are none. Rank 0 alone looks."""
    if comm.rank:
        return None
    standing = read_series_state(session.series)
    return next((leaf.num_processes for leaf in (*standing.datasizes, *standing.runs)), None)


def _wanted(session: Session, plan: TrainingResultPlan) -> RequestedResult:
    return RequestedResult(
        accelerator=plan.request.workload.accelerator,
        num_processes=plan.num_accelerators,
        place=session.place,
        num_files=plan.request.workload.dataset.num_files_train,
        num_runs=plan.edition.num_runs,
        max_pause_runs=plan.edition.require_timed().max_pause_runs,
    )


def _next(session: Session, wanted: RequestedResult, *, comm: Comm, onlooker: Onlooker) -> RunSequence:
    """What is to be done now, after what no longer counts was set aside; the same on all ranks."""
    cadence = None
    if comm.rank == 0:
        cadence = plan_run_sequence(read_series_state(session.series), wanted, now=session.clock())
        for surplus in cadence.surplus:
            target = set_aside(session.series.claim, surplus.run_dir.folder)
            onlooker.note(f"{surplus.run_dir.folder.name} was set aside: {surplus.why}. It is in {target}")
        if cadence.surplus:
            _write_manifest(session)
    found = comm.broadcast(cadence, awaiting="rank 0 to see what is left to do")
    assert found is not None
    return found


def _add(
    session: Session,
    plan: TrainingResultPlan,
    phase: SubmissionPhase,
    storage: Storage,
    *,
    comm: Comm,
    onlooker: Onlooker,
) -> None:
    workload = plan.request.workload
    if phase is SubmissionPhase.DATASIZE:
        add_datasize(session, workload, hosts=plan.hosts, num_accelerators=plan.num_accelerators, comm=comm)
    elif phase is SubmissionPhase.DATAGEN:
        recipe = DatasetRecipe(dataset=workload.dataset, seed=workload.train.seed, reduction=IRREDUCIBLE)
        data_set = DataSet(workload=workload, recipe=recipe, threads=plan.generates_with, hosts=plan.hosts)
        add_datagen(session, data_set, storage, comm=comm, progress=onlooker.progress)
    else:
        add_run(session, plan.request, storage, comm=comm, progress=onlooker.progress, tell=onlooker.tell)


def _write_manifest(session: Session) -> None:
    by = f"penstock {session.image.program.version}"
    write_manifest(session.series, by=by, now=session.clock())


def _require_tries_left(num_tries: int, num_runs: int, session: Session) -> None:
    if num_tries > TRIES_FOR_EACH_RUN * num_runs:
        raise StorageError(
            f"After {num_tries - 1} runs no {num_runs} follow one another: their durations differ too much",
            uri=str(session.series.folder),
            fix="See what else uses this storage: `penstock submission status` lists the runs.",
        )
