"""From the words of a command line to a run of checkpoints: its request, its gates, where its leaf goes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
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
from penstock.cli.gates import SkipGate, look_at_gates
from penstock.cli.handing_in import (
    Closed,
    Entry,
    Open,
    OptionalSystem,
    OptionalTree,
    changed_by,
    division_of,
    require_results,
    series_of,
)
from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest
    from penstock.checkpoint.pipe.base import PipeSettings
    from penstock.workload.checkpoint_model import CheckpointModel
    from penstock.workload.division_rules import SubmissionDivision

Target = Annotated[
    str, typer.Option("--to", metavar="URI", help="Where they go: a folder, direct:///folder, s3://bucket/x.")
]
Results = Annotated[
    str | None, typer.Option("--results", metavar="DIR", help="The folder in which the run's own is made.")
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

Accelerator = Annotated[
    str, typer.Option("--accelerator", help="b200 or mi355: whose memory is saved, with --submission.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWords:
    """What a command line says of a run. `tree` and `system` say where it is handed in, None if nowhere."""

    model: str
    to: str
    results: str
    scale: str = "1"
    writes: int | None = None
    reads: int | None = None
    subset: bool = False
    fsync: bool | None = None
    interval: str | None = None
    streams: int = 2
    chunk: str = "16MiB"
    buffer_memory: str = "256MiB"
    verify: str = "full"
    seed: int | None = None
    resume: bool = False
    remove: bool = False
    settings: list[str] | None = None
    option: list[str] | None = None
    skip_gate: list[str] | None = None
    submitted: SubmissionDivision | None = None
    tree: str | None = None
    system: str | None = None
    accelerator: str = ""


def _words(
    comm: Comm,
    model: ModelName,
    *,
    to: Target,
    results: Results = None,
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
    closed: Closed = False,
    open_: Open = False,
    submission: OptionalTree = None,
    system: OptionalSystem = None,
    accelerator: Accelerator = "",
    as_json: JsonFlag = False,
) -> None:
    """Only its signature is used: these are the options of a command that gets `CheckpointWords`."""


Verb = Callable[[Comm, CheckpointWords, Terminal], int]


def of_words(verb: Verb) -> Callable[..., int]:
    """A command with the options of `_words`."""

    @wraps(verb)
    def command(comm: Comm, **given: Any) -> int:
        terminal = Terminal(as_json=given.pop("as_json"), speaks=comm.rank == 0)
        tree = given.pop("submission")
        submitted = division_of(closed=given.pop("closed"), open_=given.pop("open_"))
        results = require_results(given.pop("results"), tree)
        words = CheckpointWords(tree=tree, submitted=submitted, results=results, **given)
        return verb(comm, words, terminal)

    command.__signature__ = inspect.signature(_words, eval_str=True)  # type: ignore[attr-defined]  # typer reads it
    return command


def request_of(words: CheckpointWords, *, comm: Comm) -> CheckpointRequest:
    """The run that the words ask for."""
    from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest, asked_of

    share = parse_scale(words.scale)
    asked = asked_of(
        model_of(words.model, words.settings),
        num_checkpoints_write=words.writes,
        num_checkpoints_read=words.reads,
        fsync=words.fsync,
        time_between_checkpoints_s=words.interval and values.seconds("--interval", words.interval),
        mode="subset" if words.subset else None,
        checkpoint_folder=words.to,
    )
    pipe = pipe_settings(
        streams=words.streams, chunk=words.chunk, buffer_memory=words.buffer_memory, verify=words.verify
    )
    return CheckpointRequest(
        model=asked,
        layout=layout_of(asked, ranks=comm.size, scale=share, subset=words.subset),
        scale=share,
        pipe=pipe,
        results=Path(words.results),
        seed=words.seed,
        resumes=words.resume,
        removes=words.remove,
        **provenance(asked, words.settings or ()),
    )


def entry_of(words: CheckpointWords, request: CheckpointRequest) -> Entry | None:
    """Where the run's leaf goes, once its division lets it be run; None if it is not handed in."""
    from penstock.submission.authoring.data_location import locate_checkpoints
    from penstock.submission.tree_layout import Benchmark

    if words.submitted is not None:
        _require_allowed(words, request, words.submitted)
    if words.tree is None:
        return None
    series = series_of(
        words.tree,
        words.system,
        words.submitted,
        benchmark=Benchmark.CHECKPOINTING,
        model=request.model.name,
    )
    return Entry(series=series, located=locate_checkpoints(request.model.workload, words.to))


def _require_allowed(
    words: CheckpointWords, request: CheckpointRequest, division: SubmissionDivision
) -> None:
    from penstock.submission.authoring.checkpoint_preflight import CheckpointPreflight, require_allowed
    from penstock.submission.edition import load_edition

    asked, layout = request.model.workload.checkpoint, request.layout
    options = {"checkpoint.fsync": words.fsync, "checkpoint.time_between_checkpoints": words.interval}
    changed = [
        *changed_by(words.settings or ()),
        *(key for key, value in options.items() if value is not None),
    ]
    require_allowed(
        load_edition("v3.0"),
        division,
        CheckpointPreflight(
            model=request.model.name,
            accelerator=words.accelerator,
            num_processes=layout.num_processes,
            num_writes=asked.num_checkpoints_write,
            num_reads=asked.num_checkpoints_read,
            is_subset=layout.is_subset,
            scale=request.scale,
            changed=changed,
            size_gib=layout.total_bytes / float(request.scale) / 2**30,
        ),
    )


def inspected(
    request: CheckpointRequest, words: CheckpointWords, *, comm: Comm, terminal: Terminal
) -> CheckpointRequest:
    """The same, once its gates were looked at; those of a result that is handed in must stand open."""
    from dataclasses import replace
    from functools import partial

    from penstock.cluster.gates.gate_model import PreflightRequest
    from penstock.environment import untraced
    from penstock.storage import open_storage

    num_writes = request.model.workload.checkpoint.num_checkpoints_write
    options = values.assignments("--option", words.option or ())
    doing = PreflightRequest(
        environment=request.environment,
        uri=words.to,
        reopen=partial(
            open_storage, words.to, untraced(request.environment), options=options, rank=comm.rank
        ),
        results=request.results,
        written_bytes=int(request.layout.bytes_of_processes()[comm.rank]) * num_writes,
    )
    inspection = look_at_gates(
        doing, skips=words.skip_gate, is_strict=words.submitted is not None, comm=comm, terminal=terminal
    )
    return replace(request, inspection=inspection)


def is_stopped(request: CheckpointRequest) -> bool:
    """Whether a gate is closed that the run must pass."""
    return request.inspection is not None and request.inspection.preflight.is_stopped


def provenance(model: CheckpointModel, settings: Sequence[str]) -> dict[str, Any]:
    """Where a request comes from, for the record of its run."""
    from penstock.environment import process_environment

    return {
        "command": ("penstock", *sys.argv[1:]),
        "environment": process_environment(),
        "overrides": tuple(f"++workload.{text}" for text in settings),
        "remarks": tuple(map(str, model.remarks)),
    }


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
