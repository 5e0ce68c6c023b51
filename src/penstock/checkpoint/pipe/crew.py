"""The threads of one phase: the first that fails stops all others, and its error is what is raised."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from typing import TYPE_CHECKING

from penstock.checkpoint.pipe.buffers import PipeStopped
from penstock.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Crew:
    """Up to `num_threads` at work; `stop`, called from any of them, makes all others give up soon."""

    def __init__(self, num_threads: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-pipe")
        self._started: list[Future[None]] = []

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Have a thread do `work`."""
        future = self._threads.submit(self._run, work, *arguments)
        self._started.append(future)
        return future

    def wait(self, some: Sequence[Future[None]], awaited: str, timeout_s: float | None = None) -> None:
        """Return when `some` are done; raises the failure that any thread of the crew had."""
        late = wait_for(some, timeout=timeout_s).not_done
        if late:
            raise WaitTimeout(awaited, timeout_s or 0.0)
        if any(each.exception() for each in some):
            # They may have stopped for the sake of one whose own end is not noted yet.
            wait_for(self._started)
        failures = [error for each in self._started if each.done() and (error := each.exception())]
        causes = [error for error in failures if not isinstance(error, PipeStopped)]
        if failures:
            raise (causes or failures)[0]

    def dismiss(self) -> None:
        """Stop all and return when none is at work."""
        self._stop()
        self._threads.shutdown(wait=True)

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        with ExitStack() as undo:
            undo.callback(self._stop)
            work(*arguments)
            undo.pop_all()
