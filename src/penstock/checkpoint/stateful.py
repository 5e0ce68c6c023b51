"""Parts of a state that make and take their own state: models, optimizers, data loaders.

They stand at the top of a state, as torch's distributed checkpoints have it. Invariant: `state_dict` is
called before anything is read or written, `load_state_dict` only after everything has been read.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@runtime_checkable
class Stateful(Protocol):
    """Whatever has these two, as modules and optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, sharing memory with it where it can."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state."""


def opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with each stateful part replaced by its state, in the same order on all ranks."""
    return {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in state.items()}


@contextmanager
def loading_into(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The opened state to load into; afterwards parts take over theirs, and the others are put back.

    Nothing is handed to a part where the body raises.
    """
    inner = opened(state)
    yield inner
    for key, part in state.items():
        if isinstance(part, Stateful):
            part.load_state_dict(inner[key])
        elif inner[key] is not part and isinstance(state, dict):
            state[key] = inner[key]
