"""Names for hashes that a DFTracer file leaves unexplained, from the files beside it.

A forked worker writes a file of its own and does not repeat what its parent's file has explained. Hashes of
16 digits are the same in every process, so a name that all files of the folder agree on is the hash's name.
Shorter hashes, as early versions wrote them, are numbers of one process and mean nothing elsewhere.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Final

from penstock.trace.reading.chunks import read_pieces, split_chunks
from penstock.trace.reading.json_lines import HASH_KINDS

_GLOBAL_HASH: Final = re.compile(r"[0-9a-f]{16}")
_searching: Final = Lock()

NamedHash = tuple[str, str]
"""The argument that has the hash (`fhash`, `hhash`), and the hash."""


def find_name_in_siblings(path: Path, kind: str, value: str) -> str | None:
    """The name that files in the folder of `path` give a hash; None if none does, or two disagree."""
    if _GLOBAL_HASH.fullmatch(value) is None:
        return None
    # Only one of the threads that read files searches; a file that appears meanwhile makes it search again.
    with _searching:
        names = _find_names(path.parent, path.parent.stat().st_mtime_ns)
    return names.get((kind, value))


@lru_cache(maxsize=8)
def _find_names(folder: Path, _mtime_ns: int) -> Mapping[NamedHash, str]:
    """The names of all hashes that the folder's files explain, except where they disagree."""
    names: dict[NamedHash, str] = {}
    disputed: set[NamedHash] = set()
    for path in (*sorted(folder.glob("*.pfw")), *sorted(folder.glob("*.pfw.gz"))):
        for named, name in _explanations(path):
            if names.setdefault(named, name) != name:
                disputed.add(named)
    return {named: name for named, name in names.items() if named not in disputed}


def _explanations(path: Path) -> Iterator[tuple[NamedHash, str]]:
    """The hashes of 16 digits that a file explains, with their names."""
    for chunk in split_chunks(read_pieces(path, lambda _: None, lambda _: None)):
        for mark in (b'"FH"', b'"HH"'):
            found = chunk.content.find(mark, chunk.start, chunk.stop)
            while found >= 0:
                start = chunk.content.rfind(b"\n", chunk.start, found) + 1 or chunk.start
                stop = chunk.content.index(b"\n", found)
                yield from _explanation(chunk.content[start:stop])
                found = chunk.content.find(mark, stop, chunk.stop)


def _explanation(line: bytes) -> Iterator[tuple[NamedHash, str]]:
    """What a line explains; nothing if it is damaged, or only mentions such a name."""
    try:
        document = json.loads(line.strip(b" \t\r\n,[]"))
        kind, arguments = HASH_KINDS[document["name"]], document["args"]
        name, value = arguments["name"], str(arguments["value"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    if isinstance(name, str) and _GLOBAL_HASH.fullmatch(value):
        yield (kind, value), name.encode(errors="backslashreplace").decode()
