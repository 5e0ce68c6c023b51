"""A training result: the data set's size, its generation, and all runs, as result directories of a tree.

    read the tree -> plan what is missing -> add the next result directory -> read the tree again

Collective. The plan is made from the tree before each run, so an interrupted sequence continues where it was,
as long as the rules allow it. Each directory begins as a draft below `.mlps/under-way`; a run that fails
leaves its draft there for inspection, and nothing in the tree.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.bench.training.training_result import TrainingResult
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import Comm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import expected_bytes, generate
from penstock.errors import ObjectNotFound, StorageError
from penstock.progress import Progress
from penstock.results.dlio_files import log_line, write_log
from penstock.results.provenance import HostFacts
from penstock.results.published_files import write_json
from penstock.storage import Storage
from penstock.storage.protocol import read_object, write_object
from penstock.submission.authoring import run_sequence, write_result_dir
from penstock.submission.authoring.result_dir import ResultDirAddress, set_aside
from penstock.submission.authoring.run_sequence import RequestedResult, RunSequence
from penstock.submission.edition import Edition
from penstock.submission.tree_layout import DATAGEN_MANIFEST, SubmissionPhase
from penstock.units import format_bytes, format_seconds
from penstock.workflows.submission.result_draft import ResultWriter, RunObserver, share_folder
from penstock.workload.spec import Workload

MANIFEST_KEY: Final = ".mlps-datagen-manifest.json"
TRIES_PER_RUN: Final = 2
"""Durations may differ so much that no run may follow another; do not repeat them forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResultPlan:
    """The result to make: one run's request, repeated as often as the edition requires, on these hosts.

    With `stops_below_minimum`, a run whose AU is below the workload's minimum ends the sequence.
    """

    request: TrainingRequest
    edition: Edition
    num_accelerators: int
    hosts: Sequence[HostFacts]
    generator_threads: int = 4
    stops_below_minimum: bool = True

    @property
    def workload(self) -> Workload:
        """The workload of all its runs."""
        return self.request.workload


def make_training(
    writer: ResultWriter,
    plan: TrainingResultPlan,
    storage: Storage,
    *,
    comm: Comm,
    observer: RunObserver[TrainingResult],
) -> RunSequence:
    """Add result directories until the result is complete; returns the final sequence."""
    requested = _requested_result(writer, plan)
    num_tries = 0
    while True:
        sequence = _plan_next(writer, requested, comm=comm, observer=observer)
        if sequence.is_complete:
            if comm.rank == 0:
                writer.complete(plan.edition)
            return sequence
        if sequence.phases[0] is SubmissionPhase.RUN:
            num_tries += 1
            _require_tries_left(num_tries, requested.num_runs, writer)
        _add(writer, plan, sequence, sequence.phases[0], storage, comm=comm, observer=observer)


def make_part(
    writer: ResultWriter,
    plan: TrainingResultPlan,
    storage: Storage,
    *,
    phase: SubmissionPhase,
    comm: Comm,
    observer: RunObserver[TrainingResult],
) -> RunSequence:
    """Add one result directory of this phase if the result still lacks it; a run adds the data size first."""
    requested = _requested_result(writer, plan)
    if phase is SubmissionPhase.DATAGEN:  # any number of ranks may generate, whatever the runs use
        num_used = comm.broadcast(_num_accelerators(writer, comm), awaiting="rank 0 to read the tree")
        requested = replace(requested, num_processes=num_used or requested.num_processes)
    sequence = _plan_next(writer, requested, comm=comm, observer=observer)
    if phase is SubmissionPhase.RUN and SubmissionPhase.DATASIZE in sequence.phases:
        _add(writer, plan, sequence, SubmissionPhase.DATASIZE, storage, comm=comm, observer=observer)
    if phase in sequence.phases:
        _add(writer, plan, sequence, phase, storage, comm=comm, observer=observer)
        sequence = _plan_next(writer, requested, comm=comm, observer=observer)
    else:
        observer.note(f"{phase.value}: exists already")
    if sequence.is_complete and comm.rank == 0:
        writer.complete(plan.edition)
    return sequence


def _num_accelerators(writer: ResultWriter, comm: Comm) -> int | None:
    """Read from the tree how many accelerators its runs use; None without runs, and on ranks but 0."""
    if comm.rank:
        return None
    state = run_sequence.read_series_state(writer.series)
    return next((result_dir.num_processes for result_dir in (*state.datasizes, *state.runs)), None)


