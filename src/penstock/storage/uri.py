"""URIs and options as text, and `open_storage`, the one way from a URI to a `Storage`.

A URI is taken literally, without percent-decoding; options follow a `?`:
`s3://bucket/prefix?client=minio&part_bytes=16MiB`. A back end is imported when its scheme is first opened, so
a program that uses only files never loads an S3 client.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.did_you_mean import did_you_mean
from penstock.environment import TRACE, Environment, process_environment, untraced
from penstock.errors import Unavailable, UsageError
from penstock.storage.capabilities import SupportsLocalPaths, find_local_paths
from penstock.storage.protocol import Storage
from penstock.units import parse_bytes, parse_seconds

_PATH_SCHEMES = ("file", "direct")
_BUCKET_SCHEMES = ("s3", "gs", "az", "mem")


@dataclass(frozen=True, slots=True)
class Location:
    """The place where a `Storage` keeps its objects.

    `root` is an absolute path, or `bucket/prefix` of a service.
    """

    scheme: str
    root: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """The location as a URI, without its options."""
        return f"{self.scheme}://{self.root}"

    @property
    def text(self) -> str:
        """The location as a path, or as a URI with options. `parse_uri` turns it into the same location."""
        if self.scheme == "file" and not self.options:
            # A path may contain a question mark, which in a URI would begin the options.
            return self.root
        if "?" in self.root:
            raise UsageError(
                f"{self.root!r} cannot be written as a URI with options, because of its '?'",
                fix="Rename the folder.",
            )
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.uri}?{query}" if query else self.uri

    def with_options(self, /, **options: str) -> Location:
        """Return the same location with more options, which replace existing ones of the same names."""
        return Location(self.scheme, self.root, {**self.options, **options})

    def split_name(self) -> tuple[Location, str] | None:
        """Return the location above and the name in it, or None for a file system's root and for a bucket."""
        above, _, name = self.root.rstrip("/").rpartition("/")
        if not name or not (above or self.root.startswith("/")):
            return None
        return Location(self.scheme, above or "/", self.options), name


def is_plain_path(text: str) -> bool:
    """Return True if `text` is a path rather than a URI with a scheme."""
    return "://" not in text


def parse_uri(text: str) -> Location:
    """Return the location that `text` names: a URI with a known or unknown scheme, or a plain path.

    `file://` and `direct://` are followed by an absolute path, `s3://` and similar schemes by a bucket.
    Schemes of other packages may have either: three slashes, as in `pfs:///scratch`, begin an absolute path.
    """
    if not text:
        raise UsageError("The storage URI is empty", fix="Give a path or a URI such as s3://bucket/prefix.")
    if "\0" in text:
        raise UsageError(f"{text!r} has a NUL character, which no path can have", fix="Remove it.")
    if is_plain_path(text):
        _require_no_scheme(text)
        try:
            return Location("file", os.path.abspath(text))
        except FileNotFoundError as error:
            raise UsageError(
                f"{text!r} is below the current folder, which was removed", fix="Change to another one."
            ) from error
    scheme, _, rest = text.partition("://")
    if not scheme.isalnum():
        raise UsageError(
            f"{text!r} is not a URI", fix="Write scheme://..., for example file:///data or s3://bucket/x."
        )
    root, _, query = rest.partition("?")
    if scheme in _PATH_SCHEMES or (scheme not in _BUCKET_SCHEMES and root.startswith("/")):
        if not root.startswith("/"):
            raise UsageError(
                f"{text!r} has no absolute path",
                fix="After scheme:// comes an absolute path: three slashes, as in direct:///data.",
            )
        root = os.path.normpath(root)
    else:
        root = root.strip("/")
        if not root:
            raise UsageError(f"{text!r} has no bucket", fix=f"Write {scheme}://bucket/prefix.")
        # A client may merge two slashes into one, so the objects would not be where this location says.
        if scheme in _BUCKET_SCHEMES and "//" in root:
            raise UsageError(
                f"{text!r} has an empty name between two slashes, which not all services keep",
                fix=f"Write {scheme}://{re.sub('/+', '/', root)}.",
            )
    options: dict[str, str] = {}
    for assignment in filter(None, query.split("&")):
        name, separator, value = assignment.partition("=")
        if not separator:
            raise UsageError(
                f"{assignment!r} in {text!r} sets nothing", fix="Write options as ?name=value&name=value."
            )
        options[name] = value
    return Location(scheme, root, options)


