"""The checkpoint benchmark from start to finish: prepare the folder, write, read, and close the run.

Collective: every rank calls `run_checkpoints` and gets the same result. However the run ends, its folder
records it. The marker on storage lists the checkpoints that are complete: rank 0 rewrites it after each
checkpoint is durable on all ranks. Only objects of listed steps are ever deleted, and the marker is deleted
before them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.bench.checkpoint.checkpoint_result import EPOCH, CheckpointResult, CheckpointRound, RoundFigures
from penstock.bench.checkpoint.checkpoint_rounds import (
    PROGRESS_FILE,
    ProgressBoard,
    RoundProgress,
    RoundRunner,
    fit_pipe,
    plan_objects,
    plan_rounds,
    rank_shift,
)
from penstock.bench.loader.loader_protocol import OpenStorage
from penstock.bench.recorded_run import DeviceObserver, RunSettings, record_run
from penstock.bench.state_layout import StateLayout, checkpoint_folder
from penstock.cluster.comm import Comm, all_gather_results, held_on_rank0
from penstock.dataset.content import CONTENT_VERSION, Content
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.results import counter_files, event_files, published_files, run_folder
from penstock.results.checkpoint_files import write_throughput
from penstock.results.counter_files import Direction
from penstock.results.provenance import peak_rss_bytes
from penstock.results.step_events import SpanEvent, SpanKind, StepPhase
from penstock.storage import Counters, Storage, capabilities
from penstock.storage.capabilities import find_local_root
from penstock.storage.protocol import read_object, write_object
from penstock.storage.volumes import locked_folder, nearest_folder, read_volume_id, require_free_space
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.pipeline import PipelineSettings
from penstock.units import format_count
from penstock.workload.enums import CheckpointMode
from penstock.workload.load_workload import CheckpointModel
from penstock.workload.spec import CheckpointSection

Result = TypeVar("Result")

KEY: Final = "penstock-checkpoints.json"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShape:
    """The settings that two runs must have in common to read each other's checkpoints. `scale` is exact."""

    model: str
    processes: int
    mode: str
    scale: str
    total_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedStep:
    """One complete checkpoint. `ended_at_s` is a time of rank 0's wall clock, in the run that wrote it."""

    step: int
    ended_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMarker:
    """The marker, which says what a folder of checkpoints contains.

    `run_folder` has the results of the run that last wrote the marker.
    """

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


def read_marker(storage: Storage) -> CheckpointMarker | None:
    """Read the marker at `storage`; None if it holds no checkpoints of this benchmark."""
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
    """Read the marker, remove what will be replaced, and plan the same rounds on all ranks.

    Returns the rounds, the seed, and the marker of earlier checkpoints that are kept and used, if there are
    any.
    """
    marker = _run_on_rank0(comm, lambda: read_marker(storage), awaiting="what is at the target")
    section = request.model.workload.checkpoint
    num_writes, num_reads = section.num_checkpoints_write, section.num_checkpoints_read
    if num_writes + num_reads == 0:
        raise UsageError(
            "There is nothing to write or read",
            fix="Give --writes or --reads (checkpoint.num_checkpoints_write, num_checkpoints_read).",
        )
    keeps = not num_writes or (request.resumes and marker is not None)
    if not keeps:
        rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, kept_steps=())
        if marker is not None:
            tell(f"Replacing {format_count(len(marker.steps), 'checkpoint')} at {storage.uri}")
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
    """Raise `UsageError`, naming each difference, if these checkpoints do not match the request."""
    found = {**asdict(marker.shape), "seed": marker.seed, "content version": marker.content_version}
    wanted = {**asdict(request.shape), "seed": request.seed, "content version": CONTENT_VERSION}
    differences = [
        f"{name} {found[name]}, not {wanted[name]}"
        for name in wanted
        if wanted[name] is not None and found[name] != wanted[name]
    ]
    if differences:
        raise UsageError(
            f"The checkpoints here were written with other settings: {'; '.join(differences)}",
            where=uri,
            fix="Use the same model, ranks, scale and seed, or write them again with --writes.",
        )


def remove_steps(storage: Storage, steps: Sequence[int], *, comm: Comm) -> None:
    """Delete complete checkpoints and their marker. All ranks share the work. Collective."""
    folders = [checkpoint_folder(EPOCH, step) for step in steps]
    # The marker goes first, because what it lists must be complete whenever this is interrupted.
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
            # A folder that holds files of other programs stays.
            with suppress(OSError):
                Path(paths.local_path(f"{folder}/any")).parent.rmdir()


def _run_on_rank0(comm: Comm, work: Callable[[], Result], *, awaiting: str) -> Result:
    """Return the result of `work` on rank 0; a failure raises `RankFailed`, even without other ranks."""
    results = all_gather_results(comm, lambda: work() if comm.rank == 0 else None, awaiting=awaiting)
    return cast("Result", results[0])


