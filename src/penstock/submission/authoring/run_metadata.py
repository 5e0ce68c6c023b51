"""What a result directory states of itself: `*_metadata.json` and `provenance.json`.

Metadata say what was requested, on which machines, when, and how it ended; a value that is unknown is absent.
Provenance names the rules, the program and the core configuration; a value that cannot be determined is
"unknown", and none is absent. Pure, except for the versions of installed packages.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

from penstock.results import provenance, run_record
from penstock.submission.authoring.result_dir import ResultDirAddress
from penstock.submission.code_image import UNKNOWN, Program, pointer_text
from penstock.submission.tree_layout import (
    DATAGEN_MANIFEST,
    PROVENANCE,
    REHEARSAL,
    Benchmark,
    SubmissionPhase,
)
from penstock.workload.enums import StorageKind
from penstock.workload.layered_settings import dotted, flatten
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

    `workload` is as it ran, with its locations; `changed` what was set, by dotted key; `data_path` the path
    of the data or of the checkpoints, or their URI in an object store; `rehearsed_at` the scale of a
    rehearsal.
    """

    address: ResultDirAddress
    workload: Workload
    accelerator: str
    changed: Mapping[str, Any]
    data_path: str
    num_processes: int
    hosts: Sequence[provenance.HostFacts]
    command: Sequence[str]
    ended_at: datetime
    exit_status: int
    data_size: DatasetSize | None = None
    rehearsed_at: Fraction | None = None
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
        "parameters": run_record.workload_values(facts.workload),
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
        "executed_command": " ".join(provenance.redact(facts.command)),
        "runtime": (facts.ended_at - address.started_at).total_seconds(),
        "exit_status": facts.exit_status,
        "invocation_start_time": address.started_at.isoformat(),
        "invocation_end_time": facts.ended_at.isoformat(),
        "provenance_file": PROVENANCE,
    }
    if facts.rehearsed_at is not None:
        document[REHEARSAL] = {"scale": float(facts.rehearsed_at)}
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
        "results_dir": str(series.tree.root),
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
            "checkpoint_folder": facts.data_path,
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
    return args | {"data_dir": facts.data_path, counted[facts.address.phase]: facts.num_processes}


SCHEMA: Final = "mlps-run-provenance/1"
RULES_EDITION: Final = "3.0"
LAYOUT_VERSION: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParameterKeys:
    """The keys that define a workload; an entry that ends in `*` stands for all keys with this prefix."""

    name: str
    included: tuple[str, ...]
    excluded: tuple[str, ...]

    def of(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that define the workload, by dotted key."""
        flat = {dotted(path): value for path, value in flatten(parameters)}
        return {key: value for key, value in sorted(flat.items()) if self._has(key)}

    def _has(self, key: str) -> bool:
        if _is_one_of(key, self.excluded):
            return False
        return _is_one_of(key, self.included)


def _is_one_of(key: str, entries: tuple[str, ...]) -> bool:
    return any(key.startswith(entry[:-1]) if entry.endswith("*") else key == entry for entry in entries)


CORE_KEYS: Final[Mapping[Benchmark, CoreParameterKeys]] = MappingProxyType(
    {
        Benchmark.TRAINING: CoreParameterKeys(
            name="training@1",
            included=(
                "framework", "metric.au", "model.*", "workflow.*", "dataset.format",
                "dataset.num_samples_per_file", "dataset.record_length*", "reader.data_loader",
                "reader.batch_size", "reader.file_shuffle", "reader.sample_shuffle", "reader.shuffle_size",
                "train.epochs", "train.computation_time*", "train.total_training_steps", "checkpoint.*",
            ),
            excluded=("checkpoint.checkpoint_folder",),
        ),
        Benchmark.CHECKPOINTING: CoreParameterKeys(
            name="checkpointing@1",
            included=("framework", "model.*", "workflow.*", "checkpoint.*"),
            excluded=("checkpoint.checkpoint_folder", "checkpoint.num_checkpoints_*"),
        ),
    }
)  # fmt: skip


def core_config_digest(values: Mapping[str, Any]) -> str:
    """16 digits of the SHA-256 of the values as JSON; 7, 7.0 and "7" are the same."""
    plain = {key: _plain(value) for key, value in values.items()}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_provenance(
    workload: Workload, benchmark: Benchmark, *, program: Program, digest: str, now: datetime
) -> dict[str, Any]:
    """The content of the file."""
    keys = CORE_KEYS[benchmark]
    values = keys.of(run_record.workload_values(workload))
    library = _storage_library(workload)
    return {
        "schema": SCHEMA,
        "rules_edition": RULES_EDITION,
        "layout_version": LAYOUT_VERSION,
        "tool": {
            "name": "penstock",
            "version": program.version,
            "git_sha": program.commit,
            "code_image": pointer_text(digest).strip(),
        },
        "dlio": {"version": UNKNOWN, "source": UNKNOWN, "commit": UNKNOWN},
        "storage_library": library,
        "core_config": {
            "algorithm": "core-config-v1",
            "allowlist": keys.name,
            "hash": core_config_digest(values),
            "keys": list(values),
        },
        "stamped_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "stamped_by": f"penstock {program.version}",
        "provenance": {
            "rules_edition": "tool-constant",
            "layout_version": "tool-constant",
            "tool": "runtime",
            "dlio": "n/a",
            "storage_library": "n/a" if library["name"] == "none" else "package-metadata",
            "core_config": "runtime",
        },
        "notes": "made by Penstock, which takes DLIO's workloads without running DLIO",
    }


def _storage_library(workload: Workload) -> dict[str, str]:
    if workload.storage.storage_type is not StorageKind.S3:
        return {"name": "none"}
    name = workload.storage.storage_library.value if workload.storage.storage_library else "obstore"
    return {"name": name, "version": provenance.package_versions((name,)).get(name, UNKNOWN)}


def _plain(value: Any) -> Any:
    """One spelling for each number, whether it was written as text or not."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _plain_text(text: str) -> Any:
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        number = float(word)
    except ValueError:
        return word
    return int(number) if number.is_integer() else number
