"""Free space and identity of local file systems, and locks on their folders."""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.errors import OutOfSpace, UsageError
from penstock.storage.files.local_files import sync_folder
from penstock.storage.files.system_calls import require_writable
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

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
        require_writable(folder)
        total_bytes, _, free_bytes = shutil.disk_usage(folder)
        if not total_bytes:
            raise OutOfSpace(
                f"{what} cannot be written here: the file system has no room for files",
                uri=str(folder),
                fix="Name a folder in which you may write, on a disk or another storage system.",
            )
        raise OutOfSpace(
            f"{what} takes {format_bytes(size_bytes, at_least=True)}, but only {format_bytes(free_bytes)} "
            "are free",
            uri=str(folder),
            fix=f"Make room, or {fix}.",
        )


def find_room(folder: Path) -> int:
    """Return the bytes that can be written below a folder, existing or not: free space minus the reserve."""
    return shutil.disk_usage(nearest_folder(folder)).free * _RESERVE // (_RESERVE + 1)


def nearest_folder(path: Path) -> Path:
    """Return `path` or its nearest existing parent that this user can see."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def read_volume_id(folder: Path) -> str:
    """Return an identity of the file system of `folder`, the same on all hosts for a shared file system."""
    facts = os.statvfs(folder)
    return f"{facts.f_fsid}:{facts.f_blocks}"


@contextmanager
def locked_folder(folder: Path | None, *, alone: bool = True) -> Iterator[None]:
    """Keep other processes out of a folder while the block runs; if not `alone`, only those that write to it.

    Raises `UsageError` if a process has locked the folder. Otherwise creates it, if `alone`, and removes it
    at the end if it is still empty. The kernel releases the lock when this process ends, however it ends.
    Nothing is locked without a folder, or where the file system has no such locks (NFS, Lustre without
    `flock`).
    """
    with ExitStack() as opened:
        try:
            if folder is not None:
                missing = [each for each in (folder, *folder.parents) if alone and not os.path.lexists(each)]
                for each in reversed(missing):
                    each.mkdir(exist_ok=True)
                    sync_folder(each.parent)
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                opened.callback(os.close, descriptor)
                fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                for each in reversed(missing):
                    opened.callback(_remove_if_empty, each)
        except BlockingIOError as error:
            holders = _find_holders(os.fstat(descriptor).st_ino)
            if os.getpid() not in holders:  # a block of this process may be inside another
                raise UsageError(
                    f"{_describe_process(holders[0]) if holders else 'Another process'} is using this folder",
                    where=str(folder),
                    fix="Wait until it ends, or name another folder.",
                ) from error
        except OSError as error:  # also if the folder is missing, which its reader or writer reports
            logger.debug("%s cannot be locked: %s", folder, error)
        yield


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _find_holders(inode: int) -> list[int]:
    """Return the processes that have locked the file or folder, as far as the kernel shows them here."""
    lines: list[list[str]] = []
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    return [int(line[4]) for line in lines if line[1] == "FLOCK" and line[5].endswith(f":{inode}")]


def _describe_process(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
        return f"Process {pid} ({name.strip()})"
    except OSError:  # a fork has the same open folder, so the lock lasts until it ends, too
        return f"A child of process {pid}, which has ended,"