def _delete(storage: Storage, keys: Sequence[str]) -> None:
    for key in keys:
        with suppress(ObjectNotFound):
            storage.delete(key)


def require_room(root: Path | None, bytes_of_ranks: Sequence[int], *, comm: Comm) -> None:
    """Raise `OutOfSpace` on all ranks if a file system lacks room for what its ranks will write. Collective.

    `root` is the storage's local folder; None if the storage is not a file system.
    """
    # All nodes have the same identifier for a shared file system.
    mine = "" if root is None else read_volume_id(nearest_folder(root))
    volumes = comm.gather(mine, awaiting="where all ranks write")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest(RunSettings):
    """A request for a checkpoint benchmark.

    `model.workload.checkpoint` says how many checkpoints are written and read, and how. It includes the
    command's options, so the run's record shows what was really run. If `seed` is None, writing draws one,
    and reading takes the marker's. With `resumes`, complete checkpoints of an interrupted run are kept; with
    `removes`, all are deleted at the end.
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
        """The settings with which another run can read these checkpoints."""
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
        """Return the plan for the run's record, as plain values."""
        return {
            "kind": "checkpoint",
            "model": self.model.workload.full_name,
            "parameters": self.layout.num_parameters,
            "parallelism": asdict(self.layout.mesh),
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
    """Return the model with `changes` to its workload's section `checkpoint`; values of None are ignored."""
    given = {name: value for name, value in changes.items() if value is not None}
    if "mode" in given:
        given["mode"] = CheckpointMode(str(given["mode"]))
    checkpoint = replace(model.workload.checkpoint, **given)  # type: ignore[arg-type]  # callers name fields
    return replace(model, workload=replace(model.workload, checkpoint=checkpoint))


Tell = Callable[[str], None]
"""Prints a line for people, on rank 0."""


def run_checkpoints(
    request: CheckpointRequest,
    reopen: OpenStorage,
    *,
    comm: Comm,
    progress: Progress,
    tell: Tell = lambda _text: None,
) -> CheckpointResult:
    """Write and read as the request's workload says. Returns the same result on every rank.

    A run that neither writes nor removes checkpoints may share the folder with other such runs.
    """
    changes = bool(request.model.workload.checkpoint.num_checkpoints_write) or request.removes
    lock = locked_folder(find_local_root(reopen()), alone=changes)
    with held_on_rank0(comm, lock, awaiting="rank 0 to lock the folder"):
        return _run_checkpoints(request, reopen, comm=comm, progress=progress, tell=tell)


def _run_checkpoints(
    request: CheckpointRequest, reopen: OpenStorage, *, comm: Comm, progress: Progress, tell: Tell
) -> CheckpointResult:
    storage, workload, layout = reopen(), request.model.workload, request.layout
    rounds, seed, earlier = prepare_folder(request, storage, comm=comm, tell=tell)
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    num_writes = sum(checkpoint.direction == "write" for checkpoint in rounds)
    sizes = layout.bytes_of_processes()
    require_room(find_local_root(storage), (sizes * num_writes).tolist(), comm=comm)
    shift = rank_shift(hosts) if workload.checkpoint.recovery_rank_shift else 0
    if workload.checkpoint.recovery_rank_shift and not shift:
        tell("checkpoint.recovery_rank_shift: all ranks are on one host, so each reads what it wrote")
    opened = request.open_run(
        workload,
        comm=comm,
        seeds={"content": seed},
        plan={**request.plan_document(), "access": {"to": storage.uri, "storage": dict(storage.options)}},
        progress=progress,
    )
    # Commands that name the folder have no --resume.
    hint = _hint_at_resuming(tell) if request.run_folder is None else nullcontext()
    with hint, opened as (run, folder):
        board = ProgressBoard(folder / PROGRESS_FILE, rank=comm.rank, num_ranks=comm.size)
        heartbeat = run.heartbeat if run else lambda: None
        watch = RoundProgress(board, rank=comm.rank, progress=progress, heartbeat=heartbeat)
        pauses_s = workload.checkpoint.time_between_checkpoints_s * (len(rounds) - 1)
        progress.expect(layout.total_bytes * len(rounds), "written_bytes", "read_bytes", pauses_s=pauses_s)
        began_ns = time.monotonic_ns()
        with record_run(comm, folder, reopen()) as (recorder, observer):
            # All rounds share this; it is warmed up before the first of them.
            processes = (comm.rank, (comm.rank + shift) % comm.size)
            largest = max(processes, key=lambda process: sizes[process])
            pipe = fit_pipe(request.pipe, plan_objects(layout, largest, 1))
            memory = WarmMemory(pipe.buffer_memory_bytes)
            if sizes[largest]:
                memory.touch()
                Content(seed, 0).prepare_verification()
            runner = RoundRunner(
                comm=comm,
                layout=layout,
                storages=[reopen() for _ in range(pipe.streams)],
                pipe=pipe,
                memory=memory,
                seed=seed,
                shift=shift,
                syncs_ranks=workload.checkpoint.rank_sync,
                progress=watch,
                recorder=recorder,
            )
            # The marker still lists the other run's checkpoints, now with this run's folder.
            marker = CheckpointMarker(
                content_version=CONTENT_VERSION,
                seed=seed,
                shape=request.shape,
                run_folder=str(folder.absolute()),
                steps=earlier.steps if earlier else (),
            )
            result = CheckpointResult(
                model=request.model.workload.full_name,
                ranks=comm.size,
                results_dir=str(folder),
                target=storage.uri,
                total_bytes=layout.total_bytes,
                full_bytes=layout.full_bytes,
                seed=seed,
                rounds=(),
                gap_s=None,
                earlier={"run_folder": earlier.run_folder, "kept_steps": earlier.step_numbers}
                if earlier
                else None,
                shift=shift,
                storage_options=storage.options,
                peak_rss_bytes=(),
            )
            try:
                for figures in _run_rounds(rounds, workload.checkpoint, runner, observer, marker):
                    done = (*result.rounds, figures)
                    result = replace(result, rounds=done, gap_s=_find_gap(done, earlier))
                    # Whatever ends the run later, the figures of finished rounds are kept.
                    if run is not None:
                        published_files.write_json(folder, run_folder.CHECKPOINTS_FILE, result.document())
            finally:
                if comm.rank == 0:
                    write_throughput(folder, runner.throughput)
            recorder.add_span(
                SpanEvent(  # DLIO's single epoch of a run without training
                    kind=SpanKind.EPOCH,
                    phase=StepPhase.TRAIN,
                    epoch=EPOCH,
                    block=0,
                    step=0,
                    start_ns=began_ns,
                    end_ns=time.monotonic_ns(),
                )
            )
        counted = sum((storage.counters.snapshot() for storage in runner.storages), Counters())
        moved: tuple[tuple[Direction, int], ...] = (
            ("write", counted.written_bytes),
            ("read", counted.read_bytes),
        )
        directions = {checkpoint.direction for checkpoint in rounds}
        deliveries = tuple(observer.deliver(one, size) for one, size in moved if one in directions)
        if request.removes:
            steps = {*(checkpoint.step for checkpoint in rounds), *(earlier.step_numbers if earlier else ())}
            remove_steps(storage, sorted(steps), comm=comm)
        result = replace(
            result,
            deliveries=deliveries,
            peak_rss_bytes=tuple(comm.gather(peak_rss_bytes(), awaiting="all ranks' memory")),
        )
        if run is not None:
            board.remove()
            event_files.gather_events(folder, comm.size)
            counter_files.gather_counters(folder)
            published_files.write_json(folder, run_folder.CHECKPOINTS_FILE, result.document())
            request.write_dlio_files(run, workload)
            run.finish(deliveries=result.deliveries, is_right=result.is_right)
        # Ranks' results differ only in their wall clocks; rank 0's clock counts.
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


@contextmanager
def _hint_at_resuming(tell: Tell) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        tell("Complete checkpoints are kept; run the same command with --resume to continue.")
        raise


def _run_rounds(
    rounds: Sequence[CheckpointRound],
    section: CheckpointSection,
    runner: RoundRunner,
    observer: DeviceObserver,
    marker: CheckpointMarker,
) -> Iterator[RoundFigures]:
    """Run all rounds; after each write, replace the marker durably. Collective."""
    storage = runner.storages[0]
    for place, checkpoint in enumerate(rounds):
        last = max(other.number for other in rounds if other.direction == checkpoint.direction)
        if place:
            runner.progress.pause(section.time_between_checkpoints_s)
        with observer.during(checkpoint.direction):
            figures = runner.run(checkpoint, last=last)
        if checkpoint.direction == "write":
            noted = MarkedStep(step=checkpoint.step, ended_at_s=figures.ended_at_s)
            others = (marked for marked in marker.steps if marked.step != checkpoint.step)
            marker = replace(marker, steps=(*others, noted))
            text = TypeAdapter(CheckpointMarker).dump_json(marker, indent=2) + b"\n"
            _run_on_rank0(
                runner.comm,
                partial(write_object, storage, KEY, [text]),
                awaiting="rank 0 to note a complete checkpoint",
            )
        yield figures


def _find_gap(rounds: Sequence[RoundFigures], earlier: CheckpointMarker | None) -> float | None:
    """Return the time from the last write, perhaps of an earlier run, to the first read. MLPerf limits it."""
    written = [figures.ended_at_s for figures in rounds if figures.round.direction == "write"]
    if not written and earlier is not None:
        written = [marked.ended_at_s for marked in earlier.steps]
    read_from_s = next((one.began_at_s for one in rounds if one.round.direction == "read"), None)
    return None if read_from_s is None or not written else read_from_s - max(written)
