"""Taking a checkpoint away, but not the last whole one of its run unless told so.

Invariant: a checkpoint loses its name in one step and durably before the first of its files goes, and another
one was read to its last byte before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.checkpoint.commit.catalog import AnyPath, open_catalog, open_parent, split_path
from penstock.checkpoint.formats.checkpoint_source import checkpoint_uri
from penstock.checkpoint.tools.inspection import Listed, State, list_all
from penstock.checkpoint.tools.verify import verify
from penstock.errors import UsageError
from penstock.progress import Progress, Silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was taken away, and which whole checkpoint stays: "" where nobody looked for one."""

    uri: str
    step: int | None
    size_bytes: int
    num_files: int
    stays: str


def whole_beside(listed: Sequence[Listed], name: str, is_whole: Callable[[str], bool]) -> str | None:
    """A checkpoint beside `name` that is whole; `is_whole` is asked for the newest first, while needed."""
    others = [one for one in listed if one.name != name and one.state is not State.DAMAGED]
    for one in sorted(others, key=lambda one: (one.step is not None, one.step or 0), reverse=True):
        if is_whole(one.name):
            return one.name
    return None


def remove(
    path: AnyPath, *, even_last: bool = False, verified: bool = True, progress: Progress | None = None
) -> Removed:
    """Remove the committed checkpoint at a path or URI.

    Another one of its run must be whole, which is verified to the last byte, or by a look at files and sizes
    without `verified`; else this is a `UsageError`, unless `even_last`. A checkpoint that looks damaged may
    always go. `ObjectNotFound` where none is committed.
    """
    storage, name = open_parent(path)
    committed = open_catalog(storage).find(name)
    listed = list_all(storage)
    (one,) = (one for one in listed if one.name == name)
    stays = ""
    if not even_last and one.state is not State.DAMAGED:
        stays = _require_another(path, listed, name, verified=verified, progress=progress or Silent())
    open_catalog(storage).remove(committed)
    return Removed(
        uri=checkpoint_uri(storage, name),
        step=one.step,
        size_bytes=one.size_bytes,
        num_files=one.num_files,
        stays=stays,
    )


def _require_another(
    path: AnyPath, listed: Sequence[Listed], name: str, *, verified: bool, progress: Progress
) -> str:
    def is_whole(other: str) -> bool:
        return not verified or verify(_beside(path, other), progress).is_whole

    found = whole_beside(listed, name, is_whole)
    if found is None:
        others = "it is the only one" if len(listed) == 1 else "no other one beside it is whole"
        raise UsageError(
            f"{name} is the last whole checkpoint here: {others}",
            where=str(path),
            fix="Give --even-last, if the run is over.",
        )
    return found


def _beside(path: AnyPath, other: str) -> str:
    """The path of another checkpoint in the same folder, options and all."""
    above, _ = split_path(path)
    root, question, query = above.partition("?")
    return f"{root.rstrip('/')}/{other}{question}{query}"
