"""An opened checkpoint of any format: DCP (Penstock's or stock), `torch.save` archives, safetensors.

The single entry point for reading: `open_checkpoint` detects the format and reads the description of the
tensors, but no tensor. Invariant: the index and manifest of an opened checkpoint agree, `.metadata` has
matched the manifest's checksum, and ranks that open together either see the same description or all get the
same error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

import numpy as np

from penstock.checkpoint.commit.checkpoints import AnyPath, follow_link, open_catalog, open_parent
from penstock.checkpoint.commit.protocol import (
    IDENTITY_BYTES,
    MANIFEST_NAME,
    METADATA_NAME,
    is_written_once,
    read_identity,
)
from penstock.checkpoint.formats import safetensors, torch_save
from penstock.checkpoint.formats.dcp_item import (
    HEAD_BYTES,
    load_object,
    most_unpacked,
    open_item,
    payload_in,
    read_data,
    tensor_bytes,
    undo_transforms,
)
from penstock.checkpoint.formats.description import (
    Manifest,
    checksum_of,
    join_manifest,
    read_manifest,
    read_metadata,
)
from penstock.checkpoint.formats.restricted_pickle import TensorRef
from penstock.checkpoint.state.regions import UNKNOWN, Bytes, CheckpointIndex, Ints, StoredObject
from penstock.checkpoint.state.walk import KEY_TYPES, OWN_ENTRIES, RankEntries, read_entries
from penstock.cluster.comm import Comm, all_gather_results, run_on_rank0
from penstock.did_you_mean import did_you_mean
from penstock.errors import DataDamaged, ObjectNotFound, ShortTransfer, StorageError, UsageError, name_some
from penstock.storage import Storage
from penstock.storage.capabilities import find_folder_tree, find_local_root, prefer_direct_access
from penstock.storage.protocol import MOST_WHOLE, Source, exists, read_if_any

logger = logging.getLogger(__name__)


class CheckpointReplaced(StorageError):
    """The checkpoint was replaced by another save, or removed, while it was being read."""


_COPY_AGAIN: Final = (
    "The checkpoint lists more than is there: copy it again from where it came from, or load an older one. "
    "`penstock checkpoint verify` names all that is missing."
)


class Format(StrEnum):
    """The format of a checkpoint on disk."""

    DCP = "dcp"
    """torch's distributed checkpoints, including Penstock's."""
    TORCH_SAVE = "torch"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointSource:
    """An opened checkpoint and its index. Callers read tensors themselves, as ranges of `key(file)`."""

    uri: str
    format: Format
    storage: Storage
    folder: str
    """The folder of the checkpoint's files below the storage's root; empty for the root itself."""
    index: CheckpointIndex
    manifest: Manifest | None = None
    archive: torch_save.TorchSaveArchive | None = None
    key_types: Mapping[str, str] | None = None
    """The types of keys that names do not show, by the name of their dict; see `state.walk.walk`.

    None if they were not saved.
    """
    entries: Sequence[RankEntries] = ()
    """The structure of each rank that saved, in parts where it differed; empty if no part differed."""
    identity: bytes = b""
    """Bytes that differ from those of any other checkpoint of this name; empty if unknown."""

    def tell_if_unchecked(self) -> None:
        """Log a warning if the checkpoint should have checksums but has none."""
        if self.format is Format.DCP and self.manifest is None:
            logger.warning(
                "%s has no %s: what is loaded from it is not compared with checksums. If Penstock saved it,"
                " copy it again with all of its files",
                self.uri,
                MANIFEST_NAME,
            )

    def require_unmixed(self) -> None:
        """Raise `CheckpointReplaced` if the bytes read so far may come from two saves."""
        if not is_written_once(self.storage, self.folder):
            self.require_current()

    def require_current(self) -> None:
        """Raise `CheckpointReplaced` if the name no longer refers to this checkpoint."""
        if self.identity and read_identity(self.storage, self.folder) != self.identity:
            raise CheckpointReplaced(
                "Another save replaced this checkpoint, or it was removed, while it was read",
                uri=self.uri,
                fix="Load it again, or load a step that no job still writes.",
            )

    def require_files(self, *, all_are_here: bool = True) -> None:
        """Raise unless all files of the folder exist and have the required length.

        Unless `all_are_here`, files may be missing: in a node's cache, they may be on other nodes.
        """
        if self.manifest is not None:
            sizes_needed = {file.name: file.size_bytes for file in self.manifest.files}
        else:
            stored = self.index.stored
            ends = np.zeros(len(self.index.files), dtype=np.int64)
            np.maximum.at(ends, stored.file, stored.item_offset + stored.item_bytes)
            for each in self.index.objects:
                ends[each.file] = max(int(ends[each.file]), each.offset + each.size_bytes)
            sizes_needed = dict(zip(self.index.files, ends.tolist(), strict=True))
        sizes = {info.key: info.size_bytes for info in self.storage.list(self.folder)}
        for name, needed in sizes_needed.items():
            actual = sizes.get(self.key(name))
            if actual is None:
                if all_are_here:
                    raise ObjectNotFound(f"The file {name} is missing", uri=self.uri)
                continue
            wrong = actual != needed if self.manifest is not None else actual < needed
            if wrong:
                raise DataDamaged(
                    f"The file {name} has {actual} bytes, but {needed} are needed",
                    where=f"{self.uri}/{name}",
                    fix=_COPY_AGAIN,
                )

    @contextmanager
    def explaining_damage(self) -> Iterator[None]:
        """Explain errors in the block: another save replaced the checkpoint, or it was copied in part."""
        try:
            yield
        except (DataDamaged, ShortTransfer, ObjectNotFound) as error:
            self.require_current()
            if isinstance(error, ShortTransfer):
                # Either the file ends too early, or only the response of the storage service did.
                self.require_files(all_are_here=False)
            elif isinstance(error, ObjectNotFound):
                error.fix = _COPY_AGAIN
            raise

    @contextmanager
    def naming_misfits(self) -> Iterator[None]:
        """Name the checkpoint in errors about a state that does not match it."""
        try:
            yield
        except UsageError as error:
            error.where = error.where or self.uri
            raise

    def key(self, file_name: str) -> str:
        """Return the key, in `storage`, of one of the checkpoint's files."""
        return _key(self.folder, file_name)

    def storage_of_files(self, tried: int = 0) -> Storage:
        """Return the best `Storage` for reading the checkpoint's files; it may bypass the page cache.

        `tried` is the index of a file that this process can open.
        """
        if not self.index.files:
            return self.storage
        return prefer_direct_access(self.storage, reads=self.key(self.index.files[tried]))

    def shape(self, row: int) -> tuple[int, ...]:
        """Return the shape of one stored region."""
        regions = self.index.stored.regions
        return regions.region(row, len(self.index.tensors[int(regions.tensor[row])].shape))[1]

    def tensor_bytes(self, row: int, item: Bytes) -> memoryview:
        """Return the elements of a row's region in row-major order, from its whole item. For packed items."""
        if self.archive is not None:
            return torch_save.row_major(self.archive.strided[row], memoryview(item))
        dtype = self.index.tensors[int(self.index.stored.regions.tensor[row])].dtype
        transforms = self.index.transforms_of(row)
        return tensor_bytes(item, dtype, self.shape(row), transforms=transforms, where=self.where(row))

    def where(self, row: int) -> str:
        """Return a row's item in the form used by messages: file, tensor and range."""
        stored = self.index.stored
        begin = int(stored.item_offset[row])
        file = self.index.files[int(stored.file[row])]
        name = self.index.tensors[int(stored.regions.tensor[row])].name
        return f"{self.uri}, {file}, {name}, bytes {begin} to {begin + int(stored.item_bytes[row])}"

    def read_object_item(self, stored: StoredObject) -> bytearray:
        """Read an object's item as it is stored in its file."""
        item = bytearray(stored.size_bytes)
        with closing(self.storage.open(self.key(self.index.files[stored.file]))) as source:
            source.read_into(stored.offset, memoryview(item))
        return item

    def value(self, stored: StoredObject, *, trust: bool = False, item: Bytes | None = None) -> Any:
        """Return an object as it was saved, from its `item`, which is read if that is None.

        Without `trust`, raises `UsageError` for an object whose unpickling could run code. Also raises it
        for an object that cannot be rebuilt although its bytes match their checksum.
        """
        where = f"{self.uri}, {stored.name}"
        if self.archive is not None:
            value, record = self.parse(stored)
            return read_data(value, record, stored.name, where)
        item = self.read_object_item(stored) if item is None else item
        try:
            return load_object(item, stored.name, transforms=stored.transforms, trust=trust, where=where)
        except DataDamaged as error:
            if checksum_of(item) != stored.sum:
                raise
            raise UsageError(
                f"{error.what}, although its bytes are as they were saved",
                where=where,
                fix="If a class has changed since the save, restore what it had. Or load with trust=True, or"
                " skip this object with exclude=.",
            ) from error

    def parse(self, stored: StoredObject) -> tuple[Any, Callable[[TensorRef], bytearray]]:
        """Parse an object; also return a function that reads the record of a tensor inside it.

        In the object, a `TensorRef` stands for each tensor. Runs no code and needs no torch: instances of
        unknown classes are `Opaque`.
        """
        if self.archive is None:
            where = f"{self.uri}, {stored.name}"
            item = self.read_object_item(stored)
            plain = undo_transforms(item, stored.transforms, where, at_most=most_unpacked(item))
            archive, record = open_item(plain, where)
            return archive.value, record

        def read(offset: int, size: int) -> bytearray:
            with open_ranges(self.storage, self.key(self.index.files[0])) as (_, read_range):
                return bytearray(read_range(offset, size))

        return self.archive.values[stored.name], partial(self.archive.record, read)


