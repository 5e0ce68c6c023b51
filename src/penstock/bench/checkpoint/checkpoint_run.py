"""The checkpoint benchmark from start to finish: prepare the folder, write, read, and close the run.

Collective: every rank calls `run_checkpoints` and gets the same result. The run's folder records how it ended
in every case, and the marker on storage lists the checkpoints that are complete.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from penstock.bench import progress_board
from penstock.bench.checkpoint import checkpoint_folder, checkpoint_rounds
from penstock.bench.checkpoint.checkpoint_result import EPOCH, CheckpointResult, EarlierRun, RoundFigures
from penstock.bench.compute import SystemClock, compute_until
from penstock.bench.device_counters import DeviceObserver
from penstock.bench.loader.loader_protocol import OpenStorage
from penstock.bench.run_settings import RunSettings
from penstock.bench.state_layout import StateLayout
from penstock.bench.step_recorder import RunTrace, StepRecorder, read_clocks
from penstock.cluster.comm import Comm
from penstock.dataset.content import CONTENT_VERSION, Content
from penstock.progress import RunProgress
from penstock.results import counter_files, event_files, published_files, run_folder, step_events
from penstock.results.checkpoint_files import write_throughput
from penstock.results.io_reconciliation import IoReconciliation
from penstock.results.provenance import peak_rss_bytes
from penstock.storage import Counters
from penstock.storage.capabilities import find_local_root
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.pipeline import PipelineSettings
from penstock.workload.enums import CheckpointMode
from penstock.workload.load_workload import CheckpointModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest(RunSettings):
    """What a checkpoint benchmark is asked to do.

    `model.workload.checkpoint` says how many writes and reads, and how; it is what is really run, options
    included, so the run's record shows it. A `seed` of None is drawn anew for writing, and taken from the
    marker for reading. With `resumes`, complete checkpoints of an interrupted run are kept; with `removes`,
    all are deleted at the end.
    """

    model: CheckpointModel
    layout: StateLayout
    scale: Fraction
    pipe: PipelineSettings
    seed: int | None = None
    resumes: bool = False
    removes: bool = False

    @property
    def shape(self) -> checkpoint_folder.CheckpointShape:
        """What another run must ask for to read these checkpoints."""
        layout, mode = self.layout, "subset" if self.layout.is_subset else "default"
        return checkpoint_folder.CheckpointShape(
            model=self.model.name,
            processes=layout.num_processes,
            mode=mode,
            scale=str(self.scale),
            total_bytes=layout.total_bytes,
            num_files=layout.num_files,
        )

    def plan_document(self) -> dict[str, Any]:
        """The plan for the run's record, as plain values."""
        mesh = self.layout.mesh
        return {
            "kind": "checkpoint",
            "model": self.model.name,
            "parameters": self.layout.num_parameters,
            "parallelism": {"tensor": mesh.tensor, "pipeline": mesh.pipeline, "data": mesh.data},
            "is_subset": self.layout.is_subset,
            "is_folded": self.layout.is_folded,
            "scale": str(self.scale),
            "total_bytes": self.layout.total_bytes,
            "num_files": self.layout.num_files,
            "pipe": {
                "streams": self.pipe.streams,
                "chunk_bytes": self.pipe.chunk_bytes,
                "buffer_memory_bytes": self.pipe.buffer_memory_bytes,
                "verify": self.pipe.verify,
                "silence_s": self.pipe.silence_s,
            },
        }


def change_checkpoint_section(model: CheckpointModel, **changes: object) -> CheckpointModel:
    """The model with values of its workload's section `checkpoint` changed; None leaves one as it is."""
    given = {name: value for name, value in changes.items() if value is not None}
    if "mode" in given:
        given["mode"] = CheckpointMode(str(given["mode"]))
    checkpoint = replace(model.workload.checkpoint, **given)  # type: ignore[arg-type]  # callers name fields
    return replace(model, workload=replace(model.workload, checkpoint=checkpoint))


Tell = Callable[[str], None]
"""A line for people, on rank 0."""


