"""One rank's share of a save, from the first copied byte to durable files.

Copying begins when `StagedFiles` is made, or with the writes. Staging memory is kept warm between saves and
never exceeds its budget. Invariant: memory is returned exactly once, when no thread uses it any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.checkpoint.engine import RankSaveStats, SaveCancelled, ShareContents, WrittenShare
from penstock.checkpoint.formats.manifest import WrittenFile
from penstock.checkpoint.saving.file_layout import (
    DeviceStreams,
    FileLayout,
    LayoutFiller,
    Payload,
    open_device_streams,
    pack_file,
)
from penstock.progress import Progress
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.protocol import Sink, Storage, WrappedStorage
from penstock.transfer.buffers import StagingMemory, WarmMemory
from penstock.transfer.ledger import Measurement, now_ns
from penstock.transfer.pipeline import (
    MIN_BUFFERS_PER_STREAM,
    PipelineSettings,
    PipelineStopped,
    PlannedObject,
    WritePipeline,
)

MOST_CHUNK_BYTES = 16 << 20
"""Larger writes are no faster, and the last one of a file takes longer to wait for."""

FEW_CHUNKS_BYTES = 8 << 20
"""Files below this are written in two chunks."""

_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveShare:
    """One rank's files, and where their payloads come from."""

    rank: int
    layouts: tuple[FileLayout, ...]
    payloads: Mapping[str, Sequence[Payload]]
    payload_bytes: int
    contents: ShareContents = field(default_factory=ShareContents)
    compare_s: float = 0.0
    plan_s: float = 0.0

    def transformed(self, transforms: Sequence[str]) -> SaveShare:
        """The share with each item transformed, as in `("stream.zstd/1",)`."""
        if not transforms:
            return self
        packed = [pack_file(layout, self.payloads[layout.name], transforms) for layout in self.layouts]
        return replace(
            self,
            layouts=tuple(layout for layout, _ in packed),
            payloads={layout.name: payloads for layout, payloads in packed},
        )


