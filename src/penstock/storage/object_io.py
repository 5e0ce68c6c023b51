"""Whole objects in one call, over any `Storage`: for manifests, records and tests, not for the hot path.

Invariant: a write that fails half-way is aborted, whatever stopped it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from penstock.errors import ObjectNotFound

if TYPE_CHECKING:
    from penstock.storage.protocol import ObjectInfo, Storage


def write_object(
    storage: Storage,
    key: str,
    buffers: Iterable[bytes | bytearray | memoryview],
    *,
    size_bytes: int | None = None,
) -> ObjectInfo:
    """Write `buffers`, one after the other, as one object; durable and visible once this returns."""
    sink = storage.create(key, size_bytes)
    with ExitStack() as undo:
        undo.callback(sink.abort)
        for buffer in buffers:
            sink.submit(memoryview(buffer))
        info = sink.finish()
        undo.pop_all()
    return info


def read_object(storage: Storage, key: str) -> bytearray:
    """All bytes of one object, in memory of their own; `ObjectNotFound` if there is none."""
    with closing(storage.open(key)) as source:
        content = bytearray(source.size_bytes)
        source.read_into(0, memoryview(content))
    return content


def exists(storage: Storage, key: str) -> bool:
    """Whether the object is there now. Any other failure than its absence is raised."""
    try:
        storage.stat(key)
    except ObjectNotFound:
        return False
    return True
