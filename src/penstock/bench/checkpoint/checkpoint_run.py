"""The checkpoint benchmark from start to finish: prepare the folder, write, read, and close the run.

Collective: every rank calls `run_checkpoints` and gets the same result. The run's folder records how it ended
in every case, and the marker on storage lists the checkpoints that are complete.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.checkpoint.checkpoint_folder import (
    CheckpointMarker,
    prepare_folder,
    remove_steps,
    require_room,
    update_marker,
)
from penstock.bench.checkpoint.checkpoint_result import CheckpointResult, EarlierRun
from penstock.bench.checkpoint.progress_board import (
    PROGRESS_FILE,
    ProgressBoard,
    ProgressOutputs,
    RoundProgress,
)
from penstock.bench.checkpoint.round_plan import (
    EPOCH,
    choose_source_process,
    plan_objects,
    rank_shift,
    seconds_between,
)
from penstock.bench.checkpoint.rounds import RoundRunner, fit_pipe
from penstock.bench.compute import SystemClock, compute_until
from penstock.bench.device_counters import DeviceObserver
from penstock.bench.step_recorder import StepRecorder, read_clocks
from penstock.checkpoint.saving.buffers import WarmMemory
from penstock.dataset.content import CONTENT_VERSION, Content
from penstock.results.active_run import ActiveRun
from penstock.results.counter_files import gather_counters
from penstock.results.dlio.output_files import DlioOutputs, HydraFacts, write_dlio_files
from penstock.results.event_files import SpoolWriter, gather_events, read_events, spool_path
from penstock.results.provenance import redact, unique_hosts
from penstock.results.published_files import write_json
from penstock.results.run_folder import CHECKPOINTS_FILE
from penstock.results.run_record import RunRequest
from penstock.results.step_events import SpanEvent, SpanKind, StepPhase
from penstock.storage import Counters
from penstock.storage.capabilities import find_local_root

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_folder import PreparedRounds
    from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest, OpenStorage
    from penstock.bench.checkpoint.checkpoint_result import RoundFigures
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.results.io_reconciliation import IoReconciliation
    from penstock.results.provenance import HostFacts


def _write_results(
    run: ActiveRun, result: CheckpointResult, *, request: CheckpointRequest, hosts: Sequence[HostFacts]
) -> None:
    """Close the run, whose ranks have all written their last span."""
    gather_events(run.folder, run.record.ranks)
    gather_counters(run.folder)
    write_json(run.folder, CHECKPOINTS_FILE, result.document())
    write_dlio_files(
        run.folder,
        DlioOutputs(
            workload=request.model.workload,
            ranks=read_events(run.folder),
            hosts=hosts,
            started=datetime.fromisoformat(run.record.started_at),
            ended=datetime.now(UTC),
            train=None,
            evaluation=None,
        ),
        HydraFacts(
            workload_name=request.model.name,
            overrides=redact(request.overrides),
            subfolder=request.hydra_subfolder,
            working_folder=str(Path.cwd()),
            run_folder=str(run.folder),
        ),
        log_before=request.log_before,
    )
    run.finish(deliveries=result.deliveries)


Tell = Callable[[str], None]
"""A line for people, on rank 0."""


def run_checkpoints(
    request: CheckpointRequest,
    reopen: OpenStorage,
    *,
    comm: Comm,
    progress: Progress,
    tell: Tell = lambda _text: None,
) -> CheckpointResult:
    """Write and read as the request's workload says; the same result on every rank."""
    storage = reopen()
    prepared = prepare_folder(request, storage, comm=comm, tell=tell)
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    num_writes = sum(each.direction == "write" for each in prepared.rounds)
    sizes = request.layout.bytes_of_processes().tolist()
    require_room(find_local_root(storage), [size * num_writes for size in sizes], comm=comm)
    facts = unique_hosts(comm.gather(request.facts_of(comm.host), awaiting="facts of all hosts"))
    shift = rank_shift(hosts) if request.model.workload.checkpoint.recovery_rank_shift else 0
    if request.model.workload.checkpoint.recovery_rank_shift and not shift:
        tell("checkpoint.recovery_rank_shift: all ranks are on one host, so each reads what it wrote")
    with ExitStack() as open_things:
        open_things.enter_context(_hint_at_resuming(tell))
        run = None
        if comm.rank == 0:
            asked = RunRequest(
                workload=request.model.workload,
                ranks=comm.size,
                hosts=facts,
                command=request.command,
                environment=request.environment,
                seeds={"content": prepared.seed},
                preflight=request.inspection.preflight if request.inspection else None,
                cluster=request.inspection.cluster if request.inspection else None,
                plan=request.plan_document(),
                remarks=request.remarks,
            )
            run = open_things.enter_context(_open_run(request, asked))
        folder = comm.broadcast(run.folder if run else None, awaiting="the folder of the run")
        board = ProgressBoard(folder / PROGRESS_FILE, rank=comm.rank, num_ranks=comm.size)
        outputs = ProgressOutputs(
            progress=progress, heartbeat=run.heartbeat if run else _nobody_asks, tell=tell
        )
        session = _Session(
            request=request,
            reopen=reopen,
            uri=storage.uri,
            comm=comm,
            prepared=prepared,
            shift=shift,
            watch=RoundProgress(board, rank=comm.rank, outputs=outputs),
        )
        result = session.run(folder)
        if run is not None:
            board.remove()
            _write_results(run, result, request=request, hosts=facts)
        # Ranks saw the same but for their wall clocks: rank 0's count.
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


@contextmanager
def _hint_at_resuming(tell: Tell) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        tell("Complete checkpoints are kept; run the same command with --resume to continue.")
        raise


