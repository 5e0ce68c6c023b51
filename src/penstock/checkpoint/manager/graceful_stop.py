"""When a job should end by itself: on a signal, before its time limit, or at the request of an operator.

All ranks learn the reason at the same step, and the job saves once more before it ends.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.cluster.launcher_env import read_slurm_end_s
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, UsageError
from penstock.storage import Storage
from penstock.storage.protocol import read_object, write_object

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

MARKER_NAME: Final = "halt.json"
"""Is next to a run's durable steps; the job that obeys it removes it."""

SAVES_SPARED: Final = 2.0
"""Time kept for the last save, in durations of the slowest so far: storage is busy when jobs end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """What ends a job: `StopConditions(signals=("SIGTERM",), time_limit="slurm", margin_s=120)`.

    `time_limit` is in seconds from now, or "slurm" for that of the Slurm job. The job ends in time for one
    more step, a save that takes twice as long as the slowest so far, and `margin_s` more, such as for a
    flush. The request of a `penstock checkpoint halt` is looked for every `look_s` seconds.
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


class StopRequest(BaseModel):
    """The content of `halt.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    asked_by: str
    asked_at_s: float
    """Seconds since 1970."""
    reason: str = ""


def request_stop(storage: Storage, request: StopRequest) -> None:
    """Write the request."""
    write_object(storage, MARKER_NAME, [request.model_dump_json().encode()])


def find_stop_request(storage: Storage) -> StopRequest | None:
    """The request; None if there is none."""
    try:
        content = bytes(read_object(storage, MARKER_NAME))
    except ObjectNotFound:
        return None
    try:
        return StopRequest.model_validate_json(content)
    except ValidationError as error:
        raise DataDamaged(
            f"The stop request cannot be parsed: {error.errors()[0]['msg']}",
            where=f"{storage.uri}/{MARKER_NAME}",
            fix="`penstock checkpoint halt RUN --cancel` removes it.",
        ) from error


def cancel_stop_request(storage: Storage) -> bool:
    """Remove the request; returns whether there was one."""
    try:
        storage.delete(MARKER_NAME)
    except ObjectNotFound:
        return False
    return True


class SignalWatch:
    """Remembers that a signal arrived, and still calls the handler that was there before."""

    def __init__(self, names: Sequence[str]) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}
        if names and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"Only the main thread can handle {names[0]}",
                where="StopConditions",
                fix="Make the Manager in the main thread, or without signals.",
            )
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Restore the former handlers, unless a later one is installed, which may still call this one."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note and before is not None:
                signal.signal(number, before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


@dataclass(slots=True)
class GracefulStop:
    """One rank's reasons to end the job, and the one that all ranks have agreed on."""

    settings: StopConditions
    storage: Storage
    rank: int
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    reason: str = ""
    """Set once all ranks know it; empty before that."""
    _signals: SignalWatch = field(init=False)
    _deadline_s: float | None = field(init=False)
    _last_call_s: float = field(init=False)
    _last_look_s: float | None = field(default=None, init=False)
    _longest_step_s: float = field(default=0.0, init=False)
    _slowest_save_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        limit = self.settings.time_limit
        now_s = self._last_call_s = self.clock()
        left_s = read_slurm_end_s() - self.wall_clock() if limit == "slurm" else limit
        self._deadline_s = None if left_s is None else now_s + left_s
        self._signals = SignalWatch(self.settings.signals)

    def find_reason(self) -> str:
        """Why this rank would end the job now; empty if it would not. Called once per step."""
        now_s = self.clock()
        self._longest_step_s = max(self._longest_step_s, now_s - self._last_call_s)
        self._last_call_s = now_s
        return self.reason or self._check_signals() or self._check_time(now_s) or self._check_request(now_s)

    def agree(self, reasons: Sequence[str]) -> None:
        """Take over the first reason of all ranks, in rank order."""
        reason = next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
        if reason and not self.reason:
            self.reason = reason.removeprefix("rank 0: ")
            logger.warning("This job ends after the next save: %s", self.reason)

    def time_save(self, save: Callable[[], Result]) -> Result:
        """Call `save` and remember its duration: the last save will need as much."""
        begin_s = self.clock()
        result = save()
        self._slowest_save_s = max(self._slowest_save_s, self.clock() - begin_s)
        return result

    def close(self) -> None:
        """Restore signal handlers; removes a request that was obeyed, so that the next job runs."""
        self._signals.close()
        if self.reason and self.rank == 0:
            try:
                cancel_stop_request(self.storage)
            except StorageError as error:
                logger.warning(
                    "The stop request could not be removed and will end the next job, too: %s", error
                )

    def _check_signals(self) -> str:
        return f"{self._signals.received} was received" if self._signals.received else ""

    def _check_time(self, now_s: float) -> str:
        if self._deadline_s is None:
            return ""
        needed_s = self._longest_step_s + SAVES_SPARED * self._slowest_save_s + self.settings.margin_s
        left_s = self._deadline_s - now_s
        if left_s > needed_s:
            return ""
        return f"{left_s:.0f} s are left, and one step, one save and the margin need {needed_s:.0f} s"

    def _check_request(self, now_s: float) -> str:
        """The request of an operator, if there is one."""
        # Rank 0 alone, and not at every step: steps can be short and the file system slow.
        if self.rank != 0 or (
            self._last_look_s is not None and now_s - self._last_look_s < self.settings.look_s
        ):
            return ""
        self._last_look_s = now_s
        try:
            request = find_stop_request(self.storage)
        except DataDamaged as error:
            return f"a stop request that cannot be read: {error}"
        except StorageError as error:
            logger.info("Could not look for a stop request: %s", error)
            return ""
        if request is None:
            return ""
        return f"requested by {request.asked_by}" + (f" ({request.reason})" if request.reason else "")


ON_REQUEST: Final = StopConditions()
"""Looks for a request only."""
