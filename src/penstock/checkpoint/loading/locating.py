"""Where payloads lie in items that others wrote: each rank looks at the heads of some, and all are told.

Invariant: all ranks end with the same contents, in which each row has a payload or is known to be packed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.dcp.items import HEAD_BYTES
from penstock.checkpoint.loading.wishes import with_payloads
from penstock.checkpoint.pieces import UNKNOWN
from penstock.cluster.collectives import run_on_all_ranks

if TYPE_CHECKING:
    from penstock.checkpoint.opened import Opened
    from penstock.checkpoint.pieces import Contents, Ints
    from penstock.cluster.comm import Comm
    from penstock.storage.protocol import Source

NUM_THREADS = 16
"""Heads are small, so it is latency that counts."""


def located(opened: Opened, comm: Comm) -> Contents:
    """The contents with all payloads' positions; collective. Costs nothing where a manifest tells them.

    Heads are read as the checkpoint was opened: past the page cache a page here and there takes four times as
    long, and there are as many as tensors.
    """
    contents = opened.contents
    rows = unlocated_rows(contents)
    if not len(rows):
        return contents
    mine = rows[comm.rank :: comm.size]
    found = run_on_all_ranks(
        comm, lambda: _positions(opened, mine), awaiting="all ranks to look into foreign items"
    )
    everybodys = comm.gather(found, awaiting="where all payloads begin")
    positions = np.empty(len(rows), dtype=np.int64)
    for rank, each in enumerate(everybodys):
        positions[rank :: comm.size] = each
    return with_payloads(contents, positions, rows)


def unlocated_rows(contents: Contents) -> Ints:
    """Rows of plain items whose payload only their own heads can tell."""
    stored = contents.stored
    return np.flatnonzero((stored.payload_offset == UNKNOWN) & ~stored.packed)


def _positions(opened: Opened, rows: Ints) -> Ints:
    """Positions in the file, -1 where only the whole item tells."""
    stored = opened.contents.stored
    positions = np.full(len(rows), UNKNOWN, dtype=np.int64)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for file in np.unique(stored.file[rows]).tolist():
            places = np.flatnonzero(stored.file[rows] == file)
            with ExitStack() as opening:
                source = opened.storage.open(opened.key(opened.contents.files[file]))
                opening.callback(source.close)
                look = partial(_position, opened, source)
                positions[places] = list(threads.map(look, rows[places].tolist()))
    return positions


def _position(opened: Opened, source: Source, row: int) -> int:
    stored = opened.contents.stored
    begin, size = int(stored.item_offset[row]), int(stored.item_bytes[row])
    head = bytearray(min(HEAD_BYTES, size))
    source.read_into(begin, memoryview(head))
    found = opened.payload_in(row, head)
    return UNKNOWN if found is None else begin + found
