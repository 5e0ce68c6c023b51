"""Names of places: URIs become `Location`s, keys are checked before they touch a root.

A URI is taken literally (no percent-decoding); what follows a `?` in one with a scheme are options:
`s3://bucket/prefix?client=minio&part_bytes=16MiB`. Invariant: no key that passes `check_key` leaves its root.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import AccessRefused, UsageError

FILE_SCHEMES = ("file", "direct")


@dataclass(frozen=True, slots=True)
class Location:
    """A root to keep objects under: an absolute path for files, `bucket/prefix` for objects."""

    scheme: str
    root: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """The location as a URI, without its options."""
        return f"{self.scheme}://{self.root}"


def parse_uri(text: str) -> Location:
    """The location that `text` names: a URI with a known or unknown scheme, or a plain path."""
    if not text:
        raise UsageError(
            "An empty string names no storage", fix="Give a path or a URI such as s3://bucket/prefix."
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Location("file", os.path.abspath(text))
    if not scheme.isalnum():
        raise UsageError(
            f"{text!r} is no URI", fix="Write scheme://..., for example file:///data or s3://bucket/x."
        )
    root, _, query = rest.partition("?")
    if scheme in FILE_SCHEMES:
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
