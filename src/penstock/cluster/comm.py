"""Communication between ranks: the `Comm` protocol, helpers on top of it, and what all communicators share.

Every call of a `Comm` is collective: all ranks make the same calls in the same order. Every wait has a limit
and names what it awaited. Invariant: a call returns on all ranks or raises on all of them that are still
alive. Point-to-point transfers stand apart because they are not collective: two ranks move bytes while the
others do something else, and any thread may call.

`all_gather_results` and its kin turn one rank's error of any kind into an error of all ranks before any of
them enters the next collective call. `BaseComm` is everything that `Comm` promises on top of three ways to
move bytes and point-to-point transfers, which MPI and torch.distributed supply. What every rank gets from
every other one (`gather`) grows with the job; `carry` has operations that do not, see `rounds`.
"""

import os
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.cluster import rounds as message_rounds
from penstock.cluster.rounds import (
    Carrying,
    Number,
    Reduction,
    Round,
    Rounds,
    move_messages,
    name_call,
    reduce_values,
)
from penstock.errors import PenstockError, RankError, RankFailed, Unavailable, WaitTimeout
from penstock.optional_libraries import missing_library

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 300.0
"""The limit of a wait, where neither the call nor the job sets one."""


class Comm(Protocol):
    """One rank's view of its job. `awaiting` is a phrase for people: "all ranks to finish writing"."""

    rank: int
    size: int
    host: str
    timeout_s: float
    """The limit of waits whose call sets none."""
    carrier: str
    """The library that carries messages, and its version; "" where nothing has to."""

    def barrier(self, *, awaiting: str, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""

    def broadcast(self, value: T | None, *, awaiting: str, timeout_s: float | None = None) -> T:
        """Rank 0's `value`, on every rank; what others pass is ignored."""

    def gather(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""

    def gather_on_rank0(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on rank 0; nothing elsewhere.

        For what grows with the job and only rank 0 needs.
        """

    def reduce(
        self, value: Number, op: Reduction, *, awaiting: str, timeout_s: float | None = None
    ) -> Number:
        """The sum, minimum or maximum over ranks, on every rank."""

    def carry(self, rounds: Rounds[T], *, awaiting: str, timeout_s: float | None = None) -> T:
        """Carry the messages of an operation of `penstock.cluster.rounds`; its result on this rank.

        A `PenstockError` that it raises is raised here; it has to raise one on all ranks or on none.
        """

    def receiving(
        self, *, awaiting: str, timeout_s: float | None = None
    ) -> AbstractContextManager[Callable[[Round], list[bytes]]]:
        """On one rank, while all others `carry` what it receives: a function that waits for one round."""

    def present_wait(self) -> "RankWait | None":
        """What this rank waits for at the moment. Not collective; any thread may ask."""


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


@runtime_checkable
class SupportsPointToPoint(Protocol):
    """A communicator whose carrier can move bytes between two ranks."""

    def transfer(self) -> PointToPoint:
        """A transfer between the same ranks; collective."""


def open_point_to_point(comm: Comm) -> PointToPoint:
    """A transfer between the ranks of `comm`; collective."""
    if isinstance(comm, SupportsPointToPoint):
        return comm.transfer()
    raise Unavailable(
        f"{type(comm).__name__} cannot move bytes between two ranks",
        fix="Run under MPI or torch.distributed.",
    )


Result = TypeVar("Result")
Conclusion = TypeVar("Conclusion")


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    host: str
    cause: str
    code: int = 1


@dataclass(frozen=True, slots=True)
class _Unsendable(_Failure):
    """Travels instead of a value that cannot be pickled, so that all ranks learn of it in the same call."""


def all_gather_results(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None
) -> list[Result]:
    """Call `work` on each rank; the results of all ranks, in rank order, on every rank. Collective.

    If `work` raises on any rank, every rank raises the same `RankFailed`, which names the lowest such rank;
    on that rank its cause is the original error. Ctrl-C and `SystemExit` are not caught.
    """
    outcome, own_error = _attempt(comm, work)
    results: list[Result] = []
    with _raising_own(comm, own_error):
        outcomes = comm.gather(outcome, awaiting=awaiting, timeout_s=timeout_s)
    for other in outcomes:
        if isinstance(other, _Failure):
            original = own_error if other.rank == comm.rank else None
            raise RankFailed(other.rank, other.host, other.cause, exit_code=other.code) from original
        results.append(other)
    return results


def run_on_all_ranks(
    comm: Comm,
    work: Callable[[], Result],
    *,
    awaiting: str,
    timeout_s: float | None = None,
    same: str = "",
    agree: Callable[[Result | None], bool] = lambda _: False,
) -> Result:
    """Call `work` on each rank; this rank's own result, which is not sent anywhere. Collective.

    Fails as `all_gather_results` does, except that a process without other ranks raises its own error, and
    that ranks must give the `same` folder if they give any. A few bytes arrive on each rank unless one fails;
    none do if `agree` is true, a collective call that gets the result, or None for a failure of this rank.
    """
    if comm.size == 1:
        result = work()
        agree(result)
        return result
    outcome, own_error = _attempt(comm, work)
    failure = None
    with _raising_own(comm, own_error):
        if not agree(None if isinstance(outcome, _Failure) else outcome):
            failure = comm.carry(_first_failure(comm, outcome, same), awaiting=awaiting, timeout_s=timeout_s)
    if failure is not None:
        raise RankFailed(failure.rank, failure.host, failure.cause, exit_code=failure.code) from (
            own_error if failure.rank == comm.rank else None
        )
    assert not isinstance(outcome, _Failure), "a failure of any rank was raised"
    return outcome


def _first_failure(comm: Comm, outcome: object, same: str = "") -> Rounds["_Failure | None"]:
    has_failed = isinstance(outcome, _Failure)
    if not (yield from message_rounds.any_failed(comm.rank, comm.size, has_failed=has_failed, same=same)):
        return None
    own = pickle.dumps(outcome) if has_failed else b""
    failure: _Failure = pickle.loads((yield from message_rounds.first_of_all(comm.rank, comm.size, own)))  # noqa: S301 - see `_unpack`
    return failure


def run_on_rank0(
    comm: Comm, work: Callable[[], Result], *, awaiting: str, timeout_s: float | None = None, same: str = ""
) -> Result:
    """Call `work` on rank 0 alone; its result, on every rank once all have called. Collective.

    Fails, and takes `same`, as `run_on_all_ranks` does.
    """
    if comm.size == 1:
        return work()
    own_error: Exception | None = None
    packed = b""
    if comm.rank == 0:
        outcome, own_error = _attempt(comm, work)
        packed = _pack(comm, outcome)
    telling = message_rounds.from_rank0(comm.rank, comm.size, packed, same)
    with _raising_own(comm, own_error):
        told = comm.carry(telling, awaiting=awaiting, timeout_s=timeout_s)
    answer: Any = pickle.loads(told)  # noqa: S301 - see `_unpack`
    if isinstance(answer, _Failure):
        raise RankFailed(answer.rank, answer.host, answer.cause, exit_code=answer.code) from own_error
    result: Result = answer
    return result


def conclude_on_rank0(
    comm: Comm,
    work: Callable[[], Result],
    conclude: Callable[[list[Result]], Conclusion],
    *,
    awaiting: str,
    timeout_s: float,
) -> Conclusion:
    """Call `work` on each rank, then `conclude` with all results on rank 0; what that returns, on every rank.

    For fewer than `FAN_IN` ranks. Collective; fails as `run_on_all_ranks` does, and concludes nothing then.
    """
    if comm.size == 1:
        return conclude([work()])
    outcome, own_error = _attempt(comm, work)
    telling = message_rounds.tell_rank0(comm.rank, comm.size, _pack(comm, outcome))
    with _raising_own(comm, own_error):
        told = comm.carry(telling, awaiting=awaiting, timeout_s=timeout_s)

    def conclude_all() -> Conclusion:
        results: list[Any] = [pickle.loads(packed) for packed in told]  # noqa: S301 - see `_unpack`
        for each in results:
            if isinstance(each, _Failure):
                raise RankFailed(each.rank, each.host, each.cause, exit_code=each.code)
        return conclude(results)

    try:
        return run_on_rank0(comm, conclude_all, awaiting=awaiting, timeout_s=timeout_s + comm.timeout_s)
    except RankFailed as failure:
        is_own = own_error is not None and failure.rank == comm.rank
        raise failure from own_error if is_own else failure.__cause__


@contextmanager
def _raising_own(comm: Comm, own_error: Exception | None) -> Iterator[None]:
    """Raise this rank's own error, and not that the others cannot be told of it: that follows from it."""
    try:
        yield
    except RankError:
        if own_error is None:
            raise
        if isinstance(own_error, RankError):
            raise own_error from own_error.__cause__
        raise RankFailed(comm.rank, comm.host, format_cause(own_error)) from own_error


def _attempt(comm: Comm, work: Callable[[], Result]) -> tuple["Result | _Failure", Exception | None]:
    """The result, or a failure that can be sent and its error."""
    try:
        return work(), None
    except RankFailed as error:
        # All ranks know already which one failed, and why.
        return _Failure(error.rank, error.host, error.cause, error.exit_code), error
    except Exception as error:  # noqa: BLE001 - gathered: no rank may fail alone
        code = error.exit_code if isinstance(error, PenstockError) else 1
        return _Failure(comm.rank, comm.host, format_cause(error), code), error


def _pack(comm: Comm, value: object) -> bytes:
    """The pickled value; of one that cannot be pickled, a failure for all ranks to learn of."""
    packed = _try_to_pack(comm, value)
    return packed if isinstance(packed, bytes) else pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)


def _try_to_pack(comm: Comm, value: object) -> "bytes | _Unsendable":
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        cause = f"cannot send a {type(value).__name__} to other ranks: {error}"
        return _Unsendable(comm.rank, comm.host, cause)


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
CHECK_EVERY_S = 0.2
LATE_AFTER_S = 5.0
"""A wait longer than this, or than half its limit, calls `on_late`: the launcher then knows who waits."""


@dataclass(slots=True)
class PollingWait:
    """A wait by polling, with one limit for all its steps. Its clock starts at construction.

    Ranks may outnumber cores, so a waiting rank must give up its core to those it waits for: it polls
    eagerly at first, then sleeps longer and longer. Every wait ends, at the latest with a `WaitTimeout`.
    """

    awaiting: str
    timeout_s: float
    on_late: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _started_s: float = field(init=False)
    _was_late: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    @property
    def waited_s(self) -> float:
        """How long it has lasted."""
        return self.clock() - self._started_s

    def until(self, ready: Callable[[], bool]) -> None:
        """Return once `ready()` is true; it is called at least once, even when no time is left."""
        for _ in range(EAGER_POLLS):
            if ready():
                return
            os.sched_yield()
        while not ready():
            waited_s = self.waited_s
            self._check(waited_s)
            self.sleep(min(max(FIRST_SLEEP_S, waited_s * SLEEP_SHARE), LONGEST_SLEEP_S))

    def next_check_s(self) -> float:
        """How long may be waited by other means before this is asked again; raises `WaitTimeout` in time."""
        waited_s = self.waited_s
        self._check(waited_s)
        return min(CHECK_EVERY_S, self.timeout_s - waited_s)

    def _check(self, waited_s: float) -> None:
        if waited_s >= self.timeout_s:
            raise WaitTimeout(self.awaiting, self.timeout_s)
        if not self._was_late and waited_s >= min(LATE_AFTER_S, self.timeout_s / 2):
            self._was_late = True
            self.on_late()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWait:
    """What this rank awaits of others at the moment; `absent` are those that have not come, where known."""

    awaiting: str
    waited_s: float
    absent: tuple[int, ...]


class BaseComm(ABC):
    """A `Comm` on top of three collective moves of bytes. Subclasses start transfers and never block.

    A rank that left a call early never makes another one, because the ranks would be out of step.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.timeout_s = DEFAULT_TIMEOUT_S
        self.carrier = ""
        self.on_late: Callable[[int, str], None] = lambda _call, _awaiting: None
        """Called once for a call that waits long, with the call's number and what it awaits."""
        self.find_absent: Callable[[int], tuple[int, ...]] = lambda _call: ()
        """The ranks that have not come to a call of this number, if a launcher knows them."""
        self._call = 0
        self._left_early: str | None = None
        self._wait: PollingWait | None = None

    def present_wait(self) -> RankWait | None:
        """What this rank waits for; any thread may ask."""
        wait, call = self._wait, self._call
        if wait is None:
            return None
        return RankWait(awaiting=wait.awaiting, waited_s=wait.waited_s, absent=self.find_absent(call))

    def barrier(self, *, awaiting: str, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""
        with self._collective(awaiting, timeout_s) as wait:
            self._move_nothing(wait)

    def broadcast(self, value: T | None, *, awaiting: str, timeout_s: float | None = None) -> T:
        """Rank 0's `value`, on every rank; a value that cannot be packed is `RankFailed` on all of them."""
        with self._collective(awaiting, timeout_s) as wait:
            packed = self._broadcast_bytes(_pack(self, value) if self.rank == 0 else None, wait)
        received: T = self._unpack([packed])[0]
        return received

    def gather(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        with self._collective(awaiting, timeout_s) as wait:
            packed = self._gather_bytes(_pack(self, value), wait)
        return self._unpack(packed)

    def gather_on_rank0(self, value: T, *, awaiting: str, timeout_s: float | None = None) -> list[T]:
        """Every rank's `value`, in rank order, on rank 0; nothing elsewhere.

        A value that cannot be packed is `RankFailed` on all ranks.
        """
        packed = _try_to_pack(self, value)
        # First all ranks agree that every value can be sent: a rank that raised alone would leave the others
        # waiting in the transfer below.
        failure = self.carry(_first_failure(self, packed), awaiting=awaiting, timeout_s=timeout_s)
        if failure is not None:
            raise RankFailed(failure.rank, failure.host, failure.cause)
        assert isinstance(packed, bytes), "what could not be packed was raised"
        with self._collective(awaiting, timeout_s) as wait:
            payloads = self._gather_bytes_on_rank0(packed, wait)
        return self._unpack(payloads) if self.rank == 0 else []

    def reduce(
        self, value: Number, op: Reduction, *, awaiting: str, timeout_s: float | None = None
    ) -> Number:
        """The sum, minimum or maximum over ranks: exact for whole numbers of any size."""
        return reduce_values(self.gather(value, awaiting=awaiting, timeout_s=timeout_s), op)

    def carry(self, rounds: Rounds[T], *, awaiting: str, timeout_s: float | None = None) -> T:
        """Carry the messages of an operation; its result on this rank."""
        carrying = Carrying(rounds)
        carrying.advance(None)
        if self.size > 1:
            with self._collective(awaiting, timeout_s) as wait:
                if carrying.round is not None:
                    self._carry_from(carrying, wait)
        return carrying.result()

    def _carry_from(self, carrying: Carrying[Any], wait: PollingWait) -> None:
        # Waits for single messages of gloo cannot be polled: a thread waits, and this one for it.
        # For its end, not only for its result: a thread that lets go of gloo's objects while Python finalizes
        # ends the process by SIGABRT, because torch's destructors wait for the interpreter.
        move, broken = self._mover(wait), list[Exception]()

        def run() -> None:
            try:
                carrying.run(move)
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits for this one
                broken.append(error)

        thread = threading.Thread(target=run, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            run()  # Too many threads here already; the other ranks wait for these messages all the same.
        while thread.is_alive():
            thread.join(wait.next_check_s())
        for error in broken:
            raise error

    @contextmanager
    def receiving(
        self, *, awaiting: str, timeout_s: float | None = None
    ) -> Iterator[Callable[[Round], list[bytes]]]:
        """On one rank, while all others `carry` what it receives: a function that waits for one round.

        An error raised within leaves the ranks out of step.
        """
        with self._collective(awaiting, timeout_s) as wait:
            yield self._mover(wait)

    def _mover(self, wait: PollingWait) -> Callable[[Round], list[bytes]]:
        """A function that waits for one round of messages."""
        call = name_call(self._call, wait.awaiting)
        transfer = self._message_transfer()
        return partial(move_messages, transfer, call=call, awaiting=wait.awaiting, timeout_s=wait.timeout_s)

    def _message_transfer(self) -> PointToPoint:
        """The transfer for `carry`, whose messages have tags from `CARRIED` on."""
        raise Unavailable(
            f"{type(self).__name__} cannot move bytes between two ranks",
            fix="Run under MPI or torch.distributed.",
        )

    def _gather_bytes_on_rank0(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        """All payloads on rank 0. A library that can gather to one rank overrides this to save copies."""
        return self._gather_bytes(payload, wait)

    @abstractmethod
    def close(self) -> None:
        """Leave the job; collective, and the last call."""

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
                f"Rank {self.rank} is out of step with the others: it gave up waiting for {self._left_early}",
                where=f"now at {awaiting}",
                fix="Stop this job and start it anew; its ranks cannot get back into step.",
            )
        call = self._call = self._call + 1
        self._left_early = awaiting
        with ExitStack() as undo:
            undo.callback(self._leave)
            try:
                limit_s = self.timeout_s if timeout_s is None else timeout_s
                self._wait = PollingWait(awaiting, limit_s, on_late=lambda: self.on_late(call, awaiting))
                yield self._wait
            except RankError as error:
                self._left_early = f"{awaiting} ({error.what})"
                raise
            except RuntimeError as error:
                raise RankError(
                    f"The connection between ranks broke while waiting for {awaiting}: {error}",
                    where=f"rank {self.rank} on {self.host}",
                    fix="Look for a rank that died, or for a network that drops connections.",
                ) from error
            finally:
                self._wait = None
            undo.pop_all()
        self._left_early = None

    def _leave(self) -> None:  # noqa: B027 - most libraries have nothing to do
        """Called when this rank has left a call early, and makes no other one."""

    def _unpack(self, packed: list[bytes]) -> list[Any]:
        # Ranks of one job trust each other: a process that can send here already runs code as this user.
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
        """Do nothing: there is no job to leave."""

    def _move_nothing(self, wait: PollingWait) -> None:
        """Return at once."""

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:  # noqa: ARG002 - the protocol's
        assert payload is not None
        return payload

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:  # noqa: ARG002 - the protocol's
        return [payload]
