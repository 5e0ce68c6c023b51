"""No key is accepted and used nowhere: each is read by some code, or its being without effect is said."""

import ast
from collections import defaultdict
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import penstock
from penstock.workload import spec
from penstock.workload.quantities import Duration

ROOT = Path(penstock.__file__).parent
NOT_A_USE = {f"workload/{name}.py" for name in ("spec", "dlio_keys", "quantities", "mlperf_divisions")}
"""Modules that name every key in order to read, write or explain it."""


@cache
def places_of_use() -> dict[str, set[str]]:
    """Where an attribute of each name is read."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        if place in NOT_A_USE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                places[node.attr].add(place)
    return places


def sections(kind: type = spec.Workload) -> dict[str, type]:
    """All sections of a workload, by the path of their keys."""
    found = {"": kind}
    for entry in fields(kind):
        hint = get_type_hints(kind)[entry.name]
        for option in get_args(hint) or (hint,):
            if is_dataclass(option) and isinstance(option, type) and option is not Duration:
                for below, section in sections(option).items():
                    found[f"{entry.name}.{below}"] = section
    return found


KEYS = sorted(
    (f"{path}{entry.name}", entry.name) for path, section in sections().items() for entry in fields(section)
)


@pytest.mark.parametrize(("key", "name"), KEYS)
def test_every_key_is_read_somewhere(key: str, name: str) -> None:
    assert places_of_use()[name], f"{key} is accepted and used nowhere: use it, or explain it in dlio_keys"


def test_the_scan_sees_what_is_used_and_nothing_else() -> None:
    assert all((ROOT / place).is_file() for place in NOT_A_USE)
    assert "bench/training/training_loop.py" in places_of_use()["expected_s"]
    assert not places_of_use()["no_such_key"]
    assert len(KEYS) > 100
