"""Convert a checkpoint to DCP, `torch.save` or safetensors, streamed in bounded memory.

A source with checksums is verified first. Invariant: nothing is overwritten, and an interrupted conversion
leaves nothing that could be mistaken for a complete checkpoint: commits and indexes come last.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Final

from penstock.checkpoint.commit.catalog import AnyPath, open_catalog, open_parent
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    Format,
    checkpoint_uri,
    open_checkpoint,
)
from penstock.checkpoint.formats.dcp_item import ZSTD
from penstock.checkpoint.formats.safetensors import INDEX_NAME
from penstock.checkpoint.state.regions import StoredObject, TensorFacts, element_type
from penstock.checkpoint.state.walk import matches_pattern
from penstock.checkpoint.tools.tensor_slabs import Appender, SlabReader
from penstock.checkpoint.tools.verify import verify
from penstock.errors import DataDamaged, ObjectNotFound, UsageError, name_some
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.protocol import exists, write_object

SHARD_BYTES: Final = 5_000_000_000
"""Hugging Face's own default."""
_HEADER_ALIGNMENT: Final = 4096
"""The header is padded with spaces, as the format allows, so that payloads begin at a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of a conversion."""

    source: str
    target: str
    format: Format
    num_tensors: int
    num_objects: int
    size_bytes: int
    left_out: tuple[str, ...] = ()
    """Names of the source that are not in the target."""
    notes: tuple[str, ...] = ()


