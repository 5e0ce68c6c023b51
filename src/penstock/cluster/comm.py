"""Communication between ranks: `Comm`, and work with errors on all ranks.

Every call of a `Comm` is collective: all ranks make the same calls in the same order. Every wait has a limit
and names what it awaited. Invariant: a call returns on all ranks or raises on all of them that are still
alive. Point-to-point transfers are the exception: two ranks move bytes while the others do something else,
and any thread may call.

A `Comm` moves values: `barrier`, `broadcast`, `gather`, `reduce`. Where work on a rank can fail, use one of
five functions, which raise the error of any rank on all ranks before they enter the next collective call:

| function | calls | returns on each rank |
|---|---|---|
| `run_on_all_ranks` | `work` on each rank | its own result, which is not sent |
| `all_gather_results` | `work` on each rank | the results of all ranks |
| `run_on_rank0` | `work` on rank 0 | that result |
| `decide_on_rank0` | `work` on each rank, `decide` on rank 0 with all results | what `decide` returned |
| `divide_on_rank0` | the same | its own part of what `divide` returned |

The subclasses of `Comm` supply a few ways to move bytes: MPI, torch.distributed, and a process alone.
"""

from __future__ import annotations

import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast

from penstock.errors import PenstockError, RankError, RankFailed, Unavailable, UsageError, WaitTimeout
from penstock.optional_libraries import missing_library

T = TypeVar("T")
Result = TypeVar("Result")
Answer = TypeVar("Answer")
Number = TypeVar("Number", int, float)
Reduction = Literal["sum", "min", "max"]

DEFAULT_TIMEOUT_S = 300.0
"""The limit of a wait, where neither the call nor the job sets one."""


class PendingTransfer(Protocol):
    """Bytes on their way. Their buffer belongs to the transfer until `wait` returns or raises."""

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Return when they have left, or arrived. Raises `WaitTimeout`, or `RankError` if a rank is gone."""


class PointToPoint(Protocol):
    """One rank's channel to all others. A send matches the receive of the same two ranks and the same tag."""

    rank: int
    size: int

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> PendingTransfer:
        """Begin to send the whole of `buffer`."""

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> PendingTransfer:
        """Begin to fill the whole of `buffer` with a message of exactly that length."""

    def close(self) -> None:
        """Release what was made for these transfers; collective."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of one rank, which can be sent to others."""

    rank: int
    host: str
    cause: str
    code: int = 1

    def error(self) -> RankFailed:
        """The error that all ranks raise."""
        return RankFailed(self.rank, self.host, self.cause, exit_code=self.code)


class _Unsendable(_Failure):
    """Travels in place of a value that cannot be pickled, so that all ranks learn of it in the same call."""

    __slots__ = ()


def all_gather_results(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None
) -> list[Result]:
    """Call `work` on each rank; return the results of all ranks, in rank order, on every rank. Collective.

    If `work` raises on any rank, every rank raises the same `RankFailed`, which names the lowest such rank;
    on that rank its cause is the original error. Ctrl-C and `SystemExit` are not caught.
    """
    outcome, own_error = _attempt(comm, work)
    results: list[Result] = []
    with _raising_own(comm, own_error):
        outcomes = comm.gather(outcome, awaiting=awaiting, timeout_s=timeout_s)
    for other in outcomes:
        if isinstance(other, _Failure):
            raise other.error() from (own_error if other.rank == comm.rank else None)
        results.append(other)
    return results


def run_on_all_ranks(
    comm: Comm,
    work: Callable[[], Result],
    *,
    awaiting: str,
    timeout_s: float | None = None,
    same: str = "",
) -> Result:
    """Call `work` on each rank; return this rank's own result, which is not sent anywhere. Collective.

    It fails as `all_gather_results` does, except that a process without other ranks raises its own error.
    If all ranks succeed but gave different folders as `same`, all raise `UsageError`.
    """
    if comm.size == 1:
        return work()
    own: list[Result] = []

    def keep() -> str:
        own.append(work())
        return same

    _require_same(all_gather_results(comm, keep, awaiting=awaiting, timeout_s=timeout_s))
    return own[0]


def run_on_rank0(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None, same: str = ""
) -> Result:
    """Call `work` on rank 0 alone, once all ranks have called this; return its result on every rank.

    Collective. It fails, and takes `same`, as `run_on_all_ranks` does: if folders differ, it calls nothing.
    """

    def decide(folders: list[str]) -> tuple[list[str], Result | None]:
        return (folders, None) if len(set(folders)) > 1 else ([], work())

    folders, result = decide_on_rank0(comm, lambda: same, decide, awaiting=awaiting, timeout_s=timeout_s)
    # That ranks differ is no failure of rank 0: all raise it as an error of the caller.
    _require_same(folders)
    return cast("Result", result)


