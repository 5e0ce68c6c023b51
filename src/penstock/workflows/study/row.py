"""One row on one rank: training steps and saves in turn, all of it traced.

Collective. Invariant: when it returns, the row's traces are whole, and nothing is left of it on the levels.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.environment import TRACE, TRACE_RANK
from penstock.storage import open_storage
from penstock.storage.rate_limit import RateLimitedStorage
from penstock.trace import span, tracing_to
from penstock.trace.capture.recorder import get_recorder
from penstock.trace.capture.traced_storage import trace_storage
from penstock.workflows.study.configurations import Level
from penstock.workflows.study.records import RowRecord, trace_folder
from penstock.workflows.study.savers import make_saver

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.environment import Environment
    from penstock.progress import Progress
    from penstock.storage import Storage
    from penstock.workflows.study.configurations import Configuration
    from penstock.workflows.study.request import StudyRequest
    from penstock.workflows.study.savers import Saver
    from penstock.workflows.study.trainer import Trainer

SAVE_EVENT: Final = "Checkpoint.save"
STEP_EVENT: Final = "train.step"
DRAIN_EVENT: Final = "Checkpoint.drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a row is played: the same for all rows, but for the folders named after them."""

    request: StudyRequest
    comm: Comm
    environment: Environment
    place: str
    """The folder of this study on each level."""
    domain: str
    """What fails together with this rank."""
    progress: Progress

    def root(self, row: Configuration, level: Level) -> Path:
        """The folder of a row on a level."""
        levels = {Level.FAST: self.request.fast, Level.SLOW: self.request.slow}
        return levels[level] / self.place / row.name

    def open_level(self, row: Configuration, level: Level, folder: str) -> Storage:
        """A folder of a row: the limit lies inside the trace, which so shows what it costs."""
        size = self.comm.size
        storage = open_storage(str(self.root(row, level) / folder), self.environment)
        limit = self.request.slow_bytes_per_s
        if level is Level.SLOW and limit is not None:
            storage = RateLimitedStorage(storage, limit / size)
        traces = trace_folder(self.request.out, row.name)
        return trace_storage(storage, {TRACE: str(traces), TRACE_RANK: f"{self.comm.rank}/{size}"})


def perform(row: Configuration, trainer: Trainer, stage: Stage) -> RowRecord:
    """Play the row; what all ranks together saw of it."""
    comm, request = stage.comm, stage.request
    traces = trace_folder(request.out, row.name)
    _clear(row, stage)
    stage.progress.begin(f"{row.name}: {row.says}", request.num_checkpoints)
    comm.barrier(awaiting=f"all ranks to begin {row.name}")
    try:
        began_s = time.monotonic()
        with tracing_to(traces, rank=comm.rank, size=comm.size):
            saver = make_saver(
                row,
                trainer,
                lambda level, folder: stage.open_level(row, level, folder),
                root=stage.root(row, row.level),
                domain=stage.domain,
                saving=request.saving,
            )
            blocked_s = _train(saver, trainer, stage)
            drain_s = _timed(saver.close, DRAIN_EVENT)
        took_s = time.monotonic() - began_s
    finally:
        get_recorder(str(traces), f"{comm.rank}/{comm.size}").close()
    seen = comm.gather((blocked_s, drain_s, took_s), awaiting=f"all ranks to finish {row.name}")
    _clear(row, stage)
    return RowRecord(
        name=row.name,
        says=row.says,
        blocked_s=tuple(max(times) for times in zip(*(each[0] for each in seen), strict=True)),
        drain_s=max(each[1] for each in seen),
        took_s=max(each[2] for each in seen),
    )


def _train(saver: Saver, trainer: Trainer, stage: Stage) -> list[float]:
    """Save and train in turn, so that each flush has training beside it; how long each save blocked."""
    blocked_s = []
    for number in range(1, stage.request.num_checkpoints + 1):
        # Training keeps its ranks together; what one waits for another is no part of the save.
        stage.comm.barrier(awaiting=f"all ranks to come to checkpoint {number}")
        blocked_s.append(_timed(lambda number=number: saver.save(number), SAVE_EVENT, step=number))  # type: ignore[misc]
        for _ in range(stage.request.num_steps):
            with span(STEP_EVENT, cat="compute", step=number):
                trainer.step()
        stage.progress.advance(1)
    return blocked_s


def _timed(work: Callable[[], None], name: str, **args: int) -> float:
    began_s = time.monotonic()
    with span(name, cat="checkpoint", **args):
        work()
    return time.monotonic() - began_s


def _clear(row: Configuration, stage: Stage) -> None:
    """Remove what lies there of this row; collective, as nobody may still be writing."""
    stage.comm.barrier(awaiting=f"all ranks to leave the files of {row.name}")
    # Where levels are shared, ranks remove side by side, and each may find that another was quicker.
    for level in Level:
        shutil.rmtree(stage.root(row, level), ignore_errors=True)
    stage.comm.barrier(awaiting=f"all ranks to remove the files of {row.name}")
