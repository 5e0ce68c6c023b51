"""The parts common to all benchmark runs: settings and folder, the record of steps, and device counters.

The timed loop calls `StepRecorder.add_*`, which keeps preallocated rows and writes them out between steps;
`results.event_files` collects the spools, and a traced run has the same events in its trace. A run that is
killed loses at most its last seconds; a run that fails or is interrupted loses nothing. `DeviceObserver`
counts the bytes that devices transfer during a run. If a host's counters cannot be read, the result is "not
checked", but the run does not fail.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from penstock.cluster import host_counters
from penstock.cluster.comm import Comm, format_cause, held_on_rank0
from penstock.cluster.gates.preflight import PreflightResult
from penstock.cluster.host_counters import CounterCoverage, find_coverage
from penstock.environment import Environment
from penstock.progress import Progress
from penstock.results import provenance
from penstock.results.active_run import ActiveRun
from penstock.results.counter_files import (
    CounterSpool,
    Direction,
    HostTraffic,
    IoReconciliation,
    SampledHost,
    reconcile,
)
from penstock.results.dlio_files import HYDRA_FOLDER, DlioOutputs, write_dlio_files, write_iostat
from penstock.results.event_files import SpoolWriter, read_events, spool_path
from penstock.results.phase_figures import PhaseFigures
from penstock.results.run_page import Pages
from penstock.results.run_record import RunRequest
from penstock.results.step_events import (
    SPAN_TYPE,
    STEP_TYPE,
    RankClock,
    RankEvents,
    SpanEvent,
    SpanKind,
    StepEvent,
    StepPhase,
)
from penstock.storage import Storage
from penstock.storage.capabilities import RecordSpan, find_span_trace
from penstock.storage.volumes import locked_folder
from penstock.workload.enums import Profiler
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run that do not depend on what it measures.

    The run's folder is created in `results`, unless `run_folder` names the folder itself. `overrides` use
    DLIO's names; `hydra_subfolder` is for DLIO's configuration files ("" for none), and `log_before` has the
    lines of DLIO's log about what happened before the run. `facts_of` describes a rank's host; `inspection`
    is the result of the preflight gates, None if none ran. `pages` build the pages that the package `results`
    cannot build.
    """

    results: Path
    command: Sequence[str] = ()
    environment: Environment = field(default_factory=dict)
    overrides: Sequence[str] = ()
    remarks: Sequence[str] = ()
    run_folder: Path | None = None
    hydra_subfolder: str = HYDRA_FOLDER
    log_before: Sequence[str] = ()
    facts_of: Callable[[str], provenance.HostFacts] = provenance.read_host
    inspection: PreflightResult | None = None
    pages: Pages = field(default_factory=dict)

    @contextmanager
    def open_run(
        self,
        workload: Workload,
        *,
        comm: Comm,
        seeds: Mapping[str, int],
        plan: Mapping[str, Any],
        remarks: Sequence[str] = (),
        progress: Progress | None = None,
        written: Path | None = None,
    ) -> Iterator[tuple[ActiveRun | None, Path]]:
        """Create the run's folder with its record, in which `progress` can be followed. Collective.

        All ranks get the folder, and rank 0 also gets the run, which ends when the block ends. If the run
        writes to a local folder, `written`, other processes are kept out of it.
        """
        hosts = provenance.unique_hosts(comm.gather(self.facts_of(comm.host), awaiting="facts of all hosts"))
        request = RunRequest(
            workload=workload,
            ranks=comm.size,
            hosts=hosts,
            command=self.command,
            environment=self.environment,
            seeds=seeds,
            preflight=self.inspection.preflight if self.inspection else None,
            cluster=self.inspection.cluster if self.inspection else None,
            plan=plan,
            remarks=(*self.remarks, *remarks),
        )
        with (
            held_on_rank0(comm, locked_folder(written), awaiting="rank 0 to lock the folder"),
            ExitStack() as resources,
        ):
            run = None
            if comm.rank == 0:
                if self.run_folder is None:
                    run = ActiveRun.start(self.results, request, pages=self.pages)
                else:
                    # Two commands that name one folder would both find no active run there.
                    resources.enter_context(locked_folder(self.run_folder))
                    run = ActiveRun.start_in(self.run_folder, request, results=self.results)
                resources.enter_context(run)
                if progress is not None:
                    run.show_in_folder(progress)
            yield run, comm.broadcast(run.folder if run else None, awaiting="the folder of the run")

    def write_dlio_files(
        self,
        run: ActiveRun,
        workload: Workload,
        *,
        events: Sequence[RankEvents] | None = None,
        train: PhaseFigures | None = None,
        evaluation: PhaseFigures | None = None,
        preparation: Sequence[str] = (),
    ) -> None:
        """Write DLIO's output and configuration files into the run's folder.

        The run's counters must have been gathered before, because `iostat.json` is made from them.
        """
        profiling = workload.profiling
        if workload.workflow.profiling and profiling.profiler is Profiler.IOSTAT:
            write_iostat(run.folder, run.record.hosts[0], profiling.iostat_devices)
        write_dlio_files(
            run.folder,
            DlioOutputs(
                workload=workload,
                ranks=read_events(run.folder) if events is None else events,
                hosts=run.record.hosts,
                started=datetime.fromisoformat(run.record.started_at),
                ended=datetime.now(UTC),
                train=train,
                evaluation=evaluation,
                preparation=preparation,
            ),
            overrides=provenance.redact(self.overrides),
            subfolder=self.hydra_subfolder,
            log_before=self.log_before,
        )


