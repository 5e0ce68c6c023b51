"""A nested state as a flat list of named leaves, with the names that torch's DCP uses.

Mappings are always entered, lists only if they contain a tensor or a mapping; everything else is a leaf.
Empty mappings are leaves in parts that get back what was saved: torch has no names for them.
Invariant: a leaf knows its place in the state, so a loaded value is put back into that place.
"""

from __future__ import annotations

import ast
import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.engine import NamePatterns


IsTensor = Callable[[object], bool]
IsFree = Callable[["Path"], bool]
"""Whether a place is in a part that gets back the structure that was saved."""
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


def is_free_nowhere(path: Path) -> bool:  # noqa: ARG001 - as `IsFree`
    """For states whose places are all known when they are loaded."""
    return False


def flatten_state(
    state: Mapping[Any, Any], is_tensor: IsTensor, is_free: IsFree = is_free_nowhere
) -> list[Leaf]:
    """All leaves in the order of the state; raises `UsageError` if two would get the same name."""
    leaves: dict[str, Leaf] = {}
    for key, value in state.items():
        for leaf in _walk_part(key, value, state, (is_tensor, is_free)):
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


_Rules = tuple[IsTensor, IsFree]


def _walk_part(key: Any, value: object, state: Mapping[Any, Any], rules: _Rules) -> Iterator[Leaf]:
    try:
        yield from _walk((str(key),), value, (state, key), rules)
    except RecursionError as error:
        raise UsageError(
            f"{key!r} contains itself, or is nested too deeply",
            fix="Give every dict and list one place in the state.",
        ) from error


def _walk(path: Path, value: object, place: tuple[Any, Any], rules: _Rules) -> Iterator[Leaf]:
    is_tensor, is_free = rules
    if isinstance(value, Mapping) and (value or not is_free(path)):
        for key, inner in value.items():
            yield from _walk((*path, str(key)), inner, (value, key), rules)
    elif isinstance(value, list) and _is_entered(value, is_tensor):
        for number, inner in enumerate(value):
            yield from _walk((*path, number), inner, (value, number), rules)
    else:
        plain = {} if isinstance(value, Mapping) else value
        yield Leaf(".".join(map(str, path)), path, plain, *place)


class Room:
    """A place in a list for a value that a load brings, where the list was entered when it was saved."""


def _is_entered(values: list[Any], is_tensor: IsTensor) -> bool:
    return any(
        isinstance(entry, Mapping | Room)
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


KEY_TYPES: Final = "key_types"
"""The fact of a manifest that has `key_types`, as JSON."""


OWN_ENTRIES: Final = "own_entries"
"""The fact of a manifest that says which names a rank lacks that others have, as JSON."""


def names_lacking(fact: str) -> dict[int, frozenset[str]]:
    """By rank, the names that it lacked when the fact was written."""
    if not fact:
        return {}
    told = json.loads(fact)
    return {
        int(rank): frozenset(told["names"][number] for number in numbers)
        for rank, numbers in told["lacking"].items()
    }


def key_types(state: Mapping[Any, Any], is_free: IsFree) -> dict[str, str]:
    """By name of a dict with keys that a reader of names would take for others: "text" or "literal".

    Names have all keys as text, and readers take what looks like a positive integer for one. Other keys are
    "unknown" if Python's literals cannot tell them either, as those of an enum.
    """
    found: dict[str, str] = {}
    for key, value in state.items():
        # Of a part that keeps its structure, all places below its own one do.
        if is_free((str(key), "")):
            _look_at_keys((str(key),), value, found)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, dict | list) and is_free((str(key), str(name))):
                    _look_at_keys((str(key), str(name)), inner, found)
            if is_free((str(key), "state", "", "")):
                # Optimizers that hold others, as torchtitan's, may name each slot by one long key instead.
                for entry, slots in value.get("state", {}).items():
                    for slot, inner in slots.items() if isinstance(slots, dict) else ():
                        if isinstance(inner, dict | list):
                            _look_at_keys((str(key), "state", str(entry), str(slot)), inner, found)
    return found


def _look_at_keys(path: Path, value: object, found: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        if kind := _key_type(list(value)):
            found[".".join(map(str, path))] = kind
        for key, inner in value.items():
            # Most are tensors, and there may be a hundred thousand.
            if isinstance(inner, Mapping | list):
                _look_at_keys((*path, str(key)), inner, found)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _look_at_keys((*path, number), inner, found)


def _key_type(keys: list[Any]) -> str:
    if all(type(key) is str for key in keys):
        return "text" if any(key.isdecimal() for key in keys) else ""
    if all(type(key) is int and key >= 0 for key in keys):
        return ""
    same = (type(key) is type(told) and key == told for key in keys for told in [literal_key(str(key))])
    return "literal" if all(same) else "unknown"


def literal_key(text: str) -> Any:
    """The key that is written like this in Python, or the text itself."""
    try:
        key = ast.literal_eval(text)
        hash(key)
    except (ValueError, SyntaxError, TypeError):
        return text
    return key


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
