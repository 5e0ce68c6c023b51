"""`penstock checkpoint ls`, `show`, `diff`, `verify`, `convert` and `rm`: work on checkpoints that exist."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from penstock.cli.options import argument, flag, option, repeated, verb
from penstock.cli.parsers import SIZE, TEXT, URI, choice
from penstock.cli.terminal import Terminal, TextTable, View, table
from penstock.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.checkpoint.tools.convert import Conversion
    from penstock.checkpoint.tools.diff import CheckpointComparison, NameComparison
    from penstock.checkpoint.tools.inspection import CheckpointDetails, CheckpointListing, TensorDetails
    from penstock.checkpoint.tools.verify import Verification

DIFFERENT = 1
DAMAGED = 1
NOT_CHECKED = 3


@dataclass(frozen=True, kw_only=True)
class _ListOptions:
    path: str = argument("PATH", URI, "Directory or URI of a run, or one checkpoint.")


@verb(_ListOptions)
def list_checkpoints(options: _ListOptions, terminal: Terminal) -> None:
    """List the checkpoints in PATH with step, state, size and age.

    The state comes from metadata, manifest and file sizes: committed, no sums (written by another program),
    damaged, or no access (for this user). Use `penstock checkpoint verify` to check every byte.

    Examples:

      penstock checkpoint ls /pfs/run

      penstock checkpoint ls s3://bucket/run --json
    """
    from penstock.checkpoint.tools import inspection

    checkpoints = inspection.list_checkpoints(options.path)
    for checkpoint in checkpoints:
        if checkpoint.complaint:
            terminal.note(f"{checkpoint.name}: {checkpoint.complaint}")
    now_s = time.time()
    rows = [_list_row(checkpoint, now_s) for checkpoint in checkpoints]
    document = {"path": options.path, "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints]}
    terminal.result(document, table(options.path, rows))


def _list_row(checkpoint: CheckpointListing, now_s: float) -> dict[str, str]:
    return {
        "checkpoint": checkpoint.name,
        "step": "-" if checkpoint.step is None else str(checkpoint.step),
        "state": checkpoint.state.value,
        "size": format_bytes(checkpoint.size_bytes),
        "files": str(checkpoint.num_files),
        "tensors": str(checkpoint.num_tensors),
        "age": format_seconds(max(now_s - checkpoint.modified_s, 0.0)) if checkpoint.modified_s else "-",
    }


@dataclass(frozen=True, kw_only=True)
class _ShowOptions:
    path: str = argument("PATH", URI, "Checkpoint directory, .pt file or .safetensors file.")
    pattern: str = option(
        "--name", TEXT, "Show only matching names, e.g. 'model.*'.", default="*", metavar="PATTERN"
    )


@verb(_ShowOptions)
def show(options: _ShowOptions, terminal: Terminal) -> None:
    """Show the tensors of a checkpoint: names, shapes, types, sizes, and the files that hold them.

    Reads torch's distributed checkpoints (ours and torch's own), torch.save files and safetensors. No tensor
    is loaded and no code of the checkpoint is run: classes of objects are named, not built.

    Examples:

      penstock checkpoint show /pfs/run/step-100

      penstock checkpoint show model.safetensors --name 'model.layers.0.*' --json
    """
    from penstock.checkpoint.tools import inspection

    contents = inspection.show(options.path)
    selected = replace(
        contents,
        tensors=tuple(tensor for tensor in contents.tensors if fnmatchcase(tensor.name, options.pattern)),
        objects=tuple(item for item in contents.objects if fnmatchcase(item.name, options.pattern)),
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
    yield TextTable(title, [_tensor_row(tensor) for tensor in contents.tensors])
    if contents.objects:
        rows = [
            {"name": item.name, "bytes": str(item.size_bytes), "file": item.file, "value": item.value}
            for item in contents.objects
        ]
        yield TextTable(f"besides tensors: {len(contents.objects)}", rows)


def _tensor_row(tensor: TensorDetails) -> dict[str, str]:
    files = tensor.files[0] if len(tensor.files) == 1 else f"{len(tensor.files)} files"
    return {
        "name": tensor.name,
        "type": tensor.dtype,
        "shape": " x ".join(map(str, tensor.shape)) or "scalar",
        "size": format_bytes(tensor.size_bytes),
        "parts": str(tensor.num_parts),
        "where": f"{files} ({tensor.note})" if tensor.note else files,
    }


@dataclass(frozen=True, kw_only=True)
class _DiffOptions:
    first: str = argument("FIRST", URI, "Checkpoint of any format.")
    second: str = argument("SECOND", URI, "Checkpoint to compare it with, of any format.")
    only: tuple[str, ...] = repeated("--only", TEXT, "Compare only matching names, e.g. 'model.*'.")


@verb(_DiffOptions)
def diff(options: _DiffOptions, terminal: Terminal) -> int:
    """Compare two checkpoints tensor by tensor, whatever their formats and sharding.

    Exits with 0 if nothing differs and with 1 otherwise. Tensors whose checksums are equal were written equal
    and are not read: `verify` finds what was damaged since.

    Examples:

      penstock checkpoint diff /pfs/run/step-100 /pfs/run/step-200

      penstock checkpoint diff /pfs/run/step-100 model.safetensors --only 'model.*' --json
    """
    from penstock.checkpoint.tools import diff

    with terminal.progress() as progress:
        comparison = diff.compare(options.first, options.second, only=options.only, progress=progress)
    document = {**asdict(comparison), "are_same": comparison.are_same}
    terminal.result(document, _view_differences(comparison))
    return 0 if comparison.are_same else DIFFERENT


def _view_differences(comparison: CheckpointComparison) -> View:
    different = [part for part in comparison.parts if part.outcome.value != "same"]
    if different:
        title = f"{comparison.first} and {comparison.second}"
        yield TextTable(title, [_difference_row(part) for part in different])
    num_same = len(comparison.parts) - len(different)
    yield f"{num_same} of {len(comparison.parts)} parts are the same, {len(different)} are not"


def _difference_row(part: NameComparison) -> dict[str, str]:
    largest = part.largest_difference
    return {
        "name": part.name,
        "outcome": part.outcome.value,
        "first": part.first,
        "second": part.second,
        "elements": str(part.different_elements) if part.different_elements else "",
        "largest": "" if largest is None else f"{largest:.3g}",
    }


@dataclass(frozen=True, kw_only=True)
class _VerifyOptions:
    path: str = argument("PATH", URI, "Checkpoint directory, .pt file or .safetensors file.")


@verb(_VerifyOptions)
def verify(options: _VerifyOptions, terminal: Terminal) -> int:
    """Read a whole checkpoint and verify every checksum in it.

    Penstock's checkpoints have a checksum of every byte. Those of torch are compared with the CRC-32 of their
    archives, which torch itself never reads. Exits with 1 and a list of the damage, or with 3 if the
    checkpoint has no checksums.

    Examples:

      penstock checkpoint verify /pfs/run/step-100

      penstock checkpoint verify s3://bucket/run/step-100 --json
    """
    from penstock.checkpoint.tools import verify as verification

    started_s = time.monotonic()
    with terminal.progress() as progress:
        report = verification.verify(options.path, progress)
    elapsed_s = time.monotonic() - started_s
    terminal.notes(report.notes)
    document = {**asdict(report), "is_whole": report.is_whole, "elapsed_s": elapsed_s}
    terminal.result(document, _view_verification(report, elapsed_s))
    if not report.is_whole:
        return DAMAGED
    return 0 if report.is_checked else NOT_CHECKED


def _view_verification(report: Verification, elapsed_s: float) -> View:
    for damage in report.damage:
        yield f"damaged: {damage}"
    rate = format_rate(report.checked_bytes / elapsed_s) if elapsed_s > 0 else "-"
    size = f"{format_bytes(report.checked_bytes)} of {format_bytes(report.size_bytes)} checked"
    verdict = "whole" if report.is_whole and report.is_checked else "not checked"
    if report.damage:
        verdict = f"damaged in {format_count(len(report.damage), 'place')}"
    yield (
        f"{report.uri}: {verdict}; {format_count(report.num_items, 'item')} in "
        f"{format_count(report.num_files, 'file')}, {size} "
        f"in {format_seconds(elapsed_s)} ({rate})"
    )


@dataclass(frozen=True, kw_only=True)
class _ConvertOptions:
    source: str = argument("SOURCE", URI, "Checkpoint of any format.")
    target: str = argument("TARGET", URI, "New path or URI.")
    format: str | None = option(
        "--to",
        choice("dcp", "torch", "safetensors"),
        "Format to write (default: by TARGET's ending: .pt is torch, .safetensors is safetensors, else dcp).",
    )
    only: tuple[str, ...] = repeated("--only", TEXT, "Convert only matching names, e.g. 'model.*'.")
    tensors_only: bool = flag("--tensors-only", "Convert only tensors, and list what is left out.")
    compresses: bool = flag("--compress", "Compress items with zstd (dcp only).")
    shard_bytes: int = option(
        "--shard-size", SIZE, "Maximum size of each safetensors file of a sharded directory.", default="5GB"
    )
    trusts: bool = flag("--trust", "Rebuild pickled objects, even if that runs code from the checkpoint.")
    no_verify: bool = flag("--no-verify", "Convert without verifying SOURCE first.")


@verb(_ConvertOptions)
def convert(options: _ConvertOptions, terminal: Terminal) -> None:
    """Convert a checkpoint to another format, in bounded memory.

    Converts between torch's distributed checkpoints (dcp), torch.save files and safetensors, from whole or
    sharded tensors. SOURCE is verified first if it has checksums. Nothing is overwritten.

    Examples:

      penstock checkpoint convert /pfs/run/step-100 model.pt

      penstock checkpoint convert /pfs/run/step-100 hf/ --to safetensors --only 'model.*' --tensors-only

      penstock checkpoint convert model.safetensors /pfs/run/step-0 --to dcp --json
    """
    from penstock.checkpoint.formats.checkpoint_source import Format
    from penstock.checkpoint.tools import convert as conversion

    target = options.target.rstrip("/")
    with terminal.progress() as progress:
        report = conversion.convert(
            options.source,
            target,
            Format(options.format or _format_by_ending(target)),
            only=options.only,
            tensors_only=options.tensors_only,
            compress=options.compresses,
            trust=options.trusts,
            verified=not options.no_verify,
            shard_bytes=options.shard_bytes,
            progress=progress,
        )
    terminal.notes(report.notes)
    terminal.result(asdict(report), _view_conversion(report))


def _format_by_ending(target: str) -> str:
    if target.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    return "safetensors" if target.endswith(".safetensors") else "dcp"


def _view_conversion(report: Conversion) -> View:
    if report.left_out:
        yield f"left out: {', '.join(report.left_out)}"
    contents = (
        f"{format_count(report.num_tensors, 'tensor')} and {format_count(report.num_objects, 'other value')}"
    )
    yield f"{report.target}: {report.format.value}, {contents}, {format_bytes(report.size_bytes)}"


@dataclass(frozen=True, kw_only=True)
class _RemoveOptions:
    path: str = argument("PATH", URI, "Directory or URI of a committed checkpoint, or of a step in a cache.")
    even_last: bool = flag("--even-last", "Allow removing the only complete checkpoint that is left.")
    no_verify: bool = flag("--no-verify", "Check only files and sizes of the checkpoint that remains.")


@verb(_RemoveOptions)
def remove(options: _RemoveOptions, terminal: Terminal) -> None:
    """Remove a checkpoint: its name first, in one durable step, then its files.

    The last complete checkpoint of a run is kept unless --even-last is given: another one, the newest first,
    is verified to its last byte before anything is removed. A step in a cache must be durable.

    Examples:

      penstock checkpoint rm /pfs/run/step-100

      penstock checkpoint rm s3://bucket/run/step-100 --even-last --json

      srun --ntasks-per-node=1 penstock checkpoint rm /local/ssd/run/step-100
    """
    from penstock.checkpoint.commit.catalog import open_parent
    from penstock.checkpoint.levels import cache_tools
    from penstock.checkpoint.tools import remove

    storage, name = open_parent(options.path)
    with terminal.progress() as progress:
        if cache_tools.is_cache(storage):
            removed = cache_tools.remove_cached(storage, name, even_last=options.even_last)
        else:
            removed = remove.remove(
                options.path, even_last=options.even_last, verified=not options.no_verify, progress=progress
            )
    remaining = f"; {removed.stays} is complete and remains" if removed.stays else ""
    text = f"removed {removed.uri}: {removed.num_files} files, {format_bytes(removed.size_bytes)}{remaining}"
    terminal.result(asdict(removed), [text])
