"""Realistic trace files of every dialect, from a seed: what readers are tested and timed with.

The mixture is that of a training run: each file is opened, read or written in several calls and closed,
between spans of the application. Invariant: a file's lines are a pure function of its `Writing`.
"""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_US = 1_727_387_307_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """One process's trace: so many events of one generation; several processes differ in `rank`."""

    generation: int = 3
    events: int = 1000
    rank: int = 0
    ranks_per_host: int = 8
    files: int = 50
    seed: int = 0

    @property
    def host(self) -> str:
        """Where the process ran."""
        return f"node{self.rank // self.ranks_per_host}"

    @property
    def pid(self) -> int:
        """A process id as systems give them; the first generation wrote the rank instead."""
        return self.rank if self.generation == 1 else 15_000 + self.rank


@dataclass(frozen=True, slots=True)
class Expected:
    """One event as a reader should tell it, whatever the dialect."""

    ts_us: int
    dur_us: int
    name: str
    cat: str
    path: str | None
    size_bytes: int | None
    offset: int | None
    ret: int | None
    step: int | None


def make_events(writing: Writing) -> Iterator[Expected]:
    """The events of one process in the order of time."""
    draw = random.Random((writing.seed << 20) + writing.rank)
    now_us, num_made = START_US + draw.randrange(1000), 0
    while num_made < writing.events:
        burst = list(_burst(writing, draw, now_us))
        yield from burst[: writing.events - num_made]
        num_made += len(burst)
        now_us = burst[-1].ts_us + burst[-1].dur_us + draw.randrange(50)


def _burst(writing: Writing, draw: random.Random, now_us: int) -> Iterator[Expected]:
    """A file's life: it is opened, moved to and fro, closed, and the application tells its step."""
    number = draw.randrange(writing.files)
    folder, verb = ("checkpoints", "write") if number % 10 == 0 else ("data/train", "read")
    path = f"/p/lustre2/someone/{folder}/rank{writing.rank}/img_{number:06d}_of_{writing.files}.npz"
    offset = 0
    calls = ["open64", *[verb] * draw.randrange(2, 8), "lseek64", "close"]
    for call in calls:
        dur_us = draw.randrange(1, 4000) if call == verb else draw.randrange(60)
        moved = draw.choice((4096, 65536, 262144, 1_048_576)) if call == verb else None
        ret = {"open64": 18, "close": 0, "lseek64": offset}.get(call, moved)
        yield Expected(now_us, dur_us, call, "POSIX", path, moved, None, ret, None)
        offset += moved or 0
        now_us += dur_us + draw.randrange(20)
    yield Expected(
        now_us, draw.randrange(9000), "NPZReader.compute", "reader", None, None, None, None, number
    )


def lines_of(writing: Writing) -> Iterator[str]:
    """The lines of one process's file, newlines included."""
    make = {1: _first_generation, 2: _second_generation, 3: _third_generation}[writing.generation]
    yield from make(writing)


def _first_generation(writing: Writing) -> Iterator[str]:
    yield "[\n"
    for number, event in enumerate(make_events(writing)):
        args: dict[str, Any] = {"hostname": writing.host}
        if event.step is not None:
            args["step"] = str(event.step)
        if event.path is not None:
            moved = (
                {"ret": str(event.ret), "count": str(event.ret)} if event.size_bytes else {"ret": event.ret}
            )
            args |= {**moved, "fname": event.path, "fd": 18}
        yield _line(
            id=str(number), name=event.name, cat=event.cat, pid=str(writing.pid), tid=str(2 * writing.pid),
            ts=str(event.ts_us), dur=str(event.dur_us), ph="X", args=args,
        )  # fmt: skip
    yield "]\n"


def _second_generation(writing: Writing) -> Iterator[str]:
    common = {"pid": writing.pid, "tid": writing.pid}
    known: dict[str, int] = {}
    yield "[\n"
    yield _line(id=1, name="HH", cat="dftracer", **common, ph="M", args={"name": writing.host, "value": 5692})
    for number, event in enumerate(make_events(writing), start=2):
        args: dict[str, Any] = {"hhash": 5692, "p_idx": -1, "level": 1}
        if event.step is not None:
            args["step"] = str(event.step)
        if event.path is not None:
            if event.path not in known:
                known[event.path] = 33_084 + len(known)
                named = {"name": event.path, "value": known[event.path]}
                yield _line(id=number, name="FH", cat="dftracer", **common, ph="M", args=named)
            args |= {"ret": event.ret, "fhash": known[event.path]}
            args |= {"count": event.ret, "fd": 18} if event.size_bytes else {}
        yield _line(
            id=number,
            name=event.name,
            cat=event.cat,
            **common,
            ts=event.ts_us,
            dur=event.dur_us,
            ph="X",
            args=args,
        )
    yield "]\n"


def _third_generation(writing: Writing) -> Iterator[str]:
    host_hash = f"{0x6882804A826580CD + writing.rank:016x}"
    common = {"pid": writing.pid, "tid": writing.pid}

    def metadata(name: str, text: str, value: str) -> str:
        args = {"hhash": host_hash, "name": text, "value": value}
        return _line(name=name, cat="dftracer", type=1, **common, ph=4, args=args)

    yield metadata("HH", writing.host, host_hash)
    yield metadata("CM", "time_metric", "US")
    yield metadata("PR", "process_name", f"Rank {writing.rank}")
    known: dict[str, str] = {}
    number, end_us = 0, START_US
    for number, event in enumerate(make_events(writing), start=1):
        end_us = event.ts_us + event.dur_us
        args: dict[str, Any] = {"hhash": host_hash}
        if event.step is not None:
            args["step"] = event.step
        if event.path is not None:
            if event.path not in known:
                known[event.path] = f"{0xF495035E926F164E ^ (len(known) * 0x9E3779B97F4A7C15) % 2**64:016x}"
                yield metadata("FH", event.path, known[event.path])
            if event.name == "open64":
                args |= {"flags": 524865, "mode": 438}
            elif event.size_bytes:
                args |= {"ret": event.ret, "count": event.ret}
            else:
                args["ret"] = event.ret
            args["fhash"] = known[event.path]
        kind = 3 if event.cat == "POSIX" else 6
        yield _line(
            id=number, name=event.name, cat=event.cat, type=kind, **common,
            ts=event.ts_us, dur=event.dur_us, ph=1, args=args,
        )  # fmt: skip
    closing = {"hhash": host_hash, "cfg": {"time_metric": "US"}, "num_events": number}
    yield _line(
        id=number + 1, name="end", cat="dftracer", type=1, **common, ts=end_us, dur=0, ph=1, args=closing
    )


def _line(**fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


def write_trace(folder: Path, writing: Writing, *, compressed: bool = True) -> Path:
    """One process's trace as a file of `folder`, named as its writer would."""
    text = "".join(lines_of(writing)).encode()
    name = f"trace-{writing.rank}-of-{writing.ranks_per_host}.pfw"
    path = folder / (f"{name}.gz" if compressed else name)
    path.write_bytes(gzip.compress(text, 6) if compressed else text)
    return path
