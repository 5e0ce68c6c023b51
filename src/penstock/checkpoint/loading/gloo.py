"""Messages between ranks over a process group of torch that speaks gloo.

Invariant: nothing of torch's own errors gets out; they become errors of ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from penstock.checkpoint.loading.exchange import AWAITED
from penstock.errors import RankError, WaitTimeout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FIRST_TAG = 1 << 20
"""Tags of our messages begin here, above those that programs choose for their own."""


@dataclass(slots=True, eq=False)
class _GlooPending:
    _work: Any
    _peer: int

    def wait(self, timeout_s: float) -> None:
        started_s = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - started_s >= timeout_s:
                raise WaitTimeout(f"{AWAITED}: rank {self._peer}", timeout_s) from error
            raise _broken(self._peer, error) from error


class GlooLines:
    """`Lines` of one group with a gloo part, a trainer's or our own; peers are ranks of the group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, peer: int, number: int, memory: NDArray[np.uint8]) -> _GlooPending:
        """Begin to send."""
        return self._begin(self._group.send, peer, number, memory)

    def receive(self, peer: int, number: int, memory: NDArray[np.uint8]) -> _GlooPending:
        """Begin to receive."""
        return self._begin(self._group.recv, peer, number, memory)

    def _begin(self, move: Any, peer: int, number: int, memory: NDArray[np.uint8]) -> _GlooPending:
        try:
            work = move([torch.from_numpy(memory)], peer, FIRST_TAG + number)
        except RuntimeError as error:
            raise _broken(peer, error) from error
        return _GlooPending(work, peer)


def _broken(peer: int, error: RuntimeError) -> RankError:
    return RankError(
        f"The connection to rank {peer} broke while loading: {error}",
        fix="Look for a rank that died, or for a network that drops connections.",
    )
