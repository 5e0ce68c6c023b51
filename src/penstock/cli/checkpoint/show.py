"""`penstock checkpoint show`: the tensors of a checkpoint, without loading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.checkpoint.inspection import Shown, ShownTensor


def show(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint's folder, .pt or .safetensors.")],
    *,
    name: Annotated[
        str, typer.Option("--name", metavar="PATTERN", help="Only names that match, as in 'model.*'.")
    ] = "*",
    as_json: JsonFlag = False,
) -> None:
    """Show what the checkpoint at PATH holds: names, shapes, types, bytes, and the files they lie in.

    Reads torch's distributed checkpoints (ours and stock), torch.save files and safetensors; no tensor is
    loaded and nothing in the checkpoint is run. Classes of objects are named, not built.

    Examples:

      penstock checkpoint show /pfs/run/step-100

      penstock checkpoint show model.safetensors --name 'model.layers.0.*' --json
    """
    from dataclasses import asdict, replace
    from fnmatch import fnmatchcase

    from penstock.checkpoint import inspection

    found = inspection.show(path)
    chosen = replace(
        found,
        tensors=tuple(one for one in found.tensors if fnmatchcase(one.name, name)),
        objects=tuple(one for one in found.objects if fnmatchcase(one.name, name)),
    )
    document: dict[str, Any] = {**asdict(chosen), "size_bytes": chosen.size_bytes}
    Terminal(as_json=as_json).result(document, lambda console: _draw(console, chosen))


def _draw(console: Console, shown: Shown) -> None:
    from penstock.units import format_bytes

    origin = [shown.format.value]
    if shown.written_by:
        origin.append(f"written by {shown.written_by} on {shown.world_size} ranks")
    if shown.step is not None:
        origin.append(f"step {shown.step}")
    origin.append("checksums" if shown.has_sums else "no checksums of its own")
    origin += [f"{key} {value}" for key, value in shown.facts.items()]
    console.print(f"{shown.uri}: {', '.join(origin)}")
    title = f"{len(shown.tensors)} tensors, {format_bytes(shown.size_bytes)}"
    table(title, [_tensor_row(one) for one in shown.tensors])(console)
    if shown.objects:
        rows = [
            {"name": one.name, "bytes": str(one.size_bytes), "file": one.file, "value": one.value}
            for one in shown.objects
        ]
        table(f"besides tensors: {len(shown.objects)}", rows)(console)


def _tensor_row(one: ShownTensor) -> dict[str, str]:
    from penstock.units import format_bytes

    files = one.files[0] if len(one.files) == 1 else f"{len(one.files)} files"
    return {
        "name": one.name,
        "type": one.dtype,
        "shape": " x ".join(map(str, one.shape)) or "scalar",
        "size": format_bytes(one.size_bytes),
        "parts": str(one.num_parts),
        "where": f"{files} ({one.note})" if one.note else files,
    }
