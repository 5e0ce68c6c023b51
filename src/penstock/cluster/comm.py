"""Communication between ranks: `Comm`, and functions that raise one rank's error on all ranks.

Every call of a `Comm` is collective: all ranks make the same calls in the same order. Every wait has a limit
and names what it awaited. Invariant: a call returns on all ranks, or raises on all ranks that are still
alive. Point-to-point transfers are the exception: two ranks transfer bytes while the others do something
else, and any thread may call.

A `Comm` transfers values: `barrier`, `broadcast`, `gather`, `reduce`. If work on a rank can fail, use one of
five functions, which raise the error of any rank on all ranks before the next collective call:

| function | calls | returns on each rank |
|---|---|---|
| `run_on_all_ranks` | `work` on each rank | its own result, which is not sent |
| `all_gather_results` | `work` on each rank | the results of all ranks |
| `run_on_rank0` | `work` on rank 0 | that result |
| `decide_on_rank0` | `work` on each rank, `decide` on rank 0 with all results | what `decide` returned |
| `divide_on_rank0` | `work` on each rank, `divide` on rank 0 with all results | its own part |

The subclasses of `Comm` transfer the bytes: over MPI, over torch.distributed, or, for a single process, not
at all.
"""

from __future__ import annotations

import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
"""The limit of a wait if neither the call nor the job sets one."""


class PendingTransfer(Protocol):
    """Bytes on their way. The transfer owns their buffer until `wait` returns or raises."""

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Wait until the bytes have been sent or received.

        Raises `WaitTimeout`, or `RankError` if a rank has ended.
        """


class PointToPoint(Protocol):
    """One rank's channel to all others.

    A send matches a receive between the same two ranks with the same tag.
    """

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> PendingTransfer:
        """Begin to send all of `buffer`."""

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> PendingTransfer:
        """Begin to fill all of `buffer` with a message of exactly this length."""

    def close(self) -> None:
        """Release the resources of these transfers. Collective."""


class _Unsendable(RankFailed):
    """Takes the place of a value that cannot be pickled, so that all ranks learn of it in the same call."""


def all_gather_results(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None
) -> list[Result]:
    """Call `work` on each rank; return the results of all ranks, in rank order, on every rank. Collective.

    If `work` raises on any rank, every rank raises the same `RankFailed`, which names the lowest such rank.
    On that rank, the `RankFailed` has the original error as its cause. Ctrl-C and `SystemExit` are not
    caught.
    """
    outcome, own_error = _attempt(comm, work)
    results: list[Result] = []
    with _raising_own(comm, own_error):
        outcomes = comm.gather(outcome, awaiting=awaiting, timeout_s=timeout_s)
    for other in outcomes:
        if isinstance(other, RankFailed):
            raise other from (own_error if other.rank == comm.rank else None)
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

    It fails as `all_gather_results` does, except that a process without other ranks raises its own error. If
    all ranks succeed but passed different folders as `same`, all raise `UsageError`.
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

    Collective. It fails and treats `same` as `run_on_all_ranks` does; if the folders differ, it does not call
    `work`.
    """

    def decide(folders: list[str]) -> tuple[list[str], Result | None]:
        return (folders, None) if len(set(folders)) > 1 else ([], work())

    folders, result = decide_on_rank0(comm, lambda: same, decide, awaiting=awaiting, timeout_s=timeout_s)
    # Differing folders are not a failure of rank 0: all ranks raise an error of the caller.
    _require_same(folders)
    return cast("Result", result)


@contextmanager
def held_on_rank0(comm: Comm, resource: AbstractContextManager[None], *, awaiting: str) -> Iterator[None]:
    """Hold `resource` on rank 0 while the block runs. Collective: it fails as `run_on_rank0` does."""
    with ExitStack() as held:
        run_on_rank0(comm, lambda: held.enter_context(resource), awaiting=awaiting)
        yield


