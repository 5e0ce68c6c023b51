"""Serves read requests one after the other: the inner loop of every loader thread and worker process.

Memory is one buffer, whatever the size of a range, and what was read is dropped; only a block that is to be
decoded is held whole, until the next one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from penstock.bench.loader.loader_protocol import Batch, BlockRequest, FormatDecoder, ReadRequest
from penstock.dataset.formats.format_protocol import Extent
from penstock.errors import ShortTransfer
from penstock.storage import Source, Storage, aligned
from penstock.storage.protocol import SupportsReadsAtOnce

DEFAULT_BUFFER_BYTES: Final = 8 << 20
_ALIGNMENT: Final = 4096


@dataclass(slots=True)
class ReadTotals:
    """Totals of requests: bytes and ranges read, and the time spent on reading and on decoding."""

    read_bytes: int = 0
    num_reads: int = 0
    read_ns: int = 0
    decode_ns: int = 0

    def add(self, other: ReadTotals) -> None:
        """Count what `other` has counted, too."""
        self.read_bytes += other.read_bytes
        self.num_reads += other.num_reads
        self.read_ns += other.read_ns
        self.decode_ns += other.decode_ns

    def of_batch(self, num_samples: int) -> Batch:
        """The batch whose requests these are."""
        return Batch(num_samples, self.read_bytes, self.num_reads, self.read_ns, self.decode_ns)


class RangeReader:
    """Has one buffer, and keeps the last object open, because ranges of one file come in runs."""

    def __init__(self, storage: Storage, buffer_bytes: int, decoder: FormatDecoder | None = None) -> None:
        self._storage = storage
        self._read_at_once = storage.read_at_once if isinstance(storage, SupportsReadsAtOnce) else None
        self._buffer = aligned.aligned_buffer(buffer_bytes)
        self._block = self._buffer
        self._decoder = decoder
        self._key: str | None = None
        self._source: Source | None = None

    def serve(self, request: ReadRequest | BlockRequest, totals: ReadTotals) -> None:
        """Read what a request asks for; decode a block. Both count in `totals`."""
        began_ns = time.monotonic_ns()
        if not isinstance(request, BlockRequest):
            totals.read_bytes += self._read(request)
            totals.num_reads += 1
            totals.read_ns += time.monotonic_ns() - began_ns
            return
        pieces = self._read_block(request)
        read_ns = time.monotonic_ns()
        assert self._decoder is not None
        self._decoder.decode(request, pieces)
        totals.read_bytes += sum(len(piece.content) for piece in pieces)
        totals.num_reads += len(pieces)
        totals.read_ns += read_ns - began_ns
        totals.decode_ns += time.monotonic_ns() - read_ns

    def _read(self, request: ReadRequest) -> int:
        """Read one range; its length."""
        is_whole = request.size_bytes is None and request.offset == 0
        if self._read_at_once is not None and is_whole:
            size_bytes = request.expected_bytes or 0
            if size_bytes <= len(self._buffer):
                size_bytes = self._read_at_once(request.key, self._buffer)
                self._require_size(request, size_bytes)
            if size_bytes <= len(self._buffer):
                return size_bytes
            self._read_at_once = None  # files of a data set are alike: the next ones are not tried
        return self._read_pieces(request)

    def _read_pieces(self, request: ReadRequest) -> int:
        source = self._open(request)
        size_bytes = _length(request, source)
        done = 0
        while done < size_bytes:
            piece = self._buffer[: min(len(self._buffer), size_bytes - done)]
            source.read_into(request.offset + done, piece)
            done += len(piece)
        self._close_if_whole(request)
        return done

    def close(self) -> None:
        """Close the open object, if there is one."""
        if self._source is not None:
            self._source.close()
            self._source = self._key = None

    def _read_block(self, block: BlockRequest) -> list[Extent]:
        """All ranges of a block, side by side in memory that the next block reuses."""
        lengths = [_length(read, self._open(read)) for read in block.reads]
        places = [aligned.round_up(length, _ALIGNMENT) for length in lengths]
        if sum(places) > len(self._block):
            self._block = aligned.aligned_buffer(sum(places))
        pieces, begin = [], 0
        for read, length, place in zip(block.reads, lengths, places, strict=True):
            piece = self._block[begin : begin + length]
            self._open(read).read_into(read.offset, piece)
            pieces.append(Extent(read.offset, piece))
            begin += place
        for read in block.reads:
            self._close_if_whole(read)
        return pieces

    def _open(self, request: ReadRequest) -> Source:
        if self._source is None or request.key != self._key:
            self.close()
            self._source = self._storage.open(request.key)
            self._key = request.key
        self._require_size(request, self._source.size_bytes)
        return self._source

    def _require_size(self, request: ReadRequest, actual_bytes: int) -> None:
        expected_bytes = request.expected_bytes
        if expected_bytes is None or expected_bytes == actual_bytes:
            return
        raise ShortTransfer(
            f"This file has {actual_bytes} bytes instead of {expected_bytes}",
            uri=f"{self._storage.uri}/{request.key}",
            expected_bytes=expected_bytes,
            actual_bytes=actual_bytes,
            fix="Generate or copy it again; `penstock training verify` finds all such files.",
        )

    def _close_if_whole(self, request: ReadRequest) -> None:
        if request.size_bytes is None:
            self.close()  # an object that was read whole is not requested again in this epoch


def _length(request: ReadRequest, source: Source) -> int:
    return source.size_bytes - request.offset if request.size_bytes is None else request.size_bytes
