"""URI schemes and who serves them. `open_storage` is the one way from a URI to a `Storage`.

A back end is imported when its scheme is first asked for: a program on files never loads an S3 client.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from penstock.environment import TRACE, process_environment, untraced
from penstock.errors import Unavailable, UsageError
from penstock.storage.capabilities import find_local_paths
from penstock.storage.uri import Location, parse_uri
from penstock.suggest import did_you_mean

if TYPE_CHECKING:
    from penstock.environment import Environment
    from penstock.storage.capabilities import SupportsLocalPaths
    from penstock.storage.protocol import Storage

Opener = Callable[[Location, "Environment", int], "Storage"]
"""Called with the location (its options included), the environment and this process's rank."""

SCHEMES: Mapping[str, str] = MappingProxyType(
    {
        "file": "penstock.storage.files.file_storage:open_buffered",
        "direct": "penstock.storage.files.file_storage:open_direct",
        "s3": "penstock.storage.objects:open_objects",
        "gs": "penstock.storage.objects:open_objects",
        "az": "penstock.storage.objects:open_objects",
        "mem": "penstock.storage.in_memory:open_memory",
    }
)
"""Scheme -> `module:function` of its `Opener`."""

Wrapper = Callable[["Storage", "Environment"], "Storage"]
"""Called with a storage that was just opened and the environment that asked for the wrapping."""

WRAPPERS: Mapping[str, str] = MappingProxyType({TRACE: "penstock.trace.capture.traced_storage:trace_storage"})
"""Variable -> `module:function` of the `Wrapper` that every storage gets where the variable is set."""

ENTRY_POINTS = "penstock.storage"
"""Other packages' back ends: entry points of this group, named by their scheme."""


def open_storage(
    uri: str, environment: Environment, *, options: Mapping[str, str] | None = None, rank: int = 0
) -> Storage:
    """Open the storage that `uri` names. `options` add to the URI's own and win over them."""
    location = parse_uri(uri)
    merged = Location(location.scheme, location.root, {**location.options, **(options or {})})
    storage = _opener(merged.scheme)(merged, environment, rank)
    for variable, wrapper in WRAPPERS.items():
        if environment.get(variable):
            storage = cast("Wrapper", _named(wrapper))(storage, environment)
    return storage


def open_here(path: str | os.PathLike[str], *, rank: int = 0) -> Storage:
    """Open a path or URI with this process's own environment: for libraries, whose callers hand over none."""
    return open_storage(os.fspath(path), process_environment(), rank=rank)


def find_local_paths_at(uri: str, environment: Environment | None = None) -> SupportsLocalPaths | None:
    """What the storage at `uri` says of its local files, before it is opened for use; None for any other.

    Opening moves no bytes. A storage that is not available here has no local files, either: whoever opens it
    for use gets the error.
    """
    storage = _open_untraced(uri, environment)
    return None if storage is None else find_local_paths(storage)


def has_option(uri: str, name: str, environment: Environment | None = None) -> bool:
    """Whether the storage at `uri` has an option of this name, such as `fsync`."""
    storage = _open_untraced(uri, environment)
    return storage is not None and name in storage.options


def _open_untraced(uri: str, environment: Environment | None) -> Storage | None:
    try:
        return open_storage(uri, untraced(process_environment() if environment is None else environment))
    except Unavailable:
        return None


def _opener(scheme: str) -> Opener:
    if scheme in SCHEMES:
        return cast("Opener", _named(SCHEMES[scheme]))
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == scheme:
            return cast("Opener", entry.load())
    hint = did_you_mean(scheme, SCHEMES, form="{}://")
    raise UsageError(
        f"Unsupported storage scheme {scheme!r}", fix=f"{hint}Known: {', '.join(SCHEMES)}, or a plain path."
    )


def _named(target: str) -> object:
    """What `module:function` names."""
    module_name, _, function_name = target.partition(":")
    found: object = getattr(import_module(module_name), function_name)
    return found
