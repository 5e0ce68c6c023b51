"""Convert a checkpoint to DCP, `torch.save` or safetensors, streamed in bounded memory.

DCP keeps the regions as they were sharded. Archives begin with the pickle; the records follow in its order,
each with its CRC-32, so that a single pass is enough. A source with checksums is verified first. torch is
loaded only to write an archive of torch.save, or objects. Invariant: nothing is overwritten, and an
interrupted conversion leaves nothing that could be mistaken for a complete checkpoint: commits and indexes
come last.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from isal import isal_zlib

from penstock.checkpoint.commit.checkpoints import (
    AnyPath,
    begin_save,
    open_catalog,
    open_parent,
    parse_step,
)
from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.formats import dcp_item
from penstock.checkpoint.formats.checkpoint_source import (
    CheckpointSource,
    Format,
    checkpoint_uri,
    open_checkpoint,
)
from penstock.checkpoint.formats.dcp_item import ZSTD
from penstock.checkpoint.formats.description import (
    WrittenFile,
    build_manifest,
    checksum_of,
    manifest_bytes,
    metadata_bytes,
    start_checksum,
)
from penstock.checkpoint.formats.safetensors import INDEX_NAME
from penstock.checkpoint.formats.torch_save import ZipRecord
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
    element_type,
)
from penstock.checkpoint.state.walk import (
    INTEGER,
    KEY_TYPES,
    OWN_ENTRIES,
    is_optimizer_dict,
    literal_key,
    matches_pattern,
)
from penstock.checkpoint.tools.tensor_slabs import Appender, Pieces, SlabReader
from penstock.checkpoint.tools.verify import verify
from penstock.cluster.comm import SoloComm
from penstock.errors import DataDamaged, ObjectNotFound, UsageError, name_some
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.protocol import exists, write_object

if TYPE_CHECKING:
    import torch


SHARD_BYTES: Final = 5_000_000_000
"""The largest safetensors file by default, as in Hugging Face's libraries."""
_STRUCTURE: Final = frozenset({KEY_TYPES, OWN_ENTRIES})
"""The manifest's facts about the types of keys, and about the entries of each rank."""
_HEADER_ALIGNMENT: Final = 4096
"""The header is padded with spaces, as the format allows, so that payloads begin at a page boundary."""


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
    """Names in the source that are not in the target."""
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

    `only` has patterns of names; without any, everything is converted. `tensors_only` leaves out everything
    but tensors. `compress` applies zstd to the items of DCP, which then cannot be read in part. `trust`
    rebuilds objects even if that runs code from the checkpoint. The source is verified first unless
    `verified` is False. Raises `DataDamaged` if the source is damaged, and `UsageError` for parts that the
    format cannot store.
    """
    progress = progress or Progress()
    storage, name = open_parent(target)
    is_taken = exists(storage, name)
    with suppress(ObjectNotFound):
        is_taken = is_taken or any(True for _ in storage.list(name))
    with suppress(ObjectNotFound):
        is_taken = is_taken or bool(open_catalog(storage).find(name))
    if is_taken:
        raise UsageError(
            f"{checkpoint_uri(storage, name)} exists already",
            fix="Convert to a new name; nothing is overwritten.",
        )
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


def _require_writable(
    checkpoint: CheckpointSource, tensors: Sequence[int], objects: Sequence[StoredObject]
) -> None:
    """Raise `UsageError` for parts that safetensors cannot store."""
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
    """Write one file, or a folder of shards with an index; return the total size of the files."""
    is_file, tensors = name.endswith(".safetensors"), checkpoint.index.tensors
    shards = {"": list(chosen)} if is_file else plan_shards(tensors, chosen, shard_bytes)
    total = 0
    with closing(SlabReader(checkpoint)) as reader:
        for shard, numbers in shards.items():
            header = build_header([tensors[number] for number in numbers])
            size_bytes = len(header) + sum(tensors[number].size_bytes for number in numbers)
            with appender.writing(storage.create(name if is_file else f"{name}/{shard}", size_bytes)):
                appender.write(header)
                for number in numbers:
                    appender.copy(appender.slabs_of(reader, number, tensors[number]))
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
    """Return the numbers of each file's tensors: up to `most_bytes`, in order, or a single larger one."""
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
    """Return the header of a file whose payloads follow in this order, preceded by its length."""
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


_FILE: Final = "__0_0.distcp"
_ALIGNMENT: Final = 64


