"""One rank's share of a save, from its first copied byte to its durable files: the pipe, fed by tensors.

Copying begins with the object itself. Invariant: its memory is given back once, when no thread uses it.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.pipe.base import MIN_BUFFERS_PER_STREAM, PipeSettings, PlannedObject
from penstock.checkpoint.pipe.buffers import PipeStopped
from penstock.checkpoint.pipe.stamps import now_ns
from penstock.checkpoint.pipe.write import WritePipe
from penstock.checkpoint.staging.base import RankShare, SaveCancelled, ShareStats, WrittenFile
from penstock.checkpoint.staging.filling import ImageFiller
from penstock.checkpoint.staging.links import links_to
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.wrapping import WrappedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.checkpoint.image import FileImage
    from penstock.checkpoint.pipe.base import Measurement
    from penstock.checkpoint.staging.memory import StagingMemory
    from penstock.checkpoint.staging.payloads import Payload
    from penstock.progress import Progress
    from penstock.storage.protocol import Sink, Storage

MOST_CHUNK_BYTES = 16 << 20
"""Larger writes are no faster, and make the last one of a file a longer wait."""

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank is to write: its files and where their payloads are."""

    rank: int
    images: tuple[FileImage, ...]
    payloads: Mapping[str, Sequence[Payload]]
    payload_bytes: int
    paths: Mapping[str, tuple[str | int, ...]]
    plan_s: float = 0.0


def pipe_settings(images: Sequence[FileImage], writers: int, buffer_bytes: int) -> PipeSettings:
    """How to write these files with at most `buffer_bytes` of buffers, and no more than they need."""
    streams = max(1, min(writers, len(images)))
    largest = max((image.size_bytes for image in images), default=0)
    # A file is at least two chunks, so that one is written while the other is filled.
    wanted = min(MOST_CHUNK_BYTES, round_up(max(-(-largest // 2), 1), PAGE_BYTES))
    room = buffer_bytes // (MIN_BUFFERS_PER_STREAM * streams) // PAGE_BYTES * PAGE_BYTES
    chunk_bytes = max(min(wanted, room), PAGE_BYTES)
    needed = sum(round_up(image.size_bytes, chunk_bytes) for image in images)
    least = MIN_BUFFERS_PER_STREAM * streams * chunk_bytes
    return PipeSettings(
        streams=streams,
        chunk_bytes=chunk_bytes,
        buffer_memory_bytes=max(min(needed, buffer_bytes // chunk_bytes * chunk_bytes), least),
    )


class Staged:
    """A `StagedSave` whose files are images filled from payloads.

    With `copies_first`, for which there is memory for all of the share, nothing is summed or written before
    everything is copied: tensors may change as early as can be.
    """

    def __init__(
        self,
        share: Share,
        memory: StagingMemory,
        settings: PipeSettings,
        *,
        copies_first: bool,
        timeout_s: float,
    ) -> None:
        self._share = share
        self._copies_first = copies_first
        self._settings = settings
        self._lock = threading.Lock()
        self._is_taken = False
        with ExitStack() as undo:
            borrowed = memory.borrow(settings.buffer_memory_bytes, timeout_s)
            undo.callback(memory.give_back, borrowed)
            self._began_ns = now_ns()
            links = links_to(share.payloads)
            links.pin(borrowed)
            self._filler = ImageFiller(
                share.images,
                share.payloads,
                links=links,
                summing="afterwards" if copies_first else "while copying",
            )
            planned = [PlannedObject(image.name, image.size_bytes) for image in share.images]
            self._pipe = undo.enter_context(
                WritePipe(
                    planned,
                    self._filler,
                    settings,
                    memory=borrowed,
                    entered_ns=self._began_ns,
                    order="all first" if copies_first else "chunk by chunk",
                )
            )
            self._undo = undo.pop_all()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when the tensors may change."""
        try:
            self._pipe.wait_filled(timeout_s)
        except PipeStopped as error:
            raise SaveCancelled from error

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> RankShare:
        """Write all files, each durable; afterwards the memory is free for the next save."""
        self._take()
        with self._undo:
            try:
                if self._copies_first:
                    self._pipe.wait_filled()
                seen = self._pipe.write_to(
                    [_Keyed(storage, key_of)], rank=self._share.rank, progress=progress
                )
            except PipeStopped as error:
                raise SaveCancelled from error
        return RankShare(
            rank=self._share.rank,
            files=tuple(self._written(image) for image in self._share.images),
            stats=self._stats(seen),
            paths=self._share.paths,
        )

    def cancel(self) -> None:
        """Give up. Whoever writes gives the memory back; if nobody does, this does."""
        self._pipe.stop()
        with self._lock:
            is_taken, self._is_taken = self._is_taken, True
        if not is_taken:
            self._undo.close()

    def _take(self) -> None:
        with self._lock:
            if self._is_taken:
                raise SaveCancelled
            self._is_taken = True

    def _written(self, image: FileImage) -> WrittenFile:
        offset, size, payload = image.columns()
        return WrittenFile(
            name=image.name,
            size_bytes=image.size_bytes,
            item_offset=offset,
            item_bytes=size,
            payload_offset=payload,
            sums=self._filler.sums(image.name),
        )

    def _stats(self, seen: Measurement) -> ShareStats:
        return ShareStats(
            rank=self._share.rank,
            payload_bytes=self._share.payload_bytes,
            file_bytes=seen.ledger.durable_bytes,
            plan_s=self._share.plan_s,
            stage_s=max(self._pipe.filled_ns - self._began_ns, 0) / _NS_PER_S,
            write_s=(seen.last_submit_ns - seen.first_submit_ns) / _NS_PER_S,
            sync_s=(seen.end_ns - seen.last_submit_ns) / _NS_PER_S,
            memory_bytes=self._settings.buffer_memory_bytes,
        )


class _Keyed(WrappedStorage):
    """A storage in which files have the keys that `key_of` gives them."""

    def __init__(self, inside: Storage, key_of: Callable[[str], str]) -> None:
        super().__init__(inside)
        self._key_of = key_of

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        """Begin the file under its key."""
        return super().create(self._key_of(key), size_bytes)
