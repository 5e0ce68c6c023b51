"""`penstock training plan`: what a rank reads first, by arithmetic alone."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import values
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.training.words import (
    Accelerator,
    DivisionWord,
    OrderSeed,
    Settings,
    WorkloadName,
    load_workload,
)

Ranks = Annotated[int, typer.Option("--ranks", min=1, metavar="N", help="Of a job of N ranks; starts none.")]


def plan(
    workload: WorkloadName,
    *,
    ranks: Ranks = 1,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose samples.")] = 0,
    epoch: Annotated[int, typer.Option("--epoch", min=1, help="Of which epoch, from 1.")] = 1,
    head: Annotated[int, typer.Option("--head", min=0, help="How many samples to show.")] = 10,
    division: DivisionWord = None,
    accelerator: Accelerator = "",
    settings: Settings = None,
    seed: OrderSeed = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the first samples that a rank reads in an epoch, and their files; at once, whatever the size.

    Examples:

      penstock training plan unet3d --ranks 8 --rank 3 --epoch 2

      penstock training plan resnet50_h100 --set dataset.num_files_train=50000000 --ranks 1024 --rank 7 --json
    """
    from dataclasses import asdict

    from penstock.bench.training.order_preview import preview

    terminal = Terminal(as_json=as_json)
    loaded = load_workload(terminal, workload, accelerator, settings, is_data_set=True)
    seen = preview(
        loaded.workload,
        num_ranks=ranks,
        rank=rank,
        epoch=epoch,
        head=head,
        division=values.division("--division", division or "rotate"),
        seed=loaded.workload.train.seed if seed is None else seed,
    )
    title = f"Rank {rank} of {ranks} reads {seen.num_samples:,} samples in epoch {epoch}; the first"
    rows = [{"sample": str(sample.index), "file": sample.file} for sample in seen.samples]
    terminal.result(asdict(seen), table(title, rows))
