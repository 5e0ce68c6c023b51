"""What a study leaves of itself beside its traces: `study.json`, and `row.json` for each row that is done.

The one module that knows their names and schemas. Invariant: a row's record is written last, and at once, so
a row that has one is whole.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import StorageError, UsageError
from penstock.storage.files.durable import write_durably

VERSION: Final = 1
STUDY_FILE: Final = "study.json"
ROW_FILE: Final = "row.json"
RUNS_FILE: Final = "runs.yaml"
TRACES: Final = "traces"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StudyIdentity(_Record):
    """Which study a folder holds, and under which name its checkpoints lie on the levels."""

    version: Literal[1] = VERSION
    place: str
    identity: dict[str, str | int | float]
    penstock: str
    hosts: tuple[str, ...]
    command: tuple[str, ...]


class RowRecord(_Record):
    """What one row was seen to do beside its trace: times are of the slowest rank."""

    name: str
    says: str
    blocked_s: tuple[float, ...]
    """For each checkpoint, how long training waited."""
    drain_s: float
    """After the last step, until all that was to be durable was."""
    took_s: float


AnyRecord = TypeVar("AnyRecord", bound=_Record)


def row_folder(out: Path, name: str) -> Path:
    """What a row leaves: its record and its traces."""
    return out / name


def trace_folder(out: Path, name: str) -> Path:
    """The traces of a row, a file a rank."""
    return row_folder(out, name) / TRACES


def begun_study(out: Path) -> StudyIdentity | None:
    """The study that `out` holds, if it holds one."""
    return _read(StudyIdentity, out / STUDY_FILE)


def begin_study(out: Path, record: StudyIdentity) -> None:
    """Make `out` the folder of this study."""
    _write(record, out / STUDY_FILE)


def require_same(found: StudyIdentity, identity: Mapping[str, str | int | float], out: Path) -> None:
    """`UsageError` unless rows of `identity` can stand beside those of `found`."""
    differing = [
        f"{key} was {found.identity.get(key, 'not there')} and is now {value}"
        for key, value in identity.items()
        if found.identity.get(key) != value
    ]
    if differing:
        raise UsageError(
            f"{out} holds another study: {'; '.join(differing)}",
            where="--out",
            fix="Give a new folder, or the options of that study to go on with it.",
        )


def done_row(out: Path, name: str) -> RowRecord | None:
    """The record of a row that is done; what a row left that was interrupted is removed."""
    found = _read(RowRecord, row_folder(out, name) / ROW_FILE)
    if found is None:
        shutil.rmtree(row_folder(out, name), ignore_errors=True)
    return found


def finish_row(out: Path, record: RowRecord) -> None:
    """Mark a row as done."""
    _write(record, row_folder(out, record.name) / ROW_FILE)


def write_runs(out: Path, description: Mapping[str, object]) -> Path:
    """Write the description of the comparison; where it lies."""
    path = out / RUNS_FILE
    try:
        path.write_text(yaml.safe_dump(dict(description), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"Cannot write it: {error.strerror}", uri=str(path), errno=error.errno) from error
    return path


def _read(model: type[AnyRecord], path: Path) -> AnyRecord | None:
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"Cannot read it: {error.strerror}", uri=str(path), errno=error.errno) from error
    except ValidationError as error:
        raise UsageError(
            f"{path} is no record of a study: {error.errors()[0]['msg']}",
            fix="Give another --out, or remove that folder.",
        ) from error


def _write(record: _Record, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, f"{record.model_dump_json(indent=2)}\n".encode())
    except OSError as error:
        raise StorageError(f"Cannot write it: {error.strerror}", uri=str(path), errno=error.errno) from error
