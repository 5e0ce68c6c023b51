"""Long work that all ranks do side by side: if one fails or is interrupted, it ends soon on all of them.

Around `execute`, whose exchange stalls when a rank leaves. A separate thread tells the other ranks every
second how this one is doing. Invariant: all ranks learn of the first failure in the same beat, and none
returns before its own work has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from penstock.cluster.comm import format_cause
from penstock.errors import RankFailed, WaitTimeout

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

Result = TypeVar("Result")

BEAT_S = 1.0
"""So late may a rank hear of another's failure: one small message of all ranks in that time costs nothing."""

INTERRUPTED = "it was interrupted (Ctrl-C) while loading"


class Stopping:
    """Tells work that it is to end; safe from any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._is_stopped = False
        self.is_interrupted = False

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` made when it is to end; now, where that is already so."""
        with self._lock:
            self._calls.append(call)
            is_late = self._is_stopped
        if is_late:
            call()

    def stop(self) -> None:
        """It is to end. Safe twice."""
        with self._lock:
            self._is_stopped = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def interrupt(self) -> None:
        """It is to end, because the caller was interrupted; other ranks will hear so."""
        self.is_interrupted = True
        self.stop()


@dataclass(frozen=True, slots=True)
class _Stand:
    """How one rank stands at one beat."""

    state: Literal["busy", "done", "failed"]
    host: str = ""
    cause: str = ""


def side_by_side(
    comm: Comm, work: Callable[[Stopping], Result], *, awaiting: str, limit_s: float | None = None
) -> Result:
    """What `work` gives on this rank once it is done on all; where it raises on any, all raise. Collective.

    `work` runs in a thread and ends soon after its `Stopping` says so. Nobody else may use `comm` meanwhile.
    A rank that is done waits for the others at most `limit_s`, by default the limit of `comm`. Alone, the
    error is its own.
    """
    stopping = Stopping()
    if comm.size == 1:
        with ExitStack() as undo:
            undo.callback(stopping.stop)
            return work(stopping)
    with (
        ThreadPoolExecutor(1, thread_name_prefix="penstock-work") as workers,
        ThreadPoolExecutor(1, thread_name_prefix="penstock-vigil") as keepers,
        ExitStack() as undo,
    ):
        # On the way out of an interrupt, too: the vigil then tells the others, and ends.
        undo.callback(stopping.interrupt)
        limit_s = comm.timeout_s if limit_s is None else limit_s
        vigil = _Vigil(comm, stopping, awaiting, limit_s)
        # The vigil begins the work, so that an interrupt finds both or neither.
        keeping = keepers.submit(vigil.keep, lambda: workers.submit(work, stopping))
        wait([keeping])
        undo.pop_all()
        stopping.stop()
        working, stands = keeping.result()
        wait([working])
    for rank, stand in enumerate(stands):
        if stand.state == "failed":
            own = working.exception() if rank == comm.rank else None
            raise RankFailed(rank, stand.host, stand.cause) from own
    return working.result()


@dataclass(frozen=True, slots=True)
class _Vigil:
    """Beat by beat, until all ranks are done or one has failed."""

    comm: Comm
    stopping: Stopping
    awaiting: str
    limit_s: float

    def keep(self, begin: Callable[[], Future[Result]]) -> tuple[Future[Result], Sequence[_Stand]]:
        """The work of this rank, and how each rank stood last."""
        with ExitStack() as undo:
            undo.callback(self.stopping.stop)
            working, done_s = begin(), None
            while True:
                wait([working], timeout=BEAT_S)
                if done_s is None and working.done():
                    done_s = time.monotonic()
                stands = self.comm.gather(self._stand(working, done_s), awaiting=self.awaiting)
                if any(each.state == "failed" for each in stands):
                    return working, stands
                if all(each.state == "done" for each in stands):
                    undo.pop_all()
                    return working, stands

    def _stand(self, working: Future[Result], done_s: float | None) -> _Stand:
        cause = ""
        if self.stopping.is_interrupted:
            cause = INTERRUPTED
        elif done_s is None:
            return _Stand("busy")
        elif (error := working.exception()) is not None:
            cause = format_cause(error)
        elif time.monotonic() - done_s > self.limit_s:
            cause = format_cause(WaitTimeout(self.awaiting, self.limit_s))
        return _Stand("failed", self.comm.host, cause) if cause else _Stand("done")
