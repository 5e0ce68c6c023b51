"""The protocol of data file formats: a file's plan, what is read of it, and what a format implements.

Between a data set's specification and everything that writes, reads or verifies files. A `FilePlan` is a pure
function of (data set, seed, index), so any file is known by itself; only `survey` opens a stored file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from penstock.storage import Source

Sample = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """One object of a data file: itself, or an index beside it. A size only an encoder knows is None."""

    pattern: str = "{}"
    size_bytes: int | None

    def key(self, name: str) -> str:
        """The key of this part of the file `name`."""
        return self.pattern.replace("{}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One data file before it exists. Its samples have `sample_bytes` each, and decode to `dims` of `dtype`.

    `block_samples` in a row are read together: an order shuffles blocks, then samples within reach.
    """

    name: str
    index: int
    num_samples: int
    dims: tuple[int, ...]
    dtype: str
    sample_bytes: int
    block_samples: int
    parts: tuple[FilePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """One range of one part that training asks storage for."""

    part: int = 0
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a stored file that were read, and their offset in the file."""

    offset: int
    content: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSurvey:
    """What only the stored file tells: size, `known` bytes, the ranges of blocks, a library's own view."""

    size_bytes: int = 0
    known: tuple[Extent, ...] = ()
    blocks: tuple[tuple[RangeRead, ...], ...] = ()
    opened: object = None


COMPUTED = FileSurvey()  # of formats whose layout is computed: nothing to find out


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first wrong byte of a stored part, and the first wrong sample, None if none can be named.

    `samples_intact`: all decode to what they should; only the format around them differs.
    """

    name: str
    offset: int
    sample: int | None
    samples_intact: bool
    what: str


class Checksum(Enum):
    """The sums that formats keep of their bytes."""

    CRC32 = "crc32"
    CRC32C = "crc32c"


class ContentSource(Protocol):
    """The bytes of one file as a function of their offset: see `penstock.dataset.content`."""

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Write the bytes that belong at `offset`."""

    def verify(self, buffer: memoryview, offset: int) -> int | None:
        """Where in `buffer` the first byte is that does not belong at `offset`; None if all do."""


class FormatSink(Protocol):
    """Takes a file front to back: one kind writes it, the other compares it with what is stored."""

    content: ContentSource
    offset: int  # how many bytes were taken so far

    def raw(self, text: bytes | memoryview) -> None:
        """Bytes of the format itself, or of an encoder; `text` may be changed after the call."""

    def fill(self, size_bytes: int) -> None:
        """That much content, from the file's own offset on."""

    def start_sum(self, kind: Checksum) -> None:
        """Sum up what comes from here on."""

    def end_sum(self) -> int:
        """The sum since `start_sum`."""


class FileFormat(Protocol):
    """A kind of data file for one data set and seed. Pure but for `survey`; any thread may call anything."""

    def plan(self, index: int, name: str) -> FilePlan:
        """File `index`, unique over training and evaluation, as it will be stored under `name`."""

    def emit(self, plan: FilePlan, part: int, out: FormatSink) -> None:
        """Give the bytes of one part to `out`, front to back."""

    def survey(self, plan: FilePlan, source: Source) -> FileSurvey:
        """Read what `reads` and `decode` must know of the stored file; once for each opened file."""

    def reads(self, plan: FilePlan, survey: FileSurvey, samples: range) -> Iterator[RangeRead]:
        """The ranges to read for these samples, in order; the survey's own came before."""

    def decode(self, plan: FilePlan, survey: FileSurvey, pieces: Sequence[Extent], samples: range) -> Sample:
        """These samples, first axis, from the pieces of part 0 that `reads` named."""

    def expected(self, plan: FilePlan, content: ContentSource, samples: range) -> Sample:
        """What `decode` must give for these samples."""


@runtime_checkable
class SupportsSums(Protocol):
    """A format whose readers compare checksums that decoding does not need."""

    def check_sums(self, plan: FilePlan, pieces: Sequence[Extent]) -> None:
        """Raise `StorageError` where what was read does not have the sums that are stored with it."""


@runtime_checkable
class LibraryEncoded(Protocol):
    """A format whose files only a library takes apart, and which ends the process over some damaged ones.

    So verification never hands it a file that differs from what it would write itself.
    """

    def with_all_columns(self) -> FileFormat:
        """The same files, with everything of each sample read."""
