"""The timed loop over a user's iterable: wait for a batch, let the step consume it, meet the other ranks.

Nothing happens between a step's moments but what their names say; what is recorded is written after the
barrier. The wait of an epoch's first step begins before the iterator is made, as it does for a trainer.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.bench.compute import ComputeTimes, SystemClock, compute_until
from penstock.bench.own_loader.process_watch import WaitingClock
from penstock.bench.own_loader.user_code import count_samples
from penstock.bench.own_loader.wait_stages import StepWait
from penstock.bench.training.training_loop import EventRecorder
from penstock.cluster.comm import Comm
from penstock.errors import OutOfSpace, PenstockError, StorageError, Unavailable
from penstock.progress import RunProgress
from penstock.results.step_events import SpanEvent, SpanKind, StepEvent, StepPhase
from penstock.units import format_bytes

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - not a file that is written
_SHARED: Final = re.compile(r"shared memory|bus error|</?torch_|torch_shm|/dev/shm|psm_\w+", re.IGNORECASE)
_DESCRIPTORS: Final = re.compile(r"too many open files|received 0 items of ancdata", re.IGNORECASE)
_KILLED: Final = re.compile(r"killed by signal: (\w+)|exited unexpectedly")
_PLACE: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def explain_failure(error: Exception, *, loader: str, epoch: int, step: int) -> PenstockError:
    """What to tell the user of an error of his loader."""
    text = "".join(traceback.format_exception(error))
    when = f"at step {step} of epoch {epoch}"
    if _SHARED.search(str(error)) or (isinstance(error, OSError) and _SHARED.search(text)):
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
            fix="`dmesg` says whether memory ran out; --set and fewer workers need less.",
        )
    return _say_failure(error, f"The loader {loader}", when)


def _say_failure(error: Exception, who: str, when: str) -> StorageError:
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
        if "-packages/torch" not in path and "/penstock/" not in path
    ]
    return places[-1] if places else ""


def _describe_shared_memory() -> str:
    with suppress(OSError):
        found = os.statvfs(_SHARED_MEMORY)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return f"{_SHARED_MEMORY} has {format_bytes(free)} free of {format_bytes(total)}"
    return _SHARED_MEMORY


_KEPT_NS: Final = 5 * 10**9
"""Steps wait so long for the bytes that were read for them; a killed run loses no more than that."""
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
        except Exception as error:  # whatever a user's step raises, said with its place
            raise _say_failure(error, f"The step {name}", f"at step {step} of epoch {epoch}") from error
        return time.monotonic_ns()

    return consume


def call_factory(make: Callable[[], Any], name: str) -> Any:
    """What a user's factory returns."""
    try:
        return make()
    except PenstockError:
        raise
    except Exception as error:  # likewise
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


