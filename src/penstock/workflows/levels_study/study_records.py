"""The files of a study besides its traces: `study.json`, and `row.json` for each finished row.

The only module that knows their names and schemas. Invariant: a row's record is written last, in one step, so
that a row with a record is complete.
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
    """The study in a folder, and the name of its folder on each level (`place`)."""

    version: Literal[1] = VERSION
    place: str
    identity: dict[str, str | int | float]
    penstock: str
    hosts: tuple[str, ...]
    command: tuple[str, ...]


class RowRecord(_Record):
    """The measurements of one row besides its trace; times are those of the slowest rank."""

    name: str
    says: str
    blocked_s: tuple[float, ...]
    """For each checkpoint, how long training waited."""
    drain_s: float
    """From the last step until all flushes were durable."""
    took_s: float


AnyRecord = TypeVar("AnyRecord", bound=_Record)


def row_folder(out: Path, name: str) -> Path:
    """The folder of a row's record and traces."""
    return out / name


def trace_folder(out: Path, name: str) -> Path:
    """The folder of a row's traces, one file per rank."""
    return row_folder(out, name) / TRACES


def read_study(out: Path) -> StudyIdentity | None:
    """Read the study in `out`; None if there is none."""
    return _read(StudyIdentity, out / STUDY_FILE)


def begin_study(out: Path, record: StudyIdentity) -> None:
    """Write the study's record into `out`."""
    _write(record, out / STUDY_FILE)


def require_same(study: StudyIdentity, identity: Mapping[str, str | int | float], out: Path) -> None:
    """`UsageError` unless rows of `identity` can be compared with those of `study`."""
    differing = [
        f"{key} was {study.identity.get(key, 'not set')} and is now {value}"
        for key, value in identity.items()
        if study.identity.get(key) != value
    ]
    if differing:
        raise UsageError(
            f"{out} holds another study: {'; '.join(differing)}",
            where="--out",
            fix="Give a new folder, or the options of that study to continue it.",
        )


def read_row(out: Path, name: str) -> RowRecord | None:
    """Read the record of a finished row; the files of an interrupted row are removed."""
    record = _read(RowRecord, row_folder(out, name) / ROW_FILE)
    if record is None:
        shutil.rmtree(row_folder(out, name), ignore_errors=True)
    return record


def finish_row(out: Path, record: RowRecord) -> None:
    """Mark a row as finished."""
    _write(record, row_folder(out, record.name) / ROW_FILE)


def write_runs(out: Path, description: Mapping[str, object]) -> Path:
    """Write the description of the comparison; returns its path."""
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
            f"{path} is not a record of a study: {error.errors()[0]['msg']}",
            fix="Give another --out, or remove that folder.",
        ) from error


def _write(record: _Record, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, f"{record.model_dump_json(indent=2)}\n".encode())
    except OSError as error:
        raise StorageError(f"Cannot write it: {error.strerror}", uri=str(path), errno=error.errno) from error
