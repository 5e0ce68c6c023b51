"""A thread that samples its host's counters at even times, and on demand at the edges of a phase.

Place in the flow: one a host while a run lasts. Invariant: it holds one sample in memory, whatever a run
takes, and its own failure never becomes the run's: it is told at the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from penstock.cluster.counters.reading import Sample

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0

Read = Callable[[], "Sample"]
Write = Callable[["Sample"], None]


class Sampler:
    """Calls `read` every `interval_s` and hands each sample to `write`, in order and one at a time."""

    def __init__(self, read: Read, write: Write, *, interval_s: float = INTERVAL_S) -> None:
        self._read = read
        self._write = write
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="counters", daemon=True)
        self.failure: str | None = None
        """Why there are no more samples; None while there are."""

    def sample(self) -> Sample | None:
        """One sample more, now; None once sampling has failed. Any thread may call."""
        with self._lock:
            if self.failure is not None:
                return None
            try:
                sample = self._read()
                self._write(sample)
            except (OSError, ValueError, LookupError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("counters are no longer sampled: %s", self.failure)
                return None
        return sample

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.sample()

    def _work(self) -> None:
        while not self._ends.wait(self._interval_s) and self.failure is None:
            self.sample()
