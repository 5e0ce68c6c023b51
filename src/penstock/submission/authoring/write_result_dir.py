"""Finish a result directory: add the files that checkers require besides the figures, and publish it.

A run has left its figures in the draft. This module adds configuration, logs, provenance and metadata, gives
the directory its name, and lists it in `submission.yaml`. Metadata contain the request, the machines, the
time, and how the run ended; unknown values are left out. Provenance names the rules, the program and the core
configuration; unknown values are written as "unknown". Invariants: metadata are written last; the manifest
lists exactly the directories that exist.
"""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.errors import StorageError
from penstock.results import provenance
from penstock.results.dlio_files import write_configuration
from penstock.results.published_files import write_json, write_text
from penstock.storage.uri import find_local_paths_at
from penstock.submission.authoring.owned_tree import ResultDirAddress, RunSeries, publish
from penstock.submission.code_image import POINTER, UNKNOWN, Program, pointer_text
from penstock.submission.edition import Edition
from penstock.submission.find_results import Submitter, find_result_dirs
from penstock.submission.parsed_file import ParsedFile, read_file
from penstock.submission.result_report import plan_tree, report_all, write_files
from penstock.submission.tree_layout import (
    CONFIG_FOLDER,
    DATAGEN_MANIFEST,
    MANIFEST,
    METADATA_SUFFIX,
    PROVENANCE,
    REHEARSAL,
    SEPARATION,
    Benchmark,
    SubmissionPhase,
    log_names,
)
from penstock.workload.enums import StorageKind
from penstock.workload.settings import dotted, flatten
from penstock.workload.spec import Workload, write_workload

