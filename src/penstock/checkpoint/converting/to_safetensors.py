"""Any checkpoint as safetensors: one file, or Hugging Face's folder of shards with an index. No second pass.

Invariant: the index is written last, so a folder without one is unfinished.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.converting.outlet import Buffers, Outlet
from penstock.checkpoint.converting.slabs import Elements, slab_bytes, slabs
from penstock.checkpoint.dtypes import element_type
from penstock.checkpoint.foreign.safetensors import INDEX_NAME
from penstock.errors import UsageError
from penstock.storage.object_io import write_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.converting.selection import Selection
    from penstock.checkpoint.opened import Opened
    from penstock.checkpoint.pieces import TensorFacts
    from penstock.progress import Progress
    from penstock.storage import Storage

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
    opened: Opened,
    chosen: Selection,
    storage: Storage,
    shards: Sequence[tuple[str, Shard]],
    progress: Progress,
) -> int:
    """Write each shard to the key that stands before it; the bytes of all files."""
    require_writable(opened, chosen)
    buffers, total = Buffers(), 0
    with closing(Elements(opened)) as elements:
        for key, shard in shards:
            tensors = [opened.contents.tensors[number] for number in shard.tensors]
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


def require_writable(opened: Opened, chosen: Selection) -> None:
    """`UsageError` for what the format has no room for."""
    for number in chosen.tensors:
        facts = opened.contents.tensors[number]
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
    opened: Opened, elements: Elements, tensor: int, outlet: Outlet, progress: Progress
) -> None:
    """Append all elements of one tensor in row-major order."""
    facts = opened.contents.tensors[tensor]
    elements.require_whole(tensor)
    for slab in slabs(facts.shape, facts.item_bytes, outlet.room_bytes):
        buffer, num_bytes = outlet.buffer(), slab_bytes(slab, facts)
        elements.read_slab(tensor, slab, buffer[:num_bytes])
        outlet.append(buffer, num_bytes)
        progress.advance(num_bytes)


def write_index(opened: Opened, storage: Storage, folder: str, shards: Sequence[Shard]) -> None:
    """Write which file each tensor is in, as Hugging Face's loaders want it."""
    tensors = opened.contents.tensors
    document = {
        "metadata": {"total_size": sum(tensors[one].size_bytes for shard in shards for one in shard.tensors)},
        "weight_map": {tensors[number].name: shard.name for shard in shards for number in shard.tensors},
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_object(storage, f"{folder}/{INDEX_NAME}", [text.encode()])
