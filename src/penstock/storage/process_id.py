"""The identity of a process, unique even after its end, after a reboot and on other machines.

Leases, presence files and run records contain it, so that what a dead process left behind can be removed.
Invariant: a process counts as ended only if the observer can know it, on the same running kernel and in the
same PID namespace (containers have their own); in all other cases, the answer is None.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from socket import gethostname

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process; `kernel` and `numbering` tell where its PID is valid. Lease files use these field names."""

    host: str
    pid: int
    started: str
    """The time when the process started, in ticks since boot, because PIDs are reused."""
    kernel: str
    """The boot ID; empty if the system has none."""
    numbering: str
    """The PID namespace, as named in /proc."""

    @classmethod
    def of_lease(cls, text: bytes | bytearray) -> ProcessId | None:
        """Return the owner named in a lease, or None if the lease cannot be parsed."""
        try:
            return cls(**json.loads(bytes(text))["owner"])
        except (ValueError, TypeError, KeyError):
            return None

    def has_ended(self, *, observer: ProcessId) -> bool | None:
        """Return True if this process has ended, or None if `observer` cannot know."""
        if not self.kernel or (self.kernel, self.numbering) != (observer.kernel, observer.numbering):
            return None
        return _read_start_ticks(self.pid) != self.started


def current_process() -> ProcessId:
    """Return the calling process. Without boot IDs, no other process can determine that it has ended."""
    return _identify(os.getpid(), _BOOT_ID)


def name_host() -> str:
    """Return an ID shared by all processes that can connect to each other over Unix sockets.

    They have one kernel and one network namespace. Empty if the system provides none.
    """
    try:
        return f"{current_process().kernel} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return ""


@lru_cache(maxsize=1)
def _identify(pid: int, boot_id: Path) -> ProcessId:
    # Cached by PID, because a forked child has the parent's cache but a different identity.
    try:
        kernel = boot_id.read_text().strip()
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        kernel = numbering = ""
    return ProcessId(
        host=gethostname(),
        pid=pid,
        started=_read_start_ticks(pid) or "",
        kernel=kernel,
        numbering=numbering,
    )


def pid_exists(pid: int) -> bool:
    """Return True if a process with this PID runs in this PID namespace."""
    return _read_start_ticks(pid) is not None


def _read_start_ticks(pid: int) -> str | None:
    """Return the time at which the process with this PID started, or None if it is gone or a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, the program's name in parentheses, may contain spaces and parentheses.
    state, *fields = line.rpartition(")")[2].split()
    return None if state in ("Z", "X") else fields[18]
