"""The checkpoint benchmark from start to finish: prepare the folder, write, read, and close the run.

Collective: every rank calls `run_checkpoints` and gets the same result. The run's folder records how it
ended in every case. The marker on storage lists the checkpoints that are complete: rank 0 rewrites it after
each, so a step that it lists was durable on all ranks. Only objects of listed steps are ever deleted, after
the marker.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.bench.checkpoint import checkpoint_rounds
from penstock.bench.checkpoint.checkpoint_result import EPOCH, CheckpointResult, CheckpointRound, RoundFigures
from penstock.bench.checkpoint.checkpoint_rounds import plan_rounds
from penstock.bench.compute import SystemClock, compute_until
from penstock.bench.device_counters import DeviceObserver
from penstock.bench.loader.loader_protocol import OpenStorage
from penstock.bench.run_settings import RunSettings
from penstock.bench.state_layout import StateLayout, checkpoint_folder
from penstock.bench.step_recorder import RunTrace, StepRecorder, read_clocks
from penstock.cluster.comm import Comm, all_gather_results
from penstock.dataset.content import CONTENT_VERSION, Content
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.results import counter_files, event_files, published_files, run_folder, step_events
from penstock.results.checkpoint_files import write_throughput
from penstock.results.counter_files import IoReconciliation
from penstock.results.provenance import peak_rss_bytes
from penstock.storage import Counters, Storage, capabilities
from penstock.storage.capabilities import find_local_root
from penstock.storage.protocol import read_object, write_object
from penstock.storage.volumes import nearest_folder, read_volume_id, require_free_space
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.pipeline import PipelineSettings
from penstock.workload.enums import CheckpointMode
from penstock.workload.load_workload import CheckpointModel

Result = TypeVar("Result")

KEY: Final = "penstock-checkpoints.json"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShape:
    """The settings that two runs must share to read each other's checkpoints; `scale` is exact."""

    model: str
    processes: int
    mode: str
    scale: str
    total_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedStep:
    """One complete checkpoint; `ended_at_s` is by the wall clock of the rank 0 that wrote it."""

    step: int
    ended_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMarker:
    """The contents of a folder. `run_folder` has the results of the run that wrote the marker last."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: int = FORMAT_VERSION
    content_version: int
    seed: int
    shape: CheckpointShape
    run_folder: str
    steps: tuple[MarkedStep, ...] = ()

    @property
    def step_numbers(self) -> tuple[int, ...]:
        """The steps of all checkpoints, ascending."""
        return tuple(sorted(marked.step for marked in self.steps))

    @property
    def last_written_s(self) -> float | None:
        """The moment at which the last checkpoint became durable."""
        return max((marked.ended_at_s for marked in self.steps), default=None)

    def with_step(self, step: int, ended_at_s: float) -> CheckpointMarker:
        """The same with one more checkpoint."""
        others = tuple(marked for marked in self.steps if marked.step != step)
        return replace(self, steps=(*others, MarkedStep(step=step, ended_at_s=ended_at_s)))


def read_marker(storage: Storage) -> CheckpointMarker | None:
    """The marker at `storage`; None if it has no checkpoints of this benchmark."""
    try:
        text = bytes(read_object(storage, KEY))
    except ObjectNotFound:
        return None
    try:
        return TypeAdapter(CheckpointMarker).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise StorageError(
            f"This is not as Penstock writes it: {place}: {first['msg']}",
            uri=f"{storage.uri}/{KEY}",
            fix="Choose another folder with --to, or remove this one's contents.",
        ) from error


_SEED_BITS = 63


def prepare_folder(
    request: CheckpointRequest, storage: Storage, *, comm: Comm, tell: Callable[[str], None]
) -> tuple[tuple[CheckpointRound, ...], int, CheckpointMarker | None]:
    """Read the marker, remove what is to be replaced, and plan the rounds; the same on all ranks.

    Returns the rounds, the seed, and the marker of earlier checkpoints that are kept and used, if any.
    """
    marker = _run_on_rank0(comm, lambda: read_marker(storage), awaiting="what is at the target")
    section = request.model.workload.checkpoint
    num_writes, num_reads = section.num_checkpoints_write, section.num_checkpoints_read
    if num_writes + num_reads == 0:
        raise UsageError(
            "Nothing is to be written or read",
            fix="Give --writes or --reads (checkpoint.num_checkpoints_write, num_checkpoints_read).",
        )
    keeps = not num_writes or (request.resumes and marker is not None)
    if not keeps:
        rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, kept_steps=())
        if marker is not None:
            tell(f"Replacing {len(marker.steps)} checkpoints at {storage.uri}")
            remove_steps(storage, marker.step_numbers, comm=comm)
        drawn = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        seed = comm.broadcast(drawn, awaiting="the seed of all content")
        return rounds, seed, None
    if marker is None:
        raise UsageError(
            "There are no checkpoints of this benchmark here",
            where=storage.uri,
            fix="Write some first: --writes 10, with --reads 0 if they are to be read later.",
        )
    _require_same_settings(marker, request, uri=storage.uri)
    rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, kept_steps=marker.step_numbers)
    return rounds, marker.seed, marker


def _require_same_settings(marker: CheckpointMarker, request: CheckpointRequest, *, uri: str) -> None:
    """`UsageError` that names each difference between these checkpoints and the request."""
    shape, wanted = asdict(marker.shape), asdict(request.shape)
    differences = [
        f"{name} {shape[name]}, not {wanted[name]}" for name in wanted if shape[name] != wanted[name]
    ]
    if differences:
        raise UsageError(
            f"The checkpoints here were written with other settings: {'; '.join(differences)}",
            where=uri,
            fix="Ask for the same model, ranks and scale, or write them again with --writes.",
        )
    if marker.content_version != CONTENT_VERSION:
        raise UsageError(
            f"The content here is of version {marker.content_version}, not {CONTENT_VERSION}",
            where=uri,
            fix="Write the checkpoints again.",
        )
    if request.seed is not None and request.seed != marker.seed:
        raise UsageError(
            f"The checkpoints here have seed {marker.seed}, not {request.seed}",
            where=uri,
            fix="Leave --seed out, or write them again.",
        )


def update_marker(storage: Storage, marker: CheckpointMarker, *, comm: Comm) -> None:
    """Replace the marker, durably, before any rank continues. Collective."""
    text = TypeAdapter(CheckpointMarker).dump_json(marker, indent=2) + b"\n"
    _run_on_rank0(
        comm, lambda: write_object(storage, KEY, [text]), awaiting="rank 0 to note a complete checkpoint"
    )


def remove_steps(storage: Storage, steps: Sequence[int], *, comm: Comm) -> None:
    """Delete complete checkpoints and their marker; ranks share the files. Collective."""
    folders = [checkpoint_folder(EPOCH, step) for step in steps]
    # The marker goes first: what it lists must be complete, whenever this is interrupted.
    _run_on_rank0(comm, lambda: _delete(storage, [KEY]), awaiting="the marker of checkpoints to be deleted")
    keys = _run_on_rank0(
        comm,
        lambda: [stored.key for folder in folders for stored in storage.list(folder)],
        awaiting="old checkpoints' files",
    )
    all_gather_results(
        comm,
        lambda: _delete(storage, keys[comm.rank :: comm.size]),
        awaiting="old checkpoints to be deleted",
    )
    paths = capabilities.find_local_paths(storage)
    if comm.rank == 0 and paths is not None:
        for folder in folders:
            # A folder with files of other programs stays.
            with suppress(OSError):
                Path(paths.local_path(f"{folder}/any")).parent.rmdir()


def _run_on_rank0(comm: Comm, work: Callable[[], Result], *, awaiting: str) -> Result:
    """As `comm.run_on_rank0`, but a failure is `RankFailed` in a process without other ranks, too."""
    results = all_gather_results(comm, lambda: work() if comm.rank == 0 else None, awaiting=awaiting)
    return cast("Result", results[0])


def _delete(storage: Storage, keys: Sequence[str]) -> None:
    for key in keys:
        with suppress(ObjectNotFound):
            storage.delete(key)


def require_room(root: Path | None, bytes_of_ranks: Sequence[int], *, comm: Comm) -> None:
    """`OutOfSpace` on all ranks unless each file system has room for what its ranks will write. Collective.

    `root` is the storage's local folder; None for a storage that is not a file system.
    """
    volumes = comm.gather(identify_volume(root), awaiting="where all ranks write")
    needed = sum(
        size for size, volume in zip(bytes_of_ranks, volumes, strict=True) if volume == volumes[comm.rank]
    )
    all_gather_results(
        comm,
        lambda: require_free_space(
            root, needed, what="Writing all checkpoints", fix="write fewer, or a smaller --scale"
        ),
        awaiting="all nodes to check their free space",
    )


def identify_volume(root: Path | None) -> str:
    """Identify a file system: the same text on all nodes for a shared one; "" for a storage without files."""
    return "" if root is None else read_volume_id(nearest_folder(root))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest(RunSettings):
    """A request for a checkpoint benchmark.

    `model.workload.checkpoint` says how many writes and reads, and how; it is what is really run, options
    included, so the run's record shows it. A `seed` of None is drawn for writing, and taken from the
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
    def shape(self) -> CheckpointShape:
        """The settings that another run needs to read these checkpoints."""
        layout, mode = self.layout, "subset" if self.layout.is_subset else "default"
        return CheckpointShape(
            model=self.model.workload.full_name,
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
            "model": self.model.workload.full_name,
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
    progress: Progress,
    tell: Tell = lambda _text: None,
) -> CheckpointResult:
    """Write and read as the request's workload says; the same result on every rank."""
    storage = reopen()
    rounds, seed, earlier = prepare_folder(request, storage, comm=comm, tell=tell)
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    num_writes = sum(checkpoint.direction == "write" for checkpoint in rounds)
    sizes = request.layout.bytes_of_processes().tolist()
    require_room(find_local_root(storage), [size * num_writes for size in sizes], comm=comm)
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
                seeds={"content": seed},
                plan=request.plan_document(),
                progress=progress,
            )
        )
        board = checkpoint_rounds.ProgressBoard(
            folder / checkpoint_rounds.PROGRESS_FILE, rank=comm.rank, num_ranks=comm.size
        )
        session = _Session(
            request=request,
            reopen=reopen,
            comm=comm,
            rounds=rounds,
            seed=seed,
            earlier=earlier,
            shift=shift,
            progress=checkpoint_rounds.RoundProgress(
                board, rank=comm.rank, progress=progress, heartbeat=run.heartbeat if run else lambda: None
            ),
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
    rounds: tuple[CheckpointRound, ...]
    seed: int
    earlier: CheckpointMarker | None
    shift: int
    progress: checkpoint_rounds.RoundProgress

    def run(self, folder: Path) -> CheckpointResult:
        """Run all rounds; afterwards the folder's spools have their spans."""
        self.progress.expect(self.request.layout.total_bytes * len(self.rounds))
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
        earlier = self.earlier
        # MLPerf Storage limits the gap between writing and reading, also across two runs.
        if not written and earlier is not None and earlier.last_written_s is not None:
            written = [earlier.last_written_s]
        read_from_s = next(
            (figures.began_at_s for figures in rounds if figures.round.direction == "read"), None
        )
        kept = {"run_folder": earlier.run_folder, "kept_steps": earlier.step_numbers} if earlier else None
        if self.request.removes:
            steps = {*(figures.round.step for figures in rounds), *(earlier.step_numbers if earlier else ())}
            remove_steps(runner.storages[0], sorted(steps), comm=self.comm)
        return CheckpointResult(
            model=self.request.model.workload.full_name,
            ranks=self.comm.size,
            results_dir=str(folder),
            target=runner.storages[0].uri,
            total_bytes=self.request.layout.total_bytes,
            seed=self.seed,
            rounds=rounds,
            gap_s=read_from_s - max(written) if read_from_s is not None and written else None,
            earlier=kept,
            shift=self.shift,
            storage_options=runner.storages[0].options,
            deliveries=deliveries,
            peak_rss_bytes=tuple(self.comm.gather(peak_rss_bytes(), awaiting="all ranks' memory")),
        )

    def _make_runner(self, recorder: StepRecorder) -> checkpoint_rounds.RoundRunner:
        """Make what all rounds share, warmed up before the first of them."""
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
            Content(self.seed, 0).prepare_verification()
        return checkpoint_rounds.RoundRunner(
            comm=self.comm,
            layout=layout,
            storages=[self.reopen() for _ in range(pipe.streams)],
            pipe=pipe,
            memory=memory,
            seed=self.seed,
            shift=self.shift,
            syncs_ranks=self.request.model.workload.checkpoint.rank_sync,
            progress=self.progress,
            recorder=recorder,
        )

    def _run_rounds(
        self, runner: checkpoint_rounds.RoundRunner, folder: Path, observer: DeviceObserver
    ) -> Iterator[RoundFigures]:
        rounds, earlier = self.rounds, self.earlier
        # Another run's checkpoints stay noted, with this run's folder.
        marker = CheckpointMarker(
            content_version=CONTENT_VERSION,
            seed=self.seed,
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
                update_marker(runner.storages[0], marker, comm=self.comm)
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
