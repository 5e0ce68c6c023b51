"""The protocol between planning batches and reading them: requests go in, loaded batches come out.

Planning (order, format) makes `BatchRequest`s; a `Loader` fulfils them some batches ahead of the loop.
Batches arrive in the order of their requests, and each says what was really read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.dataset.formats.format_protocol import Extent, FilePlan, FileSurvey
    from penstock.storage import Counters, Storage

OpenStorage = Callable[[], "Storage"]
"""Opens the rank's storage once more, in another process, where it travels by pickling."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range of one object, to its end where `size_bytes` is None; `expected_bytes` is its whole size."""

    key: str
    offset: int = 0
    size_bytes: int | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Samples of one file that are decoded once all their ranges are here; `found` is what a survey found."""

    reads: tuple[ReadRequest, ...]
    plan: FilePlan
    found: FileSurvey
    samples: range
    is_checked: bool = False
    """Whether what they decode to is held against their generator."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """All that one batch of `num_samples` needs; `preprocess_ns` is how long each sample is worked on."""

    requests: tuple[ReadRequest | BlockRequest, ...]
    num_samples: int
    preprocess_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that has arrived. Times are summed over its requests, which may have overlapped.

    `decode_ns` is all work on what was read: decoding, checking and preprocessing.
    """

    num_samples: int
    read_bytes: int
    num_reads: int
    read_ns: int
    decode_ns: int = 0


class Decoder(Protocol):
    """Works on what was read, on the thread or in the process that read it; it travels by pickling."""

    def decode(self, block: BlockRequest, pieces: Sequence[Extent]) -> None:
        """Make samples of `pieces`, which are read over afterwards; a `StorageError` names what is wrong."""


class Loader(Protocol):
    """Feeds one rank. `epoch` is called once an epoch, `close` once at the end; workers live in between."""

    def epoch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The batches of one epoch, in order; the first failed request's error comes out at its batch."""

    @property
    def counters(self) -> Counters:
        """What storages of the loader's own counted; the rank's storage, if it is read, counts for itself."""

    def close(self) -> None:
        """End all workers. Safe twice, and in the middle of an epoch."""


class LoaderOptions(Protocol):
    """Which loader a run takes, and how that works; a frozen record that ranks send to each other."""

    @property
    def prefetch_batches(self) -> int:
        """How many batches are read before they are wanted."""

    def start(self, storage: Storage, reopen: OpenStorage | None, decoder: Decoder | None = None) -> Loader:
        """Start it on `storage`; one with processes opens storage by `reopen` and never touches `storage`.

        Without `decoder` no request is a `BlockRequest`.
        """

    def document(self) -> dict[str, Any]:
        """As plain data, with the loader's name."""
