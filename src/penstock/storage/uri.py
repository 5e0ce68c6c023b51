"""URIs, keys and options: text from outside becomes a `Location`, a checked key, or typed options.

A URI is taken literally, without percent-decoding; what follows a `?` are options:
`s3://bucket/prefix?client=minio&part_bytes=16MiB`. Invariant: no key that passes `check_key` leaves its root.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.errors import AccessRefused, UsageError
from penstock.suggest import did_you_mean
from penstock.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_PATH_SCHEMES = ("file", "direct")
_BUCKET_SCHEMES = ("s3", "gs", "az", "mem")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a storage keeps its objects. `root` is an absolute path, or `bucket/prefix` of a service."""

    scheme: str
    root: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """The location as a URI, without its options."""
        return f"{self.scheme}://{self.root}"

    @property
    def text(self) -> str:
        """The location as a URI with its options: `parse_uri` makes the same location of it."""
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.uri}?{query}" if query else self.uri

    def with_options(self, **options: str) -> Location:
        """The same place with more options, which replace those of the same names."""
        return Location(self.scheme, self.root, {**self.options, **options})

    def split_name(self) -> tuple[Location, str] | None:
        """The location above this one and the name in it; None for a file system's root and for a bucket."""
        above, _, name = self.root.rstrip("/").rpartition("/")
        if not name or not (above or self.root.startswith("/")):
            return None
        return Location(self.scheme, above or "/", self.options), name


def is_plain_path(text: str) -> bool:
    """Whether `text` is a path rather than a URI with a scheme."""
    return "://" not in text


def parse_uri(text: str) -> Location:
    """The location that `text` names: a URI with a known or unknown scheme, or a plain path.

    After `file://` and `direct://` comes an absolute path, after `s3://` and its like a bucket. Schemes of
    other packages may have either: three slashes, as in `pfs:///scratch`, begin an absolute path.
    """
    if not text:
        raise UsageError(
            "An empty string names no storage", fix="Give a path or a URI such as s3://bucket/prefix."
        )
    if is_plain_path(text):
        return Location("file", os.path.abspath(text))
    scheme, _, rest = text.partition("://")
    if not scheme.isalnum():
        raise UsageError(
            f"{text!r} is not a URI", fix="Write scheme://..., for example file:///data or s3://bucket/x."
        )
    root, _, query = rest.partition("?")
    if scheme in _PATH_SCHEMES or (scheme not in _BUCKET_SCHEMES and root.startswith("/")):
        root = _absolute_path(text, root)
    else:
        root = root.strip("/")
        if not root:
            raise UsageError(f"{text!r} names no bucket", fix=f"Write {scheme}://bucket/prefix.")
    return Location(scheme, root, _parse_query(text, query))


def _absolute_path(text: str, path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(
            f"{text!r} has no absolute path",
            fix="After scheme:// comes an absolute path: three slashes, as in direct:///data.",
        )
    return os.path.normpath(path)


def _parse_query(text: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for assignment in filter(None, query.split("&")):
        name, separator, value = assignment.partition("=")
        if not separator:
            raise UsageError(
                f"{assignment!r} in {text!r} sets nothing", fix="Write options as ?name=value&name=value."
            )
        options[name] = value
    return options


def check_key(key: str, root_uri: str) -> str:
    """`key` itself, if it is a relative path of plain names; else `AccessRefused`."""
    plain = key and "\0" not in key and all(name not in ("", ".", "..") for name in key.split("/"))
    if not plain:
        raise AccessRefused(
            f"The key {key!r} is not a plain path below its root",
            uri=root_uri,
            fix="Use relative names joined by single slashes, without '.' and '..'.",
        )
    return key


def check_prefix(prefix: str, root_uri: str) -> str:
    """`prefix` without a closing slash, if it is empty or a folder below the root; else `AccessRefused`."""
    folder = prefix.removesuffix("/")
    return check_key(folder, root_uri) if folder else ""


T = TypeVar("T", bound="DataclassInstance")

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def parse_options(kind: type[T], given: Mapping[str, str], *, where: str) -> T:
    """A `kind` with the `given` values, parsed after its fields' names and types; the rest are defaults."""
    hints = get_type_hints(kind)
    known = [spec.name for spec in fields(kind) if spec.init]
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0.4, form="'{}'")
            raise UsageError(f"Unknown option {name!r}", where=where, fix=f"{hint}Known: {', '.join(known)}.")
        try:
            values[name] = _parser(name, hints[name])(text)
        except UsageError as error:
            raise UsageError(f"Option {name!r}: {error.what}", where=where, fix=error.fix) from error
    return kind(**values)


def _parser(name: str, hint: Any) -> Callable[[str], Any]:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not types.NoneType)
    if get_origin(hint) is Literal:
        return lambda text: _choice(text, get_args(hint))
    if get_origin(hint) is tuple:
        return lambda text: tuple(part for part in text.split(",") if part)
    if hint is bool:
        return _truth
    if hint is float:
        return parse_seconds if name.endswith("_s") else _number
    if hint is int:
        return parse_bytes if name.endswith("_bytes") else _whole_number
    return str


def _choice(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise UsageError(f"{text!r} is not a choice", fix=f"Choose one of {', '.join(choices)}.")
    return text


def _truth(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise UsageError(f"{text!r} is neither true nor false", fix="Write true or false.")
    return _WORDS[text.lower()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number", fix="Write a number, for example 0.5.") from error


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a whole number", fix="Write digits only.")
    return int(text)
