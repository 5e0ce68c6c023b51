"""The waist between a save that is under way on one rank and whoever waits for it and commits it.

All ranks agree who writes what, which gives each a `PreparedSave`; `stage` begins to copy at once, before
anybody knows where to; `write_to` takes it to storage; rank 0 seals what all ranks report and commits it.
Invariant: what is written are the values at the time of `stage`, whatever the tensors become after
`wait_staged`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.checkpoint.commit.protocol import Seal
    from penstock.checkpoint.pieces import Ints
    from penstock.progress import Progress
    from penstock.storage.protocol import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareStats:
    """What one rank's share of a save cost. `memory_bytes` is what its buffers took."""

    rank: int
    payload_bytes: int
    file_bytes: int
    plan_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    sync_s: float = 0.0
    commit_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrittenFile:
    """One durable file of one rank: its items in order, objects first, then boxes, as in its bucket.

    `sums` has one XXH3-128 of 16 bytes for each item, over the item as it lies in the file; gaps are zeros.
    """

    name: str
    size_bytes: int
    item_offset: Ints
    item_bytes: Ints
    payload_offset: Ints
    sums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank reports to rank 0 when all its files are durable; travels pickled.

    `paths` tells where in the nested state the names stand that this rank is to describe.
    """

    rank: int
    files: tuple[WrittenFile, ...]
    stats: ShareStats
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


Urgency = Literal["copy", "commit"]
"""What the caller waits for.

"copy": that tensors may change. All of the staging memory is used, and where it holds everything, nothing
is written before everything is copied, as a disk at work slows memory down. "commit": few buffers are written
while others are filled, and stay in caches.
"""


class SaveCancelled(PenstockError):
    """Somebody gave this save up before it was committed."""

    def __init__(self) -> None:
        super().__init__("The save was cancelled before it was committed", fix="Save the step again.")


class StagedSave(Protocol):
    """One rank's share, being copied into warm memory since it exists. Nothing in here is collective."""

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when the tensors may change; `WaitTimeout` after so long, or the failure of staging.

        With less memory than the share needs, this waits for `write_to` to take the rest to storage.
        """

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> RankShare:
        """Write all files, each durable, under `key_of(file name)`. Called once, from any thread."""

    def cancel(self) -> None:
        """Give up: `wait_staged` and `write_to` raise, nothing stays in flight. Safe twice."""


class PreparedSave(Protocol):
    """A save that all ranks have planned together and of which nothing is copied yet."""

    def stage(self, urgent: Urgency = "copy") -> StagedSave:
        """Begin to copy this rank's share. Not collective.

        Waits for the memory of earlier saves where there is not enough.
        """

    def seal(self, shares: Sequence[RankShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: what commits the checkpoint, from the shares of all ranks in rank order.

        `facts` go into the manifest: at least `step`, where the checkpoint is one.
        """
