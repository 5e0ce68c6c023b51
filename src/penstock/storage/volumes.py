"""Free space and identity of local file systems."""

import os
import shutil
from pathlib import Path

from penstock.errors import OutOfSpace
from penstock.units import format_bytes

_RESERVE = 20
"""One byte stays free for this many bytes written, for folders, journals and other users."""


def require_free_space(root: Path | None, size_bytes: int, *, what: str, fix: str) -> None:
    """Raise `OutOfSpace` unless `size_bytes` fit below `root`, which need not exist.

    `what` begins the message. If `root` is None, because the storage has no local folder (`find_local_root`),
    nothing is checked: services do not report their free space.
    """
    if root is None:
        return
    folder = nearest_folder(root)
    if find_room(folder) < size_bytes:
        free_bytes = shutil.disk_usage(folder).free
        raise OutOfSpace(
            f"{what} takes {format_bytes(size_bytes)}, but only {format_bytes(free_bytes)} are free",
            uri=str(folder),
            fix=f"Make room, or {fix}.",
        )


def find_room(folder: Path) -> int:
    """Return the bytes that can be written below a folder, existing or not: free space minus the reserve."""
    return shutil.disk_usage(nearest_folder(folder)).free * _RESERVE // (_RESERVE + 1)


def nearest_folder(path: Path) -> Path:
    """Return `path` or its nearest existing parent, without folders that this user may not look into."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def read_volume_id(folder: Path) -> str:
    """Return an identity of the file system of `folder`, the same on all hosts for a shared file system."""
    facts = os.statvfs(folder)
    return f"{facts.f_fsid}:{facts.f_blocks}"