def decide_on_rank0(
    comm: Comm,
    work: Callable[[], Result],
    decide: Callable[[list[Result]], Answer],
    *,
    awaiting: str,
    timeout_s: float | None = None,
) -> Answer:
    """Call `work` on each rank, then `decide` on rank 0 with all results; return its answer on every rank.

    Collective. It fails as `run_on_all_ranks` does; if `work` fails on any rank, it decides nothing.
    """
    return divide_on_rank0(
        comm, work, lambda results: [decide(results)] * comm.size, awaiting=awaiting, timeout_s=timeout_s
    )


def divide_on_rank0(
    comm: Comm,
    work: Callable[[], Result],
    divide: Callable[[list[Result]], Sequence[Answer]],
    *,
    awaiting: str,
    timeout_s: float | None = None,
) -> Answer:
    """Call `work` on each rank, then `divide` on rank 0 with all results; return each rank its own part.

    Collective. `divide` returns one part per rank. It fails as `decide_on_rank0` does.
    """
    if comm.size == 1:
        return divide([work()])[0]
    outcome, own_error = _attempt(comm, work)
    with _raising_own(comm, own_error):
        packed = comm.gather_bytes_on_rank0(_pack(comm, outcome), awaiting=awaiting, timeout_s=timeout_s)
    payloads: list[bytes] | None = None
    dividing_error: Exception | None = None
    if comm.rank == 0:
        # Ranks of one job trust each other: a process that can send here already runs code as this user.
        results: list[Any] = [pickle.loads(payload) for payload in packed]  # noqa: S301
        failures = [result for result in results if isinstance(result, _Failure)]
        parts: Sequence[Any] | _Failure = failures[0] if failures else []
        if not failures:
            parts, dividing_error = _attempt(comm, lambda: divide(results))
        if isinstance(parts, _Failure):
            parts = [parts] * comm.size
        # The same answer for all ranks is packed once, and then travels as one broadcast.
        distinct = {id(part): part for part in parts}
        known = {key: _pack(comm, part) for key, part in distinct.items()}
        payloads = [known[id(part)] for part in parts]
    with _raising_own(comm, own_error or dividing_error):
        # The fastest rank waits here for the slowest one's work, and for what rank 0 decides.
        limit_s = None if timeout_s is None else timeout_s + comm.timeout_s
        own_part = comm.scatter_bytes(payloads, awaiting=awaiting, timeout_s=limit_s)
    answer: Any = pickle.loads(own_part)  # noqa: S301 - see above
    if isinstance(answer, _Failure):
        own = dividing_error if comm.rank == 0 and dividing_error is not None else own_error
        raise answer.error() from (own if answer.rank == comm.rank else None)
    mine: Answer = answer
    return mine


def _require_same(folders: Sequence[str]) -> None:
    for rank, folder in enumerate(folders):
        if folder != folders[0]:
            raise UsageError(
                f"The ranks gave different folders: rank 0 {folders[0]}, rank {rank} {folder}",
                fix="Give the same path on all ranks; where hosts mount it elsewhere, make a link.",
            )


@contextmanager
def _raising_own(comm: Comm, own_error: Exception | None) -> Iterator[None]:
    """Raise this rank's own error instead of the failure to send it to the others, which follows from it."""
    try:
        yield
    except RankError:
        if own_error is None:
            raise
        if isinstance(own_error, RankError):
            raise own_error from own_error.__cause__
        raise RankFailed(comm.rank, comm.host, format_cause(own_error)) from own_error


def _attempt(comm: Comm, work: Callable[[], Result]) -> tuple[Result | _Failure, Exception | None]:
    """Return the result, or a failure that can be sent and its error."""
    try:
        return work(), None
    except RankFailed as error:
        # All ranks know already which one failed, and why.
        return _Failure(error.rank, error.host, error.cause, error.exit_code), error
    except Exception as error:  # noqa: BLE001 - gathered: no rank may fail alone
        code = error.exit_code if isinstance(error, PenstockError) else 1
        return _Failure(comm.rank, comm.host, format_cause(error), code), error


