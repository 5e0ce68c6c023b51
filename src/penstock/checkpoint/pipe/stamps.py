"""When each chunk was where: columns set aside beforehand, so that timing costs no memory while bytes flow.

Filled by the acting threads, each chunk's cells by its present owner; read by `report` when all is over.
Invariant: a cell is written once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.checkpoint.pipe.base import PlannedObject

    Column = NDArray[np.int64]

now_ns = time.monotonic_ns


@dataclass(frozen=True, slots=True, eq=False)
class Stamps:
    """Nanoseconds of CLOCK_MONOTONIC, one row a chunk; 0 where something did not happen.

    Content is made or verified from `content_begin` to `content_end`; the storage has a chunk from
    `submitted` to `acknowledged`; the call that gave it to the storage came back at `returned`. `stream` is
    the number of the stream. `opening` and `ending` are spans of the calls for whole objects, (objects, 2),
    by `object_stream`. `is_wrong` marks chunks that were not what they should be.
    """

    content_begin: Column
    content_end: Column
    submitted: Column
    returned: Column
    acknowledged: Column
    size_bytes: Column
    stream: Column
    opening: Column
    ending: Column
    object_stream: Column
    is_wrong: NDArray[np.bool_]

    @classmethod
    def for_chunks(cls, num_chunks: int, num_objects: int) -> Self:
        """Empty columns."""
        chunks = np.zeros((7, num_chunks), dtype=np.int64)
        spans = np.zeros((2, num_objects, 2), dtype=np.int64)
        return cls(
            content_begin=chunks[0],
            content_end=chunks[1],
            submitted=chunks[2],
            returned=chunks[3],
            acknowledged=chunks[4],
            size_bytes=chunks[5],
            stream=chunks[6],
            opening=spans[0],
            ending=spans[1],
            object_stream=np.zeros(num_objects, dtype=np.int64),
            is_wrong=np.zeros(num_chunks, dtype=np.bool_),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One planned object on its way; its chunks are numbered from `first_chunk`."""

    number: int
    planned: PlannedObject
    first_chunk: int
    num_chunks: int


def number_chunks(planned: Sequence[PlannedObject], chunk_bytes: int) -> tuple[Job, ...]:
    """Every object with its range of chunk numbers; an empty object has none."""
    jobs: list[Job] = []
    first = 0
    for number, each in enumerate(planned):
        num_chunks = -(-each.size_bytes // chunk_bytes)
        jobs.append(Job(number, each, first, num_chunks))
        first += num_chunks
    return tuple(jobs)


def total_chunks(jobs: Sequence[Job]) -> int:
    """Of all objects."""
    return jobs[-1].first_chunk + jobs[-1].num_chunks if jobs else 0
