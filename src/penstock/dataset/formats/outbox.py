"""Where encoder libraries write to: they are given a file, and a pen takes from it what has come so far.

Invariant: an encoder never calls a pen, so whatever a pen raises does not travel through foreign code.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from penstock.dataset.formats.base import Pen


class Outbox(io.RawIOBase):
    """A file that only grows; `drain` empties it into a pen."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = bytearray()
        self._drained_bytes = 0

    def writable(self) -> bool:
        """Encoders ask first."""
        return True

    def write(self, text: ReadableBuffer, /) -> int:
        """Keep a copy until the next `drain`."""
        view = memoryview(text)
        self._waiting += view
        return view.nbytes

    def tell(self) -> int:
        """Everything that was ever written."""
        return self._drained_bytes + len(self._waiting)

    def drain(self, pen: Pen) -> None:
        """Hand over what waits."""
        waiting, self._waiting = self._waiting, bytearray()
        self._drained_bytes += len(waiting)
        pen.literal(memoryview(waiting))