def decide_on_rank0(
    comm: Comm,
    work: Callable[[], Result],
    decide: Callable[[list[Result]], Answer],
    *,
    awaiting: str,
    timeout_s: float | None = None,
) -> Answer:
    """Call `work` on each rank, then `decide` on rank 0 with all results; return its answer on every rank.

    Collective. It fails as `run_on_all_ranks` does; if `work` fails on any rank, `decide` is not called.
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
        # The ranks of a job trust each other: a process that can send here already runs code as this user.
        results: list[Any] = [pickle.loads(payload) for payload in packed]  # noqa: S301
        failures = [result for result in results if isinstance(result, RankFailed)]
        parts: Sequence[Any] | RankFailed = failures[0] if failures else []
        if not failures:
            parts, dividing_error = _attempt(comm, lambda: divide(results))
        if isinstance(parts, RankFailed):
            parts = [parts] * comm.size
        # An answer that is the same for all ranks is pickled once, and then sent as one broadcast.
        distinct = {id(part): part for part in parts}
        known = {key: _pack(comm, part) for key, part in distinct.items()}
        payloads = [known[id(part)] for part in parts]
    with _raising_own(comm, own_error or dividing_error):
        # Here, the fastest rank waits for the slowest rank's work, and for rank 0's decision.
        limit_s = None if timeout_s is None else timeout_s + comm.timeout_s
        own_part = comm.scatter_bytes(payloads, awaiting=awaiting, timeout_s=limit_s)
    answer: Any = pickle.loads(own_part)  # noqa: S301 - see above
    if isinstance(answer, RankFailed):
        raise answer from ((dividing_error or own_error) if answer.rank == comm.rank else None)
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
    """Raise this rank's own error if the body fails with a `RankError`, which only follows from it."""
    try:
        yield
    except RankError:
        if own_error is None:
            raise
        if isinstance(own_error, RankError):
            raise own_error from own_error.__cause__
        raise blame(comm, own_error) from own_error


def _attempt(comm: Comm, work: Callable[[], Result]) -> tuple[Result | RankFailed, Exception | None]:
    """Call `work`. Returns its result or a failure that can be sent, and the error if there is one."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - gathered: no rank may fail alone
        return blame(comm, error), error


def blame(comm: Comm, error: BaseException) -> RankFailed:
    """Return an error of this rank in the form in which all ranks raise it."""
    if isinstance(error, RankFailed):
        return error  # all ranks already know which rank failed, and why
    code = error.exit_code if isinstance(error, PenstockError) else 1
    return RankFailed(comm.rank, comm.host, format_cause(error), exit_code=code)


def _pack(comm: Comm, value: object) -> bytes:
    """Pickle the value. If that is impossible, pickle a failure, so that all ranks learn of it."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        cause = f"cannot send a {type(value).__name__} to other ranks: {error}"
        return pickle.dumps(_Unsendable(comm.rank, comm.host, cause), pickle.HIGHEST_PROTOCOL)


