"""Whose the files of `strace -ff` are: one for each thread, named after it, none of which says its process.

The call that made a thread is in its maker's file, so the files beside it are searched for such calls, once
for all of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

from penstock.trace.reading.chunks import read_pieces, split_chunks

_FILE_NAME: Final = re.compile(r"(.+\.)(\d{1,10})(?:\.gz)?")
_MADE_THREAD: Final = re.compile(rb"clone3?\(.*CLONE_THREAD.*= (\d{1,10})\b")
_THREADLESS_LINE: Final = re.compile(rb"\s*\d{9,11}\.\d{6}\s")


HOST_MARK: Final = "@"
"""In names of our own recordings, as `trace@node7.strace.4711`: a listing itself does not name its host."""
_HOST: Final = re.compile(rf".*{HOST_MARK}([\w.-]+)\.strace(?:\.\d+)?(?:\.gz)?")


def find_host(path: Path) -> str | None:
    """The host on which a file was recorded, if its name has it."""
    match = _HOST.fullmatch(path.name)
    return match[1] if match else None


@dataclass(frozen=True, slots=True)
class Task:
    """A thread and its process."""

    tid: int
    pid: int


UNKNOWN_TASK: Final = Task(0, 0)
"""Whose the lines of a listing without numbers are, if its name has none either."""

_searching: Final = Lock()


def find_task(path: Path, head: bytes) -> Task:
    """The thread whose listing this file is, by its name; unknown if each line says whose it is."""
    match = _FILE_NAME.fullmatch(path.name)
    if match is None or _THREADLESS_LINE.match(head) is None:
        return UNKNOWN_TASK
    # Only one of the threads that read files searches; a file that appears meanwhile makes it search again.
    with _searching:
        makers = _find_makers(path.parent, match[1], path.parent.stat().st_mtime_ns)
    tid = pid = int(match[2])
    seen = {pid}
    while makers.get(pid, pid) not in seen:
        pid = makers[pid]
        seen.add(pid)
    return Task(tid, pid)


@lru_cache(maxsize=8)
def _find_makers(folder: Path, prefix: str, _mtime_ns: int) -> Mapping[int, int]:
    """Each thread of the files with this prefix, and the thread that made it."""
    makers: dict[int, int] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None and match[1] == prefix and path.is_file():
            makers |= dict.fromkeys(_find_threads(path), int(match[2]))
    return makers


def _find_threads(path: Path) -> list[int]:
    """The threads that a listing shows being made."""
    made: list[int] = []
    for chunk in split_chunks(read_pieces(path, lambda _: None, lambda _: None)):
        content = chunk.content[chunk.start : chunk.stop]
        if b"CLONE_THREAD" in content:
            made += map(int, _MADE_THREAD.findall(content))
    return made
