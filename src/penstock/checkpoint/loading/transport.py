"""Messages between ranks during a load: known sizes between known pairs, round by round.

Both ends know every message from the plan, so no sizes are negotiated. Invariant: a rank finishes a round
before it begins the next, and what it reads for one round waits for no later one, so ranks cannot deadlock. A
rank that fails still sends.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch

from penstock.checkpoint.state.regions import ByteArray
from penstock.errors import RankError, WaitTimeout

UNSENT_BYTES = 256 << 20
"""Reading pauses while more than this waits to be sent."""

_AWAITED = "parts of the checkpoint that other ranks read"


class Pending(Protocol):
    """A message in flight."""

    def wait(self, timeout_s: float) -> None:
        """Return when its memory may be used again; `RankError` if the connection breaks or time is up."""


class Transport(Protocol):
    """Point-to-point messages between ranks: bytes, matched by peer and number."""

    def send(self, peer: int, number: int, memory: ByteArray) -> Pending:
        """Begin to send; `memory` must not change until the wait is over."""

    def receive(self, peer: int, number: int, memory: ByteArray) -> Pending:
        """Begin to receive exactly as many bytes as `memory` has."""


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
        """A buffer for the transfers of `message`."""
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
        """One more transfer of `message` is in its memory."""
        with self._lock:
            message.num_missing -= 1
            self._lock.notify_all()

    def wait_filled(self, message: Outgoing) -> ByteArray:
        """The memory of `message` when it may be sent: filled, or with any content after a failure."""
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


def run_rounds(transport: Transport, outbox: Outbox, incoming: Sequence[Incoming], timeout_s: float) -> None:
    """Send and receive everything, in a separate thread beside the reading ones.

    Raises `RankError` and its subclasses if the connection breaks or nothing arrives for `timeout_s`.
    """
    out: dict[int, list[Outgoing]] = {}
    into: dict[int, list[Incoming]] = {}
    for message in outbox.messages:
        out.setdefault(message.in_round, []).append(message)
    for awaited in incoming:
        into.setdefault(awaited.in_round, []).append(awaited)
    for number in sorted(out.keys() | into.keys()):
        # All receives are posted before the first send is waited for: even if ranks send around a ring, each
        # send finds its receive, and messages need no memory beyond that of their round.
        receiving = [
            (awaited, *_begin_receive(transport, awaited))
            for awaited in sorted(into.get(number, ()), key=lambda message: message.number)
        ]
        sending = []
        for message in out.get(number, ()):
            memory = outbox.wait_filled(message)
            sending.append((message, transport.send(message.peer, message.number, memory)))
        for awaited, memory, pending in receiving:
            pending.wait(timeout_s)
            if awaited.memory is None:
                awaited.place(memory)
        for message, pending in sending:
            pending.wait(timeout_s)
            outbox.sent(message)


def _begin_receive(transport: Transport, awaited: Incoming) -> tuple[ByteArray, Pending]:
    memory = awaited.memory
    if memory is None:
        memory = np.empty(awaited.size_bytes, dtype=np.uint8)
    return memory, transport.receive(awaited.peer, awaited.number, memory)


FIRST_TAG = 1 << 20
"""Our tags begin here, above those that programs choose for their own messages."""


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
                raise WaitTimeout(f"{_AWAITED}: rank {self._peer}", timeout_s) from error
            raise _broken(self._peer, error) from error


class GlooTransport:
    """Messages over gloo in a trainer's process group or our own; peers are ranks of the group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, peer: int, number: int, memory: ByteArray) -> _GlooPending:
        """Begin to send."""
        return self._begin(self._group.send, peer, number, memory)

    def receive(self, peer: int, number: int, memory: ByteArray) -> _GlooPending:
        """Begin to receive."""
        return self._begin(self._group.recv, peer, number, memory)

    def _begin(self, move: Any, peer: int, number: int, memory: ByteArray) -> _GlooPending:
        try:
            work = move([torch.from_numpy(memory)], peer, FIRST_TAG + number)
        except RuntimeError as error:
            raise _broken(peer, error) from error
        return _GlooPending(work, peer)


def _broken(peer: int, error: RuntimeError) -> RankError:
    return RankError(
        f"The connection to rank {peer} broke while loading: {error}",
        fix="Look for a rank that died, or a network that drops connections.",
    )
