"""Flush daemons that tests start: found by the cache in their command line, and ended by their numbers.

Invariant: when the block of `ending_daemons` is left, no daemon of a cache below its root lives.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DAEMON = b"penstock.checkpoint.levels.flush import main"
LIMIT_S = 120.0


def daemons_below(root: Path) -> list[int]:
    """The daemons of all caches below a folder, those included that have only just been started."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                line = (process / "cmdline").read_bytes()
                if DAEMON in line and os.fsencode(root) in line:
                    found.append(int(process.name))
    return found


@contextmanager
def ending_daemons(root: Path) -> Iterator[None]:
    """Kill what daemons are left below `root` when the block ends, however it ends."""
    try:
        yield
    finally:
        while left := daemons_below(root):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Return once it is so; AssertionError names `what` after so long."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, f"timed out after {limit_s:g} s, before {what}"
        time.sleep(0.02)
