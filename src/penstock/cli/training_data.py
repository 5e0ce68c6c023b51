"""`penstock training generate` and `verify`: the data set of a workload, made and held to its recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cli.training import Accelerator, Settings, WorkloadName
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.dataset.content import Reduction
    from penstock.dataset.manifest import Recipe
    from penstock.dataset.verify import Verified
    from penstock.storage import Storage

Data = Annotated[
    str,
    typer.Option("--data", metavar="URI", help="Where the data set lies: a path, s3://bucket/prefix, ..."),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Else the workload's train.seed.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Files under way at once, on each rank.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the storage; repeatable."),
]
Compressible = Annotated[
    float, typer.Option("--compressible", min=0, max=1, help="Share of each 4 KiB that compresses away.")
]
Dedupable = Annotated[
    float, typer.Option("--dedupable", min=0, max=1, help="Share of 4 KiB blocks that occur elsewhere.")
]


@ranked
def generate(
    comm: Comm,
    workload: WorkloadName,
    *,
    data: Data,
    accelerator: Accelerator = "",
    settings: Settings = None,
    seed: Seed = None,
    threads: Threads = 4,
    compressible: Compressible = 0.0,
    dedupable: Dedupable = 0.0,
    option: StorageOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make the workload's data set; interrupted, the same command goes on where it stopped.

    Every byte follows from seed, file and offset: unique and incompressible unless asked otherwise, and
    verifiable without stored sums. Files have DLIO's names.

    Examples:

      penstock training generate unet3d --data /data/unet3d --set dataset.num_files_train=40

      penstock training generate retinanet_b200 --data s3://bucket/retinanet --ranks 8 --threads 16
    """
    from dataclasses import asdict

    from penstock.dataset.content import Reduction
    from penstock.dataset.generate import generate as make
    from penstock.units import format_bytes, format_rate, format_seconds

    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    reduction = Reduction(compressible=compressible, dedupable=dedupable)
    recipe = _recipe(workload, accelerator, settings, seed=seed, reduction=reduction, terminal=terminal)
    storage = _storage(data, option, rank=comm.rank)
    with terminal.progress() as progress:
        made = make(recipe, storage, comm=comm, threads=threads, progress=progress)
    terminal.result(
        {"data": data, **asdict(made), "rate_bytes_per_s": made.rate_bytes_per_s},
        lambda console: console.print(
            f"{made.num_files:,} files at {data}: {made.written_files:,} written "
            f"({format_bytes(made.written_bytes)} in {format_seconds(made.elapsed_s)}, "
            f"{format_rate(made.rate_bytes_per_s)}), {made.kept_files:,} were there."
        ),
    )


@ranked
def verify(
    comm: Comm,
    workload: WorkloadName,
    *,
    data: Data,
    accelerator: Accelerator = "",
    settings: Settings = None,
    seed: Seed = None,
    threads: Threads = 4,
    compressible: Compressible = 0.0,
    dedupable: Dedupable = 0.0,
    option: StorageOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Read a generated data set again and compare every byte; exits with 1 if a file is wrong.

    Give the words that it was generated with: bytes follow from them alone.

    Examples:

      penstock training verify unet3d --data /data/unet3d --set dataset.num_files_train=40

      penstock training verify retinanet_b200 --data s3://bucket/retinanet --ranks 8 --json
    """
    from dataclasses import asdict

    from penstock.dataset.content import Reduction
    from penstock.dataset.manifest import require_same
    from penstock.dataset.verify import verify as look

    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    reduction = Reduction(compressible=compressible, dedupable=dedupable)
    recipe = _recipe(workload, accelerator, settings, seed=seed, reduction=reduction, terminal=terminal)
    storage = _storage(data, option, rank=comm.rank)
    require_same(storage, recipe)
    with terminal.progress() as progress:
        seen = look(recipe, storage, comm=comm, threads=threads, progress=progress)
    terminal.result({"data": data, **asdict(seen)}, lambda console: _draw_verified(console, data, seen))
    return 1 if seen.num_wrong else 0


def _draw_verified(console: Console, data: str, seen: Verified) -> None:
    from rich.markup import escape

    from penstock.units import format_bytes, format_seconds

    for one in seen.wrong:
        console.print(escape(f"{one.name}: {one.what}"))
    if seen.num_wrong > len(seen.wrong):
        console.print(f"... and {seen.num_wrong - len(seen.wrong):,} more.")
    console.print(
        f"{seen.num_files:,} files at {escape(data)}, {format_bytes(seen.read_bytes)} in "
        f"{format_seconds(seen.elapsed_s)}: {seen.num_wrong:,} wrong."
    )


def _recipe(
    name: str,
    accelerator: str,
    settings: list[str] | None,
    *,
    seed: int | None,
    reduction: Reduction,
    terminal: Terminal,
) -> Recipe:
    """What the words ask for; remarks on keys are said."""
    from penstock.dataset.manifest import Recipe
    from penstock.workload.loading import load_data_set
    from penstock.workload.overrides import parse_settings

    loaded = load_data_set(name, accelerator=accelerator, overrides=parse_settings(settings or ()))
    for remark in loaded.remarks:
        terminal.note(str(remark))
    workload = loaded.workload
    return Recipe(
        dataset=workload.dataset, seed=workload.train.seed if seed is None else seed, reduction=reduction
    )


def _storage(data: str, option: list[str] | None, *, rank: int) -> Storage:
    from penstock.environment import process_environment
    from penstock.storage import open_storage

    options = values.assignments("--option", option or ())
    return open_storage(data, process_environment(), options=options, rank=rank)
