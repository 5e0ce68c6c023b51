"""The checkpoint folder on storage: its marker file, what is removed before a run, and the space it needs.

Collective. Rank 0 rewrites the marker after each complete checkpoint, so a step that it lists was durable on
all ranks. Only objects of listed steps are ever deleted, after the marker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.bench.checkpoint.checkpoint_result import EPOCH, CheckpointRound
from penstock.bench.checkpoint.checkpoint_rounds import plan_rounds
from penstock.bench.state_layout import checkpoint_folder
from penstock.cluster.comm import Comm, all_gather_results
from penstock.dataset.content import CONTENT_VERSION
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.storage import Storage, capabilities
from penstock.storage.protocol import read_object, write_object
from penstock.storage.volumes import nearest_folder, read_volume_id, require_free_space

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest


Result = TypeVar("Result")

KEY: Final = "penstock-checkpoints.json"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShape:
    """What two runs must have in common to read each other's checkpoints; `scale` is an exact fraction."""

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
    """What a folder holds. `run_folder` has the results of the run that wrote the marker last."""

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
        """When the last checkpoint became durable."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRounds:
    """The rounds to run. `earlier` is the marker of checkpoints that are kept and used, if there are any."""

    rounds: tuple[CheckpointRound, ...]
    seed: int
    earlier: CheckpointMarker | None


def prepare_folder(
    request: CheckpointRequest, storage: Storage, *, comm: Comm, tell: Callable[[str], None]
) -> PreparedRounds:
    """Read the marker, remove what is to be replaced, and plan the rounds; the same on all ranks."""
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
        return PreparedRounds(rounds=rounds, seed=seed, earlier=None)
    if marker is None:
        raise UsageError(
            "There are no checkpoints of this benchmark here",
            where=storage.uri,
            fix="Write some first: --writes 10, with --reads 0 if they are to be read later.",
        )
    _require_same_settings(marker, request, uri=storage.uri)
    rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, kept_steps=marker.step_numbers)
    return PreparedRounds(rounds=rounds, seed=marker.seed, earlier=marker)


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
            fix="Ask for the same model, ranks and scale, or write them anew with --writes.",
        )
    if marker.content_version != CONTENT_VERSION:
        raise UsageError(
            f"The content here is of version {marker.content_version}, not {CONTENT_VERSION}",
            where=uri,
            fix="Write the checkpoints anew.",
        )
    if request.seed is not None and request.seed != marker.seed:
        raise UsageError(
            f"The checkpoints here have seed {marker.seed}, not {request.seed}",
            where=uri,
            fix="Leave --seed out, or write them anew.",
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
