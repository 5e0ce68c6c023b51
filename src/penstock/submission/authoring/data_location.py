"""Set the location of data or checkpoints in a workload under DLIO's keys, as submissions have no URIs.

Pure. Invariant: each key that a URI sets is among the changes, so that the rules of the divisions apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.storage.uri import find_local_paths_at, parse_uri
from penstock.workload.enums import StorageKind
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLocation:
    """The workload with its location, the changed keys, and the path or URI for the metadata."""

    workload: Workload
    changes: Mapping[str, Any]
    data_path: str


def locate_data(workload: Workload, uri: str) -> DataLocation:
    """Set the location of the data set to `uri`."""
    paths = find_local_paths_at(uri)
    if paths is not None:
        folder = paths.local_root
        is_direct = not paths.uses_page_cache or workload.reader.odirect
        placed = replace(
            workload,
            dataset=replace(workload.dataset, data_folder=folder),
            reader=replace(workload.reader, odirect=is_direct),
        )
        changes: dict[str, Any] = {"dataset.data_folder": folder}
        if is_direct:
            changes["reader.odirect"] = True
        return DataLocation(workload=placed, changes=changes, data_path=folder)
    location = parse_uri(uri)
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
        data_path=location.uri,
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
