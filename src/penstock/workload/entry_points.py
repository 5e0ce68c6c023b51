"""Loaders and readers of other packages, found by the names of their entry points.

A package declares one in its pyproject: `[project.entry-points."penstock.loaders"]`, `mine = "mine:options"`.
Nothing is imported before a user names it.
"""

from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock.errors import Unavailable, UsageError


class Extension(StrEnum):
    """The groups of entry points, and the arguments with which those in each group are called."""

    LOADER = "penstock.loaders"
    """`(workload, threads)`; threads is None unless the user sets it. Returns `LoaderOptions`."""
    READER = "penstock.readers"
    """`(dataset, seed)`; returns the `FileFormat` that lays out, reads and decodes the files."""


def installed_extensions(kind: Extension) -> dict[str, EntryPoint]:
    """Return the entry points of this environment's packages, by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=kind.value), key=lambda one: one.name)}


def load_extension(kind: Extension, name: str, *, where: str, own: tuple[str, ...] = ()) -> Any:
    """Load an entry point; for an unknown name, raise a `UsageError` that lists the known names and `own`.

    Raises `Unavailable`, with the reason, if its package cannot be imported.
    """
    offered = installed_extensions(kind)
    if name not in offered:
        names = ", ".join((*own, *offered)) or "none"
        raise UsageError(
            f"No {kind.name.lower().replace('_', ' ')} is called {name!r}",
            where=where,
            fix=f"Available: {names}. Others come with packages that have entry points in {kind.value}.",
        )
    try:
        return offered[name].load()
    except (ImportError, AttributeError) as error:
        raise Unavailable(
            f"{offered[name].value} cannot be loaded: {error}",
            where=where,
            fix="Install what it needs, or correct its package's entry point.",
        ) from error
