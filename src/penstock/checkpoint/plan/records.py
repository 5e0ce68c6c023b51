"""The narrow waist between planning and moving bytes: what ranks hold, and what each saves, reads and sends.

Planners make these records, the save and load sides carry them out. Invariant: a plan follows from what all
ranks hold alone, so every rank that derives it derives the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.pieces import item_bytes_of
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.pieces import Boxes, Ints, TensorFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldObject:
    """A leaf that is no tensor: its name, and what tells whether other ranks hold the same."""

    name: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds of a state: `boxes` count in its own `tensors`. Replicas hold equal boxes."""

    tensors: tuple[TensorFacts, ...]
    boxes: Boxes
    objects: tuple[HeldObject, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a user may ask of a save plan."""

    writers: int = 2
    """Files of each rank, written side by side."""
    separation_hint: str | None = None
    """Names that begin with it go to files of their own, which begin with it, too."""
    min_cut_bytes: int = 64 * 1024
    """A replicated box below twice this size is written whole by one rank."""

    def __post_init__(self) -> None:
        if self.writers < 1:
            raise UsageError(f"writers={self.writers} can write nothing", fix="Give at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedObject:
    """An object that this rank writes: `name` is the leaf's, `stored_name` the checkpoint's.

    They differ where ranks hold different objects under one name: see `plan.objects`.
    """

    name: str
    stored_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One file of one rank: its objects first, then its boxes, in this order. There are no empty ones."""

    file: str
    objects: tuple[PlacedObject, ...]
    boxes: Boxes
    """Count in the plan's `tensors`. A box may be a part of one that the rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one rank writes. `tensors` are all of the job, the same on every rank."""

    rank: int
    tensors: tuple[TensorFacts, ...]
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Payload bytes of tensors; envelopes and objects come on top."""
        items = item_bytes_of(self.tensors)
        return sum(int(bucket.boxes.num_bytes(items).sum()) for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSavePlan:
    """What all ranks write: row by row a box and the rank that writes it; every byte exactly once."""

    tensors: tuple[TensorFacts, ...]
    boxes: Boxes
    rank: Ints
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How loads are planned. All ranks must use the same."""

    min_cut_bytes: int = 64 * 1024
    """What several ranks want is not cut into smaller parts than this."""
    min_gap_bytes: int = 256 * 1024
    """Unwanted bytes between wanted ones are skipped from this on; smaller gaps are read along."""
    exchange_bytes: int = 256 << 20
    """What a rank receives in one round, at most; the next round is read meanwhile."""
    message_bytes: int = 1 << 20
    """Transfers of fewer bytes between two ranks share a message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Parts of what is read and where they go, row by row, in the order of reading."""

    read: Ints
    """Which of the plan's reads; of a receive it has no meaning."""
    peer: Ints
    """The rank at the other end."""
    want: Ints
    """Which of the destination rank's wanted boxes."""
    boxes: Boxes
    in_round: Ints
    """Rounds of the exchange: all ranks finish one before the next. Local transfers take no notice."""
    message: Ints
    """Transfers with the same peer and number travel together, in this order."""

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadPlan:
    """What one rank reads and passes on. Reads are in the order of files and positions.

    `row` is the stored row that each read box lies in, contiguous in its payload.
    """

    rank: int
    row: Ints
    boxes: Boxes
    local: Transfers
    sends: Transfers
    receives: Transfers
