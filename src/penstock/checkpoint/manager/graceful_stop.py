"""When a job is to leave: on a signal, before its time is up, or because somebody asked for it from outside.

`Manager.due` asks every rank at once and saves once more. Invariant: all ranks learn of it at the same step,
and whoever waits for a signal's or a marker's effect sees a committed step, or why there is none.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.cluster.launcher_env import read_slurm_end_s
from penstock.errors import DataDamaged, ObjectNotFound, StorageError, UsageError
from penstock.storage.object_io import read_object, write_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from penstock.storage import Storage

MARKER_NAME: Final = "halt.json"
"""Beside a run's durable steps; whoever obeys removes it."""

SAVES_SPARED: Final = 2.0
"""So many times as long as the slowest save took is kept for the last one: storage is busy when jobs end."""

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """What makes a job leave: `Halt(signals=("SIGTERM",), time_limit="slurm", margin_s=120)`.

    `time_limit` is in seconds from now, or what Slurm has set. The job leaves in time for one more step, a
    save that takes twice as long as the slowest so far, and `margin_s` on top, as for a flush. A marker that
    `penstock checkpoint halt` has put is looked for every `look_s` seconds.
    """

    signals: tuple[str, ...] = ()
    time_limit: float | Literal["slurm"] | None = None
    margin_s: float = 60.0
    look_s: float = 10.0

    def __post_init__(self) -> None:
        limit = self.time_limit
        makes_sense = limit == "slurm" if isinstance(limit, str) else limit is None or limit > 0
        if not makes_sense:
            raise UsageError(f"Halt(time_limit={limit!r})", fix='Give seconds above 0, or "slurm".')
        unknown = [name for name in self.signals if name not in signal.Signals.__members__]
        if unknown:
            raise UsageError(f"{unknown[0]!r} is no signal", where="Halt", fix="Give names like SIGTERM.")
        if self.margin_s < 0 or self.look_s < 0:
            raise UsageError(f"Halt(margin_s={self.margin_s}, look_s={self.look_s})", fix="Give 0 or more.")


ON_REQUEST: Final = Halt()
"""Only the marker is looked for."""


class HaltOrder(BaseModel):
    """What lies in the marker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    asked_by: str
    asked_at_s: float
    """Seconds since 1970."""
    reason: str = ""


def order_halt(storage: Storage, order: HaltOrder) -> None:
    """Put the marker."""
    write_object(storage, MARKER_NAME, [order.model_dump_json().encode()])


def find_halt(storage: Storage) -> HaltOrder | None:
    """What was asked for; None where nobody did."""
    try:
        content = bytes(read_object(storage, MARKER_NAME))
    except ObjectNotFound:
        return None
    try:
        return HaltOrder.model_validate_json(content)
    except ValidationError as error:
        raise DataDamaged(
            f"The marker cannot be read: {error.errors()[0]['msg']}",
            where=f"{storage.uri}/{MARKER_NAME}",
            fix="`penstock checkpoint halt RUN --cancel` removes it.",
        ) from error


def cancel_halt(storage: Storage) -> bool:
    """Remove the marker; whether there was one."""
    try:
        storage.delete(MARKER_NAME)
    except ObjectNotFound:
        return False
    return True


class SignalWatch:
    """Remembers that a signal came, and lets whoever handled it before do so still."""

    def __init__(self, names: Sequence[str]) -> None:
        self.seen = ""
        self._before: dict[int, Any] = {}
        if names and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"{names[0]} can be watched for by the main thread alone",
                where="Halt",
                fix="Make the Manager in the main thread, or leave signals=() out.",
            )
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Put back what was there, unless somebody came after us, who may call us still."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note and before is not None:
                signal.signal(number, before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = signal.Signals(number).name
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


@dataclass(slots=True)
class Halting:
    """One rank's reasons to leave, and the one that all ranks have heard of."""

    settings: Halt
    storage: Storage
    rank: int
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    reason: str = ""
    """Once all ranks know it; empty before."""
    _signals: SignalWatch = field(init=False)
    _ends_s: float | None = field(init=False)
    _asked_s: float = field(init=False)
    _looked_s: float | None = field(default=None, init=False)
    _longest_step_s: float = field(default=0.0, init=False)
    _slowest_save_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        limit = self.settings.time_limit
        now_s = self._asked_s = self.clock()
        left_s = read_slurm_end_s() - self.wall_clock() if limit == "slurm" else limit
        self._ends_s = None if left_s is None else now_s + left_s
        self._signals = SignalWatch(self.settings.signals)

    def look(self) -> str:
        """Why this rank would leave now; empty where it would not. Called once a step."""
        now_s = self.clock()
        self._longest_step_s = max(self._longest_step_s, now_s - self._asked_s)
        self._asked_s = now_s
        return self.reason or self._signalled() or self._out_of_time(now_s) or self._asked_to(now_s)

    def hear(self, reasons: Sequence[str]) -> None:
        """What all ranks said, in their order."""
        found = next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")
        if found and not self.reason:
            self.reason = found.removeprefix("rank 0: ")
            logger.warning("This job is to leave after the next save: %s", self.reason)

    def timed(self, save: Callable[[], Result]) -> Result:
        """Call what saves, and remember how long it took: the last one will need as much."""
        began_s = self.clock()
        result = save()
        self._slowest_save_s = max(self._slowest_save_s, self.clock() - began_s)
        return result

    def close(self) -> None:
        """Let go of signals; a marker that was obeyed goes, so that the next job runs."""
        self._signals.close()
        if self.reason and self.rank == 0:
            try:
                cancel_halt(self.storage)
            except StorageError as error:
                logger.warning("The marker could not be removed, and stops the next job, too: %s", error)

    def _signalled(self) -> str:
        return f"{self._signals.seen} came" if self._signals.seen else ""

    def _out_of_time(self, now_s: float) -> str:
        if self._ends_s is None:
            return ""
        needed_s = self._longest_step_s + SAVES_SPARED * self._slowest_save_s + self.settings.margin_s
        left_s = self._ends_s - now_s
        if left_s > needed_s:
            return ""
        return f"{left_s:.0f} s are left of its time, and a step, a save and the margin need {needed_s:.0f} s"

    def _asked_to(self, now_s: float) -> str:
        """Only rank 0 looks, and not at every step: a run can have short steps and a slow file system."""
        if self.rank != 0 or (self._looked_s is not None and now_s - self._looked_s < self.settings.look_s):
            return ""
        self._looked_s = now_s
        try:
            order = find_halt(self.storage)
        except DataDamaged as error:
            return f"a marker that cannot be read asks for it: {error}"
        except StorageError as error:
            logger.info("Whether to halt could not be seen: %s", error)
            return ""
        if order is None:
            return ""
        return f"{order.asked_by} asked for it" + (f" ({order.reason})" if order.reason else "")
