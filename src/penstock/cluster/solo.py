"""One process that is the whole job: the communicator of every run without ranks.

Invariant: values go through the same packing as between ranks, so what works alone works with many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cluster.carried import ByteComm

if TYPE_CHECKING:
    from penstock.cluster.wait import Wait


class SoloComm(ByteComm):
    """Rank 0 of 1. Nothing is awaited, so nothing times out."""

    def __init__(self, host: str = "localhost") -> None:
        super().__init__(0, 1, host)

    def close(self) -> None:
        """Nothing to leave."""

    def _move_nothing(self, wait: Wait) -> None:
        """Everyone is here."""

    def _broadcast_bytes(self, payload: bytes | None, wait: Wait) -> bytes:  # noqa: ARG002 - the protocol's
        assert payload is not None
        return payload

    def _gather_bytes(self, payload: bytes, wait: Wait) -> list[bytes]:  # noqa: ARG002 - the protocol's
        return [payload]