@dataclass(slots=True, kw_only=True)
class OwnLoaderLoop:
    """Runs epochs of one rank. `read_bytes` tells what has been read so far, for the steps' record."""

    comm: Comm
    recorder: EventRecorder
    progress: RunProgress
    consume: Consume
    clock: WaitingClock
    name: str
    batch_size: int | None = None
    max_steps: int | None = None
    read_bytes: Callable[[], int] = lambda: 0
    _pending: list[StepEvent] = field(default_factory=list)
    _recorded_bytes: int = 0

    def run_epoch(self, loader: Iterable[Any], epoch: int) -> EpochOutcome:
        """One epoch; collective: it ends for all ranks with the batches of any."""
        found, clock = EpochOutcome(), self.clock
        began_ns = ended_ns = time.monotonic_ns()
        step, batch, iterator = 0, None, None
        try:
            while self.max_steps is None or step < self.max_steps:
                step += 1
                self.progress.enter("reading")
                clock.since_ns = start_ns = time.monotonic_ns()
                cpu_ns = time.thread_time_ns()
                batch, iterator = self._next(loader, iterator, epoch, step)
                own_cpu_ns = time.thread_time_ns() - cpu_ns
                loaded_ns = time.monotonic_ns()
                clock.since_ns, clock.waited_ns = 0, clock.waited_ns + loaded_ns - start_ns
                self.progress.enter("computing")
                computed_ns = loaded_ns if batch is _END else self.consume(batch, loaded_ns, epoch, step)
                if not self._meet(step, has_batch=batch is not _END):
                    break
                ended_ns = time.monotonic_ns()
                found.steps.append(StepWait(start_ns, loaded_ns, own_cpu_ns, step == 1))
                samples = self._count(batch, found)
                self._keep(_event(epoch, step, (start_ns, loaded_ns, computed_ns, ended_ns), samples))
        finally:
            clock.since_ns = 0
            self.progress.enter("working")
            del batch, iterator  # the workers of a DataLoader end with it, and say what they have read
            self._flush()
        found.elapsed_ns = ended_ns - began_ns
        self._end(epoch, step=len(found.steps), began_ns=began_ns, ended_ns=ended_ns)
        found.ended_s = (time.monotonic_ns() - ended_ns) / 1e9
        return found

    def _next(self, loader: Iterable[Any], iterator: Any, epoch: int, step: int) -> tuple[Any, Any]:
        """The next batch, or `_END`, and what gives the ones after it."""
        try:
            if iterator is None:
                iterator = iter(loader)
            return next(iterator, _END), iterator
        except PenstockError:
            raise
        except Exception as error:  # whatever a user's loader raises, said with its place
            raise explain_failure(error, loader=self.name, epoch=epoch, step=step) from error

    def _meet(self, step: int, *, has_batch: bool) -> bool:
        """Wait for all ranks; whether all of them had a batch."""
        awaiting = f"all ranks to finish step {step}"
        return (
            has_batch
            if self.comm.size == 1
            else bool(self.comm.reduce(int(has_batch), "min", awaiting=awaiting))
        )

    def _count(self, batch: Any, found: EpochOutcome) -> int:
        samples = self.batch_size or count_samples(batch) or 1
        found.samples += samples
        found.batch_size = found.batch_size or samples
        return samples

    def _keep(self, event: StepEvent) -> None:
        self._pending.append(event)
        self.progress.advance(1)
        self.progress.count(
            steps=1,
            samples=event.samples * self.comm.size,
            read_bytes=0,
            computing_s=(event.computed_ns - event.loaded_ns) / 1e9,
            sample_wait_s=(event.loaded_ns - event.start_ns) / 1e9,
            rank_wait_s=(event.barrier_ns - event.computed_ns) / 1e9,
        )
        if event.barrier_ns - self._pending[0].barrier_ns > _KEPT_NS:
            self._flush()

    def _flush(self) -> None:
        """Record the steps that wait, with equal parts of what was read meanwhile."""
        if not self._pending:
            return
        total = self.read_bytes()
        self.progress.count(read_bytes=max(0, total - self._recorded_bytes) * self.comm.size)
        share, rest = divmod(max(0, total - self._recorded_bytes), len(self._pending))
        for number, event in enumerate(self._pending):
            self.recorder.add_step(event._replace(read_bytes=share + rest * (number == 0)))
        self._recorded_bytes = max(total, self._recorded_bytes)
        self._pending.clear()

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


def _event(epoch: int, step: int, moments: tuple[int, int, int, int], samples: int) -> StepEvent:
    start_ns, loaded_ns, computed_ns, barrier_ns = moments
    return StepEvent(
        phase=StepPhase.TRAIN,
        epoch=epoch,
        block=1,
        step=step,
        start_ns=start_ns,
        loaded_ns=loaded_ns,
        computed_ns=computed_ns,
        barrier_ns=barrier_ns,
        samples=samples,
        read_bytes=0,
        reads=0,
        read_ns=0,
        decode_ns=0,
    )
