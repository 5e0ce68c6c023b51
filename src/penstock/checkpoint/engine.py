"""The interface between a manager and what moves the bytes of a state.

A manager decides when, where and which step; an `Engine` decides which rank moves what. A save goes through
`Engine.prepare` (ranks agree on a plan), `PreparedSave.stage` (copying begins), `StagedSave.write_to` (files
become durable), `PreparedSave.seal` and the commit. This module needs no torch. Invariant: an engine fails
on all ranks or on none, except for errors that `StagedSave` raises on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.checkpoint.commit.catalog import CheckpointRef
    from penstock.checkpoint.commit.protocol import Seal
    from penstock.checkpoint.state.process_group import RankGroup
    from penstock.checkpoint.state.regions import Ints
    from penstock.progress import Progress
    from penstock.storage import Storage


State = Mapping[str, Any]
NamePatterns = str | Sequence[str]
"""One pattern of names, or several: `model.*`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveChoice:
    """What of a state is saved, and as what. None is all of it, as it is."""

    only: NamePatterns | None = None
    dtype: Any = None
    """A torch.dtype that tensors of floating point are converted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice:
    """What of a state is loaded, and how freely."""

    only: NamePatterns | None = None
    exclude: NamePatterns | None = None
    rename: Mapping[str, str] | None = None
    strict: bool = True
    convert_dtypes: bool = False
    """Whether a tensor of another dtype than the checkpoint's takes its values all the same."""
    trust: bool = False
    """Whether objects of any kind may be unpickled, which can run code out of the checkpoint."""


class Engine(Protocol):
    """Moves states. Collective calls are made by all members in the same order, never two at once."""

    def prepare(self, state: State, group: RankGroup, choice: SaveChoice) -> PreparedSave:
        """Let all ranks agree who writes what; collective."""

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        group: RankGroup,
        choice: LoadChoice,
        progress: Progress | None,
    ) -> Any:
        """Fill `state` in place from a checkpoint; collective. What came of it, for the caller to look at.

        Raises `StorageError` and its kinds where the checkpoint is at fault, and `UsageError` where the state
        does not fit it.
        """

    def close(self) -> None:
        """Let go of memory and threads. Safe twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaveStats:
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
class WrittenShare:
    """What one rank reports to rank 0 when all its files are durable; travels pickled.

    `paths` tells where in the nested state the names stand that this rank is to describe.
    """

    rank: int
    files: tuple[WrittenFile, ...]
    stats: RankSaveStats
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
    ) -> WrittenShare:
        """Write all files, each durable, under `key_of(file name)`. Called once, from any thread."""

    def cancel(self) -> None:
        """Give up: `wait_staged` and `write_to` raise, nothing stays in flight. Safe twice."""


class PreparedSave(Protocol):
    """A save that all ranks have planned together and of which nothing is copied yet."""

    def stage(self, urgent: Urgency = "copy") -> StagedSave:
        """Begin to copy this rank's share. Not collective.

        Waits for the memory of earlier saves where there is not enough.
        """

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: what commits the checkpoint, from the shares of all ranks in rank order.

        `facts` go into the manifest: at least `step`, where the checkpoint is one.
        """
