"""Result directories of training: the data set's size, its generation, and runs.

Collective. Each begins as a draft below `.mlps/under-way`; a run that fails leaves its draft there for
inspection, and nothing in the tree.
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
from penstock.results.dlio.output_files import log_line, write_log
from penstock.results.published_files import write_json
from penstock.results.run_record import read_record
from penstock.storage.protocol import read_object, write_object
from penstock.submission.authoring.run_metadata import DatasetSize
from penstock.submission.authoring.write_result_dir import write_metadata_dir
from penstock.submission.tree_layout import DATAGEN_MANIFEST, SubmissionPhase
from penstock.units import format_bytes, format_seconds
from penstock.workflows.submission.result_draft import RunLogs, share_folder

if TYPE_CHECKING:
    from penstock.bench.training.training_request import TrainingRequest
    from penstock.bench.training.training_result import TrainingResult
    from penstock.cluster.comm import Comm
    from penstock.dataset.dataset_manifest import DatasetRecipe
    from penstock.progress import Progress
    from penstock.results.host_facts import HostFacts
    from penstock.storage import Storage
    from penstock.submission.authoring.result_dir import ResultDirAddress
    from penstock.workflows.submission.result_draft import ResultWriter
    from penstock.workload.spec import Workload

MANIFEST_KEY: Final = ".mlps-datagen-manifest.json"
FormatLogs = Callable[["TrainingResult"], RunLogs]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSetPlan:
    """A data set to generate: its workload and recipe, threads per rank, and the hosts that do it."""

    workload: Workload
    recipe: DatasetRecipe
    threads: int
    hosts: Sequence[HostFacts]


def add_datasize(
    writer: ResultWriter,
    workload: Workload,
    *,
    hosts: Sequence[HostFacts],
    num_accelerators: int,
    comm: Comm,
) -> Path:
    """Record how large the data set is to be; `workload` has the number of files."""
    address = writer.reserve(SubmissionPhase.DATASIZE, comm)
    folder = None
    if comm.rank == 0:
        facts = writer.describe_run(
            address,
            workload,
            accelerator=workload.accelerator,
            num_processes=num_accelerators,
            hosts=hosts,
            data_size=_dataset_size(workload),
        )
        folder = write_metadata_dir(facts, image=writer.image, now=writer.clock())
    return share_folder(folder, comm)


def add_datagen(
    writer: ResultWriter, data_set: DataSetPlan, storage: Storage, *, comm: Comm, progress: Progress
) -> Path:
    """Generate the data set, or find it complete; publish that with the manifest, also beside the data."""
    address = writer.reserve(SubmissionPhase.DATAGEN, comm)
    stages = replace(data_set.workload.workflow, generate_data=True, train=False)
    workload = replace(data_set.workload, workflow=stages)
    started_at = writer.clock()
    generated = generate(data_set.recipe, storage, comm=comm, threads=data_set.threads, progress=progress)
    folder = None
    if comm.rank == 0:
        summary = (
            f"{generated.num_files:,} files: {generated.written_files:,} written "
            f"({format_bytes(generated.written_bytes)} in {format_seconds(generated.elapsed_s)}), "
            f"{generated.kept_files:,} were there"
        )
        lines = [log_line(started_at, "Starting data generation"), log_line(writer.clock(), summary)]
        write_log(address.draft, workload, lines)
        manifest = _datagen_manifest(workload, address, writer)
        write_object(storage, MANIFEST_KEY, [json.dumps(manifest, indent=2).encode()])
        write_json(address.draft, DATAGEN_MANIFEST, manifest)
        facts = writer.describe_run(
            address,
            workload,
            accelerator=workload.accelerator,
            num_processes=comm.size,
            hosts=data_set.hosts,
            data_size=_dataset_size(workload),
            has_datagen_manifest=True,
        )
        folder = writer.publish(facts, RunLogs(stdout="\n".join(lines) + "\n"))
    return share_folder(folder, comm)


def add_run(
    writer: ResultWriter,
    request: TrainingRequest,
    storage: Storage,
    *,
    comm: Comm,
    progress: Progress,
    format_logs: FormatLogs,
) -> TrainingResult:
    """Train once, and publish the run as a result directory."""
    address = writer.reserve(SubmissionPhase.RUN, comm)
    separation = writer.probe_separation(storage.uri, comm)
    drafted = replace(request, run_folder=address.draft, results=writer.series.claim.root, hydra_subfolder="")
    result = train(drafted, storage, comm=comm, progress=progress)
    folder = None
    if comm.rank == 0:
        manifest = _read_datagen_manifest(storage)
        if manifest is not None:
            write_json(address.draft, DATAGEN_MANIFEST, manifest)
        facts = writer.describe_run(
            address,
            request.workload,
            accelerator=request.workload.accelerator,
            num_processes=comm.size,
            hosts=read_record(address.draft).hosts,
            has_datagen_manifest=manifest is not None,
        )
        logs = format_logs(replace(result, results_dir=str(address.folder)))
        folder = writer.publish(facts, logs, separation)
    return replace(result, results_dir=str(share_folder(folder, comm)))


def _dataset_size(workload: Workload) -> DatasetSize:
    dataset = workload.dataset
    return DatasetSize(
        num_files_train=dataset.num_files_train,
        num_subfolders_train=dataset.num_subfolders_train,
        total_disk_bytes=expected_bytes(dataset),
    )


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
        "mlpstorage_version": f"penstock {writer.image.program.version}",
        "source_datagen_result_dir": str(address.folder),
    }


def _read_datagen_manifest(storage: Storage) -> dict[str, Any] | None:
    """Read the manifest beside the data; None if other means than these generated it."""
    try:
        manifest: dict[str, Any] = json.loads(bytes(read_object(storage, MANIFEST_KEY)))
    except ObjectNotFound:
        return None
    return manifest