def _open_run(request: CheckpointRequest, asked: RunRequest) -> ActiveRun:
    if request.run_folder is not None:
        return ActiveRun.start_in(request.run_folder, asked, results=request.results)
    return ActiveRun.start(request.results, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """One rank's part of a run between its preparation and its figures."""

    request: CheckpointRequest
    reopen: OpenStorage
    uri: str
    comm: Comm
    prepared: PreparedRounds
    shift: int
    watch: RoundProgress

    def run(self, folder: Path) -> CheckpointResult:
        """All rounds; their spans lie in the folder's spools afterwards."""
        began_ns = time.monotonic_ns()
        spool = SpoolWriter(spool_path(folder, self.comm.rank), read_clocks(self.comm.rank, self.comm.host))
        with DeviceObserver(self.comm, folder, self.reopen()) as observer, StepRecorder(spool) as recorder:
            work = self._work(recorder)
            rounds = tuple(self._rounds(work, folder, observer))
            recorder.add_span(_epoch_span(began_ns))
        deliveries = tuple(_delivered(observer, work, rounds))
        written = [each.ended_at_s for each in rounds if each.round.direction == "write"]
        earlier = self.prepared.earlier
        if not written and earlier is not None and earlier.last_written_s is not None:
            written = [earlier.last_written_s]
        read_from_s = next((each.began_at_s for each in rounds if each.round.direction == "read"), None)
        if self.request.removes:
            steps = {*(each.round.step for each in rounds), *(earlier.step_numbers if earlier else ())}
            remove_steps(work.storages[0], sorted(steps), comm=self.comm)
        return CheckpointResult(
            model=self.request.model.name,
            ranks=self.comm.size,
            results_dir=str(folder),
            target=work.storages[0].uri,
            total_bytes=self.request.layout.total_bytes,
            seed=self.prepared.seed,
            rounds=rounds,
            gap_s=read_from_s - max(written) if read_from_s is not None and written else None,
            earlier=EarlierRun(run_folder=earlier.run_folder, kept_steps=earlier.step_numbers)
            if earlier
            else None,
            shift=self.shift,
            storage_options=work.storages[0].options,
            deliveries=deliveries,
            peak_rss_bytes=tuple(self.comm.gather(peak_rss_bytes(), awaiting="all ranks' memory")),
        )

    def _work(self, recorder: StepRecorder) -> RoundRunner:
        """Everything that rounds share, warm before the first of them."""
        layout, rank = self.request.layout, self.comm.rank
        read_rank = choose_source_process(rank, num_processes=self.comm.size, shift=self.shift)
        pipe = fit_pipe(
            self.request.pipe,
            max(
                (plan_objects(layout, process, 1) for process in (rank, read_rank)),
                key=lambda planned: sum(each.size_bytes for each in planned),
            ),
        )
        memory = WarmMemory(pipe.buffer_memory_bytes)
        if layout.bytes_of_processes()[[rank, read_rank]].any():
            memory.touch()
            Content(self.prepared.seed, 0).prepare_verification()
        return RoundRunner(
            comm=self.comm,
            layout=layout,
            storages=[self.reopen() for _ in range(pipe.streams)],
            pipe=pipe,
            memory=memory,
            seed=self.prepared.seed,
            shift=self.shift,
            syncs_ranks=self.request.model.workload.checkpoint.rank_sync,
            watch=self.watch,
            recorder=recorder,
        )

    def _rounds(self, work: RoundRunner, folder: Path, observer: DeviceObserver) -> Iterator[RoundFigures]:
        asked = self.request.model.workload.checkpoint
        rounds = self.prepared.rounds
        marker = self._first_marker(folder)
        pauses = seconds_between(rounds, asked.time_between_checkpoints_s)
        for each, pause_s in zip(rounds, pauses, strict=True):
            compute_until(time.monotonic_ns() + round(pause_s * 1e9), SystemClock())
            last = max(other.number for other in rounds if other.direction == each.direction)
            with observer.during(each.direction):
                seen = work.run(each, last=last)
            if each.direction == "write":
                marker = marker.with_step(each.step, seen.ended_at_s)
                update_marker(work.storages[0], marker, comm=self.comm)
            yield seen

    def _first_marker(self, folder: Path) -> CheckpointMarker:
        """What the marker says from now on: another run's checkpoints stay noted, with this run's folder."""
        earlier = self.prepared.earlier
        return CheckpointMarker(
            content_version=CONTENT_VERSION,
            seed=self.prepared.seed,
            shape=self.request.shape,
            run_folder=str(folder.absolute()),
            steps=earlier.steps if earlier else (),
        )


def _delivered(
    observer: DeviceObserver, work: RoundRunner, rounds: Sequence[RoundFigures]
) -> Iterator[IoReconciliation]:
    """What devices moved beside what this rank's storages did, for each direction there was. Collective."""
    counted = sum((storage.counters.snapshot() for storage in work.storages), Counters())
    directions = {each.round.direction for each in rounds}
    if "write" in directions:
        yield observer.deliver("write", counted.written_bytes)
    if "read" in directions:
        yield observer.deliver("read", counted.read_bytes)


def peak_rss_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _epoch_span(began_ns: int) -> SpanEvent:
    """DLIO's single epoch of a run without training."""
    return SpanEvent(
        kind=SpanKind.EPOCH,
        phase=StepPhase.TRAIN,
        epoch=EPOCH,
        block=0,
        step=0,
        start_ns=began_ns,
        end_ns=time.monotonic_ns(),
        size_bytes=0,
    )


def _nobody_asks() -> None:
    """Only rank 0 gives signs of life."""
