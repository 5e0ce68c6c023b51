"""Events of described traces as tables in memory, without files between: for tests of what asks events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pyarrow as pa
from tests.support.synthesize import SynthesisSpec
from tests.support.synthesize.planned_calls import plan_rank
from tests.support.synthesize.write_traces import RankProcess

from penstock.trace.event_schema import SCHEMA, canonical

_MOVING = ("read", "write", "pread", "pwrite", "readv", "writev", "fread", "fwrite")


def described_events(description: SynthesisSpec, names: Sequence[str] = ()) -> pa.Table:
    """What a reader should make of the traces of the runs `names` (default: all), damage left out."""
    rows = [
        row for name in names or description.runs for row in _rows(description, name, description.generation)
    ]
    return events_table(rows)


def events_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Events of the waist's shape, in the order of time, from what matters of them; the rest is filled in."""
    filled = sorted(map(_filled, rows), key=itemgetter("ts_us"))
    return pa.Table.from_pylist(filled, schema=SCHEMA)


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    name = row.get("name", "read")
    ts_us, dur_us = row.get("ts_us", 0), row.get("dur_us", 0)
    filled = {
        "op": canonical(name), "name": name, "cat": "POSIX", "pid": 1, "tid": 1, "args": "{}", "run": "run",
        "file": "trace-0-of-1.pfw", **row, "ts_us": ts_us, "dur_us": dur_us, "end_us": ts_us + dur_us,
    }  # fmt: skip
    return {name: filled.get(name) for name in SCHEMA.names}


def _rows(description: SynthesisSpec, name: str, generation: int) -> Iterator[dict[str, Any]]:
    run = description.runs[name]
    for rank in range(run.ranks):
        process = RankProcess(rank=rank, host=run.host_of(rank), generation=generation)
        for call in plan_rank(description, run, rank):
            yield {
                "ts_us": call.ts_us,
                "dur_us": call.dur_us,
                "name": call.name,
                "cat": call.cat,
                "pid": process.pid,
                "tid": process.tid(call.thread),
                "rank": rank,
                "host": process.host,
                "path": call.path,
                "size_bytes": call.size_bytes,
                "ret": call.size_bytes if call.name in _MOVING else None,
                "epoch": call.epoch,
                "step": call.step,
                "args": json.dumps({}),
                "run": name,
                "file": f"trace-{rank}-of-{run.world or run.ranks}.pfw.gz",
            }
