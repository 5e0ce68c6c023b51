"""The timed loop over a user's iterable: wait for a batch, let the step consume it, meet the other ranks.

Nothing happens between a step's moments but what their names say; a step keeps six numbers, and many steps
are recorded together. The wait of an epoch's first step begins before the iterator is made, as for a trainer.
"""

import os
import re
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.bench.compute import ComputeTimes, SystemClock, compute_until
from penstock.bench.own_loader.process_watch import WaitingClock
from penstock.bench.own_loader.user_code import OWN_FOLDER
from penstock.bench.own_loader.wait_stages import StepWait
from penstock.cluster.comm import Comm
from penstock.errors import OutOfSpace, PenstockError, StorageError, Unavailable
from penstock.progress import RunProgress
from penstock.results.step_events import STEP_TYPE, Rows, SpanEvent, SpanKind, StepPhase
from penstock.units import format_bytes

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - not a file that is written
_SHARED: Final = re.compile(r"shared memory|bus error|</?torch_|torch_shm|/dev/shm|psm_\w+", re.IGNORECASE)
_DESCRIPTORS: Final = re.compile(r"too many open files|received 0 items of ancdata", re.IGNORECASE)
_KILLED: Final = re.compile(r"worker \(pid.*?\) (is killed by signal: \w+|exited unexpectedly)")
_PLACE: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def explain_failure(error: BaseException, *, loader: str, epoch: int, step: int) -> PenstockError:
    """What to tell the user of an error of his loader."""
    text = "".join(traceback.format_exception(error))
    # Torch's message has the traceback of a worker, where a file of the user's may lie in /dev/shm.
    said = _PLACE.sub("", text if isinstance(error, OSError) else _last_line(str(error)))
    when = f"at step {step} of epoch {epoch}"
    if _SHARED.search(said):
        return OutOfSpace(
            f"Shared memory is full: the loader {loader} failed {when} ({_last_line(str(error))})",
            where=_describe_shared_memory(),
            fix="Give the container more (--shm-size), or use fewer workers, smaller batches or a smaller "
            "prefetch_factor.",
        )
    if _DESCRIPTORS.search(text):
        return Unavailable(
            f"Descriptors ran out: the loader {loader} failed {when}",
            where="RLIMIT_NOFILE",
            fix="Raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system').",
        )
    if (killed := _KILLED.search(str(error))) and not _PLACE.search(str(error)):
        return StorageError(
            f"A worker of the loader {loader} died {when}: {killed.group(0)}",
            fix="`dmesg` says whether memory ran out: fewer workers, smaller batches or a smaller "
            "prefetch_factor need less.",
        )
    return _say_failure(error, f"The loader {loader}", when)