def _requested_result(writer: ResultWriter, plan: TrainingResultPlan) -> RequestedResult:
    return RequestedResult(
        accelerator=plan.workload.accelerator,
        num_processes=plan.num_accelerators,
        data_path=writer.data_path,
        num_files=plan.workload.dataset.num_files_train,
        num_runs=plan.edition.num_runs,
        max_pause_runs=plan.edition.timed.max_pause_runs,
    )


def _plan_next(
    writer: ResultWriter, requested: RequestedResult, *, comm: Comm, observer: RunObserver[TrainingResult]
) -> RunSequence:
    """Plan what is to be done now, and set aside what no longer counts; the same on all ranks."""
    sequence = None
    if comm.rank == 0:
        state, now = run_sequence.read_series_state(writer.series), writer.clock()
        sequence = run_sequence.plan_run_sequence(state, requested, now=now)
        for run, reason in sequence.excluded:
            target = set_aside(writer.series.tree, run.folder)
            observer.note(f"{run.folder.name} was set aside: {reason}. It is in {target}")
        if sequence.excluded:
            by = f"penstock {writer.program.version}"
            write_result_dir.write_manifest(writer.series, by=by, now=writer.clock())
    planned = comm.broadcast(sequence, awaiting="rank 0 to plan what is left to do")
    assert planned is not None
    return planned


def _add(
    writer: ResultWriter,
    plan: TrainingResultPlan,
    sequence: RunSequence,
    phase: SubmissionPhase,
    storage: Storage,
    *,
    comm: Comm,
    observer: RunObserver[TrainingResult],
) -> None:
    if phase is not SubmissionPhase.RUN:
        dataset = plan.workload.dataset
        size = format_bytes(expected_bytes(dataset))
        observer.note(f"{phase.value}: {dataset.num_files_train:,} files, {size}")
    if phase is SubmissionPhase.DATASIZE:
        add_datasize(
            writer, plan.workload, hosts=plan.hosts, num_accelerators=plan.num_accelerators, comm=comm
        )
    elif phase is SubmissionPhase.DATAGEN:
        add_datagen(writer, plan, storage, comm=comm, progress=observer.progress)
    else:
        _add_run_of(writer, plan, sequence, storage, comm=comm, observer=observer)


def _add_run_of(
    writer: ResultWriter,
    plan: TrainingResultPlan,
    sequence: RunSequence,
    storage: Storage,
    *,
    comm: Comm,
    observer: RunObserver[TrainingResult],
) -> None:
    """The next run of the sequence, and what it came to; one that cannot count is not published."""
    num_done, num_runs = len(sequence.counted), plan.edition.num_runs
    name = f"run {num_done + 1} of {num_runs}"
    is_warm_up = num_done < plan.edition.num_warm_ups
    observer.note(f"{name}, the warm-up" if is_warm_up else name)
    began_at = writer.clock()

    def require_utilization(result: TrainingResult, draft: Path) -> None:
        # The warm-up counts in no mean, and may be slow.
        if plan.stops_below_minimum and not is_warm_up and not result.train.meets_threshold:
            raise StorageError(
                f"{name} does not count, and no other was started: {_describe_utilization(result, plan)}",
                uri=str(draft),
                fix=f"See what limits it with `penstock results show {draft}`. Fewer accelerators need less.",
            )

    result = add_run(writer, plan.request, storage, comm=comm, observer=observer, require=require_utilization)
    elapsed_s = (writer.clock() - began_at).total_seconds()
    num_left = num_runs - num_done - 1
    left = f", about {format_seconds(num_left * elapsed_s)} left" if num_left else ""
    observer.note(f"{name}: {_describe_utilization(result, plan)}, {format_seconds(elapsed_s)}{left}")


def _describe_utilization(result: TrainingResult, plan: TrainingResultPlan) -> str:
    au, minimum = result.train.au_compat_percent.mean, plan.workload.metric.au * 100
    is_enough = result.train.meets_threshold
    return f"AU {au:.2f} % {'>=' if is_enough else '<'} {minimum:g} %, {plan.workload.name}'s minimum"


def _require_tries_left(num_tries: int, num_runs: int, writer: ResultWriter) -> None:
    if num_tries > TRIES_PER_RUN * num_runs:
        raise StorageError(
            f"After {num_tries - 1} runs no {num_runs} follow one another: their durations differ too much",
            uri=str(writer.series.folder),
            fix="See what else uses this storage: `penstock submission status` lists the runs.",
        )


