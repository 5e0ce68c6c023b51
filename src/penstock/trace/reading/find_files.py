"""The trace files that names, globs and folders stand for.

In a folder, files count by their names. JSON and text may be anything, so such a file counts only if its
first bytes are those of a trace.
"""

import glob
import logging
import os
import re
import stat
import zlib
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

from penstock.errors import UsageError
from penstock.trace.reading.chunks import COUNT_SUFFIX, explain_unreadable
from penstock.trace.reading.content_guess import RECORDER, UTF8_MARK, is_of_recorder
from penstock.trace.reading.trace_file import Dialect, detect_dialect

_NAMED: Final = re.compile(r".*\.(?:pfw(?:\.gz)?|strace(?:\.[0-9].*)?|darshan)", re.DOTALL)
"""Tracers' files, and strace's of whole programs and of single threads."""
_HEAD_BYTES: Final = 1 << 16
_EXAMINED: Final = re.compile(r".*\.(?:json|txt)(?:\.gz)?", re.DOTALL)
_EVENT: Final = re.compile(rb'"ph"\s*:\s*"?[A-Za-z0-9]"?\s*[,}]')
EXPORT_HEAD: Final = '{"displayTimeUnit":"ms","traceEvents":[\n'
"""How our own exports begin: their events are those of other files, which would count twice."""


def find_trace_files(patterns: Sequence[str]) -> list[Path]:
    """The files that names, globs and folders match, each once, in the order of the patterns."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        try:
            paths.update(dict.fromkeys(_find_matches(pattern)))
        except OSError as error:
            raise explain_unreadable(error, Path(pattern)) from error
    return list(paths)


def _find_matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    fix = "Name trace files, a folder of them, a quoted glob, or an event table."
    if path.is_dir():
        traces, left_out = _find_in_folder(path)
        if not traces:
            raise UsageError(_explain_empty(path, left_out), where=pattern, fix=fix)
        if left_out:
            logger.warning("%s: left out, because they are no traces: %s", path, name_some(left_out))
        return traces
    # Counts beside unfinished traces are no traces.
    matches = (
        [path]
        if path.exists()
        else [
            match
            for match in map(Path, sorted(glob.glob(pattern, recursive=True)))  # noqa: PTH207 - absolute globs, too
            if not match.name.endswith(COUNT_SUFFIX) and not match.is_dir()
        ]
    )
    for match in matches:
        # A pipe would be waited for, and cannot be read twice.
        if not stat.S_ISREG(match.stat().st_mode):
            raise UsageError(
                "Only regular files are traces", where=str(match), fix="Write the trace to a file first."
            )
    if not matches:
        raise UsageError("No such file", where=pattern, fix=fix)
    return matches


def _find_in_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """The traces below a folder, in order, and the files of JSON or text that turned out to be none.

    OSError if there is no trace, and a folder that cannot be read; beside traces, such a one is left out.
    """
    traces: list[Path] = []
    left_out: list[Path] = []
    closed: list[OSError] = []
    for parent, _, names in os.walk(folder, onerror=closed.append):
        for name in names:
            is_named = _NAMED.fullmatch(name)
            if not (is_named or _EXAMINED.fullmatch(name)):
                continue
            path = Path(parent, name)
            if path.is_file():
                (traces if is_named or _begins_as_trace(path) else left_out).append(path)
    if closed and not traces:
        raise closed[0]
    for error in closed:
        logger.warning("%s: left out, because it cannot be read: %s", error.filename, error.strerror)
    order = attrgetter("parts")
    return sorted(traces, key=order), sorted(left_out, key=order)


def _explain_empty(folder: Path, left_out: Sequence[Path]) -> str:
    """Why there is no trace in a folder, as far as its files tell."""
    if any(is_of_recorder(name) for _, _, names in os.walk(folder) for name in names):
        return f"This folder has {RECORDER}"
    if left_out:
        return f"No trace files in this folder; {name_some(left_out)} hold no events of a trace"
    return "No trace files in this folder"


def name_some(paths: Sequence[Path]) -> str:
    """The first names of several files, and how many more there are."""
    names = ", ".join(path.name for path in paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names


def _begins_as_trace(path: Path) -> bool:
    head = _read_head(path)
    if _is_export(head):
        return False
    dialect = detect_dialect(head)
    if dialect in (Dialect.STRACE, Dialect.DARSHAN):
        return True
    is_json = ".json" in path.suffixes[-2:]
    return is_json and (b'"traceEvents"' in head or _EVENT.search(head) is not None)


def is_export(path: Path) -> bool:
    """Whether `penstock trace export` made a file."""
    return _is_export(_read_head(path))


def _is_export(head: bytes) -> bool:
    return head.startswith(EXPORT_HEAD.encode())


def _read_head(path: Path) -> bytes:
    """The first bytes of a file, decompressed; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except (OSError, zlib.error):
        return b""
    return head.removeprefix(UTF8_MARK)


logger = logging.getLogger(__name__)
