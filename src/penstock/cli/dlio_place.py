"""Where a workload's data lies, from DLIO's section `storage`: a URI, options, and an environment with keys.

Place in the flow: pure, between a loaded workload and `open_storage`. Invariant: every key of the section
becomes part of the place, or an error that says what to write instead.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError
from penstock.workload.choices import StorageKind

if TYPE_CHECKING:
    from penstock.environment import Environment
    from penstock.workload.spec import StorageOptions, Workload

_OBJECT_SCHEMES: Final = ("s3", "gs", "az")
_SECTION: Final = "storage.storage_options"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """What `open_storage` takes. `environment` holds credentials, so it is never shown."""

    uri: str
    options: dict[str, str] = field(default_factory=dict)
    environment: Environment = field(repr=False)


def data_place(workload: Workload, environment: Environment) -> DataPlace:
    """The place of the data: `storage.storage_root` joined with `dataset.data_folder`, as in DLIO."""
    kind = workload.storage.storage_type
    if kind is StorageKind.AISTORE:
        raise UsageError(
            "AIStore's own interface is not spoken here",
            where="storage.storage_type",
            fix=f"Use its S3 one: ++workload.storage.storage_type=s3 ++workload.{_SECTION}.endpoint_url=URL.",
        )
    if kind is StorageKind.S3:
        return _object_place(workload, environment)
    is_direct = kind is StorageKind.DIRECT_FS or workload.reader.odirect
    folder = os.path.join(workload.storage.storage_root, workload.dataset.data_folder)  # noqa: PTH118 - text
    root = os.path.abspath(folder)  # noqa: PTH100 - names no file: links stay as they are written
    return DataPlace(uri=f"{'direct' if is_direct else 'file'}://{root}", environment=environment)


def _object_place(workload: Workload, environment: Environment) -> DataPlace:
    asked = workload.storage.storage_options
    scheme = asked.uri_scheme or "s3"
    if scheme not in _OBJECT_SCHEMES:
        raise UsageError(
            f"{scheme!r} is no scheme of an object service",
            where=f"{_SECTION}.uri_scheme",
            fix="For files use ++workload.storage.storage_type=local_fs, or direct_fs past the page cache.",
        )
    if asked.s3_profile:
        raise UsageError(
            "Profiles are not asked for credentials",
            where=f"{_SECTION}.s3_profile",
            fix="Export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    options = dict(_object_options(workload))
    keys = {"AWS_ACCESS_KEY_ID": asked.access_key_id, "AWS_SECRET_ACCESS_KEY": asked.secret_access_key}
    given = {name: value for name, value in keys.items() if value}
    return DataPlace(
        uri=f"{scheme}://{_bucket_and_prefix(workload)}",
        options=options,
        environment={**environment, **given},
    )


def _bucket_and_prefix(workload: Workload) -> str:
    bucket, folder = workload.storage.storage_root, workload.dataset.data_folder
    plain = bucket.partition("://")[2] or bucket
    if "://" in folder or plain.strip("./") == "":
        raise UsageError(
            f"{bucket!r} and {folder!r} name no bucket and prefix",
            where="storage.storage_root, dataset.data_folder",
            fix="Write ++workload.storage.storage_root=BUCKET ++workload.dataset.data_folder=PREFIX.",
        )
    return posixpath.normpath(posixpath.join(plain, folder.lstrip("/")))


def _object_options(workload: Workload) -> Iterator[tuple[str, str]]:
    """Options of our storage, for those of DLIO's that are given."""
    asked = workload.storage.storage_options
    if workload.storage.storage_library is not None:
        yield "client", workload.storage.storage_library.value
    if asked.endpoint_url:
        yield "endpoints", _endpoint(asked)
    if asked.region:
        yield "region", asked.region
    if asked.s3_force_path_style is not None:
        yield "path_style", str(asked.s3_force_path_style).lower()
    if asked.s3_max_attempts is not None:
        yield "attempts", str(asked.s3_max_attempts)
    if asked.max_outstanding is not None:
        yield "ranges_in_flight", str(asked.max_outstanding)


def _endpoint(asked: StorageOptions) -> str:
    """The URL of the service; one without a scheme has that which `secure` says, https if it is silent."""
    url = asked.endpoint_url or ""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return f"{'http' if asked.secure is False else 'https'}://{url}"
    if asked.secure is not None and asked.secure is not (scheme == "https"):
        raise UsageError(
            f"secure is {str(asked.secure).lower()}, but the endpoint is {url}",
            where=f"{_SECTION}.secure",
            fix="Leave secure out: the endpoint's scheme says it.",
        )
    return url
