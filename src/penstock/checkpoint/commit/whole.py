"""Whether the files that lie there are those that ranks say they wrote: checked before the commit.

Pure. Invariant: a file that is missing, has another size or that nobody claims is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.errors import ShortTransfer, StorageError

_NUM_NAMED: Final = 3


def require_whole(found: Mapping[str, int], expected: Mapping[str, int], uri: str) -> None:
    """Raise unless `found` (name to bytes) is exactly what is `expected`."""
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise StorageError(
            f"{len(missing)} of {len(expected)} files of this checkpoint are not there, as rank 0 sees it: "
            f"{_named(missing)}",
            uri=uri,
            fix="All ranks must write to the same storage: give a path on a shared file system.",
        )
    for name, size_bytes in sorted(expected.items()):
        if found[name] != size_bytes:
            raise ShortTransfer(
                f"{name} has {found[name]} bytes, but {size_bytes} were written",
                uri=f"{uri}/{name}",
                expected_bytes=size_bytes,
                actual_bytes=found[name],
                fix="Something else wrote or cut this file, or the storage lost data: save again.",
            )
    strangers = sorted(found.keys() - expected.keys())
    if strangers:
        raise StorageError(
            f"{len(strangers)} files lie in this checkpoint that no rank wrote: {_named(strangers)}",
            uri=uri,
            fix="Find out what else writes there, and save again.",
        )


def _named(names: list[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
