"""Put the location of data or checkpoints into a workload, in DLIO's keys: submissions know no URIs.

Pure. Invariant: each key that a URI sets is among the changes, so that the divisions' rules see it.
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
    """The workload with its location, the changes this makes, and the path or URI that metadata state."""

    workload: Workload
    changes: Mapping[str, Any]
    place: str


def locate_data(workload: Workload, uri: str) -> DataLocation:
    """Read the data set from `uri`."""
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
    """Write the checkpoints to `uri`."""
    location = parse_uri(uri)
    place = location.root if location.scheme in FILE_SCHEMES else location.uri
    checkpoint = replace(workload.checkpoint, checkpoint_folder=place)
    return DataLocation(
        workload=replace(workload, checkpoint=checkpoint),
        changes={"checkpoint.checkpoint_folder": place},
        place=place,
    )
