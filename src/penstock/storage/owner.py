"""Who a lease belongs to: one process, told from any other so that a dead one's leavings can be collected.

Invariant: a process is called gone only where this one can know it, on the same running kernel and in the
same process numbering (containers have their own); everywhere else the answer is that nobody knows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process: its `pid` says who, `kernel` and `numbering` where that number means something."""

    host: str
    pid: int
    started: str
    """The process's start in ticks since the boot: numbers are used again."""
    kernel: str
    numbering: str

    def is_gone(self, *, asked_by: Owner) -> bool | None:
        """Whether this process has ended; None where `asked_by` cannot know."""
        if not self.kernel or (self.kernel, self.numbering) != (asked_by.kernel, asked_by.numbering):
            return None
        return _start_of(self.pid) != self.started


def this_process() -> Owner:
    """The calling process. Where the system does not tell kernels apart, nobody can know that it is gone."""
    pid = os.getpid()
    try:
        kernel = _BOOT_ID.read_text().strip()
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        kernel = numbering = ""
    return Owner(
        host=gethostname(), pid=pid, started=_start_of(pid) or "", kernel=kernel, numbering=numbering
    )


def _start_of(pid: int) -> str | None:
    """When the process of this number started; None if there is none, or only its remains (a zombie)."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = line.rpartition(")")[2].split()
    return None if state in ("Z", "X") else fields[18]
