"""Planned calls as lines of a trace, in each of the three generations of DFTracer's format.

Place in the flow: between plan and write. Invariant: a generation is told by its lines alone (quoted numbers
and names; integers and hashes; integer phases), as files of the real writers are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.trace.synthesize.plan import PlannedCall

_STREAMS: Final = ("fread", "fwrite")
_LIBC_LAYER, _PYTHON_LAYER, _TRACER_LAYER = 3, 6, 1
_COMPLETE, _METADATA = 1, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Whose lines these are. Jobs of DLIO, which the first generation traced, gave the rank as process."""

    rank: int
    host: str
    generation: int

    @property
    def pid(self) -> int:
        """The process as its trace names it."""
        return self.rank if self.generation == 1 else 40_000 + self.rank

    def tid(self, thread: int) -> int:
        """The thread as the trace names it; unique on its host."""
        return 1_000_000 + 10_000 * self.rank + thread


def write_lines(calls: Iterable[PlannedCall], process: Process) -> Iterator[str]:
    """The lines between the brackets; only those of calls are events."""
    return _GENERATIONS[process.generation](calls, process)


def is_event(line: str) -> bool:
    """Metadata explains hashes, an event is a call."""
    return '"ph":"M"' not in line and '"ph":4' not in line


def _first_generation(calls: Iterable[PlannedCall], process: Process) -> Iterator[str]:
    host = json.dumps(process.host)
    for number, call in enumerate(calls):
        args = f'"hostname":{host}'
        if call.size_bytes is not None:
            args += f',"ret":"{call.size_bytes}","count":"{call.size_bytes}"'
        elif call.path is not None:
            args += ',"ret":0'
        if call.path is not None:
            args += f',"fname":{json.dumps(call.path)}'
        if call.step is not None:
            args += f',"epoch":"{call.epoch}","step":"{call.step}"'
        yield (
            f'{{"id":"{number}","name":"{call.name}","cat":"{call.cat}","pid":"{process.pid}",'
            f'"tid":"{process.tid(call.thread)}","ts":"{call.ts_us}","dur":"{call.dur_us}","ph":"X",'
            f'"args":{{{args}}}}}'
        )


@dataclass(slots=True)
class _Hashes:
    """Paths by the number or hash that stands for them, each explained once, before its first use."""

    make: Callable[[str, int], str]
    explain: Callable[[str, str], str]
    known: dict[str, str] = field(default_factory=dict)

    def of(self, text: str) -> tuple[str, str | None]:
        """The hash as JSON, and the line that explains it if nobody has seen it yet."""
        found = self.known.get(text)
        if found is not None:
            return found, None
        made = self.known[text] = self.make(text, len(self.known))
        return made, self.explain(text, made)


def _second_generation(calls: Iterable[PlannedCall], process: Process) -> Iterator[str]:
    head = f'"cat":"dftracer","pid":{process.pid},"tid":{process.tid(0)}'

    def explain(kind: str) -> Callable[[str, str], str]:
        return lambda text, made: (
            f'{{"id":0,"name":"{kind}",{head},"ph":"M","args":{{"name":{json.dumps(text)},"value":{made}}}}}'
        )

    host, line = _Hashes(lambda _, __: "5692", explain("HH")).of(process.host)
    assert line is not None
    yield line
    files = _Hashes(lambda _, position: str(position + 1), explain("FH"))
    for number, call in enumerate(calls, start=1):
        args = f'"hhash":{host},"p_idx":-1,"level":1'
        if call.size_bytes is not None:
            args += _moved(call)
        elif call.path is not None:
            args += ',"ret":0'
        if call.path is not None:
            fhash, explained = files.of(call.path)
            if explained:
                yield explained
            args += f',"fhash":{fhash}'
        if call.step is not None:
            args += f',"epoch":"{call.epoch}","step":"{call.step}"'
        yield (
            f'{{"id":{number},"name":"{call.name}","cat":"{call.cat}","pid":{process.pid},'
            f'"tid":{process.tid(call.thread)},"ts":{call.ts_us},"dur":{call.dur_us},"ph":"X","args":{{{args}}}}}'
        )


def _third_generation(calls: Iterable[PlannedCall], process: Process) -> Iterator[str]:
    head = f'"cat":"dftracer","type":{_TRACER_LAYER},"pid":{process.pid},"tid":{process.tid(0)}'
    host = f'"{xxhash.xxh3_64_hexdigest(process.host.encode())}"'

    def explain(kind: str) -> Callable[[str, str], str]:
        return lambda text, made: (
            f'{{"name":"{kind}",{head},"ph":{_METADATA},'
            f'"args":{{"hhash":{host},"name":{json.dumps(text)},"value":{made}}}}}'
        )

    yield explain("HH")(process.host, host)
    yield explain("CM")("time_metric", '"US"')
    yield explain("PR")("process_name", f'"Rank {process.rank}"')
    files = _Hashes(lambda text, _: f'"{xxhash.xxh3_64_hexdigest(text.encode())}"', explain("FH"))
    number = 0
    for number, call in enumerate(calls, start=1):
        args = f'"hhash":{host}'
        if call.size_bytes is not None:
            args += _moved(call)
        if call.path is not None:
            fhash, explained = files.of(call.path)
            if explained:
                yield explained
            args += f',"fhash":{fhash}'
        if call.step is not None:
            args += f',"epoch":{call.epoch},"step":{call.step}'
        layer = _LIBC_LAYER if call.cat in ("POSIX", "STDIO") else _PYTHON_LAYER
        yield (
            f'{{"id":{number},"name":"{call.name}","cat":"{call.cat}","type":{layer},"pid":{process.pid},'
            f'"tid":{process.tid(call.thread)},"ts":{call.ts_us},"dur":{call.dur_us},"ph":{_COMPLETE},'
            f'"args":{{{args}}}}}'
        )


def _moved(call: PlannedCall) -> str:
    """What the tracers say of a transfer: items for streams, bytes for all others."""
    items = f',"ret":{call.size_bytes},"count":{call.size_bytes}'
    return f'{items},"size":1' if call.name in _STREAMS else items


_GENERATIONS: Final = {1: _first_generation, 2: _second_generation, 3: _third_generation}
