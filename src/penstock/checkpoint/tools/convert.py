"""Convert a checkpoint to DCP, `torch.save` or safetensors, streamed in bounded memory.

A source with checksums is verified first. Invariant: nothing is overwritten, and an interrupted conversion
leaves nothing that could be mistaken for a complete checkpoint: commits and indexes come last.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.checkpoint.commit.catalog import AnyPath, open_catalog, open_parent
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    Format,
    checkpoint_uri,
    open_checkpoint,
)
from penstock.checkpoint.formats.safetensors import INDEX_NAME
from penstock.checkpoint.state.regions import StoredObject, TensorFacts, element_type
from penstock.checkpoint.state.walk import matches_pattern
from penstock.checkpoint.tools import tensor_slabs
from penstock.checkpoint.tools.verify import verify
from penstock.errors import DataDamaged, ObjectNotFound, UsageError, name_some
from penstock.progress import Progress, Silent
from penstock.storage import Storage
from penstock.storage.protocol import exists, write_object


@dataclass(frozen=True, slots=True)
class PartSelection:
    """The parts of a checkpoint to convert: tensors by their numbers in its index, and objects."""

    tensors: tuple[int, ...]
    objects: tuple[StoredObject, ...]

    def num_bytes(self, checkpoint: CheckpointSource) -> int:
        """The bytes of all chosen tensors."""
        return sum(checkpoint.index.tensors[number].size_bytes for number in self.tensors)


def select_parts(checkpoint: CheckpointSource, only: Sequence[str]) -> PartSelection:
    """The parts that match one of the patterns, or all without patterns; `UsageError` if none does."""

    def is_chosen(name: str) -> bool:
        return not only or matches_pattern(name, only)

    index = checkpoint.index
    chosen = PartSelection(
        tuple(number for number, facts in enumerate(index.tensors) if is_chosen(facts.name)),
        tuple(stored for stored in index.objects if is_chosen(stored.name)),
    )
    if only and not (chosen.tensors or chosen.objects):
        raise UsageError(
            f"No name in {checkpoint.uri} matches {' or '.join(only)}",
            fix="`penstock checkpoint show` lists the names.",
        )
    return chosen


_HEADER_ALIGNMENT: Final = 4096
"""The header is padded with spaces, as the format allows, so that payloads begin at a page."""


@dataclass(frozen=True, slots=True)
class SafetensorsShard:
    """One file to write: its name and its tensors, by their numbers, in order."""

    name: str
    tensors: tuple[int, ...]


def plan_shards(
    tensors: Sequence[TensorFacts], chosen: Sequence[int], most_bytes: int
) -> list[SafetensorsShard]:
    """Distribute tensors to files of at most `most_bytes`, in order; larger tensors get a file each."""
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
        return [SafetensorsShard("model.safetensors", tuple(runs[0]))]
    return [
        SafetensorsShard(f"model-{place:05d}-of-{len(runs):05d}.safetensors", tuple(run))
        for place, run in enumerate(runs, start=1)
    ]


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


def write_safetensors(
    checkpoint: CheckpointSource,
    chosen: PartSelection,
    storage: Storage,
    shards: Sequence[tuple[str, SafetensorsShard]],
    progress: Progress,
) -> int:
    """Write each shard to its key; returns the bytes of all files."""
    require_writable(checkpoint, chosen)
    buffers, total = tensor_slabs.WriteBuffers(), 0
    with closing(tensor_slabs.SlabReader(checkpoint)) as reader:
        for key, shard in shards:
            tensors = [checkpoint.index.tensors[number] for number in shard.tensors]
            header = build_header(tensors)
            size_bytes = len(header) + sum(facts.size_bytes for facts in tensors)
            sink = storage.create(key, size_bytes)
            with ExitStack() as undo:
                undo.callback(sink.abort)
                appender = tensor_slabs.SinkAppender(sink, buffers)
                appender.write(header)
                for number in shard.tensors:
                    append_tensor(checkpoint, reader, number, appender, progress)
                sink.finish()
                undo.pop_all()
            total += size_bytes
    return total


def require_writable(checkpoint: CheckpointSource, chosen: PartSelection) -> None:
    """`UsageError` for parts that the format cannot store."""
    for number in chosen.tensors:
        facts = checkpoint.index.tensors[number]
        if element_type(facts.dtype).safetensors is None:
            raise UsageError(
                f"safetensors does not support {facts.dtype}, the type of {facts.name}",
                fix="Leave it out with --only, or convert to torch or dcp.",
            )
    if chosen.objects:
        names = name_some([stored.name for stored in chosen.objects])
        raise UsageError(
            f"safetensors stores only tensors, which these parts are not: {names}",
            fix="Choose tensors with --only, as in --only 'model.*', or leave out the rest: --tensors-only.",
        )


def append_tensor(
    checkpoint: CheckpointSource,
    reader: tensor_slabs.SlabReader,
    tensor: int,
    appender: tensor_slabs.SinkAppender,
    progress: Progress,
) -> None:
    """Append all elements of one tensor in row-major order."""
    facts = checkpoint.index.tensors[tensor]
    reader.require_whole(tensor)
    for slab in tensor_slabs.cut_into_slabs(facts.shape, facts.element_bytes, appender.room_bytes):
        buffer, num_bytes = appender.buffer(), tensor_slabs.slab_bytes(slab, facts)
        reader.read_slab(tensor, slab, buffer[:num_bytes])
        appender.append(buffer, num_bytes)
        progress.advance(num_bytes)


def write_index(
    checkpoint: CheckpointSource, storage: Storage, folder: str, shards: Sequence[SafetensorsShard]
) -> None:
    """Write the index of which file has which tensor, as Hugging Face's loaders need it."""
    tensors = checkpoint.index.tensors
    document = {
        "metadata": {
            "total_size": sum(tensors[number].size_bytes for shard in shards for number in shard.tensors)
        },
        "weight_map": {tensors[number].name: shard.name for shard in shards for number in shard.tensors},
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_object(storage, f"{folder}/{INDEX_NAME}", [text.encode()])


SHARD_BYTES: Final = 5_000_000_000
"""Hugging Face's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How to convert. `only` are patterns of names; without any, everything is converted."""

    only: Sequence[str] = field(default_factory=tuple)
    tensors_only: bool = False
    """Leave out what is not a tensor."""
    compress: bool = False
    """Compress items with zstd, which precludes partial and unbuffered reads; only to dcp."""
    trust: bool = False
    """Rebuild objects even if that runs code of the checkpoint."""
    verified: bool = True
    """Verify the source first."""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was written."""

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
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write the checkpoint at `source` to `target`, which must not exist, in the format `to`.

    `DataDamaged` if the source is damaged; `UsageError` for parts that the format cannot store.
    """
    options, progress = options or ConvertOptions(), progress or Silent()
    storage, name = open_parent(target)
    _require_free(storage, name)
    checkpoint = open_checkpoint(source)
    notes = _verified(source, progress) if options.verified else ()
    chosen = select_parts(checkpoint, options.only)
    if options.tensors_only:
        chosen = replace(chosen, objects=())
    progress.begin("bytes", chosen.num_bytes(checkpoint))
    size_bytes = _write(checkpoint, chosen, storage, name, to=to, options=options, progress=progress)
    return Conversion(
        source=checkpoint.uri,
        target=checkpoint_uri(storage, name),
        format=to,
        num_tensors=len(chosen.tensors),
        num_objects=len(chosen.objects),
        size_bytes=size_bytes,
        left_out=_left_out(checkpoint, chosen),
        notes=(*notes, *_notes(options, to)),
    )


def _write(
    checkpoint: CheckpointSource,
    chosen: PartSelection,
    storage: Storage,
    name: str,
    *,
    to: Format,
    options: ConvertOptions,
    progress: Progress,
) -> int:
    # The writers of torch's formats load torch, which a conversion to safetensors does without.
    if to is Format.DCP:
        from penstock.checkpoint.formats.dcp_item import ZSTD  # noqa: PLC0415
        from penstock.checkpoint.tools.torch_writers import write_dcp  # noqa: PLC0415

        descriptors = (ZSTD,) if options.compress else ()
        return write_dcp(checkpoint, chosen, storage, name, descriptors=descriptors, progress=progress)
    if options.compress:
        raise UsageError(f"{to} has no compression", fix="Leave out --compress, or convert to dcp.")
    if to is Format.TORCH_SAVE:
        from penstock.checkpoint.tools.torch_writers import write_torch  # noqa: PLC0415

        return write_torch(checkpoint, chosen, storage, name, trust=options.trust, progress=progress)
    require_writable(checkpoint, chosen)
    if name.endswith(".safetensors"):
        shards = [(name, SafetensorsShard(name, chosen.tensors))]
        return write_safetensors(checkpoint, chosen, storage, shards, progress)
    planned = plan_shards(checkpoint.index.tensors, chosen.tensors, options.shard_bytes)
    keyed = [(f"{name}/{shard.name}", shard) for shard in planned]
    size_bytes = write_safetensors(checkpoint, chosen, storage, keyed, progress)
    write_index(checkpoint, storage, name, planned)
    return size_bytes


def _require_free(storage: Storage, name: str) -> None:
    """`UsageError` if a file, a folder or a checkpoint has the target's name."""
    taken = _is_folder(storage, name) or exists(storage, name)
    if not taken:
        with suppress(ObjectNotFound):
            open_catalog(storage).find(name)
            taken = True
    if taken:
        raise UsageError(
            f"{checkpoint_uri(storage, name)} exists already",
            fix="Convert to a new name; nothing is overwritten.",
        )


def _is_folder(storage: Storage, name: str) -> bool:
    try:
        return next(iter(storage.list(name)), None) is not None
    except ObjectNotFound:
        return False


def _verified(source: AnyPath, progress: Progress) -> tuple[str, ...]:
    result = verify(source, progress)
    if not result.is_whole:
        raise DataDamaged(
            f"The source is damaged in {len(result.damage)} places; the first: {result.damage[0]}",
            where=result.uri,
            fix="Convert an undamaged step; `penstock checkpoint verify` lists all damage.",
        )
    return () if result.is_checked else ("The source has no checksums: it was converted unverified.",)


def _left_out(checkpoint: CheckpointSource, chosen: PartSelection) -> tuple[str, ...]:
    index = checkpoint.index
    chosen_names = {index.tensors[number].name for number in chosen.tensors}
    chosen_names |= {stored.name for stored in chosen.objects}
    names = [*(facts.name for facts in index.tensors), *(stored.name for stored in index.objects)]
    return tuple(name for name in names if name not in chosen_names)


def _notes(options: ConvertOptions, to: Format) -> tuple[str, ...]:
    if options.compress and to is Format.DCP:
        return ("Compressed items cannot be read in part, and not past the page cache.",)
    return ()
