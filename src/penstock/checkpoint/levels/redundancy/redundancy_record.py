"""The record of what a group's members have of one step, and their files as one sequence of bytes.

Parity knows nothing of files: it sees those of a member one after another, followed by zeros. The record of a
group is in the cache of every member, so it survives whatever the group survives. Invariant: it has the
names, sizes and checksums of all files that a rebuild must give back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.formats.manifest import start_checksum
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout
from penstock.errors import DataDamaged
from penstock.storage.protocol import Sink, Source

RECORD_NAME: Final = "redundancy.json"
FORMAT: Final = 2


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordedFile(_Strict):
    """One file: its name below the step's folder, its size, and the XXH3-128 of its bytes in hexadecimal."""

    name: str
    size_bytes: int
    sum: str


class GroupMember(_Strict):
    """One rank and the files that it wrote, in the order in which parity sees them."""

    rank: int
    domain: str
    files: tuple[RecordedFile, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(file.size_bytes for file in self.files)


class GroupRecord(_Strict):
    """How the members of one group protect each other in one step. JSON on disk."""

    format: Literal[2] = FORMAT
    step: str
    save_id: str
    """The save that wrote this: a step may have been saved twice, and one node may have missed the second."""
    domains: tuple[str, ...]
    """Of all ranks of the job that saved, in rank order."""
    scheme: str
    losses: int
    chunk_bytes: int
    block_bytes: int
    members: tuple[GroupMember, ...]
    kept: tuple[RecordedFile, ...]
    """What each member keeps for the others: parity, or a copy of its neighbour's files."""

    @property
    def layout(self) -> ParityLayout:
        """Where the pieces of parity are."""
        return ParityLayout(members=len(self.members), parities=self.losses, chunk_bytes=self.chunk_bytes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks."""
        return tuple(member.rank for member in self.members)


def record_bytes(record: GroupRecord) -> bytes:
    """The content of a record file."""
    return record.model_dump_json().encode()


def read_record(content: bytes | bytearray, uri: str) -> GroupRecord:
    """Parse a record; `DataDamaged` if it is not one."""
    try:
        return GroupRecord.model_validate_json(bytes(content))
    except ValidationError as error:
        raise DataDamaged(
            f"The redundancy record cannot be parsed: {error.errors()[0]['msg']}",
            uri=uri,
            fix="Restore from another level.",
        ) from error


class ConcatenatedReader:
    """Reads a member's files as one endless sequence of bytes: zeros follow the last file."""

    def __init__(self, files: Sequence[RecordedFile], open_file: Callable[[str], Source]) -> None:
        self._sizes = [file.size_bytes for file in files]
        self._ends = np.cumsum(self._sizes, dtype=np.int64) if files else np.zeros(0, np.int64)
        self._names = [file.name for file in files]
        self._open_file = open_file
        self._sources: dict[int, Source] = {}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of the sequence."""
        filled = 0
        while filled < buffer.nbytes:
            number = int(np.searchsorted(self._ends, offset + filled, side="right"))
            if number == len(self._sizes):
                np.frombuffer(buffer[filled:], np.uint8)[:] = 0
                return
            inside = offset + filled - (int(self._ends[number]) - self._sizes[number])
            wanted = min(buffer.nbytes - filled, self._sizes[number] - inside)
            self._source(number).read_into(inside, buffer[filled : filled + wanted])
            filled += wanted

    def _source(self, number: int) -> Source:
        if number not in self._sources:
            self._sources[number] = self._open_file(self._names[number])
        return self._sources[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()


class ConcatenatedWriter:
    """Writes a sequence of bytes to files one after another; what follows the last file is dropped.

    Each file is finished as soon as it is full. Leaving the block before that aborts it.
    """

    def __init__(self, sizes: Sequence[tuple[str, int]], create_file: Callable[[str, int], Sink]) -> None:
        self._sizes = list(sizes)
        self._create_file = create_file
        self._undo = ExitStack()
        self._sink: Sink | None = None
        self._left_bytes = 0
        self._sum = start_checksum()
        self.written: list[RecordedFile] = []
        self._open_next()

    def write(self, buffer: memoryview) -> None:
        """Write the next bytes; `buffer` may change once this returns."""
        while buffer.nbytes and self._sink is not None:
            part = buffer[: self._left_bytes]
            released = threading.Event()
            self._sink.submit(part, released.set)
            self._sum.update(part)
            released.wait()
            self._left_bytes -= part.nbytes
            buffer = buffer[part.nbytes :]
            if not self._left_bytes:
                self._finish_file()

    def _open_next(self) -> None:
        while len(self.written) < len(self._sizes):
            name, self._left_bytes = self._sizes[len(self.written)]
            self._sink = self._create_file(name, self._left_bytes)
            self._undo.callback(self._sink.abort)
            self._sum = start_checksum()
            if self._left_bytes:
                return
            self._finish_one()
        self._sink = None

    def _finish_file(self) -> None:
        self._finish_one()
        self._open_next()

    def _finish_one(self) -> None:
        assert self._sink is not None
        self._sink.finish()
        self._undo.pop_all()
        name, size_bytes = self._sizes[len(self.written)]
        self.written.append(RecordedFile(name=name, size_bytes=size_bytes, sum=self._sum.digest().hex()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