RULES_EDITION: Final = "3.0"
LAYOUT_VERSION: Final = 3
_GIB: Final = 2**30
_RANKS_KEY: Final = {
    SubmissionPhase.DATASIZE: "max_accelerators",
    SubmissionPhase.DATAGEN: "num_processes",
    SubmissionPhase.RUN: "num_accelerators",
}
_CORE_KEYS: Final[Mapping[Benchmark, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    Benchmark.TRAINING: (
        "training@1",
        (
            "framework", "metric.au", "model.*", "workflow.*", "dataset.format",
            "dataset.num_samples_per_file", "dataset.record_length*", "reader.data_loader",
            "reader.batch_size", "reader.file_shuffle", "reader.sample_shuffle", "reader.shuffle_size",
            "train.epochs", "train.computation_time*", "train.total_training_steps", "checkpoint.*",
        ),
        ("checkpoint.checkpoint_folder",),
    ),
    Benchmark.CHECKPOINTING: (
        "checkpointing@1",
        ("framework", "model.*", "workflow.*", "checkpoint.*"),
        ("checkpoint.checkpoint_folder", "checkpoint.num_checkpoints_*"),
    ),
}  # fmt: skip
"""The keys that define a workload: the name of their list, the keys, and exceptions; `a.*` means all keys
below a.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything that a result directory states.

    `workload` is the workload as it ran, with its locations. `changed` has the dotted names of the keys that
    were set. `data_path` is the path of the data or checkpoints, or their URI in an object store. `data_size`
    is the size that a data set has, or must have. `rehearsed_at` is the scale of a rehearsal.
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
    exit_status: int = 0
    data_size: Mapping[str, int] | None = None
    rehearsed_at: Fraction | None = None


def write_result_dir(
    facts: RunFacts,
    *,
    program: Program,
    now: datetime,
    logs: tuple[str, str] | None = None,
    separation: dict[str, Any] | None = None,
) -> Path:
    """Add to a run's draft the files that the run itself does not write, and publish it.

    `logs` are the run's standard output and error. Without logs, nothing ran, as when only the size of a data
    set is recorded: the directory then has only the pointer, provenance and metadata.
    """
    address, draft = facts.address, facts.address.draft
    benchmark = address.series.benchmark
    if logs is not None:
        _write_configuration(facts)
        for name, text in zip(log_names(benchmark, address.phase), logs, strict=True):
            write_text(draft, name, text)
    if separation is not None:
        write_json(draft, SEPARATION, separation)
    write_text(draft, POINTER, pointer_text(program.digest) + "\n")
    write_json(draft, PROVENANCE, build_provenance(facts.workload, benchmark, program=program, now=now))
    # Metadata come last, because metadata in a draft mean that its run has ended.
    write_json(draft, f"{benchmark.value}_{address.stamp}{METADATA_SUFFIX}", build_metadata(facts))
    folder = publish(address)
    write_manifest(address.series, by=f"penstock {program.version}", now=now)
    return folder


def _write_configuration(facts: RunFacts) -> None:
    stages = facts.workload.workflow
    own = {
        "workflow.generate_data": stages.generate_data,
        "workflow.train": stages.train,
        "workflow.checkpoint": stages.checkpoint,
    }
    overrides = [f"++workload.{key}={value}" for key, value in {**own, **facts.changed}.items()]
    write_configuration(
        facts.address.draft,
        facts.workload,
        provenance.redact(overrides),
        subfolder=CONFIG_FOLDER,
        run_folder=facts.address.folder,
    )


def build_metadata(facts: RunFacts) -> dict[str, Any]:
    address, series = facts.address, facts.address.series
    memory_bytes = sum(host.memory_bytes for host in facts.hosts)
    document: dict[str, Any] = {
        "benchmark_type": series.benchmark.value,
        "model": series.model,
        "command": address.phase.value,
        "run_datetime": address.stamp,
        "num_processes": facts.num_processes,
        "accelerator": facts.accelerator,
        "result_dir": str(address.folder),
        "verification": series.division.value.upper(),
        "parameters": write_workload(facts.workload, only_set=True),
        "override_parameters": {key: str(value) for key, value in facts.changed.items()},
        "args": _args(facts),
        "system_info": {
            "total_memory_bytes": memory_bytes,
            "total_cores": sum(host.num_cores for host in facts.hosts),
        },
        "cluster_information": {
            "num_hosts": len(facts.hosts),
            "total_memory_bytes": memory_bytes,
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
        document["dataset"] = dict(facts.data_size)
    if (address.draft / DATAGEN_MANIFEST).exists():
        document["datagen_manifest_file"] = DATAGEN_MANIFEST
    return document


def _args(facts: RunFacts) -> dict[str, Any]:
    """Return the arguments that the benchmark's own tool would have received."""
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
    return args | {"data_dir": facts.data_path, _RANKS_KEY[facts.address.phase]: facts.num_processes}


def core_parameters(benchmark: Benchmark, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that define a workload, by dotted key."""
    _, included, excluded = _CORE_KEYS[benchmark]
    flat = {dotted(path): value for path, value in flatten(parameters)}
    return {
        key: value
        for key, value in sorted(flat.items())
        if any(fnmatchcase(key, pattern) for pattern in included)
        and not any(fnmatchcase(key, pattern) for pattern in excluded)
    }


def core_config_digest(values: Mapping[str, Any]) -> str:
    """Return the first 16 digits of the SHA-256 of the values as JSON; 7, 7.0 and "7" count as equal."""
    plain = {key: _plain(value) for key, value in values.items()}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Convert a number or Boolean, even one written as a string, to a single spelling."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def build_provenance(
    workload: Workload, benchmark: Benchmark, *, program: Program, now: datetime
) -> dict[str, Any]:
    values = core_parameters(benchmark, write_workload(workload, only_set=True))
    library = {"name": "none"}
    if workload.storage.storage_type is StorageKind.S3:
        name = workload.storage.storage_library.value if workload.storage.storage_library else "obstore"
        library = {"name": name, "version": provenance.package_versions((name,)).get(name, UNKNOWN)}
    return {
        "schema": "mlps-run-provenance/1",
        "rules_edition": RULES_EDITION,
        "layout_version": LAYOUT_VERSION,
        "tool": {
            "name": "penstock",
            "version": program.version,
            "git_sha": program.commit,
            "code_image": pointer_text(program.digest),
        },
        "dlio": {"version": UNKNOWN, "source": UNKNOWN, "commit": UNKNOWN},
        "storage_library": library,
        "core_config": {
            "algorithm": "core-config-v1",
            "allowlist": _CORE_KEYS[benchmark][0],
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


def write_report(series: RunSeries, edition: Edition) -> None:
    """Write `results.json` and `results.csv` of the series' result, with figures recomputed from its runs."""
    folder = (series.tree.root / series.folder).resolve()
    # The report states the verdict, and a rule requires the report, so only the second pass finds its file.
    for _ in range(2):
        reports = [
            report for report in report_all(series.tree.root, edition) if folder in report.path.parents
        ]
        files, _unchanged = plan_tree(reports)
        write_files(files)


def write_manifest(series: RunSeries, *, by: str, now: datetime) -> None:
    """Write the `submission.yaml` of the submitter to whom the series belongs."""
    tree = series.tree
    folder = tree.root / series.submitter
    submitter = Submitter(organisation=tree.organisation, division=series.division, folder=folder)
    runs, versions, images = [], set(), set()
    for result_dir in find_result_dirs(submitter):
        metadata_files = (*sorted(result_dir.glob(f"*{METADATA_SUFFIX}")), result_dir / METADATA_SUFFIX)
        metadata, made = (read_file(path, folder) for path in (metadata_files[0], result_dir / PROVENANCE))
        relative, code_image = result_dir.relative_to(folder).as_posix(), _stated(made, "tool", "code_image")
        versions.add(_stated(made, "tool", "version"))
        images.add(code_image)
        runs.append(
            {
                "leaf": relative,
                "benchmark": _stated(metadata, "benchmark_type"),
                "model": _stated(metadata, "model"),
                "command": _stated(metadata, "command"),
                "accelerator": _stated(metadata, "accelerator"),
                "system": result_dir.relative_to(folder).parts[1],
                "rules_edition": _stated(made, "rules_edition"),
                "core_config": _stated(made, "core_config", "hash"),
                "code_image": code_image,
                "provenance": UNKNOWN if made.problem else f"{relative}/{PROVENANCE}",
            }
        )
    document = {
        "schema": "mlps-submission-manifest/1",
        "org": tree.organisation,
        "division": series.division.value,
        "rules_edition": RULES_EDITION,
        "layout_version": LAYOUT_VERSION,
        "generated_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "generated_by": by,
        "tool_versions": sorted(versions - {UNKNOWN}),
        "dlio_commits": [],
        "systems": [
            {
                "name": path.stem,
                "description": f"systems/{path.name}",
                "pdf": f"systems/{path.stem}.pdf" if path.with_suffix(".pdf").is_file() else "missing",
            }
            for path in sorted((folder / "systems").glob("*.yaml"))
        ],
        "runs": runs,
        "code_images": sorted(images - {UNKNOWN}),
        "provenance": {"rules_edition": "tool-constant", "runs": "walked"},
    }
    write_text(folder, MANIFEST, yaml.safe_dump(document, sort_keys=False))


def _stated(file: ParsedFile, *path: str) -> Any:
    """Return a value, or "unknown" if it is empty or cannot be read, which the rules will report."""
    return (file.has(*path) and file.value(*path)) or UNKNOWN


def probe_fs_separation(data_path: str, results: Path, *, host: str, now: datetime) -> dict[str, Any] | None:
    """Probe with a hard link whether data and results are on different file systems; None for objects.

    Regardless of mounts and names, a link within one file system succeeds, and one across two fails.
    """
    paths = find_local_paths_at(data_path)
    if paths is None:
        return None
    root, name = Path(paths.local_root), f".penstock-separation-{secrets.token_hex(4)}"
    source, target = results / name, root / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)  # only writing creates a folder of checkpoints
        source.touch(exist_ok=False)
        is_separate = False
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            is_separate = True
        finally:
            source.unlink()
            target.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"Cannot determine whether data and results share a file system: {error.strerror}",
            uri=str(root),
            fix="Make both folders writable.",
        ) from error
    return {
        "version": 1,
        "method": "link_exdev",
        "data_or_chkpt_path": str(root),
        "results_path": str(results),
        "data_or_chkpt_realpath": str(root.resolve()),
        "results_realpath": str(results.resolve()),
        "same_filesystem": not is_separate,
        "probed_at": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "probed_by_rank": 0,
        "probed_by_host": host,
    }