def _require_no_scheme(path: str) -> None:
    """Refuse `s3:/bucket` and `s3:bucket`, which would become a folder called `s3:`."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme in (*_PATH_SCHEMES, *_BUCKET_SCHEMES):
        slashes = "///" if scheme in _PATH_SCHEMES else "//"
        raise UsageError(
            f"{path!r} is neither a URI nor a path",
            fix=f"Write {scheme}:{slashes}{rest.lstrip('/')}, or ./{path} for a path.",
        )


T = TypeVar("T")

_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def parse_options(kind: type[T], given: Mapping[str, str], *, where: str) -> T:
    """Create the dataclass `kind` from the strings in `given`, each parsed by its field's name and type.

    A field `..._bytes` takes a size such as 16MiB, a field `..._s` a duration such as 250ms.
    """
    # Looking up the types takes longer than everything else that opening a storage does.
    hints = get_type_hints(kind) if given else {}
    known = [spec.name for spec in fields(kind) if spec.init]  # type: ignore[arg-type]  # a dataclass
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0.4, form="'{}'")
            raise UsageError(f"Unknown option {name!r}", where=where, fix=f"{hint}Known: {', '.join(known)}.")
        try:
            values[name] = _parse_value(name, text, hints[name])
        except UsageError as error:
            raise UsageError(f"Option {name!r}: {error.what}", where=where, fix=error.fix) from error
    return kind(**values)


def _parse_value(name: str, text: str, hint: Any) -> object:
    """Return the value of `text` for a field of this name and type."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not types.NoneType)
    choices = get_args(hint)
    if get_origin(hint) is Literal and text not in choices:
        raise UsageError(f"{text!r} is not a valid choice", fix=f"Choose one of {', '.join(choices)}.")
    if get_origin(hint) is tuple:
        return tuple(part for part in text.split(",") if part)
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"{text!r} is neither true nor false", fix="Write true or false.")
        return _BOOLEANS[text.lower()]
    if hint is float and name.endswith("_s"):
        return parse_seconds(text)
    if hint is int and name.endswith("_bytes"):
        return parse_bytes(text)
    if hint is int and not text.isdecimal():
        raise UsageError(f"{text!r} is not a whole number", fix="Write digits only.")
    try:
        return hint(text) if hint in (int, float) else text
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number", fix="Write a number, for example 0.5.") from error


Opener = Callable[[Location, Environment, int], Storage]
"""Called with the location (including its options), the environment and this process's rank."""

SCHEMES: Mapping[str, str] = MappingProxyType(
    {
        "file": "penstock.storage.files.file_storage:open_files",
        "direct": "penstock.storage.files.file_storage:open_files",
        "s3": "penstock.storage.objects.object_storage:ObjectStorage",
        "gs": "penstock.storage.objects.object_storage:ObjectStorage",
        "az": "penstock.storage.objects.object_storage:ObjectStorage",
        "mem": "penstock.storage.in_memory:open_memory",
    }
)
"""Maps a scheme to `module:name` of its `Opener`."""

Wrapper = Callable[[Storage, Environment], Storage]
"""Called with a `Storage` that was just opened, and the environment that requested the wrapping."""

WRAPPERS: Mapping[str, str] = MappingProxyType({TRACE: "penstock.trace.capture.traced_storage:trace_storage"})
"""Maps a variable to `module:function` of the `Wrapper` that every `Storage` gets if the variable is set."""

ENTRY_POINTS = "penstock.storage"
"""The group of entry points for back ends of other packages; each is named after its scheme."""


def open_storage(
    uri: str, environment: Environment, *, options: Mapping[str, str] | None = None, rank: int = 0
) -> Storage:
    """Open the storage that `uri` names, with the credentials of `environment`, for the process `rank`.

    `options` override those of the same name in the URI.
    """
    location = parse_uri(uri).with_options(**(options or {}))
    storage = find_opener(location)(location, environment, rank)
    for variable, wrapper in WRAPPERS.items():
        if environment.get(variable):
            wrap: Wrapper = resolve_name(wrapper)
            storage = wrap(storage, environment)
    return storage


def open_here(path: str | os.PathLike[str], *, rank: int = 0) -> Storage:
    """Open a path or URI with this process's environment. For libraries, whose callers do not pass one."""
    return open_storage(os.fspath(path), process_environment(), rank=rank)


def find_local_paths_at(uri: str, environment: Environment | None = None) -> SupportsLocalPaths | None:
    """Return the storage at `uri`, or None if its objects are not local files, or it is unavailable here.

    Opening transfers no bytes. The caller that opens the storage for use reports why it is unavailable.
    """
    storage = _open_untraced(uri, environment)
    return None if storage is None else find_local_paths(storage)


def has_option(uri: str, name: str, environment: Environment | None = None) -> bool:
    """Return True if the storage at `uri` has an option of this name, such as `fsync`."""
    storage = _open_untraced(uri, environment)
    return storage is not None and name in storage.options


def _open_untraced(uri: str, environment: Environment | None) -> Storage | None:
    try:
        return open_storage(uri, untraced(process_environment() if environment is None else environment))
    except Unavailable:
        return None


def find_opener(location: Location) -> Opener:
    """Return the function that opens this scheme's storage; raise `UsageError` if no package has one."""
    scheme = location.scheme
    opener: Opener
    if scheme in SCHEMES:
        opener = resolve_name(SCHEMES[scheme])
        return opener
    offered = entry_points(group=ENTRY_POINTS)
    for entry in offered.select(name=scheme):
        try:
            opener = entry.load()
        except (ImportError, AttributeError) as error:
            package = entry.dist.name if entry.dist else "a package"
            raise Unavailable(
                f"The storage {scheme}:// of {package} cannot be loaded: {error}",
                fix=f"Correct the entry point {entry.name} = {entry.value!r} in the group {ENTRY_POINTS}, or "
                "install what it imports.",
            ) from error
        return opener
    known = [*SCHEMES, *sorted(offered.names)]
    raise UsageError(
        f"Unsupported storage scheme {scheme!r}",
        fix=f"{did_you_mean(scheme, known, form='{}://')}Known: {', '.join(known)}, or a plain path. "
        f"Packages can add schemes through entry points in the group {ENTRY_POINTS}.",
    )
