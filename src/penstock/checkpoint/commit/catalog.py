"""Finds committed checkpoints: from a path or URI to a checkpoint, from a run's folder to its steps.

Paths and URIs that users give are resolved here. Invariant: a `CheckpointRef` was committed when it was made;
steps are what the storage lists as committed, and the pointer `latest` is for people and other programs:
nothing here ever reads it.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.commit import protocol
from penstock.checkpoint.commit.record_commit import RecordCatalog
from penstock.checkpoint.formats.manifest import Manifest, checksum_of, read_manifest
from penstock.errors import (
    DataDamaged,
    ObjectNotFound,
    PenstockError,
    StorageError,
    Unavailable,
    UsageError,
    name_some,
)
from penstock.storage import Storage
from penstock.storage.capabilities import (
    defer_sync,
    find_folder_tree,
    find_local_root,
    submit_or_run,
)
from penstock.storage.protocol import Sink, exists, read_object
from penstock.storage.uri import find_opener, open_here, parse_uri

logger = logging.getLogger(__name__)

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointRef:
    """A committed checkpoint and the storage that has it."""

    storage: Storage
    committed: protocol.Committed
    readable: tuple[str, ...] | None = None
    """The files that this rank can open, if not every rank can open all. Set on all ranks or on none."""

    @property
    def uri(self) -> str:
        """Its name in messages."""
        return f"{self.storage.uri.rstrip('/')}/{self.committed.name}"

    def key(self, file_name: str) -> str:
        """The key of one of its files."""
        return self.committed.key(file_name)

    def is_whole(self) -> bool:
        """Return whether manifest, metadata and all files are there with their sizes; payloads are not read.

        A checkpoint without a manifest cannot be checked, and counts as incomplete.
        """
        try:
            _, seal = self.read_seal()
            sizes = {info.key: info.size_bytes for info in self.storage.list(self.committed.folder)}
        except (StorageError, Unavailable) as error:
            logger.info("%s is incomplete: %s", self.uri, error)
            return False
        return all(sizes.get(self.key(name)) == size_bytes for name, size_bytes in seal.sizes.items())

    def read_seal(self) -> tuple[Manifest, protocol.Seal]:
        """Its manifest, parsed, and what sealed it; `DataDamaged` if that is not as it was written."""
        content = bytes(read_object(self.storage, self.key(protocol.MANIFEST_NAME)))
        manifest = read_manifest(content, self.uri)
        metadata = bytes(read_object(self.storage, self.key(protocol.METADATA_NAME)))
        if checksum_of(metadata) != manifest.metadata_sum:
            raise DataDamaged("The checksum of its .metadata differs", where=self.uri)
        sizes = {file.name: file.size_bytes for file in manifest.files}
        return manifest, protocol.Seal(manifest=content, metadata=metadata, sizes=sizes)


def split_path(path: AnyPath) -> tuple[str, str]:
    """The URI of a checkpoint's parent folder, with its options, and the checkpoint's name."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"The path is a {type(path).__name__}, not a path or URI",
            fix="The state comes first: save(state, path), load(state, path).",
        )
    text = os.fspath(path)
    location = parse_uri(text)
    parts = location.split_name()
    if parts is None:
        # An unknown scheme is the better reason.
        find_opener(location)
        raise UsageError(
            f"{text!r} is the root of a storage, not a checkpoint",
            fix="Add the name of the checkpoint, as in /data/run/step-100 or s3://bucket/run/step-100.",
        )
    parent, name = parts
    return parent.text, name


def can_be_named(path: AnyPath) -> bool:
    """Return whether a checkpoint may be at this path or URI."""
    try:
        open_parent(path)
    except (PenstockError, ValueError):
        return False
    return True


def absolute_path(path: Any) -> str:
    """The form in which ranks compare paths; what is no path, opening refuses."""
    try:
        return parse_uri(os.fspath(path)).uri
    except (TypeError, UsageError):
        return repr(path)


def open_parent(path: AnyPath, *, rank: int = 0) -> tuple[Storage, str]:
    """The storage of a checkpoint's parent folder, and the checkpoint's name in it."""
    above, name = split_path(path)
    return open_here(above, rank=rank), name


POINTER_NAME: Final = "latest"
_STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)")


def step_dirname(step: int) -> str:
    """The name of the folder of a step."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"Invalid step {step!r}", fix="Count steps from 0.")
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """The step that a folder is named after; None for other names."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