def _say_failure(error: BaseException, who: str, when: str) -> StorageError:
    """An error of the user's own code, with the innermost line of it."""
    said, kind = _last_line(str(error)), type(error).__name__
    return StorageError(
        f"{f'{who} failed {when}'.rstrip()}: {said if said.startswith(kind) else f'{kind}: {said}'}",
        where=_find_place("".join(traceback.format_exception(error))),
        fix="Run it alone to see the whole traceback.",
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _find_place(text: str) -> str:
    """The innermost line that is neither torch's nor ours."""
    places = [
        f"{path}:{line} in {function}"
        for path, line, function in _PLACE.findall(text)
        if "-packages/torch" not in path and not path.startswith(OWN_FOLDER)
    ]
    return places[-1] if places else ""


def _describe_shared_memory() -> str:
    with suppress(OSError):
        found = os.statvfs(_SHARED_MEMORY)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return f"{_SHARED_MEMORY} has {format_bytes(free)} free of {format_bytes(total)}"
    return _SHARED_MEMORY


_RECORDED_EVERY_NS: Final = 5 * 10**9
"""Steps wait so long for the bytes that were read for them; a killed run loses no more than that."""
_SHOWN_EVERY_NS: Final = 10**8
"""Progress counts no more often: it takes locks, and fast loaders have thousands of steps a second."""
_CPU_EVERY_NS: Final = 2 * 10**6
"""The kernel's clock of the thread, which costs a microsecond, is read no more often."""
_FIRST_DRAWN: Final = 1024
_END: Final = object()

Consume = Callable[[Any, int, int, int], int]
"""`(batch, loaded_ns, epoch, step)`; computes, and gives the moment at which it ended."""


def emulated_step(times: ComputeTimes) -> Consume:
    """A step that computes for as long as the workload says, and looks at no batch."""
    clock = SystemClock()
    drawn: dict[int, list[int]] = {}

    def consume(_batch: Any, loaded_ns: int, epoch: int, step: int) -> int:
        durations = drawn.get(epoch, [])
        if step > len(durations):
            durations = drawn[epoch] = times.of_epoch(epoch, max(_FIRST_DRAWN, 2 * len(durations)))
        return compute_until(loaded_ns + durations[step - 1], clock)

    return consume


def users_step(function: Callable[[Any], object], name: str) -> Consume:
    """The user's own step."""

    def consume(batch: Any, _loaded_ns: int, epoch: int, step: int) -> int:
        try:
            function(batch)
        except (Exception, SystemExit) as error:  # whatever a user's step raises, said with its place
            if _KILLED.search(str(error)):
                raise  # a worker of the loader
            raise _say_failure(error, f"The step {name}", f"at step {step} of epoch {epoch}") from error
        return time.monotonic_ns()

    return consume


def call_factory(make: Callable[[], Any], name: str) -> Any:
    """What a user's factory returns."""
    try:
        return make()
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:  # likewise
        raise _say_failure(error, f"The factory {name}", "") from error


@dataclass(slots=True)
class EpochOutcome:
    """What an epoch did. `ended_s` passed between its last step and the end of its iterator."""

    steps: list[StepWait] = field(default_factory=list)
    samples: int = 0
    batch_size: int = 0
    elapsed_ns: int = 0
    ended_s: float = 0.0

    @property
    def waited_ns(self) -> int:
        """All its waits."""
        return sum(step.loaded_ns - step.start_ns for step in self.steps)


class RowRecorder(Protocol):
    """Keeps the events of a rank, many steps at a time."""

    def add_steps(self, steps: Rows) -> None:
        """Keep steps that have ended, rows of `STEP_TYPE`."""

    def add_span(self, span: SpanEvent) -> None:
        """Keep an epoch or a block that has ended."""


_Moments = tuple[int, int, int, int, int, int]
"""Of a step: its wait begins, batch there, computed, all ranks met; what the wait computed; samples."""


@dataclass(slots=True, kw_only=True)
class OwnLoaderLoop:
    """Runs epochs of one rank. `read_bytes` tells what has been read so far, for the steps' record."""

    comm: Comm
    recorder: RowRecorder
    progress: RunProgress
    consume: Consume
    clock: WaitingClock
    name: str
    count: Callable[[Any], int]
    max_steps: int | None = None
    read_bytes: Callable[[], int] = lambda: 0
    _pending: list[_Moments] = field(default_factory=list)
    _num_shown: int = 0
    _num_recorded: int = 0
    _recorded_bytes: int = 0
    _due_ns: int = 0
    _cpu_due_ns: int = 0

    def run_epoch(self, loader: Iterable[Any], epoch: int) -> EpochOutcome:
        """One epoch; collective: it ends for all ranks with the batches of any."""
        try:
            return self._run_epoch(loader, epoch)
        except RuntimeError as error:
            # Torch hears of dead workers by a signal, and raises wherever this thread is.
            if not _KILLED.search(str(error)):
                raise
            step = self._num_recorded + len(self._pending) + 1
            raise explain_failure(error, loader=self.name, epoch=epoch, step=step) from error

    def _run_epoch(self, loader: Iterable[Any], epoch: int) -> EpochOutcome:
        found = EpochOutcome()
        self._num_recorded = 0
        began_ns = time.monotonic_ns()
        self._due_ns = began_ns + _SHOWN_EVERY_NS
        try:
            ended_ns = self._step_through(loader, epoch, found)
        finally:
            self.clock.since_ns = 0
            self.progress.enter("working")
            self._show()
            self._record(epoch, found)
        found.elapsed_ns = (ended_ns or began_ns) - began_ns
        self._end(epoch, step=len(found.steps), began_ns=began_ns, ended_ns=ended_ns or began_ns)
        found.ended_s = (time.monotonic_ns() - (ended_ns or began_ns)) / 1e9
        return found

    def _step_through(self, loader: Iterable[Any], epoch: int, found: EpochOutcome) -> int:
        """All steps; when the last one ended, 0 if there was none."""
        clock, now_ns, enter, consume, count = (
            self.clock,
            time.monotonic_ns,
            self.progress.enter,
            self.consume,
            self.count,
        )
        step, ended_ns, batch, iterator = 0, 0, None, None
        try:
            while step != self.max_steps:
                step += 1
                enter("reading")
                clock.since_ns = start_ns = now_ns()
                cpu_ns = time.thread_time_ns() if start_ns >= self._cpu_due_ns else -1
                batch, iterator = self._next(loader, iterator, epoch, step)
                loaded_ns = now_ns()
                if cpu_ns >= 0:
                    cpu_ns = time.thread_time_ns() - cpu_ns
                    self._cpu_due_ns = loaded_ns + _CPU_EVERY_NS
                clock.since_ns, clock.waited_ns = 0, clock.waited_ns + loaded_ns - start_ns
                enter("computing")
                computed_ns = loaded_ns if batch is _END else consume(batch, loaded_ns, epoch, step)
                if not self._meet(step, has_batch=batch is not _END):
                    break
                ended_ns = now_ns()
                self._pending.append((start_ns, loaded_ns, computed_ns, ended_ns, cpu_ns, count(batch)))
                if ended_ns >= self._due_ns:
                    self._show_or_record(epoch, found, ended_ns)
        finally:
            del batch, iterator  # the workers of a DataLoader end with it, and say what they have read
        return ended_ns

    def _next(self, loader: Iterable[Any], iterator: Any, epoch: int, step: int) -> tuple[Any, Any]:
        """The next batch, or `_END`, and what gives the ones after it."""
        try:
            if iterator is None:
                iterator = iter(loader)
            return next(iterator, _END), iterator
        except PenstockError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's loader raises, said with its place
            raise explain_failure(error, loader=self.name, epoch=epoch, step=step) from error

    def _meet(self, step: int, *, has_batch: bool) -> bool:
        """Wait for all ranks; whether all of them had a batch."""
        if self.comm.size == 1:
            return has_batch
        return bool(self.comm.reduce(int(has_batch), "min", awaiting=f"all ranks to finish step {step}"))

    def _show_or_record(self, epoch: int, found: EpochOutcome, now_ns: int) -> None:
        self._show()
        self._due_ns = now_ns + _SHOWN_EVERY_NS
        if now_ns - self._pending[0][3] > _RECORDED_EVERY_NS:
            self._record(epoch, found)

    def _show(self) -> None:
        """Count the steps that were not yet counted."""
        new = self._pending[self._num_shown :]
        self._num_shown = len(self._pending)
        if not new:
            return
        starts, loaded, computed, ended, _, samples = map(sum, zip(*new, strict=True))
        self.progress.advance(len(new))
        self.progress.count(
            steps=len(new),
            samples=samples * self.comm.size,
            read_bytes=0,
            computing_s=(computed - loaded) / 1e9,
            sample_wait_s=(loaded - starts) / 1e9,
            rank_wait_s=(ended - computed) / 1e9,
        )

    def _record(self, epoch: int, found: EpochOutcome) -> None:
        """Record the steps that wait, with equal parts of what was read meanwhile."""
        pending, self._pending, self._num_shown = self._pending, [], 0
        if not pending:
            return
        moments = np.array(pending, np.int64)
        total = self.read_bytes()
        self.progress.count(read_bytes=max(0, total - self._recorded_bytes) * self.comm.size)
        share, rest = divmod(max(0, total - self._recorded_bytes), len(pending))
        self._recorded_bytes = max(total, self._recorded_bytes)
        rows = np.zeros(len(pending), STEP_TYPE)
        rows["phase"], rows["epoch"], rows["block"] = StepPhase.TRAIN, epoch, 1
        rows["step"] = np.arange(self._num_recorded + 1, self._num_recorded + len(pending) + 1)
        for column, name in enumerate(("start_ns", "loaded_ns", "computed_ns", "barrier_ns")):
            rows[name] = moments[:, column]
        rows["samples"], rows["read_bytes"] = moments[:, 5], share
        rows["read_bytes"][0] += rest
        self.recorder.add_steps(rows)
        found.samples += int(moments[:, 5].sum())
        found.batch_size = found.batch_size or int(moments[0, 5])
        found.steps += _describe_waits(moments, is_first=self._num_recorded == 0)
        self._num_recorded += len(pending)

    def _end(self, epoch: int, *, step: int, began_ns: int, ended_ns: int) -> None:
        for kind in (SpanKind.BLOCK, SpanKind.EPOCH):
            self.recorder.add_span(
                SpanEvent(
                    kind=kind,
                    phase=StepPhase.TRAIN,
                    epoch=epoch,
                    block=1,
                    step=step if kind is SpanKind.BLOCK else 0,
                    start_ns=began_ns,
                    end_ns=ended_ns,
                    size_bytes=0,
                )
            )


def _describe_waits(moments: NDArray[np.int64], *, is_first: bool) -> list[StepWait]:
    """The waits of steps; where the thread's clock was not read, it computed as much of them as elsewhere."""
    waited, cpu_ns = moments[:, 1] - moments[:, 0], moments[:, 4]
    is_read = cpu_ns >= 0
    is_read[0] &= not (is_first and len(moments) > 1)  # the start of a loader is like no other wait
    share = cpu_ns[is_read].sum() / max(1, waited[is_read].sum())
    cpu_ns = np.where(cpu_ns >= 0, cpu_ns, waited * share).astype(np.int64)
    columns = zip(moments[:, 0].tolist(), moments[:, 1].tolist(), cpu_ns.tolist(), strict=True)
    return [StepWait(*one, is_first and number == 0) for number, one in enumerate(columns)]
