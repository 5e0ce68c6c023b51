"""A nested state as a flat list of named leaves, with the names that torch's DCP uses.

Mappings are always entered, lists only if they contain a tensor or a mapping; everything else is a leaf.
Invariant: a leaf knows where it was found, so what is loaded goes back to that very place.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.engine import NamePatterns


IsTensor = Callable[[object], bool]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One value of a state. `path` is as `.metadata` keeps it: names of mappings as text, places in lists."""

    name: str
    path: Path
    value: Any
    _holder: Any
    _key: Any

    def put(self, value: object) -> None:
        """Put `value` into this leaf's place."""
        if not isinstance(self._holder, MutableMapping | list):
            raise UsageError(
                f"{self.name!r} lies in a {type(self._holder).__name__}, which cannot be changed",
                fix="Use dicts and lists for the parts of the state that are loaded.",
            )
        self._holder[self._key] = value


def flatten_state(state: Mapping[Any, Any], is_tensor: IsTensor) -> list[Leaf]:
    """All leaves, in the order of the state. Two that would get one name are a `UsageError`."""
    leaves: dict[str, Leaf] = {}
    for key, value in state.items():
        for leaf in _walk((str(key),), value, (state, key), is_tensor):
            if leaf.name in leaves:
                raise UsageError(
                    f"Two parts of the state are called {leaf.name!r}",
                    where=f"at {list(leaves[leaf.name].path)} and at {list(leaf.path)}",
                    fix="Rename one of the keys: names of parts are their keys joined by dots.",
                )
            leaves[leaf.name] = leaf
    return list(leaves.values())


def _walk(path: Path, value: object, place: tuple[Any, Any], is_tensor: IsTensor) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk((*path, str(key)), inner, (value, key), is_tensor)
    elif isinstance(value, list) and _is_entered(value, is_tensor):
        for number, inner in enumerate(value):
            yield from _walk((*path, number), inner, (value, number), is_tensor)
    else:
        yield Leaf(".".join(map(str, path)), path, value, *place)


def _is_entered(values: list[Any], is_tensor: IsTensor) -> bool:
    return any(
        isinstance(entry, Mapping)
        or is_tensor(entry)
        or (isinstance(entry, list) and _is_entered(entry, is_tensor))
        for entry in values
    )


@runtime_checkable
class Stateful(Protocol):
    """Whatever has these two, as modules and optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, sharing memory with it where it can."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state."""


def expand_stateful(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with each stateful part replaced by its state, in the same order on all ranks."""
    return {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in state.items()}


@contextmanager
def loading_into(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The opened state to load into; afterwards parts take over theirs, and the others are put back.

    Nothing is handed to a part where the body raises.
    """
    inner = expand_stateful(state)
    yield inner
    for key, part in state.items():
        if isinstance(part, Stateful):
            part.load_state_dict(inner[key])
        elif inner[key] is not part and isinstance(state, dict):
            state[key] = inner[key]


def matches_pattern(name: str, patterns: NamePatterns) -> bool:
    """Whether one of the patterns is for `name`; upper and lower case differ."""
    each = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in each)
