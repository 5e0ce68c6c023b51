"""What lies in a folder of checkpoints, said by a small object beside them: how they were written, and which.

Place in the flow: written by rank 0 after each whole checkpoint, read by whoever reads them back, resumes, or
replaces them. Invariant: a step that is named here was durable on all ranks before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.storage.whole import read_object, write_object

if TYPE_CHECKING:
    from penstock.storage import Storage

KEY: Final = "penstock-checkpoints.json"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What two runs must have in common to read each other's checkpoints; `scale` is an exact fraction."""

    model: str
    processes: int
    mode: str
    scale: str
    total_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """One whole checkpoint; `ended_at_s` is by the wall clock of the rank 0 that wrote it."""

    step: int
    ended_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """All of a folder. `run_folder` is where the run that wrote it last keeps its results."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: int = FORMAT_VERSION
    content_version: int
    seed: int
    shape: Shape
    run_folder: str
    steps: tuple[KeptStep, ...] = ()

    @property
    def step_numbers(self) -> tuple[int, ...]:
        """The steps that are there, ascending."""
        return tuple(sorted(each.step for each in self.steps))

    @property
    def last_written_s(self) -> float | None:
        """When the last of them was durable."""
        return max((each.ended_at_s for each in self.steps), default=None)

    def with_step(self, step: int, ended_at_s: float) -> Marker:
        """The same, and one more checkpoint."""
        others = tuple(each for each in self.steps if each.step != step)
        return replace(self, steps=(*others, KeptStep(step=step, ended_at_s=ended_at_s)))


def read_marker(storage: Storage) -> Marker | None:
    """The marker of this place; None if no checkpoints of ours lie there."""
    try:
        text = bytes(read_object(storage, KEY))
    except ObjectNotFound:
        return None
    try:
        return TypeAdapter(Marker).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise StorageError(
            f"This is not as Penstock writes it: {place}: {first['msg']}",
            uri=f"{storage.uri}/{KEY}",
            fix="Name another place with --to, or remove what lies here.",
        ) from error


def write_marker(storage: Storage, marker: Marker) -> None:
    """Replace the marker; durable once this returns."""
    write_object(storage, KEY, [TypeAdapter(Marker).dump_json(marker, indent=2) + b"\n"])


def require_same_shape(found: Marker, wanted: Shape, *, uri: str) -> None:
    """`UsageError` that names each difference, if these checkpoints are others than are asked for."""
    seen, asked = asdict(found.shape), asdict(wanted)
    differences = [f"{name} {seen[name]}, not {asked[name]}" for name in asked if seen[name] != asked[name]]
    if differences:
        raise UsageError(
            f"The checkpoints here were written otherwise: {'; '.join(differences)}",
            where=uri,
            fix="Ask for the same model, ranks and scale, or write them anew with --writes.",
        )
