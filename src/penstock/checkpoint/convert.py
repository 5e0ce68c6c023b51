"""A checkpoint in another format: distributed, `torch.save` or safetensors, streamed in bounded memory.

What has checksums is verified before it is taken over. Invariant: nothing is overwritten, and an interrupted
conversion leaves nothing that could be taken for a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.catalog import AnyPath, open_around, open_shelf
from penstock.checkpoint.converting.selection import Selection, select
from penstock.checkpoint.converting.to_safetensors import (
    Shard,
    plan_shards,
    require_writable,
    write_index,
    write_safetensors,
)
from penstock.checkpoint.opened import Format, Opened, open_checkpoint, uri_of
from penstock.checkpoint.verify import verify
from penstock.errors import DataDamaged, ObjectNotFound, UsageError
from penstock.progress import Progress, Silent
from penstock.storage.object_io import exists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.storage import Storage

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
    storage, name = open_around(target)
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
        target=uri_of(storage, name),
        format=to,
        num_tensors=len(chosen.tensors),
        num_objects=len(chosen.objects),
        size_bytes=size_bytes,
        left_out=_left_out(opened, chosen),
        notes=(*notes, *_notes(options, to)),
    )


def _write(
    opened: Opened,
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
        from penstock.checkpoint.converting.to_dcp import write_dcp  # noqa: PLC0415
        from penstock.checkpoint.dcp.transforms import ZSTD  # noqa: PLC0415

        descriptors = (ZSTD,) if options.compress else ()
        return write_dcp(opened, chosen, storage, name, descriptors=descriptors, progress=progress)
    if options.compress:
        raise UsageError(f"{to} has no compression", fix="Leave out --compress, or convert to dcp.")
    if to is Format.TORCH_SAVE:
        from penstock.checkpoint.converting.to_torch import write_torch  # noqa: PLC0415

        return write_torch(opened, chosen, storage, name, trust=options.trust, progress=progress)
    require_writable(opened, chosen)
    if name.endswith(".safetensors"):
        shards = [(name, Shard(name, chosen.tensors))]
        return write_safetensors(opened, chosen, storage, shards, progress)
    planned = plan_shards(opened.contents.tensors, chosen.tensors, options.shard_bytes)
    keyed = [(f"{name}/{shard.name}", shard) for shard in planned]
    size_bytes = write_safetensors(opened, chosen, storage, keyed, progress)
    write_index(opened, storage, name, planned)
    return size_bytes


def _require_free(storage: Storage, name: str) -> None:
    """Files of the target's name, folders of it, and checkpoints that are called so."""
    taken = exists(storage, name) if not _is_folder(storage, name) else True
    if not taken:
        try:
            open_shelf(storage).find(name)
            taken = True
        except ObjectNotFound:
            taken = False
    if taken:
        raise UsageError(
            f"{uri_of(storage, name)} is there already", fix="Convert to a new name; nothing is overwritten."
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


def _left_out(opened: Opened, chosen: Selection) -> tuple[str, ...]:
    kept = {opened.contents.tensors[number].name for number in chosen.tensors}
    kept |= {one.name for one in chosen.objects}
    everything = [facts.name for facts in opened.contents.tensors]
    everything += [one.name for one in opened.contents.objects]
    return tuple(name for name in everything if name not in kept)


def _notes(options: ConvertOptions, to: Format) -> tuple[str, ...]:
    if options.compress and to is Format.DCP:
        return ("Compressed items cannot be read in part, and not past the page cache.",)
    return ()