def _pack(comm: Comm, value: object) -> bytes:
    """Pickle the value; if that is impossible, pickle a failure for all ranks to learn of."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        cause = f"cannot send a {type(value).__name__} to other ranks: {error}"
        return pickle.dumps(_Unsendable(comm.rank, comm.host, cause), pickle.HIGHEST_PROTOCOL)


def format_cause(error: BaseException) -> str:
    """`error` as one clause: Penstock's own errors are one already, others need the name of their type."""
    if isinstance(error, ModuleNotFoundError):
        # A library of an extra that this host lacks is the user's to install.
        error = missing_library(error) or error
    text = str(error).strip()
    if isinstance(error, PenstockError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


EAGER_POLLS = 200
FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 2e-3
SLEEP_SHARE = 0.1
"""A sleep is this part of the wait so far, so that short waits end soon. With doubling sleeps a barrier of 4
ranks on 2 cores was 250 times slower, because a collective only progresses while its ranks poll."""
LATE_AFTER_S = 5.0
"""A wait longer than this, or than half its limit, calls `on_late`: the launcher then knows who waits."""


class PollingWait:
    """A wait by polling, with one limit for all its steps. Its clock starts at construction.

    Ranks may outnumber cores, so a waiting rank must give up its core to those it waits for: it polls
    eagerly at first, then sleeps longer and longer. Every wait ends, at the latest with a `WaitTimeout`.
    """

    def __init__(
        self,
        awaiting: str,
        timeout_s: float,
        *,
        on_late: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.awaiting = awaiting
        self._timeout_s = timeout_s
        self._on_late: Callable[[], None] | None = on_late
        self._clock = clock
        self._sleep = sleep
        self._started_s = clock()

    @property
    def waited_s(self) -> float:
        """The time since it began."""
        return self._clock() - self._started_s

    def until(self, ready: Callable[[], bool]) -> None:
        """Return once `ready()` is true; it is called at least once, even when no time is left."""
        for _ in range(EAGER_POLLS):
            if ready():
                return
            os.sched_yield()
        while not ready():
            waited_s = self.waited_s
            if waited_s >= self._timeout_s:
                raise WaitTimeout(self.awaiting, self._timeout_s)
            if self._on_late is not None and waited_s >= min(LATE_AFTER_S, self._timeout_s / 2):
                self._on_late()
                self._on_late = None
            self._sleep(min(max(FIRST_SLEEP_S, waited_s * SLEEP_SHARE), LONGEST_SLEEP_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWait:
    """The wait of this rank at the moment; `absent` has the ranks that have not arrived, where known."""

    awaiting: str
    waited_s: float
    absent: tuple[int, ...]


class Comm(ABC):
    """One rank's view of its job. `awaiting` is a phrase for people: "all ranks to finish writing".

    Subclasses start moves of bytes and never block. A rank that left a call early never makes another one,
    because the ranks would be out of step.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.timeout_s = DEFAULT_TIMEOUT_S
        """The limit of waits whose call sets none."""
        self.carrier = ""
        """The library that carries messages, and its version; "" where nothing has to."""
        self.on_late: Callable[[int, str], None] = lambda _call, _awaiting: None
        """Called once for a call that waits long, with the call's number and what it awaits."""
        self.find_absent: Callable[[int], tuple[int, ...]] = lambda _call: ()
        """The ranks that have not arrived at a call of this number, if a launcher knows them."""
        self._call = 0
        self._left_early: str | None = None
        self._wait: PollingWait | None = None

    def present_wait(self) -> RankWait | None:
        """Return what this rank waits for; any thread may ask."""
        wait, call = self._wait, self._call
        if wait is None:
            return None
        return RankWait(awaiting=wait.awaiting, waited_s=wait.waited_s, absent=self.find_absent(call))

    def barrier(self, *, awaiting: str, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""
        with self._collective(awaiting, timeout_s) as wait:
            self._move_nothing(wait)

    def broadcast(self, value: T | None, *, awaiting: str, timeout_s: float | None = None) -> T:
        """Return rank 0's `value` on every rank; what others pass is ignored.

        Here and in `gather`, a value that cannot be pickled is `RankFailed` on all ranks.
        """
        with self._collective(awaiting, timeout_s) as wait:
            packed = self._broadcast_bytes(_pack(self, value) if self.rank == 0 else None, wait)
        received: T = self._unpack([packed])[0]
        return received

    def gather(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Return every rank's `value`, in rank order, on every rank."""
        with self._collective(awaiting, timeout_s) as wait:
            packed = self._gather_bytes(_pack(self, value), wait, only_on_rank0=False)
        return self._unpack(packed)

    def reduce(
        self, value: Number, op: Reduction, *, awaiting: str, timeout_s: float | None = None
    ) -> Number:
        """Return the sum, minimum or maximum over ranks, with the same bits on every rank."""
        folds: dict[str, Callable[[list[Number]], Number]] = {"sum": sum, "min": min, "max": max}
        if op not in folds:
            raise UsageError(f"{op!r} is not a reduction", fix=f"Use one of {', '.join(folds)}.")
        return folds[op](self.gather(value, awaiting=awaiting, timeout_s=timeout_s))

    def gather_bytes_on_rank0(
        self, payload: bytes, *, awaiting: str, timeout_s: float | None = None
    ) -> list[bytes]:
        """Return every rank's bytes, in rank order, on rank 0; nothing elsewhere."""
        with self._collective(awaiting, timeout_s) as wait:
            payloads = self._gather_bytes(payload, wait, only_on_rank0=True)
        return payloads if self.rank == 0 else []

    def scatter_bytes(
        self, payloads: Sequence[bytes] | None, *, awaiting: str, timeout_s: float | None = None
    ) -> bytes:
        """Return this rank's element of what rank 0 passes; others pass None."""
        with self._collective(awaiting, timeout_s) as wait:
            return self._scatter_bytes(payloads if self.rank == 0 else None, wait)

    def transfer(self) -> PointToPoint:
        """Open point-to-point transfers between the same ranks, where the library has them; collective."""
        raise Unavailable(
            f"{type(self).__name__} cannot move bytes between two ranks",
            fix="Run under MPI or torch.distributed.",
        )

    @abstractmethod
    def close(self) -> None:
        """Leave the job; collective, and the last call."""

    @abstractmethod
    def _move_nothing(self, wait: PollingWait) -> None: ...

    @abstractmethod
    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes: ...

    @abstractmethod
    def _gather_bytes(self, payload: bytes, wait: PollingWait, *, only_on_rank0: bool) -> list[bytes]:
        """Return the bytes of all ranks, in their order; if `only_on_rank0`, others may get anything."""

    def _scatter_bytes(self, payloads: Sequence[bytes] | None, wait: PollingWait) -> bytes:
        # A library that can do this directly overrides it.
        packed = None if payloads is None else pickle.dumps(payloads)
        received: list[bytes] = pickle.loads(self._broadcast_bytes(packed, wait))  # noqa: S301 - see `_unpack`
        return received[self.rank]

    @contextmanager
    def _collective(self, awaiting: str, timeout_s: float | None) -> Iterator[PollingWait]:
        if self._left_early is not None:
            raise RankError(
                f"Rank {self.rank} is out of step with the others: it gave up waiting for {self._left_early}",
                where=f"now at {awaiting}",
                fix="Stop this job and start it again; its ranks cannot get back into step.",
            )
        call = self._call = self._call + 1
        self._left_early = awaiting
        try:
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            self._wait = PollingWait(awaiting, limit_s, on_late=lambda: self.on_late(call, awaiting))
            yield self._wait
        except RankError as error:
            self._left_early = f"{awaiting} ({error.what})"
            raise
        except RuntimeError as error:
            raise broken_connection(error, awaiting, f"rank {self.rank} on {self.host}") from error
        finally:
            self._wait = None
        self._left_early = None

    def _unpack(self, packed: list[bytes]) -> list[Any]:
        # Ranks of one job trust each other: a process that can send here already runs code as this user.
        values = [pickle.loads(payload) for payload in packed]  # noqa: S301
        for value in values:
            if isinstance(value, _Unsendable):
                raise value.error()
        return values


def broken_connection(error: RuntimeError, awaiting: str, place: str) -> RankError:
    """The error of a connection that a library lost."""
    return RankError(
        f"The connection between ranks broke while waiting for {awaiting}: {error}",
        where=place,
        fix="Look for a rank that died, or for a network that drops connections.",
    )


class SoloComm(Comm):
    """Rank 0 of 1. Nothing is awaited, so nothing times out."""

    def __init__(self, host: str = "localhost") -> None:
        super().__init__(0, 1, host)

    def close(self) -> None:
        """Do nothing: there is no job to leave."""

    def _move_nothing(self, wait: PollingWait) -> None:
        """Return at once."""

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:  # noqa: ARG002 - the base's
        assert payload is not None
        return payload

    def _gather_bytes(
        self,
        payload: bytes,
        wait: PollingWait,  # noqa: ARG002 - the base's
        *,
        only_on_rank0: bool,  # noqa: ARG002 - the base's
    ) -> list[bytes]:
        return [payload]
