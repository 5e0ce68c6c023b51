"""Locate a result's data, and refuse a result that its edition would not accept, before any of it is made.

Pure, but for resolving links: a request in, breaches with the ids of their rules out. Invariants: every
number is the edition's; each key that a URI sets is among the changes, so that divisions' rules apply.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.storage.uri import find_local_paths_at, parse_uri
from penstock.submission.authoring.owned_tree import HIDDEN, RunSeries
from penstock.submission.edition import Edition
from penstock.workload.enums import StorageKind
from penstock.workload.mlperf_divisions import SubmissionDivision, describe_breach
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLocation:
    """The workload with its location, the changed keys, and the path or URI for the metadata."""

    workload: Workload
    changes: Mapping[str, Any]
    data_path: str


def locate_data(workload: Workload, uri: str) -> DataLocation:
    """Set the location of the data set to `uri`, under DLIO's keys: submissions have no URIs."""
    changes: dict[str, Any]
    paths = find_local_paths_at(uri)
    if paths is not None:
        folder, storage = paths.local_root, workload.storage
        is_direct = not paths.uses_page_cache or workload.reader.odirect
        changes, data_path = {"dataset.data_folder": folder}, folder
        if is_direct:
            changes["reader.odirect"] = True
    else:
        is_direct, location = workload.reader.odirect, parse_uri(uri)
        bucket, _, folder = location.root.partition("/")
        storage = replace(workload.storage, storage_type=StorageKind.S3, storage_root=bucket)
        changes, data_path = (
            {
                "dataset.data_folder": folder,
                "storage.storage_type": StorageKind.S3.value,
                "storage.storage_root": bucket,
            },
            location.uri,
        )
    placed = replace(
        workload,
        dataset=replace(workload.dataset, data_folder=folder),
        reader=replace(workload.reader, odirect=is_direct),
        storage=storage,
    )
    return DataLocation(workload=placed, changes=changes, data_path=data_path)


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
    """Raise `UsageError` with every breach and its rule."""
    if found := "; ".join(breaches):
        raise UsageError(found, where=where, fix="Change these: nothing was made yet.")


def training_breaches(
    edition: Edition, series: RunSeries, *, accelerator: str, num_accelerators: int, num_hosts: int, data: str
) -> Iterator[str]:
    """All breaches of the edition's rules for a training result; `data` is the URI of the data set."""
    workloads = edition.min_utilization_percent
    if series.model not in workloads:
        yield describe_breach("2.1.11", series.model, f"is not one of {', '.join(workloads)}")
    if accelerator not in edition.accelerators:
        why = f"is not one of {', '.join(edition.accelerators)}"
        yield describe_breach("2.1.11", accelerator or "no accelerator", why)
    if num_accelerators % num_hosts:
        key = f"{num_accelerators} accelerators"
        yield describe_breach("3.3.6", key, f"do not divide evenly among {num_hosts} hosts")
    # The storage under test must not be in the tree; `.mlps/` does not belong to it.
    if paths := find_local_paths_at(data):
        place, root = Path(paths.local_root).resolve(), series.tree.root.resolve()
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
) -> Iterator[str]:
    """All breaches of the rules on checkpointing; `changed` are the keys that are set, by dotted name."""
    rules = edition.checkpoints
    limits = rules.models.get(model)
    if limits is None:
        yield describe_breach("4.3.3", model, f"is not one of {', '.join(rules.models)}")
        return
    if scale != 1:
        yield describe_breach("4.3.4", "--scale", "must be 1: submitted checkpoints are full-size")
    for key in changed:
        if key not in rules.parameters.allowed(division):
            yield describe_breach("4.6.3", key, f"must stay as it is in the {division.value} division")
    memory, ranks = rules.accelerator_memory_gb, f"{num_processes} ranks"
    if accelerator not in memory:
        yield describe_breach("4.3.4", accelerator or "no accelerator", f"is not one of {', '.join(memory)}")
    elif memory[accelerator] * num_processes < size_gib:
        yield describe_breach(
            "4.3.4",
            f"{num_processes} x {memory[accelerator]:g} GB",
            f"are less than a checkpoint of {size_gib:.1f} GiB",
        )
    if division is SubmissionDivision.OPEN:
        if num_processes % limits.open_unit:
            yield describe_breach("4.6.4", ranks, f"are not a multiple of {limits.open_unit}")
        return
    for what, number in (("writes", num_writes), ("reads", num_reads)):
        if number not in (0, rules.num_checkpoints):
            yield describe_breach("4.7.1", f"{number} {what}", f"are not {rules.num_checkpoints} or 0")
    subset = rules.subset
    if is_subset and (model not in subset.models or num_processes != subset.num_accelerators):
        yield describe_breach(
            "4.3.5",
            "--subset",
            f"is for {', '.join(sorted(subset.models))} on {subset.num_accelerators} accelerators",
        )
    elif not is_subset and num_processes != limits.closed_processes:
        yield describe_breach("4.6.1", ranks, f"are not {limits.closed_processes}")
