"""What an unfinished save leaves beside itself: which process it belongs to, so that it can be collected.

Invariant: a lease that cannot be understood is judged by its age alone, and never makes anyone fail.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

from penstock.checkpoint.commit.base import LEASE_S
from penstock.storage.process_id import ProcessId

_VERSION: Final = 1


def lease_text(owner: ProcessId) -> bytes:
    """A lease of this owner, as it lies in storage."""
    return json.dumps({"lease_version": _VERSION, "owner": asdict(owner)}).encode()


def is_dead(text: bytes | bytearray, *, age_s: float, observer: ProcessId) -> bool:
    """Whether the save of this lease, renewed `age_s` ago, is over. In doubt, only age tells."""
    try:
        document = json.loads(text)
        gone = ProcessId(**document["owner"]).has_ended(observer=observer)
    except (ValueError, TypeError, KeyError):
        gone = None
    return age_s > LEASE_S if gone is None else gone
