"""`penstock checkpoint study`: the same checkpoints by eight configurations of levels, set side by side."""

from __future__ import annotations

import sys
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import values
from penstock.cli.checkpoint.words import Settings, layout_of, model_of, parse_scale
from penstock.cli.ranks import ranked_on
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.model_state import StateLayout
    from penstock.workflows.study.records import RowRecord
    from penstock.workflows.study.run import StudyResult
    from penstock.workload.checkpoint_model import CheckpointModel

UNSAID_RANKS = 4


class Saves(StrEnum):
    """What training waits for."""

    BLOCKING = "blocking"
    BACKGROUND = "background"


Model = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="llama3-8b, ... (`checkpoint models`), or a YAML file."),
]
Fast = Annotated[Path, typer.Option("--fast", metavar="DIR", help="The level of caches: a node's own disk.")]
Slow = Annotated[Path, typer.Option("--slow", metavar="DIR", help="The durable level, shared by all nodes.")]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", metavar="DIR", help="For traces, runs.yaml and the report; goes on with what it has."
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        "--scale", metavar="SHARE", help="Of every file's bytes; else what makes a checkpoint 512 MiB."
    ),
]
SlowBandwidth = Annotated[
    str | None,
    typer.Option(
        "--slow-bandwidth", metavar="RATE", help="Limits the slow level, all ranks together, as 1GiB/s."
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option("--configurations", "-c", metavar="NAME,...", help="Only these rows; else all eight."),
]
NumCheckpoints = Annotated[int, typer.Option("--checkpoints", min=1, help="Checkpoints of each row.")]
NumSteps = Annotated[int, typer.Option("--steps", min=0, help="Training steps after each checkpoint.")]
StepTime = Annotated[str, typer.Option("--step-time", metavar="TIME", help="How long a step computes.")]
SavesOption = Annotated[
    Saves, typer.Option("--saves", help="Training waits for the commit, or only for the copy.")
]
ParityEvery = Annotated[
    int, typer.Option("--parity-every", min=2, help="The interval of parity in interval_flushed.")
]


@ranked_on(UNSAID_RANKS)
def study(
    comm: Comm,
    *,
    model: Model = "llama3-8b",
    fast: Fast,
    slow: Slow,
    out: Out,
    scale: Scale = None,
    slow_bandwidth: SlowBandwidth = None,
    configurations: Rows = None,
    checkpoints: NumCheckpoints = 6,
    steps: NumSteps = 10,
    step_time: StepTime = "100ms",
    saves: SavesOption = Saves.BLOCKING,
    parity_every: ParityEvery = 3,
    settings: Settings = None,
    as_json: JsonFlag = False,
) -> None:
    """Save the same checkpoints by eight configurations of levels, trace each, and set them side by side.

    direct_slow and direct_fast write plain files; bypass saves past the cache; single and cached save to it,
    in one copy and protected by parity; single_flushed and cached_flushed also flush in the background, and
    interval_flushed protects only some. On one machine each rank, of 4 unless --ranks says otherwise, plays
    a host with a cache of its own. An interrupted study goes on with the rows that are missing.

    Examples:

      penstock checkpoint study --fast /local/ssd --slow /pfs/me --out study

      penstock checkpoint study --model llama3-8b --scale 1/1000 --fast /local/ssd --slow /pfs/me
      --slow-bandwidth 256MiB/s -c direct_slow,bypass,cached_flushed --out study --json
    """
    from penstock.environment import process_environment
    from penstock.workflows.study.request import Saving, StudyRequest
    from penstock.workflows.study.run import study as perform

    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    name, layout, share = _sized(model_of(model, settings), comm.size, scale)
    request = StudyRequest(
        model=name,
        layout=layout,
        scale=share,
        fast=fast.resolve(),
        slow=slow.resolve(),
        out=out.resolve(),
        names=tuple(name for text in configurations or () for name in text.split(",") if name),
        slow_bytes_per_s=None if slow_bandwidth is None else values.rate("--slow-bandwidth", slow_bandwidth),
        num_checkpoints=checkpoints,
        num_steps=steps,
        step_s=values.seconds("--step-time", step_time),
        saving=Saving(saves.value),
        parity_every=parity_every,
    )
    command, environment = ("penstock", *sys.argv[1:]), process_environment()
    with terminal.progress() as progress:
        result = perform(request, comm=comm, environment=environment, command=command, progress=progress)
    if result is not None:
        _tell(result, terminal)


def _sized(model: CheckpointModel, ranks: int, scale: str | None) -> tuple[str, StateLayout, Fraction]:
    """The model's name, its files on so many ranks, and the share of their bytes."""
    from penstock.workflows.study.request import default_scale

    whole = layout_of(model, ranks=ranks, scale=Fraction(1), subset=False)
    share = default_scale(whole.total_bytes) if scale is None else parse_scale(scale)
    return model.name, whole.scaled(share), share


def _tell(result: StudyResult, terminal: Terminal) -> None:
    for path in result.report:
        terminal.note(f"left {path}")
    terminal.result(_document(result), lambda console: _draw(console, result))


def _document(result: StudyResult) -> dict[str, Any]:
    from penstock.cli.trace.comparing import comparison_document

    return {
        "study": result.record.identity,
        "rows": [row.model_dump() for row in result.rows],
        "comparison": comparison_document(result.compared),
    }


def _draw(console: Console, result: StudyResult) -> None:
    from penstock.cli.trace.asking import draw_answer
    from penstock.units import format_bytes

    identity = result.record.identity
    size = format_bytes(float(identity["checkpoint_bytes"]))
    title = (
        f"{identity['checkpoints']} checkpoints of {identity['model']}, {size} on {identity['ranks']} ranks"
    )
    table(title, [_row(each) for each in result.rows])(console)
    for name in ("t1_measures", "t2"):
        draw_answer(console, result.compared.table(name))
    for finding in result.compared.findings:
        console.print(f"{finding.code} {finding.title}", style="bold", markup=False)
        for sentence in finding.says:
            console.print(f"  {sentence}", markup=False)
    console.print("All tables: report.html in --out, or --json.")


def _row(row: RowRecord) -> dict[str, str]:
    from statistics import median

    from penstock.units import format_seconds

    return {
        "row": row.name,
        "training waited": format_seconds(sum(row.blocked_s)),
        "for one": format_seconds(median(row.blocked_s)),
        "drain": format_seconds(row.drain_s),
        "took": format_seconds(row.took_s),
    }