def open_checkpoint(path: AnyPath, *, rank: int = 0) -> CheckpointSource:
    """Open the checkpoint at a path or URI: a folder, or a single file of `torch.save` or safetensors."""
    storage, name = follow_link(*open_parent(path, rank=rank))
    uri = checkpoint_uri(storage, name)
    try:
        storage.stat(name)
    except StorageError:
        # No such object exists, or it is a folder, for which file systems raise various errors.
        return open_folder(storage, find_folder(storage, name), uri)
    return _open_file(storage, name, uri)


def checkpoint_uri(storage: Storage, name: str) -> str:
    """Return a checkpoint's URI in the form used by messages."""
    return f"{storage.uri}{name}" if storage.uri.endswith("/") else f"{storage.uri}/{name}"


def find_folder(storage: Storage, name: str) -> str:
    """Return the folder of the checkpoint called `name`: a commit may have stored its files elsewhere."""
    try:
        return open_catalog(storage).find(name).folder
    except ObjectNotFound:
        return name


def open_folder(storage: Storage, folder: str, uri: str) -> CheckpointSource:
    """Open the checkpoint whose files are in a folder of `storage`."""
    content, sealed = _read_description(storage, folder)
    if content is None:
        return _open_safetensors_folder(storage, folder, uri)
    manifest = None if sealed is None else read_manifest(sealed, f"{uri}/{MANIFEST_NAME}")
    if manifest is not None and (len(content), checksum_of(content)) != (
        manifest.metadata_bytes,
        manifest.metadata_sum,
    ):
        raise DataDamaged(
            f"{METADATA_NAME} is not as it was written: its checksum differs from the manifest's",
            where=uri,
            fix=f"Load an older one, or remove {MANIFEST_NAME} if another program has saved here since.",
        )
    # Only version 1 and checkpoints of other programs must be read from the pickle.
    index = manifest.index if manifest is not None else None
    if index is None:
        index = read_metadata(content, f"{uri}/{METADATA_NAME}")
        index = index if manifest is None else join_manifest(index, manifest, uri)
    facts = {} if manifest is None else manifest.facts
    try:
        key_types = dict(json.loads(str(facts[KEY_TYPES]))) if KEY_TYPES in facts else None
        entries = read_entries(str(facts.get(OWN_ENTRIES, "")))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise DataDamaged(f"The facts in {MANIFEST_NAME} cannot be read: {error}", where=uri) from error
    return CheckpointSource(
        uri=uri,
        format=Format.DCP,
        storage=storage,
        folder=folder,
        index=index,
        manifest=manifest,
        key_types=key_types,
        entries=entries,
        identity=checksum_of(content) if sealed is None else bytes(sealed[:IDENTITY_BYTES]),
    )


