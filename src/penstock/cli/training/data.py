"""`penstock training generate` and `verify`: the data set of a workload, made and held to its recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cli.training.words import (
    Accelerator,
    Data,
    Settings,
    StorageOption,
    WorkloadName,
    data_at,
    load_workload,
)
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.dataset.dataset_manifest import Recipe
    from penstock.dataset.verify_dataset import Verified
    from penstock.storage import Storage

_Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Else the workload's train.seed.")]
_Threads = Annotated[int, typer.Option("--threads", min=1, help="Files under way at once, on each rank.")]
_Compressible = Annotated[
    float, typer.Option("--compressible", min=0, max=1, help="Share of each 4 KiB that compresses away.")
]
_Dedupable = Annotated[
    float, typer.Option("--dedupable", min=0, max=1, help="Share of 4 KiB blocks that occur elsewhere.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a verb works on: the data set of `recipe`, at `storage`, which the user calls `data`."""

    data: str
    recipe: Recipe
    storage: Storage
    threads: int
    terminal: Terminal


def _asked(
    comm: Comm,
    workload: WorkloadName,
    *,
    data: Data,
    accelerator: Accelerator = "",
    settings: Settings = None,
    seed: _Seed = None,
    threads: _Threads = 4,
    compressible: _Compressible = 0.0,
    dedupable: _Dedupable = 0.0,
    option: StorageOption = None,
    as_json: JsonFlag = False,
) -> _Asked:
    """The options of both verbs, understood: a data set's bytes follow from these words alone."""
    from penstock.dataset.content import Reduction
    from penstock.dataset.dataset_manifest import Recipe

    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    asked = load_workload(terminal, workload, accelerator, settings, is_data_set=True).workload
    recipe = Recipe(
        dataset=asked.dataset,
        seed=asked.train.seed if seed is None else seed,
        reduction=Reduction(compressible=compressible, dedupable=dedupable),
    )
    storage = data_at(data, option, rank=comm.rank)()
    return _Asked(data=data, recipe=recipe, storage=storage, threads=threads, terminal=terminal)


def _of_data_set(verb: Callable[[Comm, _Asked], int | None]) -> Callable[..., int | None]:
    """A command with the options of `_asked`."""

    @wraps(verb)
    def command(comm: Comm, **given: object) -> int | None:
        return verb(comm, _asked(comm, **given))  # type: ignore[arg-type]  # typer has converted them

    command.__signature__ = inspect.signature(_asked, eval_str=True)  # type: ignore[attr-defined]  # typer reads it
    return command


@ranked
@_of_data_set
def generate(comm: Comm, asked: _Asked) -> None:
    """Make the workload's data set; interrupted, the same command goes on where it stopped.

    Every byte follows from seed, file and offset: unique and incompressible unless asked otherwise, and
    verifiable without stored sums. Files have DLIO's names.

    Examples:

      penstock training generate unet3d --data /data/unet3d --set dataset.num_files_train=40

      penstock training generate retinanet_b200 --data s3://bucket/retinanet --ranks 8 --threads 16
    """
    from dataclasses import asdict

    from penstock.dataset.generate import generate as make
    from penstock.units import format_bytes, format_rate, format_seconds

    with asked.terminal.progress() as progress:
        made = make(asked.recipe, asked.storage, comm=comm, threads=asked.threads, progress=progress)
    asked.terminal.result(
        {"data": asked.data, **asdict(made), "rate_bytes_per_s": made.rate_bytes_per_s},
        lambda console: console.print(
            f"{made.num_files:,} files at {asked.data}: {made.written_files:,} written "
            f"({format_bytes(made.written_bytes)} in {format_seconds(made.elapsed_s)}, "
            f"{format_rate(made.rate_bytes_per_s)}), {made.kept_files:,} were there."
        ),
    )


@ranked
@_of_data_set
def verify(comm: Comm, asked: _Asked) -> int:
    """Read a generated data set again and compare every byte; exits with 1 if a file is wrong.

    Give the words that it was generated with: bytes follow from them alone.

    Examples:

      penstock training verify unet3d --data /data/unet3d --set dataset.num_files_train=40

      penstock training verify retinanet_b200 --data s3://bucket/retinanet --ranks 8 --json
    """
    from dataclasses import asdict

    from penstock.dataset.dataset_manifest import require_same
    from penstock.dataset.verify_dataset import verify as look

    require_same(asked.storage, asked.recipe)
    with asked.terminal.progress() as progress:
        seen = look(asked.recipe, asked.storage, comm=comm, threads=asked.threads, progress=progress)
    asked.terminal.result(
        {"data": asked.data, **asdict(seen)}, lambda console: _draw_verified(console, asked.data, seen)
    )
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
