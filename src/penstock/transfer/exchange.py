"""Messages between ranks while they read: known sizes between known pairs, round by round.

Both ends know every message from the plan, so no sizes are negotiated. Invariant: a rank finishes a round
before it begins the next, and what it reads for one round waits for no later one, so ranks cannot deadlock. A
rank that fails still sends.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cluster.comm import PointToPoint
from penstock.errors import WaitTimeout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    ByteArray = NDArray[np.uint8]

UNSENT_BYTES = 256 << 20
"""Reading pauses while more than this waits to be sent."""

FIRST_TAG = 1 << 20
"""Our tags begin here, above those that programs choose for their own messages."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message to be sent once all of its transfers have been read."""

    peer: int
    number: int
    in_round: int
    size_bytes: int
    num_missing: int
    """Transfers that have not been read yet."""
    memory: ByteArray | None = None
    """A tensor's memory, or a buffer that is freed once it is sent."""
    is_buffered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A message to receive, into `memory`, or if that is None into a buffer that `place` copies."""

    peer: int
    number: int
    in_round: int
    size_bytes: int
    memory: ByteArray | None
    place: Callable[[ByteArray], None]


class Outbox:
    """Messages that reading threads make ready and one thread sends."""

    def __init__(self, messages: Sequence[Outgoing], timeout_s: float) -> None:
        self.messages = tuple(messages)
        self._timeout_s = timeout_s
        self._lock = threading.Condition()
        self._buffered_bytes = 0
        self._has_failed = False

    def wait_for_room(self) -> None:
        """Wait before reading more, until little is left to be sent."""
        with self._lock:
            self._lock.wait_for(lambda: self._has_failed or self._buffered_bytes <= UNSENT_BYTES)

    def buffer(self, message: Outgoing) -> ByteArray:
        """Return a buffer for the transfers of `message`."""
        with self._lock:
            if message.memory is None:
                message.memory = np.empty(message.size_bytes, dtype=np.uint8)
                message.is_buffered = True
                self._buffered_bytes += message.size_bytes
            return message.memory

    def lend(self, message: Outgoing, memory: ByteArray, *, counts: bool) -> None:
        """Send `message` from `memory` itself. `counts` if that is a buffer, which is freed once sent."""
        with self._lock:
            message.memory = memory
            message.is_buffered = counts
            self._buffered_bytes += message.size_bytes if counts else 0

    def filled(self, message: Outgoing) -> None:
        """Note that one more transfer of `message` is in its memory."""
        with self._lock:
            message.num_missing -= 1
            self._lock.notify_all()

    def wait_filled(self, message: Outgoing) -> ByteArray:
        """Return the memory of `message` when it may be sent: filled, or with any content after a failure."""
        with self._lock:
            if not self._lock.wait_for(
                lambda: self._has_failed or message.num_missing == 0, timeout=self._timeout_s
            ):
                raise WaitTimeout("this rank's own reads from storage", self._timeout_s)
            memory = message.memory
        return np.empty(message.size_bytes, dtype=np.uint8) if memory is None else memory

    def sent(self, message: Outgoing) -> None:
        """Free the memory of `message`."""
        with self._lock:
            if message.is_buffered:
                self._buffered_bytes -= message.size_bytes
            message.memory = None
            self._lock.notify_all()

    def give_up(self) -> None:
        """Send the rest without waiting for its content, because other ranks wait for it."""
        with self._lock:
            self._has_failed = True
            self._lock.notify_all()


def run_rounds(line: PointToPoint, outbox: Outbox, incoming: Sequence[Incoming], timeout_s: float) -> None:
    """Send and receive everything, in a separate thread next to the reading ones.

    Raises `RankError` and its subclasses if the connection breaks or nothing arrives for `timeout_s`.
    """
    out: dict[int, list[Outgoing]] = defaultdict(list)
    into: dict[int, list[Incoming]] = defaultdict(list)
    for message in outbox.messages:
        out[message.in_round].append(message)
    for awaited in incoming:
        into[awaited.in_round].append(awaited)
    for number in sorted(out.keys() | into.keys()):
        # All receives are posted before the first send is waited for: even if ranks send around a ring, each
        # send finds its receive, and messages need no memory beyond that of their round.
        receiving = []
        for awaited in sorted(into[number], key=lambda message: message.number):
            memory = (
                np.empty(awaited.size_bytes, dtype=np.uint8) if awaited.memory is None else awaited.memory
            )
            receiving.append((awaited, memory, line.receive(awaited.peer, memory.data, tag=_tag(awaited))))
        sending = []
        for message in out[number]:
            memory = outbox.wait_filled(message)
            sending.append((message, line.send(message.peer, memory.data, tag=_tag(message))))
        for awaited, memory, pending in receiving:
            awaiting = f"parts of the checkpoint that rank {awaited.peer} reads"
            pending.wait(awaiting=awaiting, timeout_s=timeout_s)
            if awaited.memory is None:
                awaited.place(memory)
        for message, pending in sending:
            awaiting = f"rank {message.peer} to take its part of the checkpoint"
            pending.wait(awaiting=awaiting, timeout_s=timeout_s)
            outbox.sent(message)


def _tag(message: Outgoing | Incoming) -> int:
    return FIRST_TAG + message.number
