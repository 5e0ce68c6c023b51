"""Reads a workload from nested mappings with DLIO's keys, and writes it back.

The edge behind `dlio_keys`, which has settled spellings. One invariant: what `write_workload` prints (secrets
apart), `read_workload` reads as an equal workload.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from penstock.workload.layered_settings import KeyPath, SettingProblem
from penstock.workload.spec import SECRET_NAMES, Workload

_NOT_IN_FILES: Final = ("name", "accelerator")
"""Fields that come from a file's name and the command line."""


@cache
def _adapter() -> TypeAdapter[Workload]:
    return TypeAdapter(Workload)


def read_workload(
    tree: Mapping[str, Any], *, name: str, accelerator: str
) -> tuple[Workload | None, list[SettingProblem]]:
    """The workload that `tree` describes, or everything that is wrong with it."""
    try:
        workload = _adapter().validate_python({**tree, "name": name, "accelerator": accelerator})
    except ValidationError as refused:
        return None, [_describe(error) for error in refused.errors(include_url=False)]
    return workload, []


def write_workload(workload: Workload) -> dict[str, Any]:
    """All values under DLIO's keys, defaults included, as plain values; None where a value is unset."""
    tree = _adapter().dump_python(workload, mode="json", by_alias=True)
    return {key: value for key, value in tree.items() if key not in _NOT_IN_FILES}


def known_paths() -> tuple[KeyPath, ...]:
    """Every key, as a path; keys of a list's elements are below the list's own."""
    return tuple(path for path in _paths(Workload, ()) if path[0] not in _NOT_IN_FILES)


def _paths(section: type, above: KeyPath) -> Iterator[KeyPath]:
    hints = get_type_hints(section, include_extras=True)
    for entry in fields(section):
        hint = hints[entry.name]
        is_value = get_origin(hint) is Annotated
        marks = (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, FieldInfo))
        key = next((mark.alias for mark in marks if mark.alias), entry.name)
        inner = [] if is_value else [option for option in (hint, *get_args(hint)) if is_dataclass(option)]
        if not inner or get_origin(hint) is tuple:
            yield (*above, key)
        for section_type in inner:
            yield from _paths(section_type, (*above, key))  # type: ignore[arg-type]  # types, no instances


def _describe(error: Any) -> SettingProblem:
    path = tuple(str(step) for step in error["loc"])
    if error["type"] == "unexpected_keyword_argument":
        return SettingProblem(path=path, kind="unknown")
    if error["type"] == "dataclass_type":
        text = f"is {error['input']!r}, but it is a section of keys"
    elif error["type"] == "missing":
        text = "is missing"
    else:
        cause = error.get("ctx", {}).get("error")
        reason = str(cause) if cause is not None else f"it {error['msg'].removeprefix('Input ')}"
        shown = "a secret" if path[-1] in SECRET_NAMES else repr(error["input"])
        text = f"is {shown}: {reason}"
    return SettingProblem(path=path, kind="refused", text=text)
