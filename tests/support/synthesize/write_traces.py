"""Writes synthetic traces: planned calls -> lines of a generation -> damage -> files, and their runs.yaml.

One folder per run, one file per rank. Invariants: the same description gives the same bytes; a generation is
recognizable by its lines alone (quoted numbers and names; integers and hashes; integer phases), as files of
the real writers are; a damage touches only what it names.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash
import yaml
from tests.support.synthesize.planned_calls import PlannedCall, plan_rank
from tests.support.synthesize.trace_description import FileDamage, Run, SynthesisSpec

from penstock.errors import StorageError, UsageError
from penstock.progress import Progress

_STREAMS: Final = ("fread", "fwrite")
_LIBC_LAYER, _PYTHON_LAYER, _TRACER_LAYER = 3, 6, 1
_COMPLETE, _METADATA = 1, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of some lines. In the first generation, traces of DLIO's jobs, its ID is the rank."""

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


def write_lines(calls: Iterable[PlannedCall], process: RankProcess) -> Iterator[str]:
    """The lines between the brackets; only those of calls are events."""
    return _GENERATIONS[process.generation](calls, process)


def is_event(line: str) -> bool:
    """Whether the line is a call rather than metadata."""
    return '"ph":"M"' not in line and '"ph":4' not in line


def _first_generation(calls: Iterable[PlannedCall], process: RankProcess) -> Iterator[str]:
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
    """Hashes of paths: numbers or hash values, each explained once, by a line before its first use."""

    make: Callable[[str, int], str]
    explain: Callable[[str, str], str]
    known: dict[str, str] = field(default_factory=dict)

    def of(self, text: str) -> tuple[str, str | None]:
        """The hash as JSON, and at its first use the line that explains it."""
        known = self.known.get(text)
        if known is not None:
            return known, None
        made = self.known[text] = self.make(text, len(self.known))
        return made, self.explain(text, made)


def _second_generation(calls: Iterable[PlannedCall], process: RankProcess) -> Iterator[str]:
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


def _third_generation(calls: Iterable[PlannedCall], process: RankProcess) -> Iterator[str]:
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
    """The arguments of a transfer: items for streams, bytes for all others."""
    items = f',"ret":{call.size_bytes},"count":{call.size_bytes}'
    return f'{items},"size":1' if call.name in _STREAMS else items


_GENERATIONS: Final = {1: _first_generation, 2: _second_generation, 3: _third_generation}


_PATH: Final = re.compile(rb'"(fname|fhash)":("[^"]*"|\d+)')


def damage_lines(lines: Sequence[bytes], damages: Sequence[FileDamage]) -> list[bytes]:
    """Apply the damages that concern single lines."""
    damaged = list(lines)
    for damage in damages:
        if damage.kind in _ON_A_LINE and damaged:
            damaged[damage.line] = _ON_A_LINE[damage.kind](damaged[damage.line])
    return damaged


def pack(lines: Sequence[bytes], damages: Sequence[FileDamage]) -> bytes:
    """The whole file: brackets, lines, compression, and the damages of those."""
    kinds = {damage.kind for damage in damages}
    if "empty_file" in kinds:
        return b""
    opening = [] if "no_opening" in kinds else [b"["]
    closing = [] if "no_closing" in kinds else [b"]"]
    rows = [*opening, *lines, *closing]
    if "plain_text" in kinds:
        return b"\n".join(rows) + b"\n"
    middle = len(rows) // 2 if "two_members" in kinds else len(rows)
    packed = b"".join(
        gzip.compress(b"\n".join(part) + b"\n", compresslevel=1, mtime=0)
        for part in (rows[:middle], rows[middle:])
        if part
    )
    return packed[: -max(16, len(packed) // 10)] if "truncated_gzip" in kinds else packed


def _with_path(raw: bytes) -> Callable[[bytes], bytes]:
    def spoil(line: bytes) -> bytes:
        spoilt = _PATH.sub(lambda _: b'"fname":"' + raw + b'"', line, count=1)
        return spoilt if spoilt != line else line.replace(b'"args":{', b'"args":{"fname":"' + raw + b'",', 1)

    return spoil


_ON_A_LINE: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "control_characters": _with_path(b"\x01\x02\x07\x1b\x0b"),
    "bad_utf8": _with_path(b"/data/\xff\xfe\xc3"),
    "cut_line": lambda line: line[: len(line) // 2],
    "garbage_line": lambda _: b"@@ not a line of a trace @@",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesizedTraces:
    """The numbers of events and files by run, and the path of the comparison's description, if any."""

    folder: Path
    num_events: dict[str, int]
    num_files: dict[str, int]
    runs_yaml: Path | None


def synthesize(
    description: SynthesisSpec, folder: Path, *, progress: Progress | None = None
) -> SynthesizedTraces:
    """Write the traces of all runs below `folder`, which must be new or empty."""
    progress = progress or Progress()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty", fix="Name a new folder; nothing is overwritten.")
        return _write_all(description, folder, progress)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"Cannot write traces: {error}", uri=str(folder), errno=error.errno) from error


def _write_all(description: SynthesisSpec, folder: Path, progress: Progress) -> SynthesizedTraces:
    num_events, num_files = {}, {}
    progress.begin("synthesizing ranks", sum(run.ranks for run in description.runs.values()))
    for name, run in description.runs.items():
        place = folder / name
        place.mkdir()
        num_events[name] = 0
        for rank in range(run.ranks):
            content, events = rank_file(description, run, rank)
            suffix = (
                ".pfw" if any(d.kind == "plain_text" and d.rank == rank for d in run.damage) else ".pfw.gz"
            )
            (place / f"trace-{rank}-of-{run.world or run.ranks}{suffix}").write_bytes(content)
            num_events[name] += events
            progress.advance(1)
        num_files[name] = run.ranks
    runs_yaml = None
    if description.compare:
        runs_yaml = folder / "runs.yaml"
        runs_yaml.write_text(_comparison(description), encoding="utf-8")
    return SynthesizedTraces(folder=folder, num_events=num_events, num_files=num_files, runs_yaml=runs_yaml)


def rank_file(description: SynthesisSpec, run: Run, rank: int) -> tuple[bytes, int]:
    """The bytes of one rank's trace file, and how many events were put in before any damage."""
    damages = [damage for damage in run.damage if damage.rank == rank]
    process = RankProcess(rank=rank, host=run.host_of(rank), generation=description.generation)
    lines = list(write_lines(plan_rank(description, run, rank), process))
    where = [number for number, line in enumerate(lines) if is_event(line)]
    raw = [line.encode("utf-8") for line in lines]
    for number, line in zip(where, damage_lines([raw[each] for each in where], damages), strict=True):
        raw[number] = line
    return pack(raw, damages), len(where)


def _comparison(description: SynthesisSpec) -> str:
    tree = {
        "runs": {name: f"{name}/*.pfw*" for name in description.runs},
        **description.compare,
    }
    return yaml.safe_dump(tree, sort_keys=False)
