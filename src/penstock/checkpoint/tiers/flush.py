"""The waist between the levels of a run and whoever makes cached steps durable.

`Flush` is what the user asks for; a `Flusher` does it: threads of the trainer (`trainer_flush`), or a process
of the node that outlives it (`daemon`). Invariant: a step that was handed over stays in the caches until its
`FlushState` is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from penstock.errors import StorageError, UsageError
from penstock.units import parse_rate

if TYPE_CHECKING:
    from penstock.checkpoint.tiers.cache import Cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Which checkpoints become durable, and how fast: `Flush(every=10, bandwidth="2GiB/s", threads=4)`.

    `bandwidth` is what one node may write, as a rate or in bytes a second; None is no limit. Without
    `background`, a save returns only when its step is durable. `pause_while_saving` leaves the disks to a
    save to the caches, as long as it lasts.

    The copying is done `by` a daemon, a process of each node that goes on when the trainer dies, or by
    threads of the trainer, which end with it. Object services are written to by the trainer.
    """

    every: int = 1
    background: bool = True
    bandwidth: str | float | None = None
    threads: int = 2
    pause_while_saving: bool = False
    by: Literal["daemon", "trainer"] = "daemon"

    def __post_init__(self) -> None:
        if self.every < 1 or self.threads < 1:
            raise UsageError(f"Flush(every={self.every}, threads={self.threads})", fix="Both are 1 or more.")
        if self.by not in ("daemon", "trainer"):
            raise UsageError(f"Flush(by={self.by!r})", fix='It is "daemon" or "trainer".')
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise UsageError(f"Flush(bandwidth={self.bandwidth!r})", fix="Give a rate above 0, or None.")

    @property
    def bytes_per_s(self) -> float | None:
        """The cap as a number."""
        return parse_rate(self.bandwidth) if isinstance(self.bandwidth, str) else self.bandwidth


EACH: Final = Flush()
"""Every checkpoint becomes durable, as fast as it can."""

FlushPhase = Literal["given", "copying", "waiting", "durable", "superseded", "failing"]
"""How far a step is. Waiting: for other nodes' files. Superseded: retention would remove it at once."""

OVER: Final = ("durable", "superseded")
"""The phases after which nothing more is done for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushState:
    """How far this node's share of a step is on its way."""

    phase: FlushPhase
    size_bytes: int = 0
    copied_bytes: int = 0
    reason: str = ""
    """Why it is failing, or what it waits for."""

    @property
    def is_over(self) -> bool:
        """Whether the caches may forget the step."""
        return self.phase in OVER


def require_over(flusher: Flusher, step: int) -> None:
    """After waiting: raise unless the step is durable, or superseded by one that is."""
    state = flusher.states().get(step)
    if state is not None and not state.is_over:
        raise StorageError(
            f"Step {step} is cached, but not durable: {state.reason or state.phase}",
            fix="Mend what it names; `penstock checkpoint flush` makes cached steps durable.",
        )


class Flusher(Protocol):
    """Makes cached steps durable. All ranks call `hand_over` and `close`, in the same order."""

    def saving(self) -> AbstractContextManager[None]:
        """Around each save to the caches: a flusher that was told so pauses meanwhile."""

    def hand_over(self, step: int, cached: Cached) -> None:
        """Take on a step that all caches have committed. Collective; it does not wait for the copy."""

    def states(self) -> Mapping[int, FlushState]:
        """The steps that were handed over, by this process or those before it. Not collective."""

    def untold_failures(self) -> Mapping[int, BaseException]:
        """What failed, by step; each is told once. Not collective."""

    def wait(self, timeout_s: float) -> None:
        """Return when all steps are over or their failures told; `WaitTimeout` if nothing moves so long."""

    def close(self) -> None:
        """Wait likewise, and let go."""
