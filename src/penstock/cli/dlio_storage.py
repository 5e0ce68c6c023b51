"""The storage location of a workload, from DLIO's section `storage`: URI, options, and credentials.

Pure: turns a loaded workload into arguments of `open_storage`. Invariant: every key of the section becomes
part of the location, or causes an error that says what to write instead.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from penstock.environment import Environment
from penstock.errors import UsageError
from penstock.workload.enums import StorageKind

if TYPE_CHECKING:
    from penstock.workload.spec import StorageOptions, Workload

_OBJECT_SCHEMES: Final = ("s3", "gs", "az")
_SECTION: Final = "storage.storage_options"


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioLocation:
    """The arguments of `open_storage`. `environment` holds credentials, so it is never printed."""

    uri: str
    options: dict[str, str] = field(default_factory=dict)
    environment: Environment = field(repr=False)


def data_location(workload: Workload, environment: Environment) -> DlioLocation:
    """Return the data's location: `storage.storage_root` joined with `dataset.data_folder`, as in DLIO."""
    kind = workload.storage.storage_type
    if kind is StorageKind.AISTORE:
        raise UsageError(
            "AIStore's native interface is not supported",
            where="storage.storage_type",
            fix="Use its S3 interface: ++workload.storage.storage_type=s3 "
            f"++workload.{_SECTION}.endpoint_url=URL.",
        )
    if kind is StorageKind.S3:
        return _object_location(workload, environment)
    is_direct = kind is StorageKind.DIRECT_FS or workload.reader.odirect
    folder = os.path.join(workload.storage.storage_root, workload.dataset.data_folder)  # noqa: PTH118 - text
    root = os.path.abspath(folder)  # noqa: PTH100 - names no file: links stay as they are written
    return DlioLocation(uri=f"{'direct' if is_direct else 'file'}://{root}", environment=environment)


def _object_location(workload: Workload, environment: Environment) -> DlioLocation:
    options = workload.storage.storage_options
    scheme = options.uri_scheme or "s3"
    if scheme not in _OBJECT_SCHEMES:
        raise UsageError(
            f"Unsupported object storage scheme {scheme!r}",
            where=f"{_SECTION}.uri_scheme",
            fix="For files use ++workload.storage.storage_type=local_fs, or direct_fs past the page cache.",
        )
    if options.s3_profile:
        raise UsageError(
            "Credential profiles are not supported",
            where=f"{_SECTION}.s3_profile",
            fix="Export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    keys = {"AWS_ACCESS_KEY_ID": options.access_key_id, "AWS_SECRET_ACCESS_KEY": options.secret_access_key}
    credentials = {name: value for name, value in keys.items() if value}
    return DlioLocation(
        uri=f"{scheme}://{_bucket_and_prefix(workload)}",
        options=dict(_object_options(workload)),
        environment={**environment, **credentials},
    )


def _bucket_and_prefix(workload: Workload) -> str:
    bucket, folder = workload.storage.storage_root, workload.dataset.data_folder
    bucket_name = bucket.partition("://")[2] or bucket
    if "://" in folder or bucket_name.strip("./") == "":
        raise UsageError(
            f"{bucket!r} and {folder!r} do not name a bucket and a prefix",
            where="storage.storage_root, dataset.data_folder",
            fix="Write ++workload.storage.storage_root=BUCKET ++workload.dataset.data_folder=PREFIX.",
        )
    return posixpath.normpath(posixpath.join(bucket_name, folder.lstrip("/")))


def _object_options(workload: Workload) -> Iterator[tuple[str, str]]:
    """Translate DLIO's options for object stores to options of Penstock's storage."""
    options = workload.storage.storage_options
    if workload.storage.storage_library is not None:
        yield "client", workload.storage.storage_library.value
    uris = workload.storage.endpoint_uris or tuple(filter(None, (options.endpoint_url,)))
    if uris:
        yield "endpoints", ",".join(_endpoint(uri, options) for uri in uris)
    if options.region:
        yield "region", options.region
    if options.s3_force_path_style is not None:
        yield "path_style", str(options.s3_force_path_style).lower()
    if options.s3_max_attempts is not None:
        yield "attempts", str(options.s3_max_attempts)
    if options.max_outstanding is not None:
        yield "ranges_in_flight", str(options.max_outstanding)


def _endpoint(url: str, options: StorageOptions) -> str:
    """Return the service's URL. If `url` has no scheme, `secure` chooses it; the default is https."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return f"{'http' if options.secure is False else 'https'}://{url}"
    if options.secure is not None and options.secure is not (scheme == "https"):
        raise UsageError(
            f"secure={str(options.secure).lower()} contradicts the endpoint {url}",
            where=f"{_SECTION}.secure",
            fix="Leave secure out: the endpoint's scheme decides.",
        )
    return url


def checkpoint_location(workload: Workload, environment: Environment) -> DlioLocation:
    """Return the location of `checkpoint.checkpoint_folder`: a path, or a prefix in the data's bucket."""
    folder = workload.checkpoint.checkpoint_folder
    storage = workload.storage
    if storage.storage_type is not StorageKind.S3:
        # DLIO joins the storage's root with data folders, but not with the folders of checkpoints.
        storage = replace(storage, storage_root="./")
    elif "://" in folder:
        bucket, _, prefix = folder.partition("://")[2].partition("/")
        storage, folder = replace(storage, storage_root=bucket), prefix
    return data_location(
        replace(
            workload,
            storage=storage,
            dataset=replace(workload.dataset, data_folder=folder),
            reader=replace(workload.reader, odirect=False),
        ),
        environment,
    )
