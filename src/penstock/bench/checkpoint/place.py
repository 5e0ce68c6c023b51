"""The folder of checkpoints on storage: what lies there, what may go, what a run may read or must write.

Place in the flow: before the first round, and after the last. Collective. Invariant: only objects that the
marker names are ever deleted, and the marker goes first.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.checkpoint.marker import (
    KEY,
    Marker,
    read_marker,
    require_same_shape,
    write_marker,
)
from penstock.bench.checkpoint.plan import EPOCH, plan_rounds
from penstock.bench.state.layout import checkpoint_folder
from penstock.cluster.collectives import all_gather_results
from penstock.dataset.content import CONTENT_VERSION
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.residency import SupportsLocalPaths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.bench.checkpoint.plan import Round
    from penstock.bench.checkpoint.request import CheckpointRequest
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage

_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What is to be done here. `earlier` is the marker of checkpoints that are kept and used, if any are."""

    rounds: tuple[Round, ...]
    seed: int
    earlier: Marker | None


def prepare_place(
    request: CheckpointRequest, storage: Storage, *, comm: Comm, tell: Callable[[str], None]
) -> Preparation:
    """Look at what lies there, remove what is to be replaced, and plan the rounds; the same on all ranks."""
    found = all_gather_results(
        comm, lambda: read_marker(storage) if comm.rank == 0 else None, awaiting="what lies at the target"
    )[0]
    asked = request.model.workload.checkpoint
    num_writes, num_reads = asked.num_checkpoints_write, asked.num_checkpoints_read
    if num_writes + num_reads == 0:
        raise UsageError(
            "Nothing is to be written or read",
            fix="Give --writes or --reads (checkpoint.num_checkpoints_write, num_checkpoints_read).",
        )
    keeps = not num_writes or (request.resumes and found is not None)
    if not keeps:
        rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, there=())
        if found is not None:
            tell(f"Replacing {len(found.steps)} checkpoints that lie at {storage.uri}")
            remove_steps(storage, found.step_numbers, comm=comm)
        drawn = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        seed = comm.broadcast(drawn, awaiting="the seed of all content")
        return Preparation(rounds=rounds, seed=seed, earlier=None)
    if found is None:
        raise UsageError(
            "No checkpoints of this benchmark lie here",
            where=storage.uri,
            fix="Write some first: --writes 10, with --reads 0 if they are to be read later.",
        )
    require_same_shape(found, request.shape, uri=storage.uri)
    _require_same_content(found, request, storage.uri)
    rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, there=found.step_numbers)
    return Preparation(rounds=rounds, seed=found.seed, earlier=found)


def mark(storage: Storage, marker: Marker, *, comm: Comm) -> None:
    """Have the marker say so, before any rank goes on."""
    all_gather_results(
        comm,
        lambda: write_marker(storage, marker) if comm.rank == 0 else None,
        awaiting="rank 0 to note a whole checkpoint",
    )


def remove_steps(storage: Storage, steps: Sequence[int], *, comm: Comm) -> None:
    """Delete whole checkpoints and their marker; ranks share the files. Collective."""
    all_gather_results(
        comm,
        lambda: _delete(storage, KEY) if comm.rank == 0 else None,
        awaiting="the marker of checkpoints to be deleted",
    )
    keys = all_gather_results(
        comm, lambda: _keys_of(storage, steps) if comm.rank == 0 else [], awaiting="old checkpoints' files"
    )[0]
    all_gather_results(
        comm,
        lambda: _delete_all(storage, keys[comm.rank :: comm.size]),
        awaiting="old checkpoints to be deleted",
    )
    if comm.rank == 0 and isinstance(storage, SupportsLocalPaths):
        for step in steps:
            # What somebody else put there keeps the folder.
            with suppress(OSError):
                Path(storage.local_path(f"{checkpoint_folder(EPOCH, step)}/any")).parent.rmdir()


def _keys_of(storage: Storage, steps: Sequence[int]) -> list[str]:
    return [each.key for step in steps for each in storage.list(checkpoint_folder(EPOCH, step))]


def _delete_all(storage: Storage, keys: Sequence[str]) -> None:
    for key in keys:
        _delete(storage, key)


def _delete(storage: Storage, key: str) -> None:
    with suppress(ObjectNotFound):
        storage.delete(key)


def _require_same_content(found: Marker, request: CheckpointRequest, uri: str) -> None:
    if found.content_version != CONTENT_VERSION:
        raise UsageError(
            f"The content here is of version {found.content_version}, not {CONTENT_VERSION}",
            where=uri,
            fix="Write the checkpoints anew.",
        )
    if request.seed is not None and request.seed != found.seed:
        raise UsageError(
            f"The checkpoints here have seed {found.seed}, not {request.seed}",
            where=uri,
            fix="Leave --seed out, or write them anew.",
        )
