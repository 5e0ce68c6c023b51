"""When to save and when to end a job: the policies and conditions that `Manager.should_save` applies.

Policies count steps or seconds, limit the cost of saving, or weigh that cost against how often the job fails.
They are pure: measurements go in, a yes or no comes out. A job ends on a signal, before its time limit, or at
an operator's request: all ranks learn the reason at the same step, and the job saves once more. Invariant:
while the cost of a save is unknown, the policies that need it request a save at once, so that a checkpoint
exists.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any, Final, Literal, Protocol, TypeVar

from penstock.checkpoint.commit.protocol import StoredRecord
from penstock.cluster.launcher_env import read_slurm_end_s
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, UsageError
from penstock.storage import Storage
from penstock.storage.protocol import write_object


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """The facts on which a policy decides.

    `blocked_s` is the training time that a save costs, None if not yet known.
    """

    step: int
    since_last_s: float
    blocked_s: float | None


class SavePolicy(Protocol):
    """Decides when to save.

    Rank 0's policy decides for all, because each rank would measure different times.
    """

    def is_due(self, measured: SaveTiming) -> bool:
        """Return whether to save now."""


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save every `steps` steps."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps must be at least 1, not {self.steps}", where="EverySteps")

    def is_due(self, measured: SaveTiming) -> bool:
        """Return whether the step of `measured` is a multiple of `steps`."""
        return measured.step % self.steps == 0


EVERY_STEP = EverySteps(1)


class _Positive:
    """A policy whose numbers must all be positive."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what in self.__slots__:
            value = getattr(self, what)
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"{what} must be positive, not {value}")


@dataclass(frozen=True, slots=True)
class EverySeconds(_Positive):
    """Save when `seconds` have passed since the last save."""

    seconds: float

    def is_due(self, measured: SaveTiming) -> bool:
        """Return whether `seconds` have passed since the last save, according to `measured`."""
        return measured.since_last_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Overhead(_Positive):
    """Save as often as possible while spending at most `percent` of the time on saves."""

    percent: float

    def is_due(self, measured: SaveTiming) -> bool:
        """Return whether a save now would cost at most `percent` of the time since the last one.

        The cost of earlier saves in `measured` is taken as the cost of the next.
        """
        return measured.blocked_s is None or measured.since_last_s * self.percent / 100 >= measured.blocked_s


@dataclass(frozen=True, slots=True)
class Daly(_Positive):
    """Save at the interval that loses the least time to saves and failures.

    On average, a failure occurs every `mtbf_s` seconds.
    """

    mtbf_s: float

    def is_due(self, measured: SaveTiming) -> bool:
        """Return whether Daly's interval has passed since the last save, according to `measured`."""
        blocked_s = measured.blocked_s
        return blocked_s is None or measured.since_last_s >= daly_interval_s(blocked_s, self.mtbf_s)


NUM_REMEMBERED = 9
"""The number of recent saves whose cost is remembered.

Their median counts, because the first saves touch new memory and are slower.
"""


class SaveScheduler:
    """Measures the cost of saves and the time since the last one, and applies the policy to them."""

    def __init__(self, policy: SavePolicy, clock: Callable[[], float] = time.monotonic) -> None:
        if not hasattr(policy, "is_due"):
            raise UsageError(f"Invalid save_policy={policy!r}", fix="Use one such as pc.EverySteps(100).")
        self._policy = policy
        self._clock = clock
        self._since_s = clock()
        self._blocked_s: deque[float] = deque(maxlen=NUM_REMEMBERED)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the part of one save that training waits for."""
        begin_s = self._clock()
        yield
        self._since_s = self._clock()
        self._blocked_s.append(self._since_s - begin_s)

    def is_due(self, step: int) -> bool:
        """Return whether to save at this step."""
        blocked_s = median(self._blocked_s) if self._blocked_s else None
        since_s = self._clock() - self._since_s
        return self._policy.is_due(SaveTiming(step=step, since_last_s=since_s, blocked_s=blocked_s))


def daly_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order optimum (2006): the time from the end of a checkpoint to the next one."""
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    share = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - blocked_s


Result = TypeVar("Result")

logger = logging.getLogger(__name__)

MARKER_NAME: Final = "halt.json"
"""The file, next to a run's durable steps, that asks the job to end. The job that obeys removes it."""