class StepCatalog:
    """The committed steps of one run. Any rank may read; only rank 0 may change anything."""

    def __init__(self, storage: Storage, *, has_pointer: bool = True) -> None:
        self.storage = storage
        self._catalog = open_catalog(storage)
        self._has_pointer = has_pointer

    def committed(self) -> list[int]:
        """All committed steps, ascending."""
        steps = (parse_step(name) for name in self._catalog.names())
        return sorted(step for step in steps if step is not None)

    def require_run(self) -> None:
        """`UsageError` if this is a checkpoint itself, and not the folder of a run with steps."""
        if exists(self.storage, protocol.METADATA_NAME):
            raise UsageError(
                "This is a checkpoint, not the folder of a run",
                where=self.storage.uri,
                fix="Give the manager the folder above it, or use pc.load.",
            )
        others = sorted(name for name in self._catalog.names() if parse_step(name) is None)
        if others:
            logger.warning(
                "%s has no step-NUMBER, but other checkpoints: %s. pc.load loads them by name",
                self.storage.uri,
                name_some(others),
            )

    def find(self, step: int) -> CheckpointRef:
        """The checkpoint of a step; `ObjectNotFound` if it is not committed."""
        return CheckpointRef(self.storage, self._catalog.find(step_dirname(step)))

    def hide(self, step: int) -> Callable[[], None]:
        """Take a step's name away; the call that this gives removes its files."""
        return self._catalog.hide(self._catalog.find(step_dirname(step)))

    def set_latest(self, step: int) -> None:
        """Point `latest` at a step, where there is such a pointer."""
        with self.pointing_to(step) as show:
            show()

    def point_past(self, removed: str) -> None:
        """Let `latest` name the newest step that is left, if it names a removed one."""
        with suppress(ObjectNotFound):
            if bytes(read_object(self.storage, POINTER_NAME)).decode(errors="replace").strip() == removed:
                newest = max(self.committed(), default=None)
                if newest is None:
                    self.storage.delete(POINTER_NAME)
                else:
                    self.set_latest(newest)

    @contextmanager
    def pointing_to(self, step: int) -> Iterator[Callable[[], None]]:
        """Write a pointer to a step while the block runs; calling what this gives makes it `latest`."""
        if not self._has_pointer:
            yield lambda: None
            return
        with ThreadPoolExecutor(1) as helper, ExitStack() as undo:
            begun = submit_or_run(helper, self._begin_pointer, step)
            undo.callback(lambda: None if begun.exception() else begun.result().abort())

            def show() -> None:
                try:
                    begun.result().finish()
                except ObjectNotFound:
                    # Another save in the folder takes what is unfinished for a quarter of an hour for debris.
                    self._begin_pointer(step).finish()
                undo.pop_all()

            yield show

    def _begin_pointer(self, step: int) -> Sink:
        # Its name is left to the file system: after a power cut it may point to the step before.
        sink = defer_sync(self.storage, "names").create(POINTER_NAME)
        with ExitStack() as undo:
            undo.callback(sink.abort)
            sink.submit(memoryview(f"{step_dirname(step)}\n".encode()))
            undo.pop_all()
        return sink


def open_catalog(storage: Storage) -> protocol.Catalog:
    """The committed checkpoints of this storage."""
    tree = find_folder_tree(storage)
    if tree is None:
        return RecordCatalog(storage)
    return protocol.FolderCatalog(storage, tree, lambda name: parse_step(name) is not None)


def local_path(storage: Storage, key: str) -> Path:
    """The path of an object on this machine; `Unavailable` if the storage is not a file system."""
    root = find_local_root(storage)
    if root is None:
        raise Unavailable(
            "manager.output() needs file paths, and this storage is not a file system",
            where=storage.uri,
            fix="Pass cache=, a folder on each node: files are written there and then flushed.",
        )
    return root / key


def choose_surplus(steps: Sequence[int], keep: int | None, is_whole: Callable[[int], bool]) -> list[int]:
    """The steps to remove so that the newest `keep` remain, oldest first; None keeps all.

    If none of those is complete, the newest complete one before them stays, too: a run never loses its last
    usable checkpoint. `is_whole` is called for the newest first and no more often than needed.
    """
    ordered = sorted(steps)
    if keep is None or len(ordered) <= keep:
        return []
    surplus, newest = ordered[:-keep], ordered[-keep:]
    if any(is_whole(step) for step in reversed(newest)):
        return surplus
    spared = next((step for step in reversed(surplus) if is_whole(step)), None)
    return [step for step in surplus if step != spared]


def find_surplus(
    catalog: StepCatalog, committed: Sequence[int], keep: int | None, whole: int | None = None
) -> list[int]:
    """Choose which of the `committed` steps to remove, see `choose_surplus`; one is known to be `whole`."""
    return choose_surplus(committed, keep, lambda step: step == whole or catalog.find(step).is_whole())


def apply_retention(
    catalog: StepCatalog, step: int, keep: int | None, show_latest: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Point to the newest step and hide the surplus; the call that this gives removes its files.

    Neither raises `StorageError`: `step` is committed. Steps beyond `step` do not count: a job that begins
    again, or from an older step, keeps what it saves. The pointer to `step` may have been written, see
    `StepCatalog.pointing_to`.
    """
    hidden: list[Callable[[], None]] = []
    with tolerating_leftovers(step):
        committed = catalog.committed()
        if step == max(committed, default=None):
            _try_to_show(show_latest or partial(catalog.set_latest, step), step)
        for removed in find_surplus(catalog, [each for each in committed if each <= step], keep, step):
            logger.info("Removing step %d: the newest %s are kept", removed, keep)
            # One that cannot be removed must not keep the others.
            with tolerating_leftovers(step):
                hidden.append(catalog.hide(removed))
    return partial(remove_leftovers, step, hidden)


def remove_leftovers(step: int, removals: Sequence[Callable[[], None]]) -> None:
    """Remove what a save of `step` has hidden; a failure is a warning."""
    for remove in removals:
        with tolerating_leftovers(step):
            remove()


@contextmanager
def tolerating_leftovers(step: int) -> Iterator[None]:
    """A warning in place of a `StorageError`: the step is committed, whatever else is left."""
    try:
        yield
    except StorageError as error:
        logger.warning("Step %d is committed, but not all old steps could be removed: %s", step, error)


def _try_to_show(show_latest: Callable[[], None], step: int) -> None:
    try:
        show_latest()
    except StorageError as error:
        logger.warning("Step %d is committed, but %r does not name it: %s", step, POINTER_NAME, error)