def _open_file(storage: Storage, name: str, uri: str) -> CheckpointSource:
    """Open one file: as a `torch.save` archive if its first bytes indicate that, otherwise as safetensors."""
    last = name.rpartition("/")[2]
    if last in (METADATA_NAME, MANIFEST_NAME) or last.endswith(".distcp"):
        raise UsageError(
            "This is one file of a checkpoint", where=uri, fix=f"Give the folder: {uri.rpartition('/')[0]}."
        )
    with open_ranges(storage, name) as (source, read):
        head = bytes(read(0, min(9, source.size_bytes)))
        # A safetensors header may be so long that the 8 bytes of its length begin like an archive.
        if head[:2] in (b"PK", b"\x80\x02") and len(head) >= 4 and head[8:] != b"{":
            archive = torch_save.read_archive(
                torch_save.in_pages(read, source.size_bytes), source.size_bytes, name, uri
            )
            return CheckpointSource(
                uri=uri,
                format=Format.TORCH_SAVE,
                storage=storage,
                folder="",
                index=archive.index,
                archive=archive,
                key_types=archive.key_types,
            )
        try:
            tensors = safetensors.read_header(read, source.size_bytes, uri)
        except DataDamaged:
            # Other formats may begin with this byte, too, but do not continue in the same way.
            if head.startswith(b"\x80"):
                raise UsageError(
                    "This is a bare pickle, which cannot be read without running what is in it",
                    where=uri,
                    fix="If you trust its source, write it again: torch.save(torch.load(OLD), NEW).",
                ) from None
            if not name.endswith(".safetensors"):
                raise DataDamaged(
                    "The file is neither an archive of torch.save nor safetensors"
                    if head
                    else "The file is empty",
                    where=uri,
                    fix="Give a file of torch.save or safetensors, or fetch this one again.",
                ) from None
            raise
    index = safetensors.build_index([(name, tensors)], uri)
    return CheckpointSource(uri=uri, format=Format.SAFETENSORS, storage=storage, folder="", index=index)