def read_clocks(rank: int, host: str) -> RankClock:
    """Read this host's wall clock and monotonic clock together; a rank's events refer to them."""
    return RankClock(rank=rank, host=host, wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())


def name_run_in_trace(storage: Storage, folder: Path) -> RecordSpan | None:
    """Write the name of the run in `folder` into the trace of `storage`.

    Returns the function that records spans in the trace; None if `storage` is not traced.
    """
    record_span = find_span_trace(storage)
    if record_span is not None:
        now_ns, results = time.monotonic_ns(), folder.absolute()
        # This is done at the start, so that the trace of a killed run also names the run.
        record_span("run", "run", now_ns, now_ns, {"run": results.name, "results": str(results)})
    return record_span


CAPACITY: Final = 4096
FLUSH_INTERVAL_NS: Final = 10 * 10**9
"""A killed rank loses at most this much of a run."""
_PREFIXES: Final = {StepPhase.TRAIN: "train", StepPhase.EVAL: "eval"}
_SPANS: Final = {
    SpanKind.EPOCH: ("epoch", "epoch"),
    SpanKind.SAVE: ("checkpoint.save", "checkpoint"),
    SpanKind.LOAD: ("checkpoint.load", "checkpoint"),
}
"""The name and category of the spans that are traced. A block is an epoch, or part of one between
checkpoints.
"""


class StepRecorder:
    """One rank's record, used by one thread. Leaving its block writes the remaining rows, even after errors.

    Rows are written when `capacity` of them are waiting, `FLUSH_INTERVAL_NS` after the last write, and with
    every span. This always happens after a step's barrier, so that none of the step's figures include this
    work. Each write calls `on_flush`, as a sign of life. `record_span`, if given, receives the same events
    for a trace.
    """

    def __init__(
        self,
        spool: SpoolWriter,
        *,
        capacity: int = CAPACITY,
        on_flush: Callable[[], None] = lambda: None,
        record_span: RecordSpan | None = None,
    ) -> None:
        self._spool = spool
        self._record_span = record_span
        self._on_flush = on_flush
        self._rows = np.zeros(capacity, STEP_TYPE)
        self._num_rows = 0
        self._flushed_ns = time.monotonic_ns()

    def add_step(self, step: StepEvent) -> None:
        """Record one step. In a trace, this is one span for the whole step and three for its parts."""
        self._rows[self._num_rows] = step
        self._num_rows += 1
        if (record := self._record_span) is not None:
            prefix = _PREFIXES[StepPhase(step.phase)]
            place = {"epoch": step.epoch, "step": step.step}
            counted = {**place, "samples": step.samples, "read_bytes": step.read_bytes}
            record(f"{prefix}.step", "step", step.start_ns, step.barrier_ns, counted)
            record(f"{prefix}.wait", "wait", step.start_ns, step.loaded_ns, place)
            record(f"{prefix}.compute", "compute", step.loaded_ns, step.computed_ns, place)
            record(f"{prefix}.barrier", "barrier", step.computed_ns, step.barrier_ns, place)
        is_full = self._num_rows == len(self._rows)
        if is_full or step.barrier_ns - self._flushed_ns >= FLUSH_INTERVAL_NS:
            self.flush()

    def add_span(self, span: SpanEvent) -> None:
        """Record an epoch, a block or a checkpoint that has just ended. Writes all earlier steps first."""
        self.flush()
        self._spool.append(np.array([span], SPAN_TYPE))
        if self._record_span is not None and span.kind in _SPANS:
            place = {"epoch": span.epoch, "step": span.step} if span.step else {"epoch": span.epoch}
            args = {**place, "checkpoint_bytes": span.size_bytes} if span.size_bytes else place
            self._record_span(*_SPANS[SpanKind(span.kind)], span.start_ns, span.end_ns, args)

    def add_stall(self, *, epoch: int, step: int, began_ns: int) -> None:
        """Record, in a trace only, that a checkpoint has held up this rank until now, including its waits."""
        if self._record_span is not None:
            place = {"epoch": epoch, "step": step}
            self._record_span("stall", "stall", began_ns, time.monotonic_ns(), place)

    def flush(self) -> None:
        """Write the steps that are waiting."""
        self._spool.append(self._rows[: self._num_rows])
        self._num_rows = 0
        self._flushed_ns = time.monotonic_ns()
        self._on_flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._spool.close()


