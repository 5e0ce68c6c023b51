"""The options that several verbs of training take, and the workload that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import OpenStorage
    from penstock.cli.terminal import Terminal
    from penstock.workload.loading import Loaded

WorkloadName = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD", help="unet3d, unet3d_h100, ... or a YAML file; see `penstock workloads`."
    ),
]
Accelerator = Annotated[str, typer.Option("--accelerator", help="h100, b200, ...; part of some names.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value, e.g. reader.batch_size=14; repeatable."),
]
Data = Annotated[
    str,
    typer.Option("--data", metavar="URI", help="Where the data set lies: a path, s3://bucket/prefix, ..."),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the storage; repeatable."),
]
Results = Annotated[
    str, typer.Option("--results", metavar="DIR", help="The folder in which the run's own is made.")
]
ReadThreads = Annotated[int | None, typer.Option("--threads", min=1, help="Reads in flight on each rank.")]
OrderSeed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Of the order; else the workload's train.seed.")
]
DivisionWord = Annotated[
    str | None,
    typer.Option(
        "--division", metavar="WORD", help="Uneven remainders: rotate (the default), drop, pad, error."
    ),
]


def load_workload(
    terminal: Terminal, name: str, accelerator: str, settings: list[str] | None, *, is_data_set: bool = False
) -> Loaded:
    """The workload of these words, whose remarks are said; of a data set no accelerator need be named."""
    from penstock.workload.loading import load, load_data_set
    from penstock.workload.overrides import parse_settings

    overrides = parse_settings(settings or ())
    loaded = (load_data_set if is_data_set else load)(name, accelerator=accelerator, overrides=overrides)
    for remark in loaded.remarks:
        terminal.note(str(remark))
    return loaded


def data_at(data: str, option: list[str] | None, *, rank: int, is_traced: bool = True) -> OpenStorage:
    """Opens the storage of `--data`; it can be sent to another process."""
    from functools import partial

    from penstock.environment import process_environment, untraced
    from penstock.storage import open_storage

    options = values.assignments("--option", option or ())
    environment = process_environment() if is_traced else untraced(process_environment())
    return partial(open_storage, data, environment, options=options, rank=rank)
