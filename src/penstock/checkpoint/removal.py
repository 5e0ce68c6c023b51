"""Taking a checkpoint away, but not the last whole one of its run unless told so.

Invariant: a checkpoint loses its name in one step and durably, before the first of its files goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.place import open_shelf
from penstock.checkpoint.inspection import Listed, State, list_all
from penstock.checkpoint.opened import uri_of
from penstock.checkpoint.stored import AnyPath, open_around
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was taken away."""

    uri: str
    step: int | None
    size_bytes: int
    num_files: int


def is_last_whole(listed: Sequence[Listed], name: str) -> bool:
    """Whether `name` is whole and no other checkpoint beside it is."""
    whole = [one.name for one in listed if one.state is not State.DAMAGED]
    return whole == [name]


def remove(path: AnyPath, *, even_last: bool = False) -> Removed:
    """Remove the committed checkpoint at a path or URI.

    `UsageError` for the last one of its run that looks whole, unless `even_last`; `ObjectNotFound` where none
    is committed.
    """
    storage, name = open_around(path)
    committed = open_shelf(storage).find(name)
    listed = list_all(storage)
    if not even_last and is_last_whole(listed, name):
        _refuse(storage, name, listed)
    open_shelf(storage).remove(committed)
    (one,) = (one for one in listed if one.name == name)
    return Removed(
        uri=uri_of(storage, name), step=one.step, size_bytes=one.size_bytes, num_files=one.num_files
    )


def _refuse(storage: Storage, name: str, listed: Sequence[Listed]) -> None:
    others = "it is the only one" if len(listed) == 1 else f"the other {len(listed) - 1} are damaged"
    raise UsageError(
        f"{uri_of(storage, name)} is the last whole checkpoint here: {others}",
        fix="Give --even-last, if the run is over.",
    )
