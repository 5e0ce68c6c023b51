"""`penstock checkpoint convert`: a checkpoint in another format, in bounded memory."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values
from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.checkpoint.convert import Conversion


class Target(StrEnum):
    """The formats, as words of the command line."""

    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint of any format.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new path or URI.")],
    *,
    to: Annotated[
        Target | None,
        typer.Option("--to", help="Else by TARGET: .pt is torch, .safetensors one file, a folder dcp."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Names to take, as in 'model.*'; repeatable."),
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out what is no tensor; it is listed.")
    ] = False,
    compress: Annotated[bool, typer.Option("--compress", help="To dcp: items through zstd.")] = False,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Most of one safetensors file of a folder.")
    ] = "5GB",
    trust: Annotated[
        bool, typer.Option("--trust", help="Rebuild objects even if that runs code of the checkpoint.")
    ] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Take SOURCE as it is.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the checkpoint SOURCE once more at TARGET, in another format.

    Between torch's distributed checkpoints (dcp), torch.save files and safetensors, whole tensors or sharded
    ones; memory stays bounded. SOURCE is verified first where it has checksums. Nothing is overwritten.

    Examples:

      penstock checkpoint convert /pfs/run/step-100 model.pt

      penstock checkpoint convert /pfs/run/step-100 hf/ --to safetensors --only 'model.*' --tensors-only

      penstock checkpoint convert model.safetensors /pfs/run/step-0 --to dcp --json
    """
    from dataclasses import asdict

    from penstock.checkpoint import convert as conversion
    from penstock.checkpoint.opened import Format

    terminal = Terminal(as_json=as_json)
    options = conversion.ConvertOptions(
        only=tuple(only or ()),
        tensors_only=tensors_only,
        compress=compress,
        trust=trust,
        verified=not no_verify,
        shard_bytes=values.size("--shard-size", shard_size),
    )
    place = target.rstrip("/")
    with terminal.progress() as progress:
        done = conversion.convert(source, place, Format(to or _format_of(place)), options, progress)
    for note in done.notes:
        terminal.note(note)
    terminal.result(asdict(done), lambda console: _draw(console, done))


def _format_of(target: str) -> Target:
    if target.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return Target.TORCH
    return Target.SAFETENSORS if target.endswith(".safetensors") else Target.DCP


def _draw(console: Console, done: Conversion) -> None:
    from penstock.units import format_bytes

    if done.left_out:
        console.print(f"left out: {', '.join(done.left_out)}")
    held = f"{done.num_tensors} tensors and {done.num_objects} other values"
    console.print(f"{done.target}: {done.format.value}, {held}, {format_bytes(done.size_bytes)}")
