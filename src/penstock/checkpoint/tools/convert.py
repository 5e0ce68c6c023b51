"""Convert a checkpoint to DCP, `torch.save` or safetensors, streamed in bounded memory.

A source with checksums is verified first. Invariant: nothing is overwritten, and an interrupted conversion
leaves nothing that could be mistaken for a complete checkpoint: commits and indexes come last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
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
from penstock.checkpoint.state.leaves import matches_pattern
from penstock.checkpoint.state.regions import StoredObject, TensorFacts, element_type
from penstock.checkpoint.tools.tensor_slabs import Elements, Outlet, WriteBuffers, slab_bytes, slabs
from penstock.checkpoint.tools.verify import verify
from penstock.errors import DataDamaged, ObjectNotFound, UsageError
from penstock.progress import Progress, Silent
from penstock.storage import Storage
from penstock.storage.protocol import exists, write_object


@dataclass(frozen=True, slots=True)
class Selection:
    """Tensors by their numbers in the contents, and objects."""

    tensors: tuple[int, ...]
    objects: tuple[StoredObject, ...]

    def num_bytes(self, opened: CheckpointSource) -> int:
        """Of all chosen tensors."""
        return sum(opened.index.tensors[number].size_bytes for number in self.tensors)


def select(opened: CheckpointSource, only: Sequence[str]) -> Selection:
    """What matches one of the patterns; all without patterns. Nothing at all is a `UsageError`."""

    def is_chosen(name: str) -> bool:
        return not only or matches_pattern(name, only)

    contents = opened.index
    chosen = Selection(
        tuple(number for number, facts in enumerate(contents.tensors) if is_chosen(facts.name)),
        tuple(one for one in contents.objects if is_chosen(one.name)),
    )
    if only and not (chosen.tensors or chosen.objects):
        raise UsageError(
            f"No name in {opened.uri} matches {' or '.join(only)}",
            fix="`penstock checkpoint show` lists the names.",
        )
    return chosen


_HEADER_ALIGNMENT: Final = 4096
"""The header is filled up with spaces, so that payloads begin at a page; the format allows it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be: its name and its tensors, by their numbers, in order."""

    name: str
    tensors: tuple[int, ...]


def plan_shards(tensors: Sequence[TensorFacts], chosen: Sequence[int], most_bytes: int) -> list[Shard]:
    """Deal tensors out to files of at most `most_bytes`, in their order; larger tensors get a file each."""
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
        return [Shard("model.safetensors", tuple(runs[0]))]
    return [
        Shard(f"model-{place:05d}-of-{len(runs):05d}.safetensors", tuple(run))
        for place, run in enumerate(runs, start=1)
    ]


def header_bytes(tensors: Sequence[TensorFacts]) -> bytes:
    """A file's header for tensors whose payloads follow in this order, its length in front."""
    document: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for facts in tensors:
        word = element_type(facts.dtype).safetensors
        end = position + facts.size_bytes
        document[facts.name] = {"dtype": word, "shape": facts.shape, "data_offsets": (position, end)}
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    opened: CheckpointSource,
    chosen: Selection,
    storage: Storage,
    shards: Sequence[tuple[str, Shard]],
    progress: Progress,
) -> int:
    """Write each shard to the key that stands before it; the bytes of all files."""
    require_writable(opened, chosen)
    buffers, total = WriteBuffers(), 0
    with closing(Elements(opened)) as elements:
        for key, shard in shards:
            tensors = [opened.index.tensors[number] for number in shard.tensors]
            header = header_bytes(tensors)
            size_bytes = len(header) + sum(facts.size_bytes for facts in tensors)
            sink = storage.create(key, size_bytes)
            with ExitStack() as undo:
                undo.callback(sink.abort)
                outlet = Outlet(sink, buffers)
                outlet.write(header)
                for number in shard.tensors:
                    append_tensor(opened, elements, number, outlet, progress)
                sink.finish()
                undo.pop_all()
            total += size_bytes
    return total


def require_writable(opened: CheckpointSource, chosen: Selection) -> None:
    """`UsageError` for what the format has no room for."""
    for number in chosen.tensors:
        facts = opened.index.tensors[number]
        if element_type(facts.dtype).safetensors is None:
            raise UsageError(
                f"safetensors has no word for {facts.dtype}, the type of {facts.name}",
                fix="Leave it out with --only, or convert to torch or dcp.",
            )
    if chosen.objects:
        raise UsageError(
            f"safetensors holds tensors alone, and {len(chosen.objects)} parts are none, "
            f"{chosen.objects[0].name} for one",
            fix="Choose tensors with --only, as in --only 'model.*', or drop the rest by --tensors-only.",
        )


def append_tensor(
    opened: CheckpointSource, elements: Elements, tensor: int, outlet: Outlet, progress: Progress
) -> None:
    """Append all elements of one tensor in row-major order."""
    facts = opened.index.tensors[tensor]
    elements.require_whole(tensor)
    for slab in slabs(facts.shape, facts.item_bytes, outlet.room_bytes):
        buffer, num_bytes = outlet.buffer(), slab_bytes(slab, facts)
        elements.read_slab(tensor, slab, buffer[:num_bytes])
        outlet.append(buffer, num_bytes)
        progress.advance(num_bytes)