def run_checkpoints(
    request: CheckpointRequest,
    reopen: OpenStorage,
    *,
    comm: Comm,
    progress: RunProgress,
    tell: Tell = lambda _text: None,
) -> CheckpointResult:
    """Write and read as the request's workload says; the same result on every rank."""
    storage = reopen()
    prepared = checkpoint_folder.prepare_folder(request, storage, comm=comm, tell=tell)
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    num_writes = sum(checkpoint.direction == "write" for checkpoint in prepared.rounds)
    sizes = request.layout.bytes_of_processes().tolist()
    checkpoint_folder.require_room(find_local_root(storage), [size * num_writes for size in sizes], comm=comm)
    workload = request.model.workload
    shift = checkpoint_rounds.rank_shift(hosts) if workload.checkpoint.recovery_rank_shift else 0
    if workload.checkpoint.recovery_rank_shift and not shift:
        tell("checkpoint.recovery_rank_shift: all ranks are on one host, so each reads what it wrote")
    with ExitStack() as resources:
        if request.run_folder is None:  # commands that name the folder have no --resume
            resources.enter_context(_hint_at_resuming(tell))
        run, folder = resources.enter_context(
            request.open_run(
                workload,
                comm=comm,
                seeds={"content": prepared.seed},
                plan=request.plan_document(),
                progress=progress,
            )
        )
        board = progress_board.ProgressBoard(
            folder / progress_board.PROGRESS_FILE, rank=comm.rank, num_ranks=comm.size
        )
        outputs = progress_board.ProgressOutputs(
            progress=progress, heartbeat=run.heartbeat if run else lambda: None
        )
        session = _Session(
            request=request,
            reopen=reopen,
            comm=comm,
            prepared=prepared,
            shift=shift,
            progress=progress_board.RoundProgress(board, rank=comm.rank, outputs=outputs),
        )
        result = session.run(folder)
        if run is not None:
            board.remove()
            event_files.gather_events(folder, comm.size)
            counter_files.gather_counters(folder)
            published_files.write_json(folder, run_folder.CHECKPOINTS_FILE, result.document())
            request.write_dlio_files(run, workload)
            run.finish(deliveries=result.deliveries, is_right=result.is_right)
        # All ranks have the same result but for their wall clocks: rank 0's count.
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


