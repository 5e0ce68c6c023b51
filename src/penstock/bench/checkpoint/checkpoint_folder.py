"""The checkpoint folder on storage: its marker file, what is removed before a run, and the space it needs.

Collective. Rank 0 rewrites the marker after each complete checkpoint, so a step that it lists was durable on
all ranks. Only objects of listed steps are ever deleted, and the marker goes before them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.bench.checkpoint.round_plan import EPOCH, plan_rounds
from penstock.bench.model_state.state_layout import checkpoint_folder
from penstock.cluster.comm import all_gather_results
from penstock.dataset.content import CONTENT_VERSION
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.storage.capabilities import find_local_paths
from penstock.storage.protocol import read_object, write_object
from penstock.storage.volumes import nearest_folder, read_volume_id, require_free_space

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest
    from penstock.bench.checkpoint.round_plan import CheckpointRound
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage


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
    """One whole checkpoint; `ended_at_s` is by the wall clock of the rank 0 that wrote it."""

    step: int
    ended_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMarker:
    """All of a folder. `run_folder` is where the run that wrote it last keeps its results."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: int = FORMAT_VERSION
    content_version: int
    seed: int
    shape: CheckpointShape
    run_folder: str
    steps: tuple[MarkedStep, ...] = ()

    @property
    def step_numbers(self) -> tuple[int, ...]:
        """The steps that are there, ascending."""
        return tuple(sorted(each.step for each in self.steps))

    @property
    def last_written_s(self) -> float | None:
        """When the last of them was durable."""
        return max((each.ended_at_s for each in self.steps), default=None)

    def with_step(self, step: int, ended_at_s: float) -> CheckpointMarker:
        """The same, and one more checkpoint."""
        others = tuple(each for each in self.steps if each.step != step)
        return replace(self, steps=(*others, MarkedStep(step=step, ended_at_s=ended_at_s)))


def read_marker(storage: Storage) -> CheckpointMarker | None:
    """The marker at `storage`; None if no checkpoints of this benchmark are there."""
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


def write_marker(storage: Storage, marker: CheckpointMarker) -> None:
    """Replace the marker; durable once this returns."""
    write_object(storage, KEY, [TypeAdapter(CheckpointMarker).dump_json(marker, indent=2) + b"\n"])


def require_same_shape(found: CheckpointMarker, wanted: CheckpointShape, *, uri: str) -> None:
    """`UsageError` that names each difference, if these checkpoints are others than are asked for."""
    seen, asked = asdict(found.shape), asdict(wanted)
    differences = [f"{name} {seen[name]}, not {asked[name]}" for name in asked if seen[name] != asked[name]]
    if differences:
        raise UsageError(
            f"The checkpoints here were written with other settings: {'; '.join(differences)}",
            where=uri,
            fix="Ask for the same model, ranks and scale, or write them anew with --writes.",
        )


_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRounds:
    """What is to be done here. `earlier` is the marker of checkpoints that are kept and used, if any are."""

    rounds: tuple[CheckpointRound, ...]
    seed: int
    earlier: CheckpointMarker | None


def prepare_folder(
    request: CheckpointRequest, storage: Storage, *, comm: Comm, tell: Callable[[str], None]
) -> PreparedRounds:
    """Read the marker, remove what is to be replaced, and plan the rounds; the same on all ranks."""
    found = all_gather_results(
        comm, lambda: read_marker(storage) if comm.rank == 0 else None, awaiting="what lies at the target"
    )[0]
    asked = request.model.workload.checkpoint
    num_writes, num_reads = asked.num_checkpoints_write, asked.num_checkpoints_read
    if num_writes + num_reads == 0:
        raise UsageError(
            "Nothing is to be written or read",
            fix="Give --writes or --reads (checkpoint.num_checkpoints_write, num_checkpoints_read).",
        )
    keeps = not num_writes or (request.resumes and found is not None)
    if not keeps:
        rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, there=())
        if found is not None:
            tell(f"Replacing {len(found.steps)} checkpoints that lie at {storage.uri}")
            remove_steps(storage, found.step_numbers, comm=comm)
        drawn = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        seed = comm.broadcast(drawn, awaiting="the seed of all content")
        return PreparedRounds(rounds=rounds, seed=seed, earlier=None)
    if found is None:
        raise UsageError(
            "There are no checkpoints of this benchmark here",
            where=storage.uri,
            fix="Write some first: --writes 10, with --reads 0 if they are to be read later.",
        )
    require_same_shape(found, request.shape, uri=storage.uri)
    _require_same_content(found, request, storage.uri)
    rounds = plan_rounds(num_writes=num_writes, num_reads=num_reads, there=found.step_numbers)
    return PreparedRounds(rounds=rounds, seed=found.seed, earlier=found)


def update_marker(storage: Storage, marker: CheckpointMarker, *, comm: Comm) -> None:
    """Rewrite the marker before any rank continues."""
    all_gather_results(
        comm,
        lambda: write_marker(storage, marker) if comm.rank == 0 else None,
        awaiting="rank 0 to note a whole checkpoint",
    )


def remove_steps(storage: Storage, steps: Sequence[int], *, comm: Comm) -> None:
    """Delete whole checkpoints and their marker; ranks share the files. Collective."""
    all_gather_results(
        comm,
        lambda: _delete(storage, KEY) if comm.rank == 0 else None,
        awaiting="the marker of checkpoints to be deleted",
    )
    keys = all_gather_results(
        comm, lambda: _keys_of(storage, steps) if comm.rank == 0 else [], awaiting="old checkpoints' files"
    )[0]
    all_gather_results(
        comm,
        lambda: _delete_all(storage, keys[comm.rank :: comm.size]),
        awaiting="old checkpoints to be deleted",
    )
    paths = find_local_paths(storage)
    if comm.rank == 0 and paths is not None:
        for step in steps:
            # A folder with files of other programs stays.
            with suppress(OSError):
                Path(paths.local_path(f"{checkpoint_folder(EPOCH, step)}/any")).parent.rmdir()


def _keys_of(storage: Storage, steps: Sequence[int]) -> list[str]:
    return [each.key for step in steps for each in storage.list(checkpoint_folder(EPOCH, step))]


def _delete_all(storage: Storage, keys: Sequence[str]) -> None:
    for key in keys:
        _delete(storage, key)


def _delete(storage: Storage, key: str) -> None:
    with suppress(ObjectNotFound):
        storage.delete(key)


def _require_same_content(found: CheckpointMarker, request: CheckpointRequest, uri: str) -> None:
    if found.content_version != CONTENT_VERSION:
        raise UsageError(
            f"The content here is of version {found.content_version}, not {CONTENT_VERSION}",
            where=uri,
            fix="Write the checkpoints anew.",
        )
    if request.seed is not None and request.seed != found.seed:
        raise UsageError(
            f"The checkpoints here have seed {found.seed}, not {request.seed}",
            where=uri,
            fix="Leave --seed out, or write them anew.",
        )


def require_room(root: Path | None, bytes_of_ranks: Sequence[int], *, comm: Comm) -> None:
    """`OutOfSpace` on all ranks unless each file system holds what its ranks will write. Collective.

    `root` is the storage's local folder; None for a storage that is not of files.
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
    """What tells one file system from another: the same on all nodes for a shared one. "" without files."""
    return "" if root is None else read_volume_id(nearest_folder(root))
