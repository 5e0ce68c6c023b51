"""Leaves of training: the data set's size, its generation, and runs.

Place in the flow: session -> the benchmark itself, with the draft as its folder -> leaf. Collective.
Invariant: a run that fails leaves its draft below `.mlps/under-way`, and nothing in the tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.bench.training.training_run import train
from penstock.dataset.generate import expected_bytes, generate
from penstock.errors import ObjectNotFound
from penstock.results.dlio.folder import log_line, write_log
from penstock.results.durable import write_json
from penstock.results.record import read_record
from penstock.storage.object_io import read_object, write_object
from penstock.submission.authoring.run_metadata import DatasetSize, RunFacts
from penstock.submission.authoring.write_result_dir import (
    probe_fs_separation,
    write_metadata_dir,
    write_result_dir,
)
from penstock.submission.tree_layout import DATAGEN_MANIFEST, SubmissionPhase
from penstock.units import format_bytes, format_seconds
from penstock.workflows.submission.session import Said

if TYPE_CHECKING:
    from penstock.bench.training.training_request import TrainingRequest
    from penstock.bench.training.training_result import TrainingResult
    from penstock.cluster.comm import Comm
    from penstock.dataset.dataset_manifest import DatasetRecipe
    from penstock.progress import Progress
    from penstock.results.host import HostFacts
    from penstock.storage import Storage
    from penstock.submission.authoring.result_dir import ResultDirAddress
    from penstock.workflows.submission.session import Session
    from penstock.workload.spec import Workload

MANIFEST_KEY: Final = ".mlps-datagen-manifest.json"
Tell = Callable[["TrainingResult"], Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set to make, and who makes it."""

    workload: Workload
    recipe: DatasetRecipe
    threads: int
    hosts: Sequence[HostFacts]


def add_datasize(
    session: Session, workload: Workload, *, hosts: Sequence[HostFacts], num_accelerators: int, comm: Comm
) -> Path:
    """The leaf that says how large the data set is to be: `workload` has the number of files."""
    address = session.reserve(SubmissionPhase.DATASIZE, comm)
    folder = None
    if comm.rank == 0:
        facts = RunFacts(
            address=address,
            workload=workload,
            accelerator=workload.accelerator,
            changed=session.changed,
            place=session.place,
            num_processes=num_accelerators,
            hosts=hosts,
            command=session.command,
            ended=session.clock(),
            exit_status=0,
            data_size=_size_of(workload),
        )
        folder = write_metadata_dir(facts, image=session.image, now=session.clock())
    return _broadcast(folder, comm)


def add_datagen(
    session: Session, data_set: DataSet, storage: Storage, *, comm: Comm, progress: Progress
) -> Path:
    """Make the data set, or find it whole, and leave the leaf of it and the manifest beside the data."""
    address = session.reserve(SubmissionPhase.DATAGEN, comm)
    stages = replace(data_set.workload.workflow, generate_data=True, train=False)
    workload = replace(data_set.workload, workflow=stages)
    began = session.clock()
    made = generate(data_set.recipe, storage, comm=comm, threads=data_set.threads, progress=progress)
    folder = None
    if comm.rank == 0:
        told = (
            f"{made.num_files:,} files: {made.written_files:,} written ({format_bytes(made.written_bytes)} "
            f"in {format_seconds(made.elapsed_s)}), {made.kept_files:,} were there"
        )
        lines = [log_line(began, "Starting data generation"), log_line(session.clock(), told)]
        write_log(address.draft, workload, lines)
        manifest = _manifest(workload, address, session)
        write_object(storage, MANIFEST_KEY, [json.dumps(manifest, indent=2).encode()])
        write_json(address.draft, DATAGEN_MANIFEST, manifest)
        facts = RunFacts(
            address=address,
            workload=workload,
            accelerator=workload.accelerator,
            changed=session.changed,
            place=session.place,
            num_processes=comm.size,
            hosts=data_set.hosts,
            command=session.command,
            ended=session.clock(),
            exit_status=0,
            data_size=_size_of(workload),
            has_datagen_manifest=True,
        )
        folder = write_result_dir(
            facts,
            image=session.image,
            stdout="\n".join(lines) + "\n",
            stderr="",
            separation=None,
            now=session.clock(),
        )
    return _broadcast(folder, comm)


def add_run(
    session: Session,
    request: TrainingRequest,
    storage: Storage,
    *,
    comm: Comm,
    progress: Progress,
    tell: Tell,
) -> TrainingResult:
    """One run, whose folder is its leaf when this returns."""
    address = session.reserve(SubmissionPhase.RUN, comm)
    separation = None
    if comm.rank == 0:
        root = session.series.claim.root
        separation = probe_fs_separation(storage.uri, root, host=comm.host, now=session.clock())
    tree = session.series.claim.root
    of_leaf = replace(request, run_folder=address.draft, results=tree, hydra_subfolder="")
    result = train(of_leaf, storage, comm=comm, progress=progress)
    folder = None
    if comm.rank == 0:
        manifest = _manifest_at(storage)
        if manifest is not None:
            write_json(address.draft, DATAGEN_MANIFEST, manifest)
        said = tell(replace(result, results_dir=str(address.folder)))
        facts = RunFacts(
            address=address,
            workload=request.workload,
            accelerator=request.workload.accelerator,
            changed=session.changed,
            place=session.place,
            num_processes=comm.size,
            hosts=read_record(address.draft).hosts,
            command=session.command,
            ended=session.clock(),
            exit_status=0,
            has_datagen_manifest=manifest is not None,
        )
        folder = write_result_dir(
            facts,
            image=session.image,
            stdout=said.stdout,
            stderr=said.stderr,
            separation=separation,
            now=session.clock(),
        )
    return replace(result, results_dir=str(_broadcast(folder, comm)))


def _size_of(workload: Workload) -> DatasetSize:
    dataset = workload.dataset
    return DatasetSize(
        num_files_train=dataset.num_files_train,
        num_subfolders_train=dataset.num_subfolders_train,
        total_disk_bytes=expected_bytes(dataset),
    )


def _manifest(workload: Workload, address: ResultDirAddress, session: Session) -> dict[str, Any]:
    dataset = workload.dataset
    return {
        "schema_version": 1,
        "model": address.series.model,
        "num_files_train": dataset.num_files_train,
        "num_subfolders_train": dataset.num_subfolders_train,
        "num_samples_per_file": dataset.num_samples_per_file,
        "record_length_bytes": float(dataset.record_length_bytes),
        "created_at": f"{session.clock():%Y-%m-%dT%H:%M:%SZ}",
        "mlpstorage_version": f"penstock {session.image.program.version}",
        "source_datagen_result_dir": str(address.folder),
    }


def _manifest_at(storage: Storage) -> dict[str, Any] | None:
    """What the generation left beside the data; None where it was made otherwise."""
    try:
        found: dict[str, Any] = json.loads(bytes(read_object(storage, MANIFEST_KEY)))
    except ObjectNotFound:
        return None
    return found


def _broadcast(folder: Path | None, comm: Comm) -> Path:
    found = comm.broadcast(folder, awaiting="rank 0 to publish the leaf")
    assert found is not None
    return found
