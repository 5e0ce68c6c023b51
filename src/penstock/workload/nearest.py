"""The key that somebody meant who wrote another one."""

from __future__ import annotations

from functools import cache

from penstock.suggest import nearest
from penstock.workload.dialect import ALIASES, EXPLAINED, SECTION_ALIASES
from penstock.workload.document import known_paths
from penstock.workload.tree import Path, dotted


def advice(path: Path) -> str:
    """What to write instead of `path`, or which keys there are beside it."""
    steps = tuple(step for step in path if not step.isdecimal())  # elements of a list share their keys
    meant = _namesake(steps) or _sibling(steps) or _lookalike(steps)
    if meant:
        return f"did you mean {meant}?"
    beside = sorted(_children(steps[:-1])) or sorted(_children(()))
    return f"known here: {', '.join(beside)}"


@cache
def _all_paths() -> tuple[Path, ...]:
    return (*known_paths(), *ALIASES, *EXPLAINED, *((section,) for section in SECTION_ALIASES))


def _children(section: Path) -> set[str]:
    depth = len(section)
    return {path[depth] for path in _all_paths() if path[:depth] == section and len(path) > depth}


def _sibling(path: Path) -> str:
    meant = nearest(path[-1], sorted(_children(path[:-1])))
    return _ours((*path[:-1], meant)) if meant else ""


def _namesake(path: Path) -> str:
    return next((_ours(known) for known in _all_paths() if known[-1] == path[-1]), "")


def _lookalike(path: Path) -> str:
    meant = nearest(dotted(path), sorted(map(dotted, _all_paths())), cutoff=0.8)
    return _ours(tuple(meant.split("."))) if meant else ""


def _ours(path: Path) -> str:
    """An old spelling is understood, but not recommended."""
    return dotted(ALIASES.get(path, path))
