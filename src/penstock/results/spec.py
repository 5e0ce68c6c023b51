"""A workload in and out of a run's record: under DLIO's keys, without what nobody set.

Invariant: what `spec_values` wrote, `spec_of` reads as the same workload, but for its secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import StorageError
from penstock.workload.layered_settings import dotted
from penstock.workload.workload_schema import read_workload, write_workload

if TYPE_CHECKING:
    from penstock.workload.spec import Workload


def spec_values(workload: Workload) -> dict[str, Any]:
    """All values that are set, by default or by somebody."""
    return _set_values(write_workload(workload))


def spec_of(values: Mapping[str, Any], *, name: str, accelerator: str, where: str) -> Workload:
    """The workload that a record holds; `where` names the record if this version cannot read it."""
    workload, problems = read_workload(values, name=name, accelerator=accelerator)
    if workload is None:
        first = problems[0]
        raise StorageError(
            f"The recorded workload is not understood: {dotted(first.path)} {first.text}".rstrip(), uri=where
        )
    return workload


def _set_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _set_values(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }
