"""Warm memory that a CUDA device copies to and from by itself, at the full speed of its bus.

For `staging` on the way out and `loading` on the way back. Invariant: memory is pinned at most once, and let
go of before it goes.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.storage.aligned import address_of

if TYPE_CHECKING:
    from penstock.checkpoint.pipe.memory import WarmMemory

logger = logging.getLogger(__name__)


class Registrar(Protocol):
    """CUDA's runtime, as far as memory of ours is made known to it. Calls return 0, or an error's number."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:  # noqa: N802 - CUDA's name
        """Pin memory."""

    def cudaHostUnregister(self, address: int, /) -> int:  # noqa: N802 - CUDA's name
        """Let it go."""


def pin(memory: WarmMemory, registrar: Registrar | None = None) -> bool:
    """Have `memory` pinned until it goes; whether it is. It takes as long as a first touch, once.

    The pool that memory comes from bounds what is pinned. Without leave to pin so much, copies take longer.
    """
    if memory.is_pinned:
        return True
    runtime: Registrar = registrar or torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it untyped
    address = address_of(memory.view)
    error = int(runtime.cudaHostRegister(address, memory.size_bytes, 0))
    if error:
        logger.warning(
            "CUDA error %d: %d bytes of memory for checkpoints are not pinned, so copies to and from devices"
            " take longer. Look at `ulimit -l`, or stage through less memory: staging_bytes.",
            error,
            memory.size_bytes,
        )
        return False
    memory.is_pinned = True
    weakref.finalize(memory, partial(_unpin, runtime, address))
    return True


def _unpin(runtime: Registrar, address: int) -> None:
    error = int(runtime.cudaHostUnregister(address))
    if error:
        logger.warning("CUDA error %d when memory for checkpoints was let go of", error)
