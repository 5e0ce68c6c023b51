"""`penstock training run`: the timed run, and what it found, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.delivery import delivery_lines, delivery_notes
from penstock.cli.gates import CLOSED_GATES, SkipGate
from penstock.cli.handing_in import (
    Closed,
    Open,
    OptionalSystem,
    OptionalTree,
    division_of,
    drawn,
    require_results,
)
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.training.asking import RunWords, asked_of, inspected
from penstock.cli.training.words import (
    Accelerator,
    Data,
    DivisionWord,
    OrderSeed,
    ReadThreads,
    Settings,
    StorageOption,
    WorkloadName,
)
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.bench.training.training_result import TrainingResult
    from penstock.results.utilization import EpochRate
    from penstock.workflows.submission.session import Said


_Decode = Annotated[bool, typer.Option("--decode", help="Decode samples, as a trainer would.")]
_Check = Annotated[
    str,
    typer.Option(
        "--check",
        metavar="WORD",
        help="Hold what is read against its generator: off, sample (1 in 16), full.",
    ),
]
_Reader = Annotated[
    str | None, typer.Option("--reader", metavar="NAME", help="A format of another package, for all files.")
]
_Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints", metavar="URI", help="Where they go, if there are any; else checkpoint_folder."
    ),
]
_Results = Annotated[
    str | None, typer.Option("--results", metavar="DIR", help="The folder in which the run's own is made.")
]
_Loader = Annotated[
    str | None, typer.Option("--loader", metavar="NAME", help="Who reads: native (the default) or pytorch.")
]


@ranked
def run(
    comm: Comm,
    workload: WorkloadName,
    *,
    data: Data,
    results: _Results = None,
    accelerator: Accelerator = "",
    loader: _Loader = None,
    reader: _Reader = None,
    settings: Settings = None,
    threads: ReadThreads = None,
    seed: OrderSeed = None,
    division: DivisionWord = None,
    closed: Closed = False,
    open_: Open = False,
    submission: OptionalTree = None,
    system: OptionalSystem = None,
    decode: _Decode = False,
    check: _Check = "off",
    option: StorageOption = None,
    checkpoints: _Checkpoints = None,
    skip_gate: SkipGate = None,
    as_json: JsonFlag = False,
) -> int:
    """Train as the workload says, with emulated computation, and tell how busy accelerators were kept.

    One rank is one accelerator; before each epoch the data set's page cache is dropped. AU is in percent.

    Examples:

      penstock training run unet3d --accelerator h100 --data direct:///data/unet3d --results runs --ranks 4

      penstock training run retinanet_b200 --data s3://bucket/retinanet --results runs --threads 32 --json

      penstock training run unet3d_b200 --data /data/unet3d --ranks 8 --closed --submission tree --system fast

      penstock training run unet3d --accelerator h100 --data /data/unet3d --results runs
      --set workflow.checkpoint=true --set checkpoint.steps_between_checkpoints=10 --checkpoints /data/saves
    """
    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    words = RunWords(
        workload=workload,
        accelerator=accelerator,
        settings=settings,
        data=data,
        option=option,
        results=require_results(results, submission),
        submitted=division_of(closed=closed, open_=open_),
        tree=submission,
        system=system,
        loader=loader,
        reader=reader,
        threads=threads,
        seed=seed,
        division=division,
        decode=decode,
        check=check,
        checkpoints=checkpoints,
    )
    return _carry_out(words, skip_gate, comm=comm, terminal=terminal)


def _carry_out(words: RunWords, skips: list[str] | None, *, comm: Comm, terminal: Terminal) -> int:
    from penstock.bench.training.training_run import train
    from penstock.workflows.submission.training import add_run

    asked = asked_of(words, comm=comm, terminal=terminal)
    asked = inspected(asked, words, skips, comm=comm, terminal=terminal)
    if asked.is_stopped:
        return CLOSED_GATES
    request, storage = asked.request, asked.reopen()
    with terminal.progress() as progress:
        if asked.session is None:
            result = train(request, storage, comm=comm, progress=progress)
        else:
            result = add_run(
                asked.session,
                request,
                storage,
                comm=comm,
                progress=progress,
                tell=lambda result: said_of(result, request.remarks),
            )
    for remark in (*result.stages.remarks, *delivery_notes(result.stages.deliveries)):
        terminal.note(remark)
    terminal.result(result.document(), lambda console: draw(console, result))
    return 0


def said_of(result: TrainingResult, remarks: Sequence[str]) -> Said:
    """What the command prints of a run, for the logs of its leaf."""
    from penstock.workflows.submission.session import Said

    notes = (*remarks, *result.stages.remarks)
    return Said(
        stdout=drawn(lambda console: draw(console, result)), stderr="".join(f"{note}\n" for note in notes)
    )


def draw(console: Console, result: TrainingResult) -> None:
    """For people: how busy accelerators were kept, and what held them up."""
    from rich.markup import escape

    from penstock.units import format_bytes, format_rate

    train, ceiling = result.train, result.stages.ceiling
    accelerators = f"{result.ranks} accelerator{'s' * (result.ranks > 1)}"
    table(f"{escape(result.workload)}, {accelerators}", [_row(rate) for rate in train.epochs])(console)
    strict = f"{train.au_strict_percent.mean:.2f} %" if train.au_strict_percent else "-"
    console.print(f"  AU        {train.au_compat_percent.mean:.2f} % by DLIO's formula, {strict} strictly")
    console.print(
        f"  read      {format_bytes(train.read_bytes)}, {format_rate(train.read_bytes_per_s)}, "
        f"{train.samples_per_s_strict:,.1f} samples/s"
    )
    for title, line in delivery_lines(result.stages.deliveries):
        console.print(f"  {title:<16}{escape(line)}")
    for note in train.notes:
        console.print(f"  note      {escape(note)}")
    if ceiling is not None:
        console.print(f"  ceiling   AU {ceiling.au_compat_percent:.2f} % on storage that costs nothing")
    if train.verdict is not None:
        console.print(f"  limit     {train.verdict.bottleneck.value}")
        for sentence in train.verdict.evidence:
            console.print(f"            {escape(sentence)}")
    if (saved := result.stages.checkpoints) is not None:
        rate = f", {format_rate(saved.gib_per_s * 2**30)}" if saved.gib_per_s else ""
        console.print(
            f"  saved     {saved.checkpoints} checkpoints of {format_bytes(saved.bytes_each)}{rate}"
        )
    console.print(f"  results   {escape(result.results_dir)}")


def _row(rate: EpochRate) -> dict[str, str]:
    from penstock.units import format_bytes, format_seconds

    strict = "-" if rate.au_strict_percent is None else f"{rate.au_strict_percent:.2f} %"
    return {
        "epoch": str(rate.epoch),
        "AU": f"{rate.au_compat_percent:.2f} %",
        "AU strict": strict,
        "samples/s": f"{rate.samples_per_s_strict:,.1f}",
        "read": format_bytes(rate.read_bytes),
        "time": format_seconds(rate.elapsed_s),
    }