def format_cause(error: BaseException) -> str:
    """Describe `error` in one clause. Errors of other packages are preceded by the name of their type."""
    if isinstance(error, ModuleNotFoundError):
        # If the library of an extra is missing on this host, the user has to install it.
        error = missing_library(error) or error
    text = str(error).strip()
    if isinstance(error, PenstockError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


EAGER_POLLS = 200
FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 2e-3
SLEEP_SHARE = 0.1
"""A sleep takes this share of the wait so far, so that short waits end soon. If sleeps doubled instead, a
barrier of 4 ranks on 2 cores would take 250 times as long, because a collective only progresses while its
ranks poll.
"""
LATE_AFTER_S = 5.0
"""A wait longer than this, or than half its limit, calls `on_late`, so that the launcher knows who is
waiting.
"""


class PollingWait:
    """A wait by polling, with one limit for all its steps. The time counts from construction.

    Ranks may outnumber cores, so a waiting rank must leave its core to the ranks that it waits for: it polls
    frequently at first, then sleeps longer and longer. Every wait ends, at the latest by raising
    `WaitTimeout`.
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
        """The time since construction."""
        return self._clock() - self._started_s

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true. It is called at least once, even if no time is left."""
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
    """The current wait of this rank. `absent` has the ranks that have not arrived, if they are known."""

    awaiting: str
    waited_s: float
    absent: tuple[int, ...]


class Comm(ABC):
    """One rank's view of its job. `awaiting` is a phrase for messages: "all ranks to finish writing".

    Subclasses only start transfers and never block. A rank that has left a call early refuses all further
    calls, because the ranks would be out of step.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.job_ranks: Sequence[int] = range(size)
        """The connected ranks, numbered as in the job: all of its ranks, or those that a caller chose."""
        self.timeout_s = DEFAULT_TIMEOUT_S
        """The limit of waits in calls that set none."""
        self.carrier = ""
        """The library that transfers messages, and its version; "" if no messages are needed."""
        self.on_late: Callable[[int, str], None] = lambda _call, _awaiting: None
        """Called once for a call that waits long, with the number of the call and what it is waiting for."""
        self.find_absent: Callable[[int], tuple[int, ...]] = lambda _call: ()
        """Returns the ranks that have not arrived at the call of this number, if a launcher knows them."""
        self._call = 0
        self._left_early: str | None = None
        self._wait: PollingWait | None = None

    def present_wait(self) -> RankWait | None:
        """Return what this rank is waiting for. Any thread may call this."""
        wait, call = self._wait, self._call
        if wait is None:
            return None
        return RankWait(awaiting=wait.awaiting, waited_s=wait.waited_s, absent=self.find_absent(call))

    @contextmanager
    def leaving_if_interrupted(self) -> Iterator[None]:
        """Refuse further calls if Ctrl-C or `sys.exit` ends this block: other ranks may be inside it."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            if self.size > 1:
                self._left_early = "the others when it was interrupted"
            raise

    def barrier(self, *, awaiting: str, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""
        with self._collective(awaiting, timeout_s) as wait:
            self._move_nothing(wait)

    def broadcast(self, value: T | None, *, awaiting: str, timeout_s: float | None = None) -> T:
        """Return rank 0's `value` on every rank. The values of other ranks are ignored.

        Here and in `gather`, a value that cannot be pickled raises `RankFailed` on all ranks.
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
        return folds[op](self.gather(value, awaiting=awaiting, timeout_s=timeout_s))

    def gather_bytes_on_rank0(
        self, payload: bytes, *, awaiting: str, timeout_s: float | None = None
    ) -> list[bytes]:
        """Return every rank's bytes, in rank order, on rank 0, and an empty list on the others."""
        with self._collective(awaiting, timeout_s) as wait:
            payloads = self._gather_bytes(payload, wait, only_on_rank0=True)
        return payloads if self.rank == 0 else []

    def scatter_bytes(
        self, payloads: Sequence[bytes] | None, *, awaiting: str, timeout_s: float | None = None
    ) -> bytes:
        """Return this rank's element of the sequence that rank 0 passes. Other ranks pass None."""
        with self._collective(awaiting, timeout_s) as wait:
            # One broadcast carries either a part that is the same for all ranks, or the sizes of their parts.
            announced = None
            if self.rank == 0 and payloads is not None:
                is_same = all(part is payloads[0] for part in payloads)
                announced = pickle.dumps(payloads[0] if is_same else [len(part) for part in payloads])
            same_or_sizes = pickle.loads(self._broadcast_bytes(announced, wait))  # noqa: S301 - see `_unpack`
            if isinstance(same_or_sizes, bytes):
                return same_or_sizes
            return self._scatter_bytes(payloads if self.rank == 0 else None, same_or_sizes, wait)

    def transfer(self) -> PointToPoint:
        """Open point-to-point transfers between the same ranks, if the library has them. Collective."""
        raise Unavailable(
            f"{type(self).__name__} cannot move bytes between two ranks",
            fix="Run under MPI or torch.distributed.",
        )

    @abstractmethod
    def close(self) -> None:
        """Leave the job. Collective, and the last call."""

    @abstractmethod
    def _move_nothing(self, wait: PollingWait) -> None: ...

    @abstractmethod
    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes: ...

    @abstractmethod
    def _gather_bytes(self, payload: bytes, wait: PollingWait, *, only_on_rank0: bool) -> list[bytes]:
        """Return the bytes of all ranks in rank order. If `only_on_rank0`, other ranks may get any result."""

    def _scatter_bytes(
        self, payloads: Sequence[bytes] | None, sizes: Sequence[int], wait: PollingWait
    ) -> bytes:
        # Subclasses whose library can do this directly override it.
        everything = self._broadcast_bytes(None if payloads is None else b"".join(payloads), wait)
        begin = sum(sizes[: self.rank])
        return everything[begin : begin + sizes[self.rank]]

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
        # The ranks of a job trust each other: a process that can send here already runs code as this user.
        values = [pickle.loads(payload) for payload in packed]  # noqa: S301
        for value in values:
            if isinstance(value, _Unsendable):
                raise value
        return values


def broken_connection(error: RuntimeError, awaiting: str, place: str) -> RankError:
    """Return the error to raise when a library has lost a connection."""
    return RankError(
        f"The connection between ranks broke while waiting for {awaiting}: {error}",
        where=place,
        fix="Look for a rank that died, or for a network that drops connections.",
    )


class SoloComm(Comm):
    """The only rank of a job of one. It never waits, so it never times out."""

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