class EventsInMemory:
    """Keeps events in memory, for a run that leaves no record."""

    def __init__(self) -> None:
        self._steps: list[StepEvent] = []
        self._spans: list[SpanEvent] = []
        self.add_step = self._steps.append
        self.add_span = self._spans.append

    def events(self, *, rank: int, host: str) -> RankEvents:
        """Return everything recorded, as one rank's events."""
        return RankEvents(
            clock=read_clocks(rank, host),
            steps=np.array(self._steps, STEP_TYPE),
            spans=np.array(self._spans, SPAN_TYPE),
        )


ROOT: Final = Path("/")
_NO_HARDWARE: Final = host_counters.HostHardware(boot_id="", drives=(), nics=(), ports=())


class DeviceObserver:
    """One rank's part in observing devices.

    The lowest rank of each host samples the host's counters; the other ranks only take part.
    """

    def __init__(self, comm: Comm, run_folder: Path, storage: Storage, *, root: Path = ROOT) -> None:
        """Find the devices of `storage` and prepare to sample them. Collective."""
        self._comm = comm
        self._moved: dict[Direction, Counter[str]] = {"read": Counter(), "write": Counter()}
        self._failure: str | None = None
        self._hardware = _NO_HARDWARE
        self._coverage = CounterCoverage(watched="nothing", reason="it was not looked at")
        self._sampler: host_counters.CounterSampler | None = None
        self._resources = ExitStack()
        hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
        self._samples = hosts.index(comm.host) == comm.rank
        if self._samples:
            try:
                self._begin(run_folder, storage, root)
            except (OSError, ValueError, LookupError) as error:
                self._failure = format_cause(error)

    def _begin(self, run_folder: Path, storage: Storage, root: Path) -> None:
        self._coverage = find_coverage(storage, proc=root / "proc")
        hardware = self._hardware = host_counters.find_hardware(root)
        host = SampledHost(
            host=self._comm.host,
            rank=self._comm.rank,
            boot_id=hardware.boot_id,
            drives=hardware.drives,
            interval_s=host_counters.INTERVAL_S,
            wall_ns=time.time_ns(),
            monotonic_ns=time.monotonic_ns(),
        )
        # Entered first and left last, because the sampler writes one more sample when it stops.
        spool = self._resources.enter_context(CounterSpool(run_folder, host))
        self._sampler = self._resources.enter_context(
            host_counters.CounterSampler(lambda: host_counters.read_sample(hardware, root), spool.append)
        )

    def sample(self) -> host_counters.CounterSample | None:
        """Take a sample now; return None if this rank takes none.

        A sample between two phases separates what each of them transferred.
        """
        return self._sampler.sample() if self._sampler else None

    @contextmanager
    def during(self, direction: Direction) -> Iterator[None]:
        """Attribute what devices transfer while the block runs to `direction`."""
        before = self.sample()
        yield
        after = self.sample()
        if before is not None and after is not None:
            self._moved[direction].update(
                {name: after.values[name] - before.values.get(name, 0) for name in after.values}
            )

    def deliver(self, direction: Direction, application_bytes: int) -> IoReconciliation:
        """Compare the devices' bytes with the application's.

        `application_bytes` are this rank's. Collective.
        """
        sampler_failure = self._sampler.failure if self._sampler else None
        mine = HostTraffic(
            host=self._comm.host,
            coverage=self._coverage,
            hardware=self._hardware,
            moved=dict(self._moved[direction]),
            failure=self._failure or sampler_failure,
        )
        reports = self._comm.gather(
            (application_bytes, mine if self._samples else None), awaiting="what all hosts counted"
        )
        hosts = [traffic for _, traffic in reports if traffic is not None]
        return reconcile(direction, sum(size_bytes for size_bytes, _ in reports), hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Take a last sample, and stop."""
        self._resources.close()


@contextmanager
def record_run(
    comm: Comm, folder: Path, storage: Storage, *, heartbeat: Callable[[], None] = lambda: None
) -> Iterator[tuple[StepRecorder, DeviceObserver]]:
    """Record a run in `folder`, and observe the devices of `storage`, on this rank. Collective."""
    spool = SpoolWriter(spool_path(folder, comm.rank), read_clocks(comm.rank, comm.host))
    record_span = name_run_in_trace(storage, folder)

    def mark() -> None:
        # Steps are flushed at the end of every span, and so this samples between phases.
        heartbeat()
        observer.sample()

    with (
        DeviceObserver(comm, folder, storage) as observer,
        StepRecorder(spool, on_flush=mark, record_span=record_span) as recorder,
    ):
        yield recorder, observer