SAVES_SPARED: Final = 2.0
"""The time reserved for the last save, as a multiple of the slowest so far: storage is busy when jobs end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """The events that end a job: `StopConditions(signals=("SIGTERM",), time_limit="slurm", margin_s=120)`.

    `time_limit` is in seconds from now, or "slurm" for the limit of the Slurm job. The job ends early enough
    for one more step, a save that takes twice as long as the slowest one so far, and another `margin_s`, for
    example for a flush. Every `look_s` seconds, the job checks whether `penstock checkpoint halt` has asked
    it to end.
    """

    signals: tuple[str, ...] = ()
    time_limit: float | Literal["slurm"] | None = None
    margin_s: float = 60.0
    look_s: float = 10.0

    def __post_init__(self) -> None:
        limit = self.time_limit
        makes_sense = limit == "slurm" if isinstance(limit, str) else limit is None or limit > 0
        if not makes_sense:
            raise UsageError(f"time_limit must be positive or 'slurm', not {limit!r}", where="StopConditions")
        unknown = [name for name in self.signals if name not in signal.Signals.__members__]
        if unknown:
            raise UsageError(
                f"Unknown signal {unknown[0]!r}", where="StopConditions", fix="Use names such as SIGTERM."
            )
        if self.margin_s < 0 or self.look_s < 0:
            raise UsageError(
                f"margin_s and look_s must not be negative: {self.margin_s}, {self.look_s}",
                where="StopConditions",
            )


class StopRequest(StoredRecord):
    """A request to end the job: the content of `halt.json`."""

    version: Literal[1] = 1
    asked_by: str
    asked_at_s: float
    """Seconds since 1970."""
    reason: str = ""


def request_stop(storage: Storage, request: StopRequest) -> None:
    """Ask the job to end: write `request` to its durable storage."""
    write_object(storage, MARKER_NAME, [request.model_dump_json().encode()])


def find_stop_request(storage: Storage) -> StopRequest | None:
    """Return the pending request to end the job, or None."""
    fix = "`penstock checkpoint halt RUN --cancel` removes it."
    try:
        return StopRequest.read(storage, MARKER_NAME, what="The stop request", fix=fix)
    except ObjectNotFound:
        return None


def cancel_stop_request(storage: Storage) -> bool:
    """Remove the request to end the job; return whether there was one."""
    try:
        storage.delete(MARKER_NAME)
    except ObjectNotFound:
        return False
    return True


class GracefulStop:
    """One rank's reasons to end the job, and the reason that all ranks have agreed on."""

    def __init__(
        self,
        settings: StopConditions,
        storage: Storage,
        rank: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reason = ""
        """Empty until all ranks have agreed on a reason."""
        self._settings = settings
        self._storage = storage
        self._rank = rank
        self._clock = clock
        self._last_call_s = clock()
        limit = settings.time_limit
        left_s = read_slurm_end_s() - time.time() if limit == "slurm" else limit
        self._deadline_s = math.inf if left_s is None else self._last_call_s + left_s
        self._next_look_s = -math.inf
        self._longest_step_s = self._slowest_save_s = 0.0
        self._received = ""
        self._former_handlers: dict[int, Any] = {}
        if settings.signals and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"Only the main thread can handle {settings.signals[0]}",
                where="StopConditions",
                fix="Create the Manager in the main thread, or without signals.",
            )
        for name in settings.signals:
            number = signal.Signals[name]
            self._former_handlers[number] = signal.signal(number, self._note_signal)

    def find_reason(self) -> str:
        """Return the reason for which this rank would end the job now, or "". Called once per step."""
        now_s = self._clock()
        self._longest_step_s = max(self._longest_step_s, now_s - self._last_call_s)
        self._last_call_s = now_s
        if self.reason:
            return self.reason
        if self._received:
            return f"{self._received} was received"
        needed_s = self._longest_step_s + SAVES_SPARED * self._slowest_save_s + self._settings.margin_s
        left_s = self._deadline_s - now_s
        if left_s <= needed_s:
            return f"{left_s:.0f} s are left, and one step, one save and the margin need {needed_s:.0f} s"
        # Only rank 0 looks, and not at every step: steps can be short and the file system slow.
        if self._rank != 0 or now_s < self._next_look_s:
            return ""
        self._next_look_s = now_s + self._settings.look_s
        try:
            request = find_stop_request(self._storage)
        except DataDamaged as error:
            return f"a stop request that cannot be read: {error}"
        except StorageError as error:
            logger.info("Could not look for a stop request: %s", error)
            return ""
        if request is None:
            return ""
        return f"requested by {request.asked_by}" + (f" ({request.reason})" if request.reason else "")

    def agree(self, reasons: Sequence[str]) -> None:
        """Adopt the first of all ranks' reasons, in rank order."""
        reason = next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
        if reason and not self.reason:
            self.reason = reason.removeprefix("rank 0: ")
            logger.warning("This job ends after the next save: %s", self.reason)

    def time_save(self, save: Callable[[], Result]) -> Result:
        """Call `save`, and remember how long it took, to reserve time for the job's last save."""
        begin_s = self._clock()
        result = save()
        self._slowest_save_s = max(self._slowest_save_s, self._clock() - begin_s)
        return result

    def close(self) -> None:
        """Restore signal handlers, and remove a request that was obeyed so that the next job can run."""
        for number, former in self._former_handlers.items():
            # A handler that was installed later stays in place, and may still call this one.
            if signal.getsignal(number) == self._note_signal and former is not None:
                signal.signal(number, former)
        self._former_handlers = {}
        if self.reason and self._rank == 0:
            try:
                cancel_stop_request(self._storage)
            except StorageError as error:
                logger.warning(
                    "The stop request could not be removed and will end the next job, too: %s", error
                )

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        former = self._former_handlers.get(number)
        if callable(former):
            former(number, frame)


ON_REQUEST: Final = StopConditions()
"""Stop only on request."""
