"""`penstock checkpoint run`: checkpoints written and read back, timed, and what held them up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import values
from penstock.cli.checkpoint.words import (
    ModelName,
    Scale,
    Settings,
    Subset,
    layout_of,
    model_of,
    parse_scale,
)
from penstock.cli.delivery import delivery_lines, delivery_notes
from penstock.cli.gates import SkipGate, look_at_gates
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from penstock.bench.checkpoint.figures import DirectionFigures
    from penstock.bench.checkpoint.outcome import CheckpointResult
    from penstock.bench.checkpoint.request import CheckpointRequest
    from penstock.checkpoint.pipe.base import PipeSettings
    from penstock.workload.model import CheckpointModel

WRONG_BYTES = 1

Target = Annotated[
    str, typer.Option("--to", metavar="URI", help="Where they go: a folder, direct:///folder, s3://bucket/x.")
]
Results = Annotated[
    str, typer.Option("--results", metavar="DIR", help="The folder in which the run's own is made.")
]
Writes = Annotated[
    int | None, typer.Option("--writes", min=0, help="Checkpoints to write; else the model's, 10.")
]
Reads = Annotated[
    int | None, typer.Option("--reads", min=0, help="Checkpoints to read back; else the model's, 10.")
]
Fsync = Annotated[
    bool | None, typer.Option("--fsync/--no-fsync", help="Whether files are durable before they count.")
]
Interval = Annotated[
    str | None, typer.Option("--interval", metavar="TIME", help="Between two checkpoints; else 5s.")
]
Streams = Annotated[int, typer.Option("--streams", min=1, help="Files in flight on each rank.")]
Chunk = Annotated[str, typer.Option("--chunk", metavar="SIZE", help="What one request moves.")]
BufferMemory = Annotated[
    str, typer.Option("--buffer-memory", metavar="SIZE", help="Buffers of each rank, at most.")
]
Verify = Annotated[
    str, typer.Option("--verify", metavar="WORD", help="What of the bytes read: full, sample or off.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Of the content; else drawn for each run.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the whole checkpoints of an interrupted run, and go on.")
]
Remove = Annotated[bool, typer.Option("--remove", help="Delete the checkpoints at the end.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option("-o", "--option", metavar="NAME=VALUE", help="An option of the storage; repeatable."),
]


@ranked
def run(
    comm: Comm,
    model: ModelName,
    *,
    to: Target,
    results: Results,
    scale: Scale = "1",
    writes: Writes = None,
    reads: Reads = None,
    subset: Subset = False,
    fsync: Fsync = None,
    interval: Interval = None,
    streams: Streams = 2,
    chunk: Chunk = "16MiB",
    buffer_memory: BufferMemory = "256MiB",
    verify: Verify = "full",
    seed: Seed = None,
    resume: Resume = False,
    remove: Remove = False,
    settings: Settings = None,
    option: StorageOption = None,
    skip_gate: SkipGate = None,
    as_json: JsonFlag = False,
) -> int:
    """Write checkpoints of a model, then read them back, and tell how fast the storage took and gave them.

    A write ends when its last byte is durable; before a read, its files are dropped from memory on every
    node. Every byte read is verified. Checkpoints stay for `--writes 0` to read, but for `--remove`.

    Examples:

      penstock checkpoint run llama3-8b --to direct:///mnt/pfs/ckpt --results runs --ranks 8

      penstock checkpoint run llama3-8b --to ./ckpt --results runs --scale 0.01 --writes 2 --reads 2 --json
    """
    from penstock.bench.checkpoint.request import CheckpointRequest, asked_of

    terminal, share = Terminal(as_json=as_json, speaks=comm.rank == 0), parse_scale(scale)
    asked = asked_of(
        model_of(model, settings),
        num_checkpoints_write=writes,
        num_checkpoints_read=reads,
        fsync=fsync,
        time_between_checkpoints_s=interval and values.seconds("--interval", interval),
        mode="subset" if subset else None,
        checkpoint_folder=to,
    )
    request = CheckpointRequest(
        model=asked,
        layout=layout_of(asked, ranks=comm.size, scale=share, subset=subset),
        scale=share,
        pipe=pipe_settings(streams=streams, chunk=chunk, buffer_memory=buffer_memory, verify=verify),
        results=Path(results),
        seed=seed,
        resumes=resume,
        removes=remove,
        **provenance(asked, settings or ()),
    )
    request = inspected(request, to, option, skip_gate, comm=comm, terminal=terminal)
    return _told(request, to, option, comm=comm, terminal=terminal)


def _told(
    request: CheckpointRequest, to: str, option: list[str] | None, *, comm: Comm, terminal: Terminal
) -> int:
    result = perform(request, to, values.assignments("--option", option or ()), comm=comm, terminal=terminal)
    terminal.result(result.document(), lambda console: draw(console, result))
    return 0 if result.is_right else WRONG_BYTES


def inspected(
    request: CheckpointRequest,
    to: str,
    option: list[str] | None,
    skips: list[str] | None,
    *,
    comm: Comm,
    terminal: Terminal,
    is_strict: bool = False,
) -> CheckpointRequest:
    """The same, once its gates were looked at. Where `is_strict`, the caller stops if they say so."""
    from dataclasses import replace
    from functools import partial

    from penstock.cluster.gates.base import Undertaking
    from penstock.environment import untraced
    from penstock.storage import open_storage

    num_writes = request.model.workload.checkpoint.num_checkpoints_write
    options = values.assignments("--option", option or ())
    doing = Undertaking(
        environment=request.environment,
        uri=to,
        reopen=partial(open_storage, to, untraced(request.environment), options=options, rank=comm.rank),
        results=request.results,
        written_bytes=int(request.layout.bytes_of_processes()[comm.rank]) * num_writes,
    )
    inspection = look_at_gates(doing, skips=skips, is_strict=is_strict, comm=comm, terminal=terminal)
    return replace(request, inspection=inspection)


def provenance(model: CheckpointModel, settings: Sequence[str]) -> dict[str, Any]:
    """Where a request comes from, for the record of its run."""
    from penstock.environment import process_environment

    return {
        "command": ("penstock", *sys.argv[1:]),
        "environment": process_environment(),
        "overrides": tuple(f"++workload.{text}" for text in settings),
        "remarks": tuple(map(str, model.remarks)),
    }


def perform(
    request: CheckpointRequest, uri: str, options: Mapping[str, str], *, comm: Comm, terminal: Terminal
) -> CheckpointResult:
    """Say what the request's makers remarked, and carry it out."""
    for remark in request.remarks:
        terminal.note(remark)
    return carry_out(request, uri, options, comm=comm, terminal=terminal)


