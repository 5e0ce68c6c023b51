"""`*_metadata.json` of a result directory: what was requested, on which machines, when, and how it ended.

Pure: facts in, plain data out. Invariant: every key has its value; what is unknown is absent, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from penstock.results.provenance import redacted
from penstock.results.spec import spec_values
from penstock.submission.tree_layout import DATAGEN_MANIFEST, PROVENANCE, Benchmark, SubmissionPhase

if TYPE_CHECKING:
    from penstock.results.host import HostFacts
    from penstock.submission.authoring.result_dir import ResultDirAddress
    from penstock.workload.spec import Workload

_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSize:
    """The size that a data set has, or must have."""

    num_files_train: int
    num_subfolders_train: int
    total_disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything that a result directory states.

    `workload` is as it ran, with its locations; `changed` what was set, by dotted key; `place` the path of
    the data or of the checkpoints, or their URI in an object store.
    """

    address: ResultDirAddress
    workload: Workload
    accelerator: str
    changed: Mapping[str, Any]
    place: str
    num_processes: int
    hosts: Sequence[HostFacts]
    command: Sequence[str]
    ended: datetime
    exit_status: int
    data_size: DatasetSize | None = None
    has_datagen_manifest: bool = False


def build_metadata(facts: RunFacts) -> dict[str, Any]:
    """The content of the metadata file."""
    address, series = facts.address, facts.address.series
    document: dict[str, Any] = {
        "benchmark_type": series.benchmark.value,
        "model": series.model,
        "command": address.phase.value,
        "run_datetime": address.stamp,
        "num_processes": facts.num_processes,
        "accelerator": facts.accelerator,
        "result_dir": str(address.folder),
        "verification": series.division.value.upper(),
        "parameters": spec_values(facts.workload),
        "override_parameters": {key: str(value) for key, value in facts.changed.items()},
        "args": _args(facts),
        "system_info": {
            "total_memory_bytes": sum(host.memory_bytes for host in facts.hosts),
            "total_cores": sum(host.num_cores for host in facts.hosts),
        },
        "cluster_information": {
            "num_hosts": len(facts.hosts),
            "total_memory_bytes": sum(host.memory_bytes for host in facts.hosts),
            "hosts": [
                {"hostname": host.host, "memory_bytes": host.memory_bytes, "cpu_cores": host.num_cores}
                for host in facts.hosts
            ],
        },
        "executed_command": " ".join(redacted(facts.command)),
        "runtime": (facts.ended - address.began).total_seconds(),
        "exit_status": facts.exit_status,
        "invocation_start_time": address.began.isoformat(),
        "invocation_end_time": facts.ended.isoformat(),
        "provenance_file": PROVENANCE,
    }
    if facts.data_size is not None:
        size = facts.data_size
        document["dataset"] = {
            "num_files_train": size.num_files_train,
            "num_subfolders_train": size.num_subfolders_train,
            "total_disk_bytes": size.total_disk_bytes,
        }
    if facts.has_datagen_manifest:
        document["datagen_manifest_file"] = DATAGEN_MANIFEST
    return document


def _args(facts: RunFacts) -> dict[str, Any]:
    """The arguments that the benchmark's own tool would have had."""
    series = facts.address.series
    args: dict[str, Any] = {
        "mode": series.division.value,
        "benchmark": series.benchmark.value,
        "command": facts.address.phase.value,
        "model": series.model,
        "systemname": series.system,
        "results_dir": str(series.claim.root),
        "hosts": [host.host for host in facts.hosts],
        "num_client_hosts": len(facts.hosts),
        "client_host_memory_in_gb": min(host.memory_bytes for host in facts.hosts) / _GIB,
        "exec_type": "mpi",
    }
    if facts.accelerator:
        args["accelerator_type"] = facts.accelerator
    if series.benchmark is Benchmark.CHECKPOINTING:
        checkpoint = facts.workload.checkpoint
        return args | {
            "checkpoint_folder": facts.place,
            "num_processes": facts.num_processes,
            "num_checkpoints_write": checkpoint.num_checkpoints_write,
            "num_checkpoints_read": checkpoint.num_checkpoints_read,
            "checkpoint_subset": checkpoint.mode.value == "subset",
        }
    counted = {
        SubmissionPhase.DATASIZE: "max_accelerators",
        SubmissionPhase.DATAGEN: "num_processes",
        SubmissionPhase.RUN: "num_accelerators",
    }
    return args | {"data_dir": facts.place, counted[facts.address.phase]: facts.num_processes}