def convert(
    source: AnyPath,
    target: AnyPath,
    to: Format,
    *,
    only: Sequence[str] = (),
    tensors_only: bool = False,
    compress: bool = False,
    trust: bool = False,
    verified: bool = True,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Conversion:
    """Write the checkpoint at `source` to `target`, which must not exist, in the format `to`.

    `only` are patterns of names; without any, everything is converted. `tensors_only` leaves out everything
    but tensors. `compress` applies zstd to the items of DCP, which then cannot be read in part. `trust`
    rebuilds objects even if that runs code of the checkpoint. Unless `verified` is False, the source is
    verified first. `DataDamaged` if it is damaged; `UsageError` for parts that the format cannot store.
    """
    progress = progress or Progress()
    storage, name = open_parent(target)
    _require_free(storage, name)
    checkpoint, notes = open_checkpoint(source), []
    if verified:
        result = verify(source, progress)
        if not result.is_whole:
            raise DataDamaged(
                f"The source is damaged in {len(result.damage)} places; the first: {result.damage[0]}",
                where=result.uri,
                fix="Convert an undamaged step; `penstock checkpoint verify` lists all damage.",
            )
        if not result.is_checked:
            notes.append("The source has no checksums: it was converted unverified.")
    index = checkpoint.index
    names = [*(facts.name for facts in index.tensors), *(stored.name for stored in index.objects)]
    chosen = {name for name in names if not only or matches_pattern(name, only)}
    if only and not chosen:
        raise UsageError(
            f"No name in {checkpoint.uri} matches {' or '.join(only)}",
            fix="`penstock checkpoint show` lists the names.",
        )
    tensors = [number for number, facts in enumerate(index.tensors) if facts.name in chosen]
    objects = [stored for stored in index.objects if stored.name in chosen and not tensors_only]
    progress.begin("bytes", sum(index.tensors[number].size_bytes for number in tensors))
    if compress and to is not Format.DCP:
        raise UsageError(f"{to} has no compression", fix="Leave out --compress, or convert to dcp.")
    if to is Format.SAFETENSORS:
        _require_writable(checkpoint, tensors, objects)
    appender = Appender(progress.advance)
    if to is Format.SAFETENSORS:
        size_bytes = _write_safetensors(
            checkpoint, tensors, storage, name, appender=appender, shard_bytes=shard_bytes
        )
    else:
        # These writers load torch, which a conversion to safetensors does without.
        from penstock.checkpoint.tools.torch_writers import write_dcp, write_torch  # noqa: PLC0415

        place = (checkpoint, tensors, objects, storage, name)
        if to is Format.DCP:
            transforms = (ZSTD,) if compress else ()
            size_bytes = write_dcp(*place, transforms=transforms, appender=appender)
        else:
            size_bytes = write_torch(*place, trust=trust, appender=appender)
    if compress:
        notes.append("Compressed items cannot be read in part, and not past the page cache.")
    kept = {index.tensors[number].name for number in tensors} | {stored.name for stored in objects}
    return Conversion(
        source=checkpoint.uri,
        target=checkpoint_uri(storage, name),
        format=to,
        num_tensors=len(tensors),
        num_objects=len(objects),
        size_bytes=size_bytes,
        left_out=tuple(name for name in names if name not in kept),
        notes=tuple(notes),
    )


def _require_free(storage: Storage, name: str) -> None:
    """`UsageError` if a file, a folder or a checkpoint has the target's name."""
    is_taken = exists(storage, name)
    with suppress(ObjectNotFound):
        is_taken = is_taken or next(iter(storage.list(name)), None) is not None
    with suppress(ObjectNotFound):
        is_taken = is_taken or bool(open_catalog(storage).find(name))
    if is_taken:
        raise UsageError(
            f"{checkpoint_uri(storage, name)} exists already",
            fix="Convert to a new name; nothing is overwritten.",
        )


def _require_writable(
    checkpoint: CheckpointSource, tensors: Sequence[int], objects: Sequence[StoredObject]
) -> None:
    """`UsageError` for parts that safetensors cannot store."""
    for number in tensors:
        facts = checkpoint.index.tensors[number]
        if element_type(facts.dtype).safetensors is None:
            raise UsageError(
                f"safetensors does not support {facts.dtype}, the type of {facts.name}",
                fix="Leave it out with --only, or convert to torch or dcp.",
            )
    if objects:
        names = name_some([stored.name for stored in objects])
        raise UsageError(
            f"safetensors stores only tensors, which these parts are not: {names}",
            fix="Choose tensors with --only, as in --only 'model.*', or leave out the rest: --tensors-only.",
        )


def _write_safetensors(
    checkpoint: CheckpointSource,
    chosen: Sequence[int],
    storage: Storage,
    name: str,
    *,
    appender: Appender,
    shard_bytes: int,
) -> int:
    """Write one file, or a folder of shards with an index; returns the bytes of all files."""
    is_file, tensors = name.endswith(".safetensors"), checkpoint.index.tensors
    shards = {"": list(chosen)} if is_file else plan_shards(tensors, chosen, shard_bytes)
    total = 0
    with closing(SlabReader(checkpoint)) as reader:
        for shard, numbers in shards.items():
            header = build_header([tensors[number] for number in numbers])
            size_bytes = len(header) + sum(tensors[number].size_bytes for number in numbers)
            sink = storage.create(name if is_file else f"{name}/{shard}", size_bytes)
            with ExitStack() as undo:
                undo.callback(sink.abort)
                appender.begin(sink)
                appender.write(header)
                for number in numbers:
                    appender.copy(appender.slabs_of(reader, number, tensors[number]))
                sink.finish()
                undo.pop_all()
            total += size_bytes
    if not is_file:
        # Hugging Face's loaders look up in it which file has which tensor.
        document = {
            "metadata": {"total_size": sum(tensors[number].size_bytes for number in chosen)},
            "weight_map": {
                tensors[number].name: shard for shard, numbers in shards.items() for number in numbers
            },
        }
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        write_object(storage, f"{name}/{INDEX_NAME}", [text.encode()])
    return total


def plan_shards(
    tensors: Sequence[TensorFacts], chosen: Sequence[int], most_bytes: int
) -> dict[str, list[int]]:
    """By file, the numbers of its tensors: at most `most_bytes` in order; larger tensors get a file each."""
    runs: list[list[int]] = [[]]
    filled = 0
    for number in chosen:
        size_bytes = tensors[number].size_bytes
        if runs[-1] and filled + size_bytes > most_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(number)
        filled += size_bytes
    if len(runs) == 1:
        return {"model.safetensors": runs[0]}
    return {
        f"model-{place:05d}-of-{len(runs):05d}.safetensors": run for place, run in enumerate(runs, start=1)
    }


def build_header(tensors: Sequence[TensorFacts]) -> bytes:
    """The header of a file whose payloads follow in this order, with its length in front."""
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for facts in tensors:
        dtype = element_type(facts.dtype).safetensors
        end = position + facts.size_bytes
        document[facts.name] = {"dtype": dtype, "shape": facts.shape, "data_offsets": (position, end)}
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
