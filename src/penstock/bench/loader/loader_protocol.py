"""The protocol between planning batches and reading them: requests go in, loaded batches come out.

Planning (order, format) makes `BatchRequest`s; a `Loader` fulfils them some batches ahead of the loop.
Batches arrive in the order of their requests, and each says what was really read for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.dataset.formats.format_protocol import Extent, FilePlan, FileSurvey
from penstock.storage import Counters, Storage

OpenStorage = Callable[[], "Storage"]
"""Opens a rank's storage once more, with counters of its own; it can be pickled for a worker process."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range of one object, to its end where `size_bytes` is None; `expected_bytes` is its whole size."""

    key: str
    offset: int = 0
    size_bytes: int | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Samples of one file, decoded once all their ranges are read; `survey` is the result of a survey."""

    reads: tuple[ReadRequest, ...]
    plan: FilePlan
    survey: FileSurvey
    samples: range
    is_checked: bool = False
    """Whether the decoded samples are compared with their generator."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What one batch of `num_samples` needs; `preprocess_ns` is how long each sample is worked on."""

    requests: tuple[ReadRequest | BlockRequest, ...]
    num_samples: int
    preprocess_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A loaded batch. Times are summed over its requests, which may have overlapped.

    `decode_ns` is all work on what was read: decoding, checking and preprocessing.
    """

    num_samples: int
    read_bytes: int
    num_reads: int
    read_ns: int
    decode_ns: int = 0


class Decoder(Protocol):
    """Decodes what was read, on the thread or in the process that read it; it can be pickled."""

    def decode(self, block: BlockRequest, pieces: Sequence[Extent]) -> None:
        """Make samples of `pieces`, whose memory is reused afterwards; a `StorageError` names a wrong one."""


class Loader(Protocol):
    """Feeds one rank. `epoch` is called once an epoch, `close` at the end; workers live in between."""

    def epoch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The batches of one epoch, in order; a failed request's error is raised at its batch."""

    @property
    def counters(self) -> Counters:
        """What the loader's own storages counted; the rank's storage, if it is read, counts for itself."""

    def close(self) -> None:
        """End all workers. Safe twice, and in the middle of an epoch."""


@runtime_checkable
class SupportsChangeOfStorage(Protocol):
    """A loader whose workers can go on with another storage, because it takes long to start them."""

    def change_storage(self, reopen: OpenStorage) -> None:
        """Between two epochs: let all workers open this one, and read from it from now on."""


class LoaderOptions(Protocol):
    """Which loader a run uses, with its settings; a frozen record that ranks send to each other."""

    @property
    def prefetch_batches(self) -> int:
        """How many batches are read before they are wanted."""

    def start(self, storage: Storage, reopen: OpenStorage | None, decoder: Decoder | None = None) -> Loader:
        """Start it on `storage`; one with processes opens storage by `reopen` and never touches `storage`.

        Without `decoder` no request is a `BlockRequest`.
        """

    def document(self) -> dict[str, Any]:
        """As plain data, with the loader's name."""
