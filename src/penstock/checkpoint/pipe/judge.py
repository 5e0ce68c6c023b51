"""What a measurement proves: that every byte arrived, and what held the phase back. Pure.

Invariant: a ledger that does not add up is an error, never a slower rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.errors import ShortTransfer

if TYPE_CHECKING:
    from penstock.checkpoint.pipe.base import Ledger, Measurement

Bottleneck = Literal["storage", "generator", "verifier", "durability"]

_DRAIN_SHARE = 0.5
"""Of the duration: a longer wait at the end than this is what the phase consisted of."""


def require_durable(ledger: Ledger, *, uri: str) -> None:
    """Raise unless every planned byte was generated, submitted, acknowledged and made durable."""
    stations = {
        "generated": ledger.generated_bytes,
        "submitted": ledger.submitted_bytes,
        "acknowledged": ledger.acknowledged_bytes,
        "durable": ledger.durable_bytes,
    }
    _require(ledger.planned_bytes, stations, uri)


def require_read(ledger: Ledger, *, uri: str) -> None:
    """Raise unless every planned byte was read."""
    _require(ledger.planned_bytes, {"read": ledger.read_bytes}, uri)


def _require(planned_bytes: int, stations: dict[str, int], uri: str) -> None:
    account = ", ".join(f"{name} {size_bytes}" for name, size_bytes in stations.items())
    for name, size_bytes in stations.items():
        if size_bytes != planned_bytes:
            raise ShortTransfer(
                f"The ledger does not add up: planned {planned_bytes} bytes, {account}",
                uri=uri,
                expected_bytes=planned_bytes,
                actual_bytes=size_bytes,
                fix=f"Bytes were lost before they were {name}; nothing of this phase counts.",
            )


def bottleneck(measurement: Measurement) -> Bottleneck:
    """What the phase waited for most.

    Content that waits for buffers has the storage ahead of it; a storage that waits for content (or, reading,
    for buffers that are still being verified) has the content ahead.
    """
    duration_ns = max(measurement.end_ns - measurement.first_submit_ns, 1)
    if measurement.direction == "write":
        if (measurement.end_ns - measurement.last_submit_ns) / duration_ns > _DRAIN_SHARE:
            return "durability"
        return "generator" if measurement.storage_stall_s > measurement.content_stall_s else "storage"
    return "verifier" if measurement.storage_stall_s > measurement.content_stall_s else "storage"
