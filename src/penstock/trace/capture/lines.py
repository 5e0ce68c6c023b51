"""Recorded events as lines of a trace: pure, from tuples to bytes.

One line of JSON an event, in the third generation of DFTracer's format; files and hosts are named once a
process, in lines of their own, and by hash after that. Invariant: whatever a path holds, a line is one line
of valid JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import xxhash

COMPLETE: Final = 1
METADATA: Final = 4


class Layer(IntEnum):
    """Which part of a process an event belongs to, as the format numbers them."""

    TRACER = 1
    LIBC_IO = 3
    PYTHON = 6


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What all events of one sort share. Each is itself alone: finding it in a table costs nothing."""

    name: str
    cat: str
    layer: Layer


Recorded = tuple[Kind, int, int, str | None, int | None, int | None, int | None, Mapping[str, Any] | None]
"""One event, as it is recorded: its kind, when it began and ended in nanoseconds of the monotonic clock, its
path, offset, count and return value, and what else is to be said. A plain tuple, because one is made for
every event."""


@dataclass(slots=True)
class LineWriter:
    """Makes one process's lines. `epoch_ns` is what the monotonic clock lacks to be the time since 1970."""

    host: str
    pid: int
    epoch_ns: int
    num_events: int = 0
    _files: dict[str, str] = field(default_factory=dict)
    _heads: dict[Kind, str] = field(default_factory=dict)

    def opening(self, *, rank: int | None) -> bytes:
        """What names this process: its host, its unit of time, its rank."""
        host = self._hash_of_host()
        named = [
            self._metadata("HH", {"name": self.host, "value": host}),
            self._metadata("CM", {"name": "time_metric", "value": "US"}),
        ]
        if rank is not None:
            named.append(self._metadata("PR", {"name": "rank", "value": rank}))
            named.append(self._metadata("process_name", {"name": "process_name", "value": f"Rank {rank}"}))
        return b"".join(named)

    def events(self, thread: int, recorded: Iterable[Recorded]) -> bytes:
        """The lines of what one thread recorded."""
        lines: list[str] = []
        files, heads, epoch_ns = self._files, self._heads, self.epoch_ns
        number, tail = self.num_events, f'"ph":{COMPLETE},"args":{{"hhash":"{self._hash_of_host()}"'
        for kind, began_ns, ended_ns, path, offset, count, ret, others in recorded:
            args = "" if path is None else files.get(path) or self._name_file(path, lines)
            if ret is not None:
                args += f',"ret":{ret}'
            if offset is not None:
                args += f',"offset":{offset}'
            if count is not None:
                args += f',"count":{count}'
            if others:
                args += "," + json.dumps(others, default=str)[1:-1]
            began_us = (began_ns + epoch_ns) // 1000
            number += 1
            lines.append(
                f'{{"id":{number},{heads.get(kind) or self._head(kind)},"tid":{thread},"ts":{began_us},'
                f'"dur":{(ended_ns + epoch_ns) // 1000 - began_us},{tail}{args}}}}}\n'
            )
        self.num_events = number
        return "".join(lines).encode()

    def ending(self, at_ns: int) -> bytes:
        """The last line: how many events came before it, for whoever wants to know that all are there."""
        at_us = (at_ns + self.epoch_ns) // 1000
        return (
            f'{{"id":{self.num_events + 1},"name":"end","cat":"dftracer","type":{Layer.TRACER:d},'
            f'"pid":{self.pid},"tid":{self.pid},"ts":{at_us},"dur":0,"ph":{COMPLETE},'
            f'"args":{{"hhash":"{self._hash_of_host()}","num_events":{self.num_events}}}}}\n'
        ).encode()

    def _hash_of_host(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.host.encode())

    def _head(self, kind: Kind) -> str:
        """What all lines of a kind have in common; made once."""
        name, cat = json.dumps(kind.name), json.dumps(kind.cat)
        head = f'"name":{name},"cat":{cat},"type":{kind.layer:d},"pid":{self.pid}'
        self._heads[kind] = head
        return head

    def _name_file(self, path: str, lines: list[str]) -> str:
        """The argument that names a file, after a line that says what it stands for; made once."""
        value = xxhash.xxh3_64_hexdigest(path.encode(errors="surrogateescape"))
        lines.append(self._metadata("FH", {"name": path, "value": value}).decode())
        self._files[path] = f',"fhash":"{value}"'
        return self._files[path]

    def _metadata(self, name: str, args: Mapping[str, Any]) -> bytes:
        line = {
            "name": name,
            "cat": "dftracer",
            "type": int(Layer.TRACER),
            "pid": self.pid,
            "tid": self.pid,
            "ph": METADATA,
            "args": {"hhash": self._hash_of_host(), **args},
        }
        return (json.dumps(line, separators=(",", ":")) + "\n").encode()
