"""The protocol between planning and reading batches: requests go in, loaded batches come out.

Planning (order, format) makes `BatchRequest`s; a `Loader` fulfills them some batches ahead of the loop.
Batches arrive in the order of their requests, and each records what was really read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np

from penstock.dataset.content import Content
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.formats.format_protocol import Extent, FileFormat, FilePlan, FileSurvey
from penstock.errors import StorageError
from penstock.storage import Counters, Storage

OpenStorage = Callable[[], "Storage"]
"""Opens a rank's storage again, with separate counters. It can be pickled for a worker process."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range of one object, up to the object's end if `size_bytes` is None.

    `expected_bytes` is the object's size; None if it is unknown.
    """

    key: str
    offset: int = 0
    size_bytes: int | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Samples of one file, decoded when all their ranges have been read.

    `survey` is what was found when the file was opened.
    """

    reads: tuple[ReadRequest, ...]
    plan: FilePlan
    survey: FileSurvey
    samples: range
    is_checked: bool = False
    """True if the decoded samples are compared with what their generator produced."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The reads of one batch of `num_samples`.

    `preprocess_ns` has the time for each sample's preprocessing.
    """

    requests: tuple[ReadRequest | BlockRequest, ...]
    num_samples: int
    preprocess_ns: tuple[int, ...] = ()


@dataclass(slots=True)
class Batch:
    """A loaded batch, or the part read so far. Times are sums over requests, which may overlap.

    `decode_ns` is all work on the bytes read: decoding, checking and preprocessing.
    """

    num_samples: int = 0
    read_bytes: int = 0
    num_reads: int = 0
    read_ns: int = 0
    decode_ns: int = 0

    def add(self, other: Batch) -> None:
        """Add the figures of another part of the batch."""
        self.read_bytes += other.read_bytes
        self.num_reads += other.num_reads
        self.read_ns += other.read_ns
        self.decode_ns += other.decode_ns


SAMPLED: Final = 16
"""One in this many blocks is checked by `ContentCheck.SAMPLE`."""


class ContentCheck(StrEnum):
    """The share of the blocks read that are compared with what was generated."""

    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"

    def includes(self, block: int) -> bool:
        """Return True if the block of this number, in a rank's order, is checked."""
        return self is ContentCheck.FULL or (self is ContentCheck.SAMPLE and block % SAMPLED == 0)


@dataclass(frozen=True, slots=True)
class FormatDecoder:
    """Decodes samples from the bytes read, in the process that read them, and checks some of them.

    Checked samples are compared with what their generator produced. All samples are copied out of the
    loader's buffers, as a trainer would need them, and then dropped. A decoder can be pickled.
    """

    kind: FileFormat
    recipe: DatasetRecipe
    check: ContentCheck = ContentCheck.OFF

    def decode(self, block: BlockRequest, pieces: Sequence[Extent]) -> None:
        """Decode a block, and check it if `is_checked` is set.

        `StorageError` names the first wrong sample.
        """
        decoded = np.array(self.kind.decode(block.plan, block.survey, pieces, block.samples))
        if not block.is_checked:
            self.kind.check_sums(block.plan, pieces)
            return
        content = Content(self.recipe.seed, block.plan.index, self.recipe.reduction)
        expected = self.kind.expected(block.plan, content, block.samples)
        for sample, stored, right in zip(block.samples, decoded, expected, strict=True):
            # Compare bytes, because content includes NaNs, which are not equal to themselves.
            if np.ascontiguousarray(stored).tobytes() != np.ascontiguousarray(right).tobytes():
                raise StorageError(
                    f"Sample {sample} of {block.plan.name} is not what was generated",
                    uri=block.plan.name,
                    fix="`penstock training verify` names all wrong files; delete them and generate again.",
                )


class Loader(Protocol):
    """Feeds batches to one rank.

    `epoch` is called once per epoch, `close` at the end; workers live until then.
    """

    def epoch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches of one epoch, in order; raise a failed request's error in place of its batch."""

    @property
    def counters(self) -> Counters:
        """The counters of the loader's own storages. The rank's storage has its own counters."""

    def close(self) -> None:
        """End all workers. May be called twice, and in the middle of an epoch."""

    # A loader whose workers take long to start may also have `change_storage(reopen)`: between two epochs all
    # workers open another storage and read from it.


class LoaderOptions(Protocol):
    """A loader's settings: a frozen record that ranks send to each other."""

    @property
    def prefetch_batches(self) -> int:
        """The number of batches that are read ahead."""

    def start(
        self, storage: Storage, reopen: OpenStorage | None, decoder: FormatDecoder | None = None
    ) -> Loader:
        """Start the loader on `storage`.

        A loader with processes opens storage by `reopen` and never touches `storage`. Without `decoder`, no
        request is a `BlockRequest`.
        """

    def document(self) -> dict[str, Any]:
        """Return the settings as plain data, with the loader's name."""
