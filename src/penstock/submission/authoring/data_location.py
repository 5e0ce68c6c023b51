"""A workload told where its bytes lie, in DLIO's keys, because a leaf must say so and a URI is ours alone.

Pure. Invariant: what the URI says becomes a change that the divisions' rules see, such as `reader.odirect`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.storage.uri import FILE_SCHEMES, parse_uri
from penstock.workload.choices import StorageKind

if TYPE_CHECKING:
    from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLocation:
    """The workload with its place, the changes that this is, and the place as leaves name it."""

    workload: Workload
    changes: Mapping[str, Any]
    place: str


def locate_data(workload: Workload, uri: str) -> DataLocation:
    """The data set lies at `uri`."""
    location = parse_uri(uri)
    if location.scheme in FILE_SCHEMES:
        is_direct = location.scheme == "direct" or workload.reader.odirect
        placed = replace(
            workload,
            dataset=replace(workload.dataset, data_folder=location.root),
            reader=replace(workload.reader, odirect=is_direct),
        )
        changes: dict[str, Any] = {"dataset.data_folder": location.root}
        if is_direct:
            changes["reader.odirect"] = True
        return DataLocation(workload=placed, changes=changes, place=location.root)
    bucket, _, prefix = location.root.partition("/")
    placed = replace(
        workload,
        dataset=replace(workload.dataset, data_folder=prefix),
        storage=replace(workload.storage, storage_type=StorageKind.S3, storage_root=bucket),
    )
    return DataLocation(
        workload=placed,
        changes={
            "dataset.data_folder": prefix,
            "storage.storage_type": StorageKind.S3.value,
            "storage.storage_root": bucket,
        },
        place=location.uri,
    )


def locate_checkpoints(workload: Workload, uri: str) -> DataLocation:
    """The checkpoints go to `uri`."""
    location = parse_uri(uri)
    place = location.root if location.scheme in FILE_SCHEMES else location.uri
    checkpoint = replace(workload.checkpoint, checkpoint_folder=place)
    return DataLocation(
        workload=replace(workload, checkpoint=checkpoint),
        changes={"checkpoint.checkpoint_folder": place},
        place=place,
    )