def _open_safetensors_folder(storage: Storage, folder: str, uri: str) -> CheckpointSource:
    index_key = _key(folder, safetensors.INDEX_NAME)
    content = read_if_any(storage, index_key, at_most=safetensors.LARGEST_HEADER)
    file_of = None if content is None else safetensors.read_index(content, uri)
    if file_of is not None:
        names = sorted(set(file_of.values()))
    else:
        keys = (info.key.removeprefix(f"{folder}/") for info in storage.list(folder))
        names = sorted(key for key in keys if key.endswith(".safetensors") and "/" not in key)
    if not names and exists(storage, _key(folder, MANIFEST_NAME)):
        raise ObjectNotFound(
            f"This checkpoint has no {METADATA_NAME}, the file that is written last",
            uri=uri,
            fix="Copy it again with its hidden files (`cp -a`, not `cp DIR/*`), or load another one.",
        )
    if not names:
        raise _nothing_here(storage, folder, uri)
    files = []
    for name in names:
        with open_ranges(storage, _key(folder, name)) as (source, read):
            files.append((name, safetensors.read_header(read, source.size_bytes, f"{uri}/{name}")))
    index = safetensors.build_index(files, uri)
    if file_of is not None:
        safetensors.check_index(file_of, index, f"{uri}/{safetensors.INDEX_NAME}")
    return CheckpointSource(uri=uri, format=Format.SAFETENSORS, storage=storage, folder=folder, index=index)


def _nothing_here(storage: Storage, folder: str, uri: str) -> ObjectNotFound:
    """Return the error for a folder without a checkpoint.

    If the folder does not exist, the error names checkpoints next to it.
    """
    root = find_local_root(storage)
    path = None if root is None else root / folder
    if path is not None and path.exists() and not (path.is_file() or path.is_dir()):
        return ObjectNotFound(
            "There is no checkpoint here: this is a device, a pipe or a socket",
            uri=uri,
            fix="Give the folder or file of a checkpoint.",
        )
    tree = find_folder_tree(storage)
    if any(storage.list(folder)) or (tree and folder in {entry.name for entry in tree.entries()}):
        what = "There is no checkpoint here: neither .metadata nor safetensors files"
        fix = "Give the folder of one checkpoint, as run/step-100, or a .pt or .safetensors file."
        return ObjectNotFound(what, uri=uri, fix=fix)
    others = sorted(open_catalog(storage).names(), key=lambda name: (len(name), name), reverse=True)
    fix = f"Next to it are {name_some(others)}." if others else "No checkpoint is next to it either."
    fix = did_you_mean(folder, others) + fix
    return ObjectNotFound("This checkpoint does not exist", uri=uri, fix=fix)


@contextmanager
def open_ranges(storage: Storage, key: str) -> Iterator[tuple[Source, torch_save.ReadRange]]:
    """Open an object to read ranges of it; a range that extends beyond its end counts as damage."""
    with closing(storage.open(key)) as source:

        def read(offset: int, size: int) -> bytearray:
            if offset < 0 or offset + size > source.size_bytes:
                raise DataDamaged(
                    f"The file has {source.size_bytes} bytes, but {offset + size} are needed",
                    where=f"{storage.uri}/{key}",
                )
            content = bytearray(size)
            source.read_into(offset, memoryview(content))
            return content

        yield source, read