def add_datasize(
    writer: ResultWriter, workload: Workload, *, hosts: Sequence[HostFacts], num_accelerators: int, comm: Comm
) -> Path:
    """Record how large the data set is to be; `workload` has the number of files."""
    with writer.attempt(SubmissionPhase.DATASIZE, comm) as address:
        folder = None
        if comm.rank == 0:
            size = _dataset_size(workload)
            folder = writer.publish(
                address, workload, num_processes=num_accelerators, hosts=hosts, data_size=size
            )
        return share_folder(folder, comm)


def dataset_recipe(workload: Workload) -> DatasetRecipe:
    """The recipe of the bytes of a submitted data set."""
    return DatasetRecipe(dataset=workload.dataset, seed=workload.train.seed, reduction=IRREDUCIBLE)


def add_datagen(
    writer: ResultWriter, plan: TrainingResultPlan, storage: Storage, *, comm: Comm, progress: Progress
) -> Path:
    """Generate the data set, or find it complete; publish that with the manifest."""
    with writer.attempt(SubmissionPhase.DATAGEN, comm) as address:
        stages = replace(plan.workload.workflow, generate_data=True, train=False)
        workload = replace(plan.workload, workflow=stages)
        recipe = dataset_recipe(workload)
        started_at = writer.clock()
        generated = generate(recipe, storage, comm=comm, threads=plan.generator_threads, progress=progress)
        folder = None
        if comm.rank == 0:
            summary = (
                f"{generated.num_files:,} files: {generated.written_files:,} written "
                f"({format_bytes(generated.written_bytes)} in {format_seconds(generated.elapsed_s)}), "
                f"{generated.kept_files:,} existed"
            )
            lines = [log_line(started_at, "Starting data generation"), log_line(writer.clock(), summary)]
            write_log(address.draft, workload, lines)
            manifest = _datagen_manifest(workload, address, writer)
            write_object(storage, MANIFEST_KEY, [json.dumps(manifest, indent=2).encode()])
            write_json(address.draft, DATAGEN_MANIFEST, manifest)
            folder = writer.publish(
                address,
                workload,
                num_processes=comm.size,
                hosts=plan.hosts,
                logs=("\n".join(lines) + "\n", ""),
                data_size=_dataset_size(workload),
            )
        return share_folder(folder, comm)


def add_run(
    writer: ResultWriter,
    request: TrainingRequest,
    storage: Storage,
    *,
    comm: Comm,
    observer: RunObserver[TrainingResult],
    require: Callable[[TrainingResult, Path], None] | None = None,
) -> TrainingResult:
    """Train once, and publish the run as a result directory, unless `require` raises."""
    with writer.attempt(SubmissionPhase.RUN, comm) as address:
        separation = writer.probe_separation(storage.uri, comm)
        result = train(writer.redirect(request, address), storage, comm=comm, progress=observer.progress)
        if require is not None:
            require(result, address.draft)
        if comm.rank == 0 and (manifest := _read_datagen_manifest(storage)) is not None:
            write_json(address.draft, DATAGEN_MANIFEST, manifest)
        return writer.publish_run(
            address, request.workload, result, observer.format_logs, comm=comm, separation=separation
        )


def _dataset_size(workload: Workload) -> dict[str, int]:
    dataset = workload.dataset
    return {
        "num_files_train": dataset.num_files_train,
        "num_subfolders_train": dataset.num_subfolders_train,
        "total_disk_bytes": expected_bytes(dataset),
    }


def _datagen_manifest(workload: Workload, address: ResultDirAddress, writer: ResultWriter) -> dict[str, Any]:
    dataset = workload.dataset
    return {
        "schema_version": 1,
        "model": address.series.model,
        "num_files_train": dataset.num_files_train,
        "num_subfolders_train": dataset.num_subfolders_train,
        "num_samples_per_file": dataset.num_samples_per_file,
        "record_length_bytes": float(dataset.record_length_bytes),
        "created_at": f"{writer.clock():%Y-%m-%dT%H:%M:%SZ}",
        "mlpstorage_version": f"penstock {writer.program.version}",
        "source_datagen_result_dir": str(address.folder),
    }


def _read_datagen_manifest(storage: Storage) -> dict[str, Any] | None:
    """Read the manifest next to the data; None if the data set was generated by other means."""
    try:
        manifest: dict[str, Any] = json.loads(bytes(read_object(storage, MANIFEST_KEY)))
    except ObjectNotFound:
        return None
    return manifest
