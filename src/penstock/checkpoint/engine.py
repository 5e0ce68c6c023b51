"""The waist between the manager and what moves a state's bytes: how all ranks together save and load one.

The manager decides when, where and which step; an `Engine` decides who moves what. Invariant: an engine fails
on all ranks or on none, except by the errors that `StagedSave` raises on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.checkpoint.commit.catalog import Stored
    from penstock.checkpoint.members import Members
    from penstock.checkpoint.staging.base import PreparedSave
    from penstock.progress import Progress

State = Mapping[str, Any]
Names = str | Sequence[str]
"""One pattern of names, or several: `model.*`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveChoice:
    """What of a state is saved, and as what. None is all of it, as it is."""

    only: Names | None = None
    dtype: Any = None
    """A torch.dtype that tensors of floating point are converted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice:
    """What of a state is loaded, and how freely."""

    only: Names | None = None
    exclude: Names | None = None
    rename: Mapping[str, str] | None = None
    strict: bool = True
    convert_dtypes: bool = False
    """Whether a tensor of another dtype than the checkpoint's takes its values all the same."""
    trust: bool = False
    """Whether objects of any kind may be unpickled, which can run code out of the checkpoint."""


class Engine(Protocol):
    """Moves states. Collective calls are made by all members in the same order, never two at once."""

    def prepare(self, state: State, members: Members, choice: SaveChoice) -> PreparedSave:
        """Let all ranks agree who writes what; collective."""

    def load(
        self, state: State, stored: Stored, members: Members, choice: LoadChoice, progress: Progress | None
    ) -> Any:
        """Fill `state` in place from a checkpoint; collective. What came of it, for the caller to look at.

        Raises `StorageError` and its kinds where the checkpoint is at fault, and `UsageError` where the state
        does not fit it.
        """

    def close(self) -> None:
        """Let go of memory and threads. Safe twice."""
