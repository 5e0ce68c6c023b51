"""`penstock training run`: the timed run, and what it found, for people and as JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.training import Accelerator, Settings, WorkloadName
from penstock.cli.training_data import Data, StorageOption
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.bench.loader.base import LoaderOptions, OpenStorage
    from penstock.bench.loader.pytorch import PytorchOptions
    from penstock.bench.order import Division
    from penstock.bench.training.outcome import TrainingResult
    from penstock.bench.training.run import TrainingRequest
    from penstock.results.utilization import EpochRate
    from penstock.workload.spec import Workload


Results = Annotated[
    str, typer.Option("--results", metavar="DIR", help="The folder in which the run's own is made.")
]
Loader = Annotated[str, typer.Option("--loader", metavar="NAME", help="Who reads: native or pytorch.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Reads in flight on each rank.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Of the order; else the workload's train.seed.")
]
DivisionWord = Annotated[
    str, typer.Option("--division", metavar="WORD", help="Uneven remainders: rotate, drop, pad, error.")
]


@ranked
def run(
    comm: Comm,
    workload: WorkloadName,
    *,
    data: Data,
    results: Results,
    accelerator: Accelerator = "",
    loader: Loader = "native",
    settings: Settings = None,
    threads: Threads = None,
    seed: Seed = None,
    division: DivisionWord = "rotate",
    option: StorageOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train as the workload says, with emulated computation, and tell how busy accelerators were kept.

    One rank is one accelerator. A short run on storage that costs nothing comes first; then, before each
    epoch, the data set's page cache is dropped. AU is in percent.

    Examples:

      penstock training run unet3d --accelerator h100 --data direct:///data/unet3d --results runs --ranks 4

      penstock training run retinanet_b200 --data s3://bucket/retinanet --results runs --threads 32 --json
    """
    from functools import partial

    from penstock.bench.training.run import train
    from penstock.environment import process_environment
    from penstock.storage import open_storage
    from penstock.workload.loading import load
    from penstock.workload.overrides import parse_settings

    loaded = load(workload, accelerator=accelerator, overrides=parse_settings(settings or ()))
    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    remarks = (*map(str, loaded.remarks), *left_undone(loaded.workload))
    for remark in remarks:
        terminal.note(remark)
    options = values.assignments("--option", option or ())
    reopen = partial(open_storage, data, process_environment(), options=options, rank=comm.rank)
    request = _request(
        loaded.workload,
        results=results,
        seed=choose_seed(comm, loaded.workload, seed),
        division=values.division("--division", division),
        loader=loader_options(loader, loaded.workload, threads),
        reopen=reopen,
        settings=settings or (),
        remarks=remarks,
    )
    with terminal.progress() as progress:
        result = train(request, reopen(), comm=comm, progress=progress)
    terminal.result(result.document(), lambda console: _draw(console, result))


def _request(
    workload: Workload,
    *,
    results: str,
    seed: int,
    division: Division,
    loader: LoaderOptions,
    reopen: OpenStorage,
    settings: Sequence[str],
    remarks: tuple[str, ...],
) -> TrainingRequest:
    from pathlib import Path

    from penstock.bench.training.run import TrainingRequest
    from penstock.environment import process_environment

    return TrainingRequest(
        workload=workload,
        results=Path(results),
        seed=seed,
        division=division,
        loader=loader,
        reopen=reopen,
        command=("penstock", *sys.argv[1:]),
        environment=process_environment(),
        overrides=tuple(f"++workload.{text}" for text in settings),
        remarks=remarks,
    )


def loader_options(name: str, workload: Workload, threads: int | None) -> LoaderOptions:
    """The loader of this name as the workload and `--threads` ask for it."""
    from penstock.bench.loader.native import NativeOptions
    from penstock.errors import UsageError

    if name == "pytorch":
        return _pytorch_options(workload, threads)
    if name != "native":
        raise UsageError(f"No loader is called {name!r}", where="--loader", fix="There are: native, pytorch.")
    reader = workload.reader
    return NativeOptions(
        threads=threads or reader.read_threads or NativeOptions().threads,
        prefetch_batches=reader.prefetch_size,
    )


def _pytorch_options(workload: Workload, threads: int | None) -> PytorchOptions:
    """One worker for each read in flight; none where the workload says `read_threads: 0`."""
    from penstock.bench.loader.native import NativeOptions
    from penstock.errors import Unavailable

    try:
        from penstock.bench.loader.pytorch import PytorchOptions
    except ImportError as error:
        raise Unavailable(
            "The pytorch loader needs torch", where="--loader", fix="pip install 'penstock[torch]'"
        ) from error
    reader, dataset = workload.reader, workload.dataset
    workers = reader.read_threads if threads is None else threads
    return PytorchOptions(
        workers=NativeOptions().threads if workers is None else workers,
        sample_bytes=max(1, int(dataset.record_length_bytes_resize or dataset.record_length_bytes)),
        prefetch_batches=reader.prefetch_size,
        context=reader.multiprocessing_context,
        pin_memory=reader.pin_memory,
    )


def choose_seed(comm: Comm, workload: Workload, asked: int | None) -> int:
    """The seed that was asked for, or a new one where the workload's shuffling is to be random."""
    import secrets

    from penstock.workload.choices import Shuffle

    if asked is not None:
        return asked
    if Shuffle.RANDOM in (workload.reader.file_shuffle, workload.reader.sample_shuffle):
        return comm.broadcast(secrets.randbits(31), awaiting="rank 0 to draw a seed")
    return workload.train.seed


def left_undone(workload: Workload) -> tuple[str, ...]:
    """What the workload asks for and this command does not do: said once, and recorded."""
    from penstock.workload.choices import FileAccess, ReadType

    reader = workload.reader
    undone = {
        "workflow.checkpoint: training takes no checkpoints yet": workload.workflow.checkpoint,
        "workflow.profiling: nothing observes the run from outside": workload.workflow.profiling,
        "reader.preprocess_time: samples are not preprocessed": not reader.preprocess_time.is_zero,
        "reader.read_type: samples are read when they are wanted": reader.read_type is ReadType.MEMORY,
        "reader.file_access: each rank reads files of its own": reader.file_access is not FileAccess.MULTI,
    }
    return tuple(text for text, is_asked in undone.items() if is_asked)


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
    if ceiling is not None:
        console.print(f"  ceiling   AU {ceiling.au_compat_percent:.2f} % on storage that costs nothing")
    if train.verdict is not None:
        console.print(f"  limit     {train.verdict.bottleneck.value}")
        for sentence in train.verdict.evidence:
            console.print(f"            {escape(sentence)}")
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
