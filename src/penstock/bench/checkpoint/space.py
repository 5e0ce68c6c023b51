"""Is there room for all checkpoints? Asked on every node before the first byte.

Invariant: ranks whose storage is the same file system need its space together, others each their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster.collectives import all_gather_results
from penstock.storage.space import nearest_folder, require_free_space, volume_identity
from penstock.storage.uri import FILE_SCHEMES, parse_uri

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm


def require_room(uri: str, bytes_of_ranks: Sequence[int], *, comm: Comm) -> None:
    """`OutOfSpace` on all ranks unless each file system holds what its ranks will write. Collective."""
    volumes = comm.gather(volume_of(uri), awaiting="where all ranks write")
    needed = sum(
        size for size, volume in zip(bytes_of_ranks, volumes, strict=True) if volume == volumes[comm.rank]
    )
    all_gather_results(
        comm,
        lambda: require_free_space(
            uri, needed, what="Writing all checkpoints", fix="write fewer, or a smaller --scale"
        ),
        awaiting="all nodes to check their free space",
    )


def volume_of(uri: str) -> str:
    """What tells one file system from another: the same on all nodes for a shared one. "" without files."""
    location = parse_uri(uri)
    if location.scheme not in FILE_SCHEMES:
        return ""
    return volume_identity(nearest_folder(Path(location.root)))