def open_together(storage: Storage, folder: str, uri: str, comm: Comm) -> CheckpointSource:
    """Open the checkpoint in a folder. Collective. Rank 0 parses its description for all ranks."""
    if comm.size == 1:
        return open_folder(storage, folder, uri)

    def open_for_all() -> dict[str, Any]:
        opened = open_folder(storage, folder, uri)
        return {each.name: getattr(opened, each.name) for each in fields(opened) if each.name != "storage"}

    found = run_on_rank0(comm, open_for_all, awaiting="rank 0 to read the checkpoint's description")
    # Each rank has its own way to the files, which may be in a cache of its node.
    return CheckpointSource(**{**found, "storage": storage, "folder": folder, "uri": uri})


NUM_HEAD_READERS = 16
"""The number of threads that read heads: these are small, so the time to read them is latency."""


def locate_payloads(checkpoint: CheckpointSource, comm: Comm) -> CheckpointSource:
    """Return `checkpoint` with the positions of all payloads, read from the items if no manifest has them.

    Collective. Heads of items are read through the page cache: with direct I/O, scattered pages take four
    times as long.
    """
    stored = checkpoint.index.stored
    rows = np.flatnonzero((stored.payload_offset == UNKNOWN) & ~stored.packed)
    if not len(rows):
        return checkpoint

    def find(source: Source, row: int) -> int:
        """Return the position of a payload in its file, or `UNKNOWN` if the whole item must be read."""
        begin, size = int(stored.item_offset[row]), int(stored.item_bytes[row])
        head = bytearray(min(HEAD_BYTES, size))
        source.read_into(begin, memoryview(head))
        dtype = checkpoint.index.tensors[int(stored.regions.tensor[row])].dtype
        offset = payload_in(head, size, dtype, checkpoint.shape(row))
        return UNKNOWN if offset is None else begin + offset

    def find_own() -> Ints:
        own = rows[comm.rank :: comm.size]
        found = np.full(len(own), UNKNOWN, dtype=np.int64)
        with ThreadPoolExecutor(NUM_HEAD_READERS) as threads:
            for file in np.unique(stored.file[own]).tolist():
                places = np.flatnonzero(stored.file[own] == file)
                key = checkpoint.key(checkpoint.index.files[file])
                with closing(checkpoint.storage.open(key)) as source:
                    found[places] = list(threads.map(partial(find, source), own[places].tolist()))
        return found

    payload, packed = stored.payload_offset.copy(), stored.packed.copy()
    of_ranks = all_gather_results(comm, find_own, awaiting="all ranks to locate payloads")
    for rank, found in enumerate(of_ranks):
        payload[rows[rank :: comm.size]] = found
    packed[rows] |= payload[rows] < 0
    index = replace(checkpoint.index, stored=replace(stored, payload_offset=payload, packed=packed))
    return replace(checkpoint, index=index)


_NUM_READINGS = 5


def _read_description(storage: Storage, folder: str) -> tuple[bytearray | None, bytearray | None]:
    """Return the `.metadata` and manifest of the same save, or None for a file that is missing."""
    is_final = is_written_once(storage, folder)
    for _ in range(_NUM_READINGS):
        manifest = read_if_any(storage, _key(folder, MANIFEST_NAME), at_most=MOST_WHOLE)
        metadata = read_if_any(storage, _key(folder, METADATA_NAME), at_most=MOST_WHOLE)
        # If a save has replaced the folder between the two reads, its manifest differs.
        if manifest is None or is_final or manifest[:IDENTITY_BYTES] == read_identity(storage, folder):
            break
    tree = find_folder_tree(storage)
    if (
        tree
        and metadata is not None
        and manifest is None
        and any(
            entry.name == MANIFEST_NAME and not entry.is_plain
            for entry in tree.entries(folder, prefix=MANIFEST_NAME)
        )
    ):
        # It would count as absent, and its step as one without checksums.
        raise DataDamaged(
            f"{MANIFEST_NAME} is not a file, but a folder, a device or a link to nothing",
            where=f"{storage.uri}/{folder}".rstrip("/"),
            fix="Copy the checkpoint again from where it came from, or load an older one.",
        )
    return metadata, manifest


def _key(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
