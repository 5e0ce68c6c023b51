"""`penstock training run`: the timed run, and what it found, for people and as JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.training.reading import (
    asks_to_decode,
    choose_seed,
    closed_rules,
    left_undone,
    loader_options,
    open_rules,
    reader_of,
)
from penstock.cli.training.saving import checkpoint_wish
from penstock.cli.training.words import (
    Accelerator,
    Data,
    DivisionWord,
    OrderSeed,
    ReadThreads,
    Results,
    Settings,
    StorageOption,
    WorkloadName,
    data_at,
    load_workload,
)
from penstock.cluster.comm import Comm
from penstock.environment import process_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.bench.loader.base import LoaderOptions, OpenStorage
    from penstock.bench.loader.decoding import ContentCheck
    from penstock.bench.order import Division
    from penstock.bench.training.checkpoints import CheckpointWish
    from penstock.bench.training.files import OpenFormat
    from penstock.bench.training.outcome import TrainingResult
    from penstock.bench.training.request import TrainingRequest
    from penstock.results.utilization import EpochRate
    from penstock.workload.spec import Workload


_Decode = Annotated[bool, typer.Option("--decode", help="Decode samples, as a trainer would.")]
_Check = Annotated[
    str,
    typer.Option(
        "--check",
        metavar="WORD",
        help="Hold what is read against its generator: off, sample (1 in 16), full.",
    ),
]
_Closed = Annotated[
    bool,
    typer.Option(
        "--closed", help="Refuse what MLPerf Storage's closed division forbids; pytorch loader, drop."
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
_Loader = Annotated[
    str | None, typer.Option("--loader", metavar="NAME", help="Who reads: native (the default) or pytorch.")
]


@ranked
def run(
    comm: Comm,
    workload: WorkloadName,
    *,
    data: Data,
    results: Results,
    accelerator: Accelerator = "",
    loader: _Loader = None,
    reader: _Reader = None,
    settings: Settings = None,
    threads: ReadThreads = None,
    seed: OrderSeed = None,
    division: DivisionWord = None,
    closed: _Closed = False,
    decode: _Decode = False,
    check: _Check = "off",
    option: StorageOption = None,
    checkpoints: _Checkpoints = None,
    as_json: JsonFlag = False,
) -> None:
    """Train as the workload says, with emulated computation, and tell how busy accelerators were kept.

    One rank is one accelerator. A short run on storage that costs nothing comes first; then, before each
    epoch, the data set's page cache is dropped. AU is in percent.

    Examples:

      penstock training run unet3d --accelerator h100 --data direct:///data/unet3d --results runs --ranks 4

      penstock training run retinanet_b200 --data s3://bucket/retinanet --results runs --threads 32 --json

      penstock training run unet3d_b200 --data /data/unet3d --results runs --ranks 8 --closed

      penstock training run unet3d --accelerator h100 --data /data/unet3d --results runs
      --set workflow.checkpoint=true --set checkpoint.steps_between_checkpoints=10 --checkpoints /data/saves
    """
    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    loaded = load_workload(terminal, workload, accelerator, settings)
    rules = closed_rules(workload, settings, loader, division) if closed else open_rules(loader, division)
    undone = left_undone(loaded.workload)
    for remark in undone:
        terminal.note(remark)
    reopen = data_at(data, option, rank=comm.rank)
    request = _request(
        loaded.workload,
        results=results,
        seed=choose_seed(comm, loaded.workload, seed),
        division=rules.division,
        loader=loader_options(rules.loader, loaded.workload, threads),
        reopen=reopen,
        decodes=decode or asks_to_decode(loaded.workload),
        check=values.content_check("--check", check),
        reader=reader_of(reader),
        settings=settings or (),
        remarks=(*map(str, loaded.remarks), *undone),
        checkpoints=checkpoint_wish(
            loaded.workload, checkpoints, comm=comm, environment=process_environment()
        ),
    )
    _carry_out(request, reopen, comm=comm, terminal=terminal)


def _carry_out(request: TrainingRequest, reopen: OpenStorage, *, comm: Comm, terminal: Terminal) -> None:
    from penstock.bench.training.run import train

    with terminal.progress() as progress:
        result = train(request, reopen(), comm=comm, progress=progress)
    for remark in result.stages.remarks:
        terminal.note(remark)
    terminal.result(result.document(), lambda console: _draw(console, result))


def _request(
    workload: Workload,
    *,
    results: str,
    seed: int,
    division: Division,
    loader: LoaderOptions,
    reopen: OpenStorage,
    decodes: bool,
    check: ContentCheck,
    reader: OpenFormat | None,
    settings: Sequence[str],
    remarks: tuple[str, ...],
    checkpoints: CheckpointWish | None,
) -> TrainingRequest:
    from pathlib import Path

    from penstock.bench.training.request import TrainingRequest

    return TrainingRequest(
        workload=workload,
        results=Path(results),
        seed=seed,
        division=division,
        loader=loader,
        reopen=reopen,
        decodes=decodes,
        check=check,
        reader=reader,
        command=("penstock", *sys.argv[1:]),
        environment=process_environment(),
        overrides=tuple(f"++workload.{text}" for text in settings),
        remarks=remarks,
        checkpoints=checkpoints,
    )


def _draw(console: Console, result: TrainingResult) -> None:
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
