"""What all communicators share, whichever library carries their bytes: values, reductions, time limits.

MPI and torch.distributed supply three ways to move bytes; everything that `Comm` promises is kept here, once.
`SoloComm` is the communicator of a process without other ranks. Invariant: a rank that left a call early
never makes another one, because the ranks would be out of step.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cluster.comm import DEFAULT_TIMEOUT_S
from penstock.cluster.polling import PollingWait
from penstock.errors import RankError, RankFailed, UsageError

if TYPE_CHECKING:
    from penstock.cluster.comm import Number, Reduction, T


OnLate = Callable[[int, str], None]
"""Told once for a call that takes long: the call's number and what it awaits."""


def _nobody(call: int, awaiting: str) -> None:
    """No one keeps attendance."""


@dataclass(frozen=True, slots=True)
class _Unsendable:
    """Travels instead of a value that could not be packed, so that all ranks learn of it in the same call."""

    rank: int
    host: str
    cause: str


def reduce_values(values: list[Number], op: Reduction) -> Number:
    """`values` folded in rank order: the same bits on every rank and in every run."""
    folds: dict[str, Callable[[list[Number]], Number]] = {"sum": sum, "min": min, "max": max}
    if op not in folds:
        raise UsageError(f"{op!r} is not a reduction", fix=f"Use one of {', '.join(folds)}.")
    return folds[op](values)


class BaseComm(ABC):
    """A `Comm` on top of three collective moves of bytes. Subclasses start transfers and never block."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.timeout_s = DEFAULT_TIMEOUT_S
        self.carrier = ""
        self.on_late: OnLate = _nobody
        self._call = 0
        self._left_early: str | None = None

    def barrier(self, *, awaiting: str, timeout_s: float | None = None) -> None:
        """Return once every rank has come here."""
        with self._collective(awaiting, timeout_s) as wait:
            self._move_nothing(wait)

    def broadcast(self, value: T | None, *, awaiting: str, timeout_s: float | None = None) -> T:
        """Rank 0's `value`, on every rank; a value that cannot be packed is `RankFailed` on all of them."""
        with self._collective(awaiting, timeout_s) as wait:
            packed = self._broadcast_bytes(self._pack(value) if self.rank == 0 else None, wait)
        received: T = self._unpack([packed])[0]
        return received

    def gather(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        with self._collective(awaiting, timeout_s) as wait:
            packed = self._gather_bytes(self._pack(value), wait)
        return self._unpack(packed)

    def gather_on_lead(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on rank 0; nothing elsewhere.

        A value that cannot be packed is `RankFailed` on all ranks.
        """
        packed = self._packed(value)
        # Only what cannot travel is told to everybody: then nothing else is sent.
        refusal = packed if isinstance(packed, _Unsendable) else None
        self.gather(refusal, awaiting=awaiting, timeout_s=timeout_s)
        assert isinstance(packed, bytes), "the gather has raised what could not be packed"
        with self._collective(awaiting, timeout_s) as wait:
            payloads = self._lead_bytes(packed, wait)
        return self._unpack(payloads) if self.rank == 0 else []

    def reduce(
        self, value: Number, op: Reduction, *, awaiting: str, timeout_s: float | None = None
    ) -> Number:
        """The sum, minimum or maximum over ranks: exact for whole numbers of any size."""
        return reduce_values(self.gather(value, awaiting=awaiting, timeout_s=timeout_s), op)

    def _lead_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        """All payloads on rank 0, whatever elsewhere. A carrier that can spares the others their copies."""
        return self._gather_bytes(payload, wait)

    @abstractmethod
    def close(self) -> None:
        """Leave the job in good order; collective, and the last call."""

    @abstractmethod
    def _move_nothing(self, wait: PollingWait) -> None: ...

    @abstractmethod
    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes: ...

    @abstractmethod
    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]: ...

    @contextmanager
    def _collective(self, awaiting: str, timeout_s: float | None) -> Iterator[PollingWait]:
        if self._left_early is not None:
            raise RankError(
                f"Rank {self.rank} left the ranks' common step when it gave up on {self._left_early}",
                where=f"now at {awaiting}",
                fix="Stop this job; its ranks cannot find together again.",
            )
        call = self._call = self._call + 1
        self._left_early = awaiting
        try:
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            yield PollingWait(awaiting, limit_s, on_late=lambda: self.on_late(call, awaiting))
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"The connection between ranks broke while waiting for {awaiting}: {error}",
                where=f"rank {self.rank} on {self.host}",
                fix="Look for a rank that died, or for a network that drops connections.",
            ) from error
        self._left_early = None

    def _pack(self, value: object) -> bytes:
        packed = self._packed(value)
        return packed if isinstance(packed, bytes) else pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)

    def _packed(self, value: object) -> bytes | _Unsendable:
        try:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
            cause = f"cannot send a {type(value).__name__} to other ranks: {error}"
            return _Unsendable(self.rank, self.host, cause)

    def _unpack(self, packed: list[bytes]) -> list[Any]:
        # Ranks of one job trust each other: whoever can speak here already runs code as this user.
        values = [pickle.loads(payload) for payload in packed]  # noqa: S301
        for value in values:
            if isinstance(value, _Unsendable):
                raise RankFailed(value.rank, value.host, value.cause)
        return values


class SoloComm(BaseComm):
    """Rank 0 of 1. Nothing is awaited, so nothing times out."""

    def __init__(self, host: str = "localhost") -> None:
        super().__init__(0, 1, host)

    def close(self) -> None:
        """Nothing to leave."""

    def _move_nothing(self, wait: PollingWait) -> None:
        """Everyone is here."""

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:  # noqa: ARG002 - the protocol's
        assert payload is not None
        return payload

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:  # noqa: ARG002 - the protocol's
        return [payload]
