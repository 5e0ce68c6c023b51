"""The outer form of a workload: pydantic models derived from the spec's types, in DLIO's words, and back.

Place in the flow: the edge, behind `dialect`, which has settled spellings. One invariant: what
`write_workload` prints (secrets apart), `read_workload` reads as an equal workload.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, ClassVar, Final, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    Strict,
    ValidationError,
    create_model,
)
from pydantic import Field as OuterField

from penstock.workload.choices import Shuffle
from penstock.workload.duration import Duration
from penstock.workload.layered_settings import Path, SettingProblem
from penstock.workload.spec import (
    SECRET_NAMES,
    CheckpointSection,
    Dataset,
    ReaderSection,
    StorageSection,
    Workload,
)
from penstock.workload.values import (
    read_bytes,
    read_duration,
    read_element_type,
    read_exact_bytes,
    read_seconds,
    write_duration,
)

_OUTER_NAMES: Final = {
    (Dataset, "chunk_size_bytes"): "chunk_size",
    (ReaderSection, "transfer_bytes"): "transfer_size",
    (CheckpointSection, "time_between_checkpoints_s"): "time_between_checkpoints",
    (StorageSection, "post_generation_settle_s"): "post_generation_settle_seconds",
}
"""Fields whose key in a file is another word; all others are the same."""


class _Section(BaseModel):
    """Strict: a quoted number is not a number, and `true` is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_by_alias=True, validate_by_name=False)
    spec: ClassVar[type] = object


def read_workload(
    tree: Mapping[str, Any], *, name: str, accelerator: str
) -> tuple[Workload | None, list[SettingProblem]]:
    """The workload that `tree` describes, or all that is wrong with it."""
    try:
        outer = _model(Workload).model_validate({**tree, "name": name, "accelerator": accelerator})
    except ValidationError as refused:
        return None, [_problem(error) for error in refused.errors(include_url=False)]
    return _inner(outer), []


def write_workload(workload: Workload) -> dict[str, Any]:
    """All values under DLIO's keys, defaults included, as plain values; None where nothing was asked for."""
    tree = _outer(workload)
    assert isinstance(tree, dict)
    return {key: value for key, value in tree.items() if key not in ("name", "accelerator")}


def known_paths() -> tuple[Path, ...]:
    """Every key of the outer form, as a path; keys of a list's elements stand below the list's own."""
    return tuple(path for path in _paths(Workload, ()) if path not in (("name",), ("accelerator",)))


@cache
def _model(kind: type) -> type[_Section]:
    hints = get_type_hints(kind, include_extras=True)
    definitions: dict[str, Any] = {
        entry.name: (
            _outer_type(hints[entry.name]),
            OuterField(alias=_outer_name(kind, entry.name), default=... if _is_required(entry) else None),
        )
        for entry in fields(kind)
    }
    model: type[_Section] = create_model(kind.__name__, __base__=_Section, **definitions)
    model.spec = kind
    return model


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _outer_name(kind: type, name: str) -> str:
    return _OUTER_NAMES.get((kind, name), name)


def _outer_type(hint: Any) -> Any:
    """How a value of the type `hint` is read; an unset one never gets here, so None is not accepted."""
    if isinstance(hint, types.UnionType) or type(None) in get_args(hint):
        hint = next(option for option in get_args(hint) if option is not types.NoneType)
    if get_origin(hint) is Annotated:
        bare, *marks = get_args(hint)
        bounds = [mark for mark in marks if not isinstance(mark, str)]
        return Annotated[(bare, *bounds, *_readers(bare, marks))]
    if get_origin(hint) is tuple:
        element = _outer_type(get_args(hint)[0])
        # Only known now, so that no checker can follow: the type is built for pydantic alone.
        return Annotated[tuple[element, ...], Strict(strict=False)]  # type: ignore[valid-type]
    if hint is Duration:
        return Annotated[Duration, PlainValidator(read_duration)]
    if is_dataclass(hint):
        return _model(hint)  # type: ignore[arg-type]  # a dataclass type, not an instance
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Annotated[hint, Strict(strict=False), BeforeValidator(_spelling_of(hint))]
    return Annotated[bool, Strict(strict=False)] if hint is bool else hint


def _readers(bare: Any, marks: list[Any]) -> list[Any]:
    if "bytes" in marks:
        return [BeforeValidator(read_exact_bytes if bare is Fraction else read_bytes)]
    if "seconds" in marks:
        return [BeforeValidator(read_seconds)]
    return [AfterValidator(read_element_type)] if "dtype" in marks else []


def _spelling_of(kind: type[StrEnum]) -> Any:
    def fold(value: Any) -> Any:
        if kind is Shuffle and value is False:  # YAML 1.1 reads a bare `off` as false
            return Shuffle.OFF
        return value.lower() if isinstance(value, str) else value

    return fold


def _inner(section: _Section) -> Any:
    """The spec's dataclass with the values that were given; its own defaults for the rest."""
    return section.spec(**{name: _inner_value(getattr(section, name)) for name in section.model_fields_set})


def _inner_value(value: Any) -> Any:
    if isinstance(value, _Section):
        return _inner(value)
    return tuple(map(_inner_value, value)) if isinstance(value, tuple) else value


def _outer(value: Any) -> Any:
    if isinstance(value, Duration):
        return write_duration(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            _outer_name(type(value), entry.name): _outer(getattr(value, entry.name))
            for entry in fields(value)
            if entry.name not in SECRET_NAMES
        }
    if isinstance(value, tuple):
        return [_outer(part) for part in value]
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value.value if isinstance(value, StrEnum) else value


def _paths(kind: type, above: Path) -> Iterator[Path]:
    for entry in fields(kind):
        path = (*above, _outer_name(kind, entry.name))
        hint = get_type_hints(kind)[entry.name]
        section = _section_of(hint)
        if section is None or get_origin(hint) is tuple:
            yield path
        if section is not None:
            yield from _paths(section, path)


def _section_of(hint: Any) -> type | None:
    options = get_args(hint) or (hint,)
    sections = (option for option in options if is_dataclass(option) and option is not Duration)
    return next((section for section in sections if isinstance(section, type)), None)


def _problem(error: Any) -> SettingProblem:
    path = tuple(str(step) for step in error["loc"])
    if error["type"] == "extra_forbidden":
        return SettingProblem(path=path, kind="unknown")
    if error["type"] in ("model_type", "model_attributes_type"):
        return SettingProblem(
            path=path, kind="refused", text=f"is {error['input']!r}, but it is a section of keys"
        )
    if error["type"] == "missing":
        return SettingProblem(path=path, kind="refused", text="is missing")
    cause = error.get("ctx", {}).get("error")
    said = str(cause) if cause is not None else f"it {error['msg'].removeprefix('Input ')}"
    shown = "a secret" if path[-1] in SECRET_NAMES else repr(error["input"])
    return SettingProblem(path=path, kind="refused", text=f"is {shown}: {said}")
