"""The shipped workloads: families of the catalog, each with what its accelerators do otherwise.

A family's file holds `about`, `workload` (what all accelerators share, in DLIO's keys) and `accelerators`
(what each of them sets beyond that).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from penstock.workload.yamlfile import parse_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One file of the catalog. `variants` is empty where the workload names no accelerator."""

    name: str
    about: str
    shared: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]

    def full_names(self) -> tuple[str, ...]:
        """What `workload=` may call its members."""
        return tuple(f"{self.name}_{accelerator}" for accelerator in self.variants) or (self.name,)


@cache
def families() -> Mapping[str, Family]:
    """All families by name, in order."""
    folder = files("penstock.workload") / "catalog"
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    shipped = (_family(entry.name, entry.read_text()) for entry in entries if entry.name.endswith(".yaml"))
    return {family.name: family for family in shipped}


def _family(file_name: str, text: str) -> Family:
    tree = parse_yaml(text, source=file_name)
    return Family(
        name=file_name.removesuffix(".yaml"),
        about=tree["about"],
        shared=tree["workload"],
        variants=tree.get("accelerators", {}),
    )
