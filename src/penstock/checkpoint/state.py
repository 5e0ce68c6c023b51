"""A nested state as a flat list of named leaves, in the names that torch's distributed checkpoints use.

Mappings are entered always, lists where something inside is a tensor or a mapping; everything else is a leaf.
Invariant: a leaf knows where it was found, so what is loaded goes back to that very place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError

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


def leaves_of(state: Mapping[Any, Any], is_tensor: IsTensor) -> list[Leaf]:
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
