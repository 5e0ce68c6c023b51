"""Reads the kernel's figures of processes, and leaves out of them what measuring itself has read."""

import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

OWN_THREADS: Final = "penstock-"
"""The names of threads that measure begin so."""
_WHOLE: Final = 1 << 20
_MESSENGERS: Final = re.compile(r"^QueueFeeder|\(_serve\)$")


class OwnReads:
    """What measuring has read in this process; of all its threads, so exact to a read in a million."""

    def __init__(self) -> None:
        self.num_reads = self.read_bytes = 0

    def add(self, read_bytes: int) -> None:
        """One more read."""
        self.num_reads += 1
        self.read_bytes += read_bytes

    def read(self, path: str | Path) -> bytes:
        """A file of /proc or of a probe; empty where it is gone."""
        content = b""
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                while part := os.read(file, _WHOLE):
                    content += part
                    self.add(len(part))
                self.add(0)
            finally:
                os.close(file)
        return content

    def io_of(self, pid: int) -> dict[str, int]:
        """The kernel's figures of what a process has read, but for measuring; empty if it doesn't tell."""
        own_bytes, own_reads = self.read_bytes, self.num_reads
        found = _parse(self.read(f"/proc/{pid}/io"))
        if found and pid == os.getpid():
            found["rchar"] -= own_bytes
            found["syscr"] -= own_reads
        return found

    def io_without(self, pid: int, threads: Iterable[int]) -> dict[str, int]:
        """The same without what these of its threads have read."""
        found = self.io_of(pid)
        for thread in threads if found else ():
            its = _parse(self.read(f"/proc/{pid}/task/{thread}/io"))
            found = {name: value - its.get(name, 0) for name, value in found.items()}
        return found


def find_messengers() -> list[int]:
    """The threads of this process in which `multiprocessing` sends batches and hands over their memory."""
    return [one.native_id or 0 for one in threading.enumerate() if _MESSENGERS.search(one.name)]


def _parse(content: bytes) -> dict[str, int]:
    pairs = (line.partition(": ") for line in content.decode().splitlines())
    return {name: int(value) for name, _, value in pairs}
