"""What this process may take, as its kernel says: under the same names for whoever tells or judges them."""

from __future__ import annotations

import resource
from typing import Final

OPEN_FILES: Final = "open files"
PROCESSES: Final = "processes"
LOCKED_BYTES: Final = "locked bytes"
BYTES_OF_A_FILE: Final = "bytes of a file"

_KINDS: Final = {
    OPEN_FILES: resource.RLIMIT_NOFILE,
    PROCESSES: resource.RLIMIT_NPROC,
    LOCKED_BYTES: resource.RLIMIT_MEMLOCK,
    BYTES_OF_A_FILE: resource.RLIMIT_FSIZE,
}


def soft_limits() -> dict[str, int | None]:
    """The limits that hold now; None is no limit."""
    soft = {name: resource.getrlimit(kind)[0] for name, kind in _KINDS.items()}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}
