"""A nested state as a flat list of named leaves, with the names that torch's DCP uses.

Mappings are always entered, lists only if they contain a tensor or a mapping; everything else is a leaf.
Invariant: a leaf knows its place in the state, so a loaded value is put back into that place.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.engine import NamePatterns


IsTensor = Callable[[object], bool]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One value of a state. `path` is as in `.metadata`: keys of mappings as text, and indices of lists."""

    name: str
    path: Path
    value: Any
    _holder: Any
    _key: Any

    def put(self, value: object) -> None:
        """Put `value` into this leaf's place."""
        if not isinstance(self._holder, MutableMapping | list):
            raise UsageError(
                f"{self.name!r} is in a {type(self._holder).__name__}, which cannot be changed",
                fix="Use dicts and lists for the parts of the state that are loaded.",
            )
        self._holder[self._key] = value


def flatten_state(state: Mapping[Any, Any], is_tensor: IsTensor) -> list[Leaf]:
    """All leaves in the order of the state; raises `UsageError` if two would get the same name."""
    leaves: dict[str, Leaf] = {}
    for key, value in state.items():
        for leaf in _walk_part(key, value, state, is_tensor):
            require_text(leaf.name)
            if leaf.name in leaves:
                raise UsageError(
                    f"Two parts of the state have the name {leaf.name!r}",
                    where=f"at {list(leaves[leaf.name].path)} and at {list(leaf.path)}",
                    fix="Rename one of the keys: names of parts are their keys joined by dots.",
                )
            leaves[leaf.name] = leaf
    return list(leaves.values())


def require_text(name: str) -> None:
    """Raise `UsageError` for a name that no file can hold."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The name {name!r} holds half of a character, which is no text",
            fix="Use names that can be written as UTF-8.",
        ) from error


def _walk_part(key: Any, value: object, state: Mapping[Any, Any], is_tensor: IsTensor) -> Iterator[Leaf]:
    try:
        yield from _walk((str(key),), value, (state, key), is_tensor)
    except RecursionError as error:
        raise UsageError(
            f"{key!r} contains itself, or is nested too deeply",
            fix="Give every dict and list one place in the state.",
        ) from error


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


class Stateful(Protocol):
    """An object with these two methods, as modules and optimizers have."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, sharing memory with it where possible."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Replace its state."""


def is_stateful(part: object) -> TypeGuard[Stateful]:
    """Whether a part of a state has both methods; asking the protocol itself takes fifty times as long."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def require_dict(state: object) -> None:
    """Raise `UsageError` for a state that has no names."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise UsageError(f"The state is a {kind}, not a dict", fix='Give it a name, as in {"model": model}.')


def expand_stateful(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with each `Stateful` replaced by its state dict, in the same order on all ranks."""
    require_dict(state)
    return {key: part.state_dict() if is_stateful(part) else part for key, part in state.items()}


def matches_pattern(name: str, patterns: NamePatterns) -> bool:
    """Whether one of the patterns matches `name`, case-sensitively."""
    all_patterns = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in all_patterns)