def choose_pipeline_settings(
    layouts: Sequence[FileLayout], writers: int, buffer_bytes: int
) -> PipelineSettings:
    """Settings that write these files with at most `buffer_bytes` of buffers, and no more than needed."""
    streams = max(1, min(writers, len(layouts)))
    largest = max((layout.size_bytes for layout in layouts), default=0)
    # Chunks of one size, so that none is small; several, so that the storage works while others are filled.
    num_chunks = max(-(-largest // MOST_CHUNK_BYTES), 2 if largest < FEW_CHUNKS_BYTES else 4)
    wanted = round_up(max(-(-largest // num_chunks), 1), PAGE_BYTES)
    room = buffer_bytes // (MIN_BUFFERS_PER_STREAM * streams) // PAGE_BYTES * PAGE_BYTES
    chunk_bytes = max(min(wanted, room), PAGE_BYTES)
    needed = sum(round_up(layout.size_bytes, chunk_bytes) for layout in layouts)
    least = MIN_BUFFERS_PER_STREAM * streams * chunk_bytes
    return PipelineSettings(
        streams=streams,
        chunk_bytes=chunk_bytes,
        buffer_memory_bytes=max(min(needed, buffer_bytes // chunk_bytes * chunk_bytes), least),
    )


def copy_to_host(
    payloads: Sequence[Payload], sizes: Sequence[int], memory: WarmMemory, device_streams: DeviceStreams
) -> list[memoryview]:
    """Copy payloads of these sizes in bytes to `memory`, each to a page of its own; done when this returns.

    Devices copy to pinned memory in side streams.
    """
    device_streams.pin(memory)
    views, start = [], 0
    for payload, size in zip(payloads, sizes, strict=True):
        views.append(memory.view[start : start + size])
        if size and not device_streams.fetch(payload, 0, views[-1]):
            payload.copy_into(0, views[-1])
        start += round_up(size, PAGE_BYTES)
    device_streams.catch_up()
    return views


CopyOrder = Literal["with the writes", "at once", "before all else"]
"""When tensors are copied. "before all else", which needs memory for the whole share: no checksum is computed
and nothing is written before everything is copied, because checksums and a busy disk take memory bandwidth
from the copies, and training waits for these alone. "with the writes" leaves processor and memory alone until
`write_to` has opened the files: a disk then waits for the first buffer and not for the last one. See
docs/decisions/010-copy-or-write-first.md."""


class StagedFiles:
    """A `StagedSave` whose files are filled from payloads according to their layouts."""

    def __init__(
        self,
        share: SaveShare,
        memory: StagingMemory,
        settings: PipelineSettings,
        *,
        copies: CopyOrder,
        timeout_s: float,
    ) -> None:
        self._share = share
        self._copies = copies
        self._settings = settings
        self._lock = threading.Lock()
        self._is_claimed = False
        with ExitStack() as undo:
            borrowed = memory.borrow(settings.buffer_memory_bytes, timeout_s)
            undo.callback(memory.give_back, borrowed)
            self._start_ns = now_ns()
            # In the caller's thread: device streams wait for what this thread's stream has queued so far.
            device_streams = open_device_streams(share.payloads)
            device_streams.pin(borrowed)
            self._filler = LayoutFiller(
                share.layouts,
                share.payloads,
                device_streams=device_streams,
                summing="afterwards" if copies == "before all else" else "while copying",
            )
            planned = [PlannedObject(layout.name, layout.size_bytes) for layout in share.layouts]
            self._pipe = undo.enter_context(
                WritePipeline(
                    planned,
                    self._filler,
                    settings,
                    memory=borrowed,
                    entered_ns=self._start_ns,
                    fills_first=copies == "before all else",
                )
            )
            if copies != "with the writes":
                self._pipe.start_filling()
            self._undo = undo.pop_all()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when the tensors may change."""
        try:
            self._pipe.wait_filled(timeout_s)
        except PipelineStopped as error:
            raise SaveCancelled from error

    def count_bytes(self, storage: Storage, key_of: Callable[[str], str]) -> int:  # noqa: ARG002 - as laid out
        """The sizes of all files."""
        return sum(layout.size_bytes for layout in self._share.layouts)

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        """Write all files durably; afterwards the memory is free for the next save."""
        if self._claim():
            raise SaveCancelled
        with self._undo:
            try:
                if self._copies == "before all else":
                    self._pipe.wait_filled()
                measurement = self._pipe.write_to(
                    [_Keyed(storage, key_of)], rank=self._share.rank, progress=progress
                )
            except PipelineStopped as error:
                raise SaveCancelled from error
        return WrittenShare(
            rank=self._share.rank,
            files=tuple(self._describe_file(layout) for layout in self._share.layouts),
            stats=self._stats(measurement),
            contents=self._share.contents,
        )

    def cancel(self) -> None:
        """Stop the copies and writes. The memory is returned by `write_to` if it runs, else here."""
        self._pipe.stop()
        if not self._claim():
            self._undo.close()

    def _claim(self) -> bool:
        """Claim the duty to return the memory; whether it was claimed before."""
        with self._lock:
            was_claimed, self._is_claimed = self._is_claimed, True
        return was_claimed

    def _describe_file(self, layout: FileLayout) -> WrittenFile:
        offset, size, payload = layout.columns()
        return WrittenFile(
            name=layout.name,
            size_bytes=layout.size_bytes,
            item_offset=offset,
            item_bytes=size,
            payload_offset=payload,
            sums=self._filler.sums(layout.name),
        )

    def _stats(self, measurement: Measurement) -> RankSaveStats:
        return RankSaveStats(
            rank=self._share.rank,
            payload_bytes=self._share.payload_bytes,
            file_bytes=measurement.ledger.durable_bytes,
            compare_s=self._share.compare_s,
            plan_s=self._share.plan_s,
            stage_s=max(self._pipe.filled_ns - self._start_ns, 0) / _NS_PER_S,
            write_s=(measurement.last_submit_ns - measurement.first_submit_ns) / _NS_PER_S,
            sync_s=(measurement.end_ns - measurement.last_submit_ns) / _NS_PER_S,
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