def write_dcp(
    checkpoint: CheckpointSource,
    tensors: Sequence[int],
    objects: Sequence[StoredObject],
    storage: Storage,
    name: str,
    *,
    transforms: tuple[str, ...],
    appender: Appender,
) -> int:
    """Write the chosen parts as the checkpoint `name`; return the size of its data file.

    With transforms, items are assembled in memory, and cannot be read in part or unbuffered afterwards.
    """
    index = checkpoint.index
    number_of = np.full(len(index.tensors), -1, dtype=np.int64)
    number_of[list(tensors)] = np.arange(len(tensors))
    rows = np.flatnonzero(number_of[index.stored.regions.tensor] >= 0)
    items: list[tuple[int, int, int]] = []
    """The offset, size and payload offset of each item, in the order of the file: objects first."""
    sums: list[bytes] = []

    def write_whole(item: bytes) -> None:
        items.append((appender.position, len(item), appender.position))
        sums.append(checksum_of(item))
        appender.write(item)

    transaction = begin_save(storage, name, SoloComm())
    with ExitStack() as undo:
        undo.callback(transaction.abandon)
        sink = transaction.data_storage.create(transaction.draft.key(_FILE))
        with appender.writing(sink), closing(SlabReader(checkpoint)) as reader:
            for held in objects:
                if checkpoint.archive is not None:
                    packed = dcp_item.object_bytes(checkpoint.value(held))
                else:
                    # The item is already an archive, and is copied without parsing it.
                    where = f"{checkpoint.uri}, {held.name}"
                    item = checkpoint.read_object_item(held)
                    most = dcp_item.most_unpacked(item)
                    packed = dcp_item.undo_transforms(item, held.transforms, where, at_most=most)
                write_whole(dcp_item.apply_transforms(packed, transforms))
            for row in rows.tolist():
                facts = index.tensors[int(index.stored.regions.tensor[row])]
                around = dcp_item.envelope(facts.dtype, checkpoint.shape(row))
                if transforms:
                    payload = bytearray(around.payload_bytes)
                    reader.read_payload(row, 0, memoryview(payload))
                    plain = b"".join((around.prefix, payload, around.suffix))
                    write_whole(dcp_item.apply_transforms(plain, transforms))
                    continue
                start, total = dcp_item.item_start(appender.position, around), start_checksum()
                appender.write(bytes(start - appender.position) + around.prefix)
                total.update(around.prefix)
                appender.copy(
                    appender.pieces_of(around.payload_bytes, partial(reader.read_payload, row)), total.update
                )
                appender.write(around.suffix)
                total.update(around.suffix)
                items.append((start, around.item_bytes, start + len(around.prefix)))
                sums.append(total.digest())
        columns = np.array(items, dtype=np.int64).reshape(-1, 3).T.copy()
        file = WrittenFile(
            name=_FILE,
            size_bytes=appender.position,
            item_offset=columns[0],
            item_bytes=columns[1],
            payload_offset=columns[2],
            sums=b"".join(sums),
        )
        regions = index.stored.regions.take(rows)
        names = [*(index.tensors[number].name for number in tensors), *(held.name for held in objects)]
        written = CheckpointIndex(
            tuple(index.tensors[number] for number in tensors),
            StoredRegions(
                Regions(number_of[regions.tensor], regions.offsets, regions.sizes),
                file=np.zeros(len(rows), dtype=np.int64),
                item_offset=columns[0, len(objects) :],
                item_bytes=columns[1, len(objects) :],
                payload_offset=np.full(len(rows), UNKNOWN, dtype=np.int64),
                packed=np.full(len(rows), bool(transforms)),
            ),
            tuple(
                StoredObject(held.name, 0, offset, size, transforms)
                for held, (offset, size, _) in zip(objects, items, strict=False)
            ),
            (_FILE,) if items else (),
            paths=_paths(checkpoint, names),
            transforms=[transforms] * len(rows) if transforms else (),
        )

        def seal() -> Seal:
            metadata = metadata_bytes(written)
            known = checkpoint.manifest
            described: dict[str, Any] = {}
            facts: dict[str, Any] = {}
            if known is not None:
                step = known.step if (named := parse_step(name)) is None else named
                described = {"step": step, "world_size": known.world_size, "mesh": known.mesh}
                # Only of all entries can be told which rank had them.
                kept = {KEY_TYPES} if len(names) < len(index.tensors) + len(index.objects) else _STRUCTURE
                facts = {name: value for name, value in known.facts.items() if name in kept}
            elif checkpoint.key_types is not None:
                facts[KEY_TYPES] = json.dumps(checkpoint.key_types)
            facts["converted_from"] = checkpoint.uri
            manifest = build_manifest(written, [file], metadata, **described, facts=facts)
            return Seal(manifest=manifest_bytes(manifest), metadata=metadata, sizes={_FILE: file.size_bytes})

        transaction.commit(seal)
        undo.pop_all()
    return file.size_bytes


def _paths(checkpoint: CheckpointSource, names: Sequence[str]) -> Mapping[str, tuple[str | int, ...]]:
    """Return the path of each name, in the order of the state: stock readers build whole states from them."""
    paths = checkpoint.index.paths
    order = {name: position for position, name in enumerate(paths)}
    ordered = sorted(names, key=lambda name: order.get(name, len(order)))
    return {name: paths.get(name, (name,)) for name in ordered}


