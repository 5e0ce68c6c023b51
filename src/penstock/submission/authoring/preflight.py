"""Locate a result's data, and refuse, before anything runs, a result that its edition would not accept.

Pure, except for resolving links: turns a request into breaches with the ids of their rules. Invariants: every
number comes from the edition; each key that a URI sets is among the changed keys, so that the rules of the
divisions apply to it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.storage.uri import find_local_paths_at, parse_uri
from penstock.submission.authoring.owned_tree import HIDDEN
from penstock.submission.edition import Edition
from penstock.workload.enums import StorageKind
from penstock.workload.mlperf_divisions import SubmissionDivision, describe_breach
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLocation:
    """A workload with its location set, the changed keys, and the path or URI for the metadata."""

    workload: Workload
    changes: Mapping[str, Any]
    data_path: str


def locate_data(workload: Workload, uri: str) -> DataLocation:
    """Set the location of the data set to `uri`, using DLIO's keys, because submissions have no URIs."""
    reader, storage, changes = workload.reader, workload.storage, dict[str, Any]()
    if paths := find_local_paths_at(uri):
        folder = data_path = paths.local_root
        reader = replace(reader, odirect=reader.odirect or not paths.uses_page_cache)
        if reader.odirect:
            changes = {"reader.odirect": True}
    else:
        location = parse_uri(uri)
        data_path, (bucket, _, folder) = location.uri, location.root.partition("/")
        storage = replace(storage, storage_type=StorageKind.S3, storage_root=bucket)
        changes = {"storage.storage_type": StorageKind.S3.value, "storage.storage_root": bucket}
    dataset = replace(workload.dataset, data_folder=folder)
    return DataLocation(
        workload=replace(workload, dataset=dataset, reader=reader, storage=storage),
        changes={"dataset.data_folder": folder, **changes},
        data_path=data_path,
    )


def locate_checkpoints(workload: Workload, uri: str) -> DataLocation:
    """Set the destination of checkpoints to `uri`."""
    paths = find_local_paths_at(uri)
    data_path = parse_uri(uri).uri if paths is None else paths.local_root
    checkpoint = replace(workload.checkpoint, checkpoint_folder=data_path)
    return DataLocation(
        workload=replace(workload, checkpoint=checkpoint),
        changes={"checkpoint.checkpoint_folder": data_path},
        data_path=data_path,
    )


def require_none(breaches: Iterable[str], where: str) -> None:
    """Raise `UsageError` with all breaches, each with its rule, if there are any."""
    if found := "; ".join(breaches):
        raise UsageError(found, where=where, fix="Give others, or --open; no run was started.")


def training_breaches(
    edition: Edition,
    tree: Path,
    *,
    model: str,
    accelerator: str,
    num_accelerators: int,
    num_hosts: int,
    data: str,
) -> Iterator[str]:
    """Yield all breaches of the edition's rules for a training result; `data` is the URI of the data set."""
    workloads = edition.min_utilization_percent
    if model not in workloads:
        yield describe_breach("2.1.11", model, f"is not one of {', '.join(workloads)}")
    if accelerator not in edition.accelerators:
        why = f"is not one of {', '.join(edition.accelerators)}"
        yield describe_breach("2.1.11", accelerator or "no accelerator", why)
    if num_accelerators % num_hosts:
        key = f"{num_accelerators} accelerators"
        yield describe_breach("3.3.6", key, f"do not divide evenly among {num_hosts} hosts")
    # The storage under test must not hold the tree itself, except for `.mlps/`, which does not belong to the
    # tree.
    if paths := find_local_paths_at(data):
        place, root = Path(paths.local_root).resolve(), tree.resolve()
        if place.is_relative_to(root) and not place.is_relative_to(root / HIDDEN):
            yield describe_breach("3.4.1", f"--data {place}", "must be outside of the submission's tree")


def checkpoint_breaches(  # noqa: PLR0913 - the request of a checkpointing result
    edition: Edition,
    division: SubmissionDivision,
    *,
    model: str,
    accelerator: str,
    num_processes: int,
    num_writes: int,
    num_reads: int,
    is_subset: bool,
    scale: Fraction,
    changed: Sequence[str],
    size_gib: float,
) -> list[str]:
    """Return all breaches of the rules on checkpointing; `changed` has the dotted names of changed keys."""
    rules, ranks = edition.checkpoints, f"{num_processes} ranks"
    limits, memory = rules.models.get(model), rules.accelerator_memory_gb
    if limits is None:
        return [describe_breach("4.3.3", model, f"is not one of {', '.join(rules.models)}")]
    is_closed, free = division is SubmissionDivision.CLOSED, rules.parameters.allowed(division)
    each_gb, count = memory.get(accelerator), rules.num_checkpoints
    subset_text = f"{', '.join(sorted(rules.subset_models))} on {rules.subset_accelerators} accelerators"
    is_known_subset = model in rules.subset_models and num_processes == rules.subset_accelerators
    needs_all = is_closed and not is_subset
    # For each check: the rule, the value, what would be wrong with it, and whether it is wrong.
    checks = [
        ("4.3.4", "--scale", "must be 1: submitted checkpoints are full-size", scale != 1),
        *(
            ("4.6.3", key, f"must stay as it is in the {division} division", key not in free)
            for key in changed
        ),
        ("4.3.4", accelerator or "no accelerator", f"is not one of {', '.join(memory)}", each_gb is None),
        (
            "4.3.4",
            f"{num_processes} x {each_gb or 0:g} GB",
            f"are less than a checkpoint of {size_gib:.1f} GiB",
            each_gb is not None and each_gb * num_processes < size_gib,
        ),
        (
            "4.7.1",
            f"{num_writes} writes",
            f"are not {count} or 0",
            is_closed and num_writes not in (0, count),
        ),
        ("4.7.1", f"{num_reads} reads", f"are not {count} or 0", is_closed and num_reads not in (0, count)),
        ("4.3.5", "--subset", f"is for {subset_text}", is_closed and is_subset and not is_known_subset),
        (
            "4.6.1",
            ranks,
            f"are not {limits.closed_processes}",
            needs_all and num_processes != limits.closed_processes,
        ),
        (
            "4.6.4",
            ranks,
            f"are not a multiple of {limits.open_unit}",
            not is_closed and num_processes % limits.open_unit != 0,
        ),
    ]
    return [describe_breach(rule, value, why) for rule, value, why, is_breach in checks if is_breach]
