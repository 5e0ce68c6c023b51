"""`penstock checkpoint ls`, `show`, `diff`, `verify`, `convert` and `rm`: tools for existing checkpoints."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from penstock.cli.options import argument, flag, option, refuse_ignored, repeated, verb
from penstock.cli.parsers import SIZE, TEXT, URI, choice
from penstock.cli.terminal import Terminal, TextTable, View, table
from penstock.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.checkpoint.tools.inspection import CheckpointDetails

DIFFERENT = 1
DAMAGED = 1
NOT_CHECKED = 3
_FORMATS = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch") | {".safetensors": "safetensors"}
"""The format of a target by its suffix; any other suffix means torch's distributed format."""


@verb
def list_checkpoints(
    terminal: Terminal,
    *,
    path: str = argument("PATH", URI, "Directory or URI of a run, or one checkpoint."),
) -> None:
    """List the checkpoints in PATH, with the step, state, size and age of each.

    The state is committed, damaged, no sums (written by another program, without checksums) or no access
    (this user may not read it). It is derived from the metadata, the manifest and the file sizes; to check
    every byte, use `penstock checkpoint verify`.

    Examples:

      penstock checkpoint ls /pfs/run

      penstock checkpoint ls s3://bucket/run --json
    """
    from penstock.checkpoint.tools import inspection

    checkpoints = inspection.list_checkpoints(path)
    terminal.notes(f"{one.name}: {one.complaint}" for one in checkpoints if one.complaint)
    now_s = time.time()
    rows = [
        {
            "checkpoint": checkpoint.name,
            "step": "-" if checkpoint.step is None else str(checkpoint.step),
            "state": checkpoint.state.value,
            "size": format_bytes(checkpoint.size_bytes),
            "files": str(checkpoint.num_files),
            "tensors": str(checkpoint.num_tensors),
            "age": format_seconds(max(now_s - checkpoint.modified_s, 0.0)) if checkpoint.modified_s else "-",
        }
        for checkpoint in checkpoints
    ]
    document = {"path": path, "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints]}
    terminal.result(document, table(path, rows))


@verb
def show(
    terminal: Terminal,
    *,
    path: str = argument("PATH", URI, "Checkpoint directory, .pt file or .safetensors file."),
    pattern: str = option(
        "--name",
        TEXT,
        "Show only items with matching names, e.g. 'model.*'.",
        default="*",
        metavar="PATTERN",
    ),
) -> None:
    """Show the tensors of a checkpoint: names, shapes, types, sizes, and the files that hold them.

    Reads torch's distributed checkpoints (written by Penstock or torch), torch.save files and safetensors. No
    tensor is loaded and no code from the checkpoint is run: pickled objects are shown by class name only.

    Examples:

      penstock checkpoint show /pfs/run/step-100

      penstock checkpoint show model.safetensors --name 'model.layers.0.*' --json
    """
    from penstock.checkpoint.tools import inspection

    contents = inspection.show(path)
    selected = replace(
        contents,
        tensors=tuple(tensor for tensor in contents.tensors if fnmatchcase(tensor.name, pattern)),
        objects=tuple(item for item in contents.objects if fnmatchcase(item.name, pattern)),
    )
    document = {**asdict(selected), "size_bytes": selected.size_bytes}
    terminal.result(document, _view_contents(selected))


def _view_contents(contents: CheckpointDetails) -> View:
    facts = [contents.format.value]
    if contents.written_by:
        facts.append(f"written by {contents.written_by} on {format_count(contents.world_size or 0, 'rank')}")
    if contents.step is not None:
        facts.append(f"step {contents.step}")
    facts.append("checksums" if contents.has_sums else "no checksums of its own")
    facts += [f"{key} {value}" for key, value in contents.facts.items()]
    yield f"{contents.uri}: {', '.join(facts)}"
    title = f"{format_count(len(contents.tensors), 'tensor')}, {format_bytes(contents.size_bytes)}"
    rows = [
        {
            "name": tensor.name,
            "type": tensor.dtype,
            "shape": " x ".join(map(str, tensor.shape)) or "scalar",
            "size": format_bytes(tensor.size_bytes),
            "parts": str(tensor.num_parts),
            "where": (tensor.files[0] if len(tensor.files) == 1 else f"{len(tensor.files)} files")
            + (f" ({tensor.note})" if tensor.note else ""),
        }
        for tensor in contents.tensors
    ]
    yield TextTable(title, rows)
    if contents.objects:
        rows = [
            {"name": item.name, "bytes": str(item.size_bytes), "file": item.file, "value": item.value}
            for item in contents.objects
        ]
        yield TextTable(f"besides tensors: {len(contents.objects)}", rows)


@verb
def diff(
    terminal: Terminal,
    *,
    first: str = argument("FIRST", URI, "Checkpoint of any format."),
    second: str = argument("SECOND", URI, "Checkpoint to compare it with, of any format."),
    only: tuple[str, ...] = repeated(
        "--only", TEXT, "Compare only items with matching names, e.g. 'model.*'."
    ),
) -> int:
    """Compare two checkpoints tensor by tensor, whatever their formats and sharding.

    Exits with 0 if nothing differs and with 1 otherwise. Tensors with equal checksums are not read; use
    `verify` to find damage to tensors after they were written.

    Examples:

      penstock checkpoint diff /pfs/run/step-100 /pfs/run/step-200

      penstock checkpoint diff /pfs/run/step-100 model.safetensors --only 'model.*' --json
    """
    from penstock.checkpoint.tools import diff

    with terminal.progress() as progress:
        comparison = diff.compare(first, second, only=only, progress=progress)
    different = [part for part in comparison.parts if part.outcome.value != "same"]
    rows = [
        {
            "name": part.name,
            "outcome": part.outcome.value,
            "first": part.first,
            "second": part.second,
            "elements": str(part.different_elements) if part.different_elements else "",
            "largest": "" if part.largest_difference is None else f"{part.largest_difference:.3g}",
        }
        for part in different
    ]
    num_same = len(comparison.parts) - len(different)
    view = [
        *(table(f"{comparison.first} and {comparison.second}", rows) if rows else ()),
        f"{num_same} of {len(comparison.parts)} parts are the same, {len(different)} are not",
    ]
    terminal.result({**asdict(comparison), "are_same": comparison.are_same}, view)
    return 0 if comparison.are_same else DIFFERENT


@verb
def verify(
    terminal: Terminal,
    *,
    path: str = argument("PATH", URI, "Checkpoint directory, .pt file or .safetensors file."),
) -> int:
    """Read a whole checkpoint and verify every checksum in it.

    Checkpoints written by Penstock have checksums of every byte. Those written by torch are checked against
    the CRC-32 in their archives, which torch itself ignores. If there is damage, lists it and exits with 1.
    If there are no checksums, exits with 3.

    Examples:

      penstock checkpoint verify /pfs/run/step-100

      penstock checkpoint verify s3://bucket/run/step-100 --json
    """
    from penstock.checkpoint.tools import verify as verification

    started_s = time.monotonic()
    with terminal.progress() as progress:
        report = verification.verify(path, progress)
    elapsed_s = time.monotonic() - started_s
    terminal.notes(report.notes)
    rate = format_rate(report.checked_bytes / elapsed_s) if elapsed_s > 0 else "-"
    verdict = "whole" if report.is_whole and report.is_checked else "not checked"
    if report.damage:
        verdict = f"damaged in {format_count(len(report.damage), 'place')}"
    summary = (
        f"{report.uri}: {verdict}; {format_count(report.num_items, 'item')} in "
        f"{format_count(report.num_files, 'file')}, {format_bytes(report.checked_bytes)} of "
        f"{format_bytes(report.size_bytes)} checked in {format_seconds(elapsed_s)} ({rate})"
    )
    document = {**asdict(report), "is_whole": report.is_whole, "elapsed_s": elapsed_s}
    terminal.result(document, [*(f"damaged: {damage}" for damage in report.damage), summary])
    if not report.is_whole:
        return DAMAGED
    return 0 if report.is_checked else NOT_CHECKED


@verb
def convert(
    terminal: Terminal,
    *,
    source: str = argument("SOURCE", URI, "Checkpoint of any format."),
    target: str = argument("TARGET", URI, "New path or URI."),
    target_format: str | None = option(
        "--to",
        choice("dcp", "torch", "safetensors"),
        "Format to write (default: by TARGET's suffix: .pt is torch, .safetensors is safetensors, else dcp).",
    ),
    only: tuple[str, ...] = repeated(
        "--only", TEXT, "Convert only items with matching names, e.g. 'model.*'."
    ),
    tensors_only: bool = flag("--tensors-only", "Convert only tensors, and list what is left out."),
    compresses: bool = flag("--compress", "Compress items with zstd (dcp only)."),
    shard_bytes: int = option(
        "--shard-size", SIZE, "Maximum size of each safetensors file of a sharded directory.", default="5GB"
    ),
    trusts: bool = flag("--trust", "Rebuild pickled objects, even if that runs code from the checkpoint."),
    no_verify: bool = flag("--no-verify", "Convert without verifying SOURCE first."),
) -> None:
    """Convert a checkpoint to another format, in bounded memory.

    Converts whole or sharded tensors between torch's distributed checkpoints (dcp), torch.save files and
    safetensors. Verifies SOURCE first if it has checksums. Never overwrites a file.

    Examples:

      penstock checkpoint convert /pfs/run/step-100 model.pt

      penstock checkpoint convert /pfs/run/step-100 hf/ --to safetensors --only 'model.*' --tensors-only

      penstock checkpoint convert model.safetensors /pfs/run/step-0 --to dcp --json
    """
    from penstock.checkpoint.formats.checkpoint_source import Format
    from penstock.checkpoint.tools import convert as conversion

    target = target.rstrip("/")
    to = Format(target_format or _FORMATS.get(PurePosixPath(target).suffix, "dcp"))
    if to is not Format.SAFETENSORS or target.endswith(".safetensors"):
        refuse_ignored(("--shard-size",), "only a directory of safetensors files is sharded")
    if to is not Format.TORCH_SAVE:
        refuse_ignored(("--trust",), f"objects are not rebuilt for {to.value}")
    with terminal.progress() as progress:
        report = conversion.convert(
            source,
            target,
            to,
            only=only,
            tensors_only=tensors_only,
            compress=compresses,
            trust=trusts,
            verified=not no_verify,
            shard_bytes=shard_bytes,
            progress=progress,
        )
    terminal.notes(report.notes)
    lines = [f"left out: {', '.join(report.left_out)}"] if report.left_out else []
    tensors = format_count(report.num_tensors, "tensor")
    others = format_count(report.num_objects, "other value")
    lines.append(
        f"{report.target}: {report.format.value}, {tensors} and {others}, {format_bytes(report.size_bytes)}"
    )
    terminal.result(asdict(report), lines)


@verb
def remove(
    terminal: Terminal,
    *,
    path: str = argument("PATH", URI, "Directory or URI of a committed checkpoint, or of a step in a cache."),
    even_last: bool = flag(
        "--even-last", "Allow removing the last complete checkpoint, or a step that is not durable."
    ),
    no_verify: bool = flag(
        "--no-verify",
        "Do not read the checkpoint that remains: check only that its files have the right sizes.",
    ),
) -> None:
    """Remove a checkpoint: hide it atomically and durably, then delete its files.

    Refuses to remove the last complete checkpoint of a run: before it removes anything, it verifies the other
    checkpoints byte by byte, newest first, until it finds a complete one. In a cache, refuses to remove a
    step that is not durable. --even-last overrides both.

    Examples:

      penstock checkpoint rm /pfs/run/step-100

      penstock checkpoint rm s3://bucket/run/step-100 --even-last --json

      srun --ntasks-per-node=1 penstock checkpoint rm /local/ssd/run/step-100
    """
    from penstock.checkpoint.commit.checkpoints import open_parent
    from penstock.checkpoint.levels import cache_tools
    from penstock.checkpoint.levels.cache import RUN_NOTE
    from penstock.checkpoint.tools import inspection
    from penstock.storage.protocol import exists

    storage, name = open_parent(path)
    with terminal.progress() as progress:
        if exists(storage, RUN_NOTE):
            removed = cache_tools.remove_cached(storage, name, even_last=even_last)
        else:
            removed = inspection.remove(path, even_last=even_last, verified=not no_verify, progress=progress)
    remaining = f"; {removed.stays} is complete and remains" if removed.stays else ""
    text = (
        f"removed {removed.uri}: {format_count(removed.num_files, 'file')}, "
        f"{format_bytes(removed.size_bytes)}{remaining}"
    )
    terminal.result(asdict(removed), [text])
