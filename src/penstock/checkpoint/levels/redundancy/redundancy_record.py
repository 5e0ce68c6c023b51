"""What each member of a group holds of one step, and its files as one run of bytes.

Parity knows nothing of files: it sees a member's files one after another, with zeros after the last. The
record of a group lies in every member's cache, so it survives whatever the group does. Invariant: a record
says the names, sizes and sums of every file that a rebuild must give back.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.formats.checksums import running_sum
from penstock.checkpoint.levels.redundancy.parity_layout import Layout
from penstock.errors import DataDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from penstock.storage.protocol import Sink, Source

RECORD_NAME: Final = "redundancy.json"
FORMAT: Final = 2


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HeldFile(_Strict):
    """One file: its name below the step's folder, its size, and the XXH3-128 of its bytes in hexadecimal."""

    name: str
    size_bytes: int
    sum: str


class Member(_Strict):
    """One rank and the files that it wrote, in the order in which parity sees them."""

    rank: int
    domain: str
    files: tuple[HeldFile, ...]

    @property
    def size_bytes(self) -> int:
        """All of its files."""
        return sum(file.size_bytes for file in self.files)


class GroupRecord(_Strict):
    """How one group's members protect each other in one step."""

    format: Literal[2] = FORMAT
    step: str
    save_id: str
    """Of the save that wrote all this: a step may have been saved twice, and one node have missed it."""
    domains: tuple[str, ...]
    """Of all ranks of the job that saved, in their order."""
    scheme: str
    losses: int
    chunk_bytes: int
    block_bytes: int
    members: tuple[Member, ...]
    kept: tuple[HeldFile, ...]
    """What each member keeps of the others: its parity, or its neighbour's copy."""

    @property
    def layout(self) -> Layout:
        """Where pieces of parity lie."""
        return Layout(members=len(self.members), parities=self.losses, chunk_bytes=self.chunk_bytes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks."""
        return tuple(member.rank for member in self.members)


def record_bytes(record: GroupRecord) -> bytes:
    """The record as it lies in caches."""
    return record.model_dump_json().encode()


def read_record(content: bytes | bytearray, uri: str) -> GroupRecord:
    """Read a record; `DataDamaged` if it is none."""
    try:
        return GroupRecord.model_validate_json(bytes(content))
    except ValidationError as error:
        raise DataDamaged(
            f"The redundancy record cannot be read: {error.errors()[0]['msg']}",
            uri=uri,
            fix="Restore from another level.",
        ) from error


class FilesIn:
    """A member's files, read as one run of bytes that never ends: zeros follow the last."""

    def __init__(self, files: Sequence[HeldFile], open_file: Callable[[str], Source]) -> None:
        self._sizes = [file.size_bytes for file in files]
        self._ends = np.cumsum(self._sizes, dtype=np.int64) if files else np.zeros(0, np.int64)
        self._names = [file.name for file in files]
        self._open_file = open_file
        self._sources: dict[int, Source] = {}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `offset` of the run."""
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


class FilesOut:
    """A run of bytes, written into files one after another; what comes after the last is dropped.

    Files are finished as soon as they are full, each with its sum. Leaving the block with an error aborts.
    """

    def __init__(self, sizes: Sequence[tuple[str, int]], create_file: Callable[[str, int], Sink]) -> None:
        self._sizes = list(sizes)
        self._create_file = create_file
        self._undo = ExitStack()
        self._sink: Sink | None = None
        self._left_bytes = 0
        self._sum = running_sum()
        self.written: list[HeldFile] = []
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
            self._sum = running_sum()
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
        self.written.append(HeldFile(name=name, size_bytes=size_bytes, sum=self._sum.digest().hex()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