def carry_out(
    request: CheckpointRequest, uri: str, options: Mapping[str, str], *, comm: Comm, terminal: Terminal
) -> CheckpointResult:
    """Run it on the storage at `uri`, saying on the way what people should know."""
    from functools import partial

    from penstock.bench.checkpoint.run import run_checkpoints
    from penstock.storage import open_storage

    told = {**durability(uri, fsync=request.model.workload.checkpoint.fsync), **options}
    with terminal.progress() as progress:
        result = run_checkpoints(
            request,
            partial(open_storage, uri, request.environment, options=told, rank=comm.rank),
            comm=comm,
            progress=progress,
            tell=terminal.note,
        )
    for sentence in shortcomings(result):
        terminal.note(sentence)
    return result


def durability(uri: str, *, fsync: bool) -> Mapping[str, str]:
    """The storage's option for it; an object service knows no other way than durable."""
    from penstock.storage.uri import FILE_SCHEMES, parse_uri

    return {"fsync": str(fsync).lower()} if parse_uri(uri).scheme in FILE_SCHEMES else {}


def pipe_settings(*, streams: int, chunk: str, buffer_memory: str, verify: str) -> PipeSettings:
    """How each rank moves its files, from a command line's words."""
    from penstock.checkpoint.pipe.base import PipeSettings
    from penstock.errors import UsageError

    if verify not in ("full", "sample", "off"):
        raise UsageError(
            f"{verify!r} is no way to verify", where="--verify", fix="Choose of: full, sample, off."
        )
    return PipeSettings(
        streams=streams,
        chunk_bytes=values.size("--chunk", chunk),
        buffer_memory_bytes=values.size("--buffer-memory", buffer_memory),
        verify=verify,  # type: ignore[arg-type]  # one of the three words
    )


def shortcomings(result: CheckpointResult) -> list[str]:
    """What keeps figures of this run from being what they look like, a sentence each."""
    said = [
        f"Checkpoint {each.round.step}: {each.phase.wrong_bytes} chunks hold other bytes than were written, "
        f"the first at byte {each.wrong[0].offset:,} of {each.wrong[0].key}"
        for each in result.rounds
        if each.phase.wrong_bytes
    ]
    warm = [each.cold for each in result.rounds if each.is_from_memory and each.cold]
    if warm:
        share = max(cold.resident_share for cold in warm)
        num_reads = sum(each.round.direction == "read" for each in result.rounds)
        said.append(
            f"{len(warm)} of {num_reads} reads came from the page cache: up to {share:.0%} of the bytes "
            "stayed in memory after they were dropped. They count for no storage; direct:// reads past "
            "the page cache"
        )
    return [*said, *delivery_notes(result.deliveries)]


def draw(console: Console, result: CheckpointResult) -> None:
    """For people: what each direction reached, and what held it up."""
    from penstock.bench.checkpoint.figures import job_bottleneck
    from penstock.units import format_bytes

    rows = [
        _row(name, figures)
        for name, figures in (("write", result.write), ("read", result.read))
        if figures is not None
    ]
    title = f"{format_bytes(result.total_bytes)} a checkpoint of {result.model}, at {result.target}"
    table(title, rows)(console)
    console.print(f"Bottleneck: {job_bottleneck(result.rounds)}", style="bold")
    console.print(
        "  GiB/s: all bytes over all time; each: mean of checkpoints; content: making or verifying it"
    )
    if result.gap_s is not None:
        console.print(f"  {result.gap_s:.1f} s between the last write and the first read", markup=False)
    for title, line in delivery_lines(result.deliveries):
        console.print(f"  {title:<16}{line}", markup=False)
    console.print(f"  the record: {result.results_dir}", markup=False)


def _row(name: str, figures: DirectionFigures) -> dict[str, str]:
    from penstock.units import format_bytes, format_seconds

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return {
        "": name,
        "bytes": format_bytes(figures.num_bytes),
        "took": format_seconds(figures.duration_s),
        "GiB/s": rate(figures.gib_per_s),
        "each": rate(figures.mean_gib_per_s),
        "content": rate(figures.content_gib_per_s),
        "drain": format_seconds(figures.drain_s),
        "p99": f"{figures.p99_ms:.1f} ms",
    }