@contextmanager
def _hint_at_resuming(tell: Tell) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        tell("Complete checkpoints are kept; run the same command with --resume to continue.")
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """One rank's part of a run between its preparation and its figures."""

    request: CheckpointRequest
    reopen: OpenStorage
    comm: Comm
    prepared: checkpoint_folder.PreparedRounds
    shift: int
    progress: progress_board.RoundProgress

    def run(self, folder: Path) -> CheckpointResult:
        """Run all rounds; afterwards the folder's spools have their spans."""
        self.progress.expect(self.request.layout.total_bytes * len(self.prepared.rounds))
        began_ns = time.monotonic_ns()
        spool = event_files.SpoolWriter(
            event_files.spool_path(folder, self.comm.rank), read_clocks(self.comm.rank, self.comm.host)
        )
        storage = self.reopen()
        trace = RunTrace.of(storage, folder)
        with (
            DeviceObserver(self.comm, folder, storage) as observer,
            StepRecorder(spool, trace=trace) as recorder,
        ):
            runner = self._make_runner(recorder)
            rounds = tuple(self._run_rounds(runner, folder, observer))
            recorder.add_span(_epoch_span(began_ns))
        if self.comm.rank == 0:
            write_throughput(folder, runner.throughput)
        deliveries = tuple(_reconcile(observer, runner, rounds))
        written = [figures.ended_at_s for figures in rounds if figures.round.direction == "write"]
        earlier = self.prepared.earlier
        # MLPerf Storage limits the gap between writing and reading, also across two runs.
        if not written and earlier is not None and earlier.last_written_s is not None:
            written = [earlier.last_written_s]
        read_from_s = next(
            (figures.began_at_s for figures in rounds if figures.round.direction == "read"), None
        )
        if self.request.removes:
            steps = {*(figures.round.step for figures in rounds), *(earlier.step_numbers if earlier else ())}
            checkpoint_folder.remove_steps(runner.storages[0], sorted(steps), comm=self.comm)
        return CheckpointResult(
            model=self.request.model.name,
            ranks=self.comm.size,
            results_dir=str(folder),
            target=runner.storages[0].uri,
            total_bytes=self.request.layout.total_bytes,
            seed=self.prepared.seed,
            rounds=rounds,
            gap_s=read_from_s - max(written) if read_from_s is not None and written else None,
            earlier=EarlierRun(run_folder=earlier.run_folder, kept_steps=earlier.step_numbers)
            if earlier
            else None,
            shift=self.shift,
            storage_options=runner.storages[0].options,
            deliveries=deliveries,
            peak_rss_bytes=tuple(self.comm.gather(peak_rss_bytes(), awaiting="all ranks' memory")),
        )

    def _make_runner(self, recorder: StepRecorder) -> checkpoint_rounds.RoundRunner:
        """What all rounds share, warmed up before the first of them."""
        layout, rank = self.request.layout, self.comm.rank
        read_rank = checkpoint_rounds.choose_source_process(
            rank, num_processes=self.comm.size, shift=self.shift
        )
        pipe = checkpoint_rounds.fit_pipe(
            self.request.pipe,
            max(
                (checkpoint_rounds.plan_objects(layout, process, 1) for process in (rank, read_rank)),
                key=lambda planned: sum(file.size_bytes for file in planned),
            ),
        )
        memory = WarmMemory(pipe.buffer_memory_bytes)
        if layout.bytes_of_processes()[[rank, read_rank]].any():
            memory.touch()
            Content(self.prepared.seed, 0).prepare_verification()
        return checkpoint_rounds.RoundRunner(
            comm=self.comm,
            layout=layout,
            storages=[self.reopen() for _ in range(pipe.streams)],
            pipe=pipe,
            memory=memory,
            seed=self.prepared.seed,
            shift=self.shift,
            syncs_ranks=self.request.model.workload.checkpoint.rank_sync,
            progress=self.progress,
            recorder=recorder,
        )

    def _run_rounds(
        self, runner: checkpoint_rounds.RoundRunner, folder: Path, observer: DeviceObserver
    ) -> Iterator[RoundFigures]:
        rounds, earlier = self.prepared.rounds, self.prepared.earlier
        # Another run's checkpoints stay noted, with this run's folder.
        marker = checkpoint_folder.CheckpointMarker(
            content_version=CONTENT_VERSION,
            seed=self.prepared.seed,
            shape=self.request.shape,
            run_folder=str(folder.absolute()),
            steps=earlier.steps if earlier else (),
        )
        interval_s = self.request.model.workload.checkpoint.time_between_checkpoints_s
        for checkpoint, pause_s in zip(
            rounds, checkpoint_rounds.seconds_between(rounds, interval_s), strict=True
        ):
            compute_until(time.monotonic_ns() + round(pause_s * 1e9), SystemClock())
            last = max(other.number for other in rounds if other.direction == checkpoint.direction)
            with observer.during(checkpoint.direction):
                figures = runner.run(checkpoint, last=last)
            if checkpoint.direction == "write":
                marker = marker.with_step(checkpoint.step, figures.ended_at_s)
                checkpoint_folder.update_marker(runner.storages[0], marker, comm=self.comm)
            yield figures


def _reconcile(
    observer: DeviceObserver, runner: checkpoint_rounds.RoundRunner, rounds: Sequence[RoundFigures]
) -> Iterator[IoReconciliation]:
    """Compare what devices moved with what the storages did, in each direction there was. Collective."""
    counted = sum((storage.counters.snapshot() for storage in runner.storages), Counters())
    directions = {figures.round.direction for figures in rounds}
    if "write" in directions:
        yield observer.deliver("write", counted.written_bytes)
    if "read" in directions:
        yield observer.deliver("read", counted.read_bytes)


def _epoch_span(began_ns: int) -> step_events.SpanEvent:
    """DLIO's single epoch of a run without training."""
    return step_events.SpanEvent(
        kind=step_events.SpanKind.EPOCH,
        phase=step_events.StepPhase.TRAIN,
        epoch=EPOCH,
        block=0,
        step=0,
        start_ns=began_ns,
        end_ns=time.monotonic_ns(),
        size_bytes=0,
    )
