"""Trace files as chunks of whole lines: plain or gzip, of one member or many, whole or torn.

The first stage of reading. Invariants: a chunk ends behind a newline; memory is bounded whatever the file's
size; what can be decompressed is delivered, and what cannot is reported.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from isal import igzip_lib

from penstock.errors import StorageError

PIECE_BYTES: Final = 1 << 20
"""Decompressed at a time: small enough to be in a cache when it is read next."""
LINE_LIMIT_BYTES: Final = 8 << 20
"""A longer line is no event of a trace; only its beginning is kept, so that memory stays bounded."""
_KEPT_BYTES: Final = 1 << 16
"""What is kept of a line that is too long: enough to salvage an event."""

COUNT_SUFFIX: Final = ".count"
"""Ending of the file beside a trace that is being written, which has the number of its events."""
_READ_BYTES: Final = 1 << 17
_GZIP_MAGIC: Final = b"\x1f\x8b\x08"

_BAD_GZIP: Any = igzip_lib.IsalError

ReportFault = Callable[[str], None]
"""Called with each fault of the file as a whole."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines: `content[start:stop]`."""

    content: bytes
    start: int
    stop: int


def split_chunks(pieces: Iterable[bytes]) -> Iterator[Chunk]:
    """The lines of a file's pieces, in order; a last line without a newline gets one."""
    carry = b""
    is_too_long = False
    for piece in pieces:
        start = 0
        if carry or is_too_long:
            start = piece.find(b"\n") + 1
            if not is_too_long:
                carry += piece[:start] if start else piece
            if not start:
                is_too_long = len(carry) >= LINE_LIMIT_BYTES
                continue
            head = carry[:_KEPT_BYTES] + b"\n" if is_too_long or len(carry) > LINE_LIMIT_BYTES else carry
            yield Chunk(head, 0, len(head))
            carry, is_too_long = b"", False
        stop = piece.rfind(b"\n", start) + 1
        if stop > start:
            yield Chunk(piece, start, stop)
            start = stop
        carry = piece[start:]
    if carry:
        head = (carry[:_KEPT_BYTES] if is_too_long else carry) + b"\n"
        yield Chunk(head, 0, len(head))


def read_pieces(path: Path, report_fault: ReportFault, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The file's bytes, decompressed, in pieces of at most `PIECE_BYTES`."""
    try:
        with path.open("rb", buffering=0) as file:
            counted = _Counted(file, advance)
            if file.read(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
                file.seek(0)
                while piece := counted.read(PIECE_BYTES):
                    yield piece
                return
            file.seek(0)
            yield from _Members(file, counted, report_fault).pieces()
    except OSError as error:
        raise explain_unreadable(error, path) from error


def explain_unreadable(error: OSError, path: Path) -> StorageError:
    """The system's refusal to read a trace, as an error that names the file."""
    return StorageError(
        f"Cannot read the trace: {error.strerror}", uri=str(error.filename or path), errno=error.errno
    )


class _Counted:
    """Reads of a file that advance a progress."""

    def __init__(self, file: BinaryIO, advance: Callable[[int], None]) -> None:
        self._file = file
        self._advance = advance

    def read(self, num_bytes: int) -> bytes:
        piece = self._file.read(num_bytes)
        self._advance(len(piece))
        return piece


class _Members:
    """The gzip members of a file, one after another, past those that are damaged."""

    def __init__(self, file: BinaryIO, counted: _Counted, report_fault: ReportFault) -> None:
        self._file = file
        self._counted = counted
        self._report_fault = report_fault
        self._member_at = 0
        self._delivered = 0

    def pieces(self) -> Iterator[bytes]:
        is_more = True
        while is_more:
            self._delivered = 0
            decompressor = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            try:
                yield from self._member(decompressor)
            except _BAD_GZIP as error:
                yield from self._rescue()
                self._report_fault(f"gzip member at byte {self._member_at} is damaged: {error}")
                is_more = self._seek_member(self._member_at + 1)
                continue
            is_more = self._next_member(decompressor)

    def _member(self, decompressor: Any) -> Iterator[bytes]:
        while not decompressor.eof:
            read = b""
            if decompressor.needs_input:
                read = self._counted.read(_READ_BYTES)
                if not read:
                    self._report_fault(
                        f"ends inside the gzip member at byte {self._member_at}: it was cut short"
                    )
                    return
            piece = decompressor.decompress(read, PIECE_BYTES)
            self._delivered += len(piece)
            if piece:
                yield piece

    def _rescue(self) -> Iterator[bytes]:
        """The rest of a damaged member that can still be decoded."""
        self._file.seek(self._member_at)
        decompressor = zlib.decompressobj(wbits=31)
        to_skip = self._delivered
        # Fed byte by byte, zlib returns all that it decodes before the damage.
        try:
            while read := self._file.read(256):
                for number in range(len(read)):
                    piece = decompressor.decompress(read[number : number + 1])
                    if len(piece) > to_skip:
                        yield piece[to_skip:]
                    to_skip = max(0, to_skip - len(piece))
        except zlib.error:
            return

    def _next_member(self, decompressor: Any) -> bool:
        """Seek to the next member; False if there is none."""
        if not decompressor.eof:
            return False
        unused = len(decompressor.unused_data)
        at = self._file.tell() - unused
        rest = decompressor.unused_data + self._file.read(_READ_BYTES)
        if not rest.strip(b"\0") and len(rest) < _READ_BYTES:
            return False
        if rest.startswith(_GZIP_MAGIC):
            self._member_at = at
            self._file.seek(at)
            return True
        self._report_fault(f"bytes from {at} on are not a gzip member")
        return self._seek_member(at)

    def _seek_member(self, at: int) -> bool:
        """Seek to the first member that begins at `at` or later; False if there is none."""
        self._file.seek(at)
        overlap = b""
        while read := self._file.read(_READ_BYTES):
            window = overlap + read
            found = window.find(_GZIP_MAGIC)
            if found >= 0:
                self._member_at = self._file.tell() - len(window) + found
                self._file.seek(self._member_at)
                return True
            overlap = window[-len(_GZIP_MAGIC) + 1 :]
        return False


def read_event_count(trace: Path) -> int | None:
    """How many events the process of an unfinished trace has recorded; None for a finished one."""
    try:
        content = trace.with_name(trace.name + COUNT_SUFFIX).read_bytes()
    except FileNotFoundError:
        return None
    return sum(memoryview(content[: len(content) // 8 * 8]).cast("q"))