def write_torch(
    checkpoint: CheckpointSource,
    tensors: Sequence[int],
    objects: Sequence[StoredObject],
    storage: Storage,
    key: str,
    *,
    trust: bool,
    appender: Appender,
) -> int:
    """Write the chosen parts as the nested state that was saved; return the size of the file."""
    import torch  # noqa: PLC0415 - other formats do without it

    index, pickled = checkpoint.index, io.BytesIO()
    leaves: dict[str, Any] = {}
    for number, facts in enumerate(index.tensors[tensor] for tensor in tensors):
        leaves[facts.name] = dcp_item.TensorStub(element_type(facts.dtype), facts.shape, str(number))
    leaves |= {held.name: checkpoint.value(held, trust=trust) for held in objects}
    tree: dict[Any, Any] = {}
    for name, path in _paths(checkpoint, list(leaves)).items():
        *parents, last = path
        node = tree
        for step in parents:
            node = node.setdefault(step, {})
        node[last] = leaves[name]
    pickler = _Pickler(pickled, len(tensors))
    pickler.dump(_restore_keys(tree, checkpoint.key_types))
    records: list[ZipRecord] = []

    def add(name: str, content: bytes) -> None:
        body, record = dcp_item.small_record(f"archive/{name}", content, appender.position)
        appender.write(body)
        records.append(record)

    def add_data(number: int, size_bytes: int, pieces: Pieces) -> None:
        name, offset, crc32 = f"archive/data/{number}", appender.position, 0

        def look(part: memoryview) -> None:
            nonlocal crc32
            crc32 = isal_zlib.crc32(part, crc32)

        appender.write(dcp_item.begin_record(name, offset, align=_ALIGNMENT))
        appender.copy(pieces, look)
        appender.write(dcp_item.end_record(size_bytes, crc32))
        records.append(ZipRecord(name, offset, size_bytes, crc32))

    with appender.writing(storage.create(key)), closing(SlabReader(checkpoint)) as reader:
        add("data.pkl", pickled.getvalue())
        add(".format_version", b"1")
        add(".storage_alignment", b"64")
        add("byteorder", b"little")
        for number, tensor in enumerate(tensors):
            facts = index.tensors[tensor]
            add_data(number, facts.size_bytes, appender.slabs_of(reader, tensor, facts))
        for number, inner in enumerate(pickler.inner, start=len(tensors)):
            content = torch.tensor(inner, dtype=torch.uint8, device="cpu").numpy().data

            def read(begin: int, target: memoryview, content: memoryview = content) -> None:
                target[:] = content[begin : begin + len(target)]

            add_data(number, content.nbytes, appender.pieces_of(content.nbytes, read))
        add("version", b"3\n")
        appender.write(dcp_item.directory(records, appender.position))
    return appender.position


def _restore_keys(tree: Any, key_types: Mapping[str, str] | None, name: str = "") -> Any:
    """Convert mappings whose keys are positions in a list to that list, without gaps for parts left out.

    In other mappings below the top, keys get their types back if the checkpoint has them: AdamW, for example,
    silently loads nothing from a state whose keys are "0" and "1".
    """
    if not isinstance(tree, dict) or not tree:
        return tree
    inner = {
        key: _restore_keys(value, key_types, f"{name}.{key}" if name else str(key))
        for key, value in tree.items()
    }
    if all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    if name and key_types is not None:
        kind = key_types.get(name, "number")
        if kind == "literal":
            return {literal_key(key): value for key, value in inner.items()}
        if kind == "number" and all(INTEGER.fullmatch(key) for key in inner):
            return {int(key): value for key, value in inner.items()}
    # The state of an optimizer without any, such as SGD, is an empty dict, which checkpoints lack.
    with_state = {"state": {}, **inner}
    return with_state if is_optimizer_dict(with_state) else inner


class _Pickler(dcp_item.ArchivePickler):
    """Refers to records by number, and collects the storages of tensors inside objects in `inner`."""

    def __init__(self, file: io.BytesIO, num_tensors: int) -> None:
        super().__init__(file, protocol=2)
        self._num_tensors = num_tensors
        self.inner: list[torch.UntypedStorage] = []

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        import torch  # noqa: PLC0415 - see `write_torch`

        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj  # torch.save itself calls these private methods
            kind = getattr(torch, typed._pickle_storage_type())  # noqa: SLF001
            return ("storage", kind, self._record(typed._untyped_storage), "cpu", typed._size())  # noqa: SLF001
        if isinstance(obj, torch.UntypedStorage):
            return ("storage", torch.UntypedStorage, self._record(obj), "cpu", obj.nbytes())
        return super().persistent_id(obj)

    def _record(self, storage: torch.UntypedStorage) -> str:
        for number, known in enumerate(self.inner):
            if known.data_ptr() == storage.data_ptr() and known.nbytes() == storage.nbytes():
                return str(self._num_tensors + number)
        self.inner.append(storage)
        return str(self._num_tensors + len(self.inner) - 1)