def write_index(opened: CheckpointSource, storage: Storage, folder: str, shards: Sequence[Shard]) -> None:
    """Write which file each tensor is in, as Hugging Face's loaders want it."""
    tensors = opened.index.tensors
    document = {
        "metadata": {"total_size": sum(tensors[one].size_bytes for shard in shards for one in shard.tensors)},
        "weight_map": {tensors[number].name: shard.name for shard in shards for number in shard.tensors},
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_object(storage, f"{folder}/{INDEX_NAME}", [text.encode()])


SHARD_BYTES: Final = 5_000_000_000
"""Hugging Face's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How to convert. `only` are patterns of names; without any, everything is taken."""

    only: Sequence[str] = field(default_factory=tuple)
    tensors_only: bool = False
    """Leave out what is no tensor."""
    compress: bool = False
    """Only to dcp: items through zstd, which gives up alignment and partial reads."""
    trust: bool = False
    """Let objects be rebuilt by running code of the checkpoint."""
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
    """Write the checkpoint at `source` once more at `target`, which must be free, as `to`.

    `DataDamaged` if the source is; `UsageError` for what the format cannot hold.
    """
    options, progress = options or ConvertOptions(), progress or Silent()
    storage, name = open_parent(target)
    _require_free(storage, name)
    opened = open_checkpoint(source)
    notes = _verified(source, progress) if options.verified else ()
    chosen = select(opened, options.only)
    if options.tensors_only:
        chosen = replace(chosen, objects=())
    progress.begin("bytes", chosen.num_bytes(opened))
    size_bytes = _write(opened, chosen, storage, name, to=to, options=options, progress=progress)
    return Conversion(
        source=opened.uri,
        target=checkpoint_uri(storage, name),
        format=to,
        num_tensors=len(chosen.tensors),
        num_objects=len(chosen.objects),
        size_bytes=size_bytes,
        left_out=_left_out(opened, chosen),
        notes=(*notes, *_notes(options, to)),
    )


def _write(
    opened: CheckpointSource,
    chosen: Selection,
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
        return write_dcp(opened, chosen, storage, name, descriptors=descriptors, progress=progress)
    if options.compress:
        raise UsageError(f"{to} has no compression", fix="Leave out --compress, or convert to dcp.")
    if to is Format.TORCH_SAVE:
        from penstock.checkpoint.tools.torch_writers import write_torch  # noqa: PLC0415

        return write_torch(opened, chosen, storage, name, trust=options.trust, progress=progress)
    require_writable(opened, chosen)
    if name.endswith(".safetensors"):
        shards = [(name, Shard(name, chosen.tensors))]
        return write_safetensors(opened, chosen, storage, shards, progress)
    planned = plan_shards(opened.index.tensors, chosen.tensors, options.shard_bytes)
    keyed = [(f"{name}/{shard.name}", shard) for shard in planned]
    size_bytes = write_safetensors(opened, chosen, storage, keyed, progress)
    write_index(opened, storage, name, planned)
    return size_bytes


def _require_free(storage: Storage, name: str) -> None:
    """Files of the target's name, folders of it, and checkpoints that are called so."""
    taken = exists(storage, name) if not _is_folder(storage, name) else True
    if not taken:
        try:
            open_catalog(storage).find(name)
            taken = True
        except ObjectNotFound:
            taken = False
    if taken:
        raise UsageError(
            f"{checkpoint_uri(storage, name)} is there already",
            fix="Convert to a new name; nothing is overwritten.",
        )


def _is_folder(storage: Storage, name: str) -> bool:
    try:
        return next(iter(storage.list(name)), None) is not None
    except ObjectNotFound:
        return False


def _verified(source: AnyPath, progress: Progress) -> tuple[str, ...]:
    found = verify(source, progress)
    if not found.is_whole:
        raise DataDamaged(
            f"The source is damaged in {len(found.damage)} places; the first: {found.damage[0]}",
            where=found.uri,
            fix="Convert an undamaged step; `penstock checkpoint verify` lists all damage.",
        )
    return () if found.is_checked else ("The source has no checksums: it was taken over as it is.",)


def _left_out(opened: CheckpointSource, chosen: Selection) -> tuple[str, ...]:
    kept = {opened.index.tensors[number].name for number in chosen.tensors}
    kept |= {one.name for one in chosen.objects}
    everything = [facts.name for facts in opened.index.tensors]
    everything += [one.name for one in opened.index.objects]
    return tuple(name for name in everything if name not in kept)


def _notes(options: ConvertOptions, to: Format) -> tuple[str, ...]:
    if options.compress and to is Format.DCP:
        return ("Compressed items cannot be read in part, and not past the page cache.",)
    return ()
