"""A storage whose data files wait or fail when a test wants it: for slow saves and full disks.

Invariant: only the creation of `.distcp` files is affected; drafts, manifests and leases work as usual.
"""

import threading
from collections.abc import Callable

from penstock.storage import Storage
from penstock.storage.protocol import Sink, WrappedStorage


class HeldStorage(WrappedStorage):
    """`hold` keeps data files from being created until it is set; `spoil` is called then and may raise."""

    def __init__(
        self,
        inside: Storage,
        *,
        hold: threading.Event | None = None,
        spoil: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(inside)
        self.hold = hold
        self.spoil = spoil

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        """Begin an object."""
        if key.endswith(".distcp"):
            if self.hold is not None:
                assert self.hold.wait(60), "nobody let the save go on"
            if self.spoil is not None:
                self.spoil()
        return super().create(key, size_bytes)
