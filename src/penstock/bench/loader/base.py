"""The waist between deciding what a batch reads and reading it: requests go in, arrived batches come out.

Planning (order, format) makes `BatchRequest`s; a `Loader` fulfils them some batches ahead of the loop.
Invariant: batches arrive in the order of their requests, and each says what was really read for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range of one object, to its end where `size_bytes` is None; `expected_bytes` is its whole size."""

    key: str
    offset: int = 0
    size_bytes: int | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """All that one batch of `num_samples` needs from storage."""

    requests: tuple[ReadRequest, ...]
    num_samples: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that has arrived. `read_ns` is summed over its requests, which may have overlapped."""

    num_samples: int
    read_bytes: int
    num_reads: int
    read_ns: int


class Loader(Protocol):
    """Feeds one rank. `epoch` is called once an epoch, `close` once at the end; workers live in between."""

    def epoch(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The batches of one epoch, in order; the first failed request's error comes out at its batch."""

    def close(self) -> None:
        """End all workers. Safe twice, and in the middle of an epoch."""
