"""Read `checkpoints.json` of a run: what its writes and its reads reached.

`bench.checkpoint` writes it. Invariant: another version of the file is refused by its number.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.errors import StorageError
from penstock.results.run_folder import CHECKPOINTS_FILE

FORMAT_VERSION: Final = 1
"""Raised whenever a key is renamed or means something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionFigures:
    """All writes or all reads. Rates are None where the page cache served every read."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")  # the file has many more figures

    checkpoints: int
    bytes: int
    duration_s: float
    gib_per_s: float | None
    mean_gib_per_s: float | None
    p99_ms: float
    bottleneck: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFigures:
    """What a checkpoint run reached; None for a direction that moved nothing."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    model: str
    target: str
    checkpoint_bytes: int
    write: DirectionFigures | None
    read: DirectionFigures | None
    bottleneck: str
    is_right: bool
    gap_s: float | None


def read_checkpoint_figures(folder: Path) -> CheckpointFigures | None:
    """The figures in a run's folder; None if the run has none, or did not finish."""
    path = folder / CHECKPOINTS_FILE
    try:
        text = path.read_bytes()
        value: Any = json.loads(text)
        version = value.get("format") if isinstance(value, dict) else None
        if version != FORMAT_VERSION:
            raise StorageError(
                f"These figures have format {version}, not {FORMAT_VERSION}",
                uri=str(path),
                fix="Read them with the version of Penstock that wrote them.",
            )
        return _adapter().validate_json(text)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StorageError(
            f"This is not as Penstock writes it: {place} {first['msg']}", uri=str(path)
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"Cannot read these figures: {error}", uri=str(path)) from error


@cache
def _adapter() -> TypeAdapter[CheckpointFigures]:
    return TypeAdapter(CheckpointFigures)
