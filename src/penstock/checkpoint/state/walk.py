"""One pass over a nested state: a flat list of named leaves, each with its place and its owner.

Names are as in torch's distributed checkpoints: keys joined by dots. Mappings are always entered, lists
only if they contain a tensor or a mapping; everything else is a leaf. Invariant: a leaf knows its place in
the state, so a loaded value is put back into that place.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import re
from collections.abc import Callable, Collection, Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeGuard

from penstock.errors import UsageError

IsTensor = Callable[[object], bool]
Path = tuple[str | int, ...]
"""The place of a leaf: keys of mappings as text, and indices of lists."""
NamePatterns = str | Sequence[str]
"""One pattern for names of leaves, such as `model.*`, or several."""

EXTRA_STATE: Final = "_extra_state"
"""torch's name for what a module adds to its state: any value, which may change from save to save."""
KEY_TYPES: Final = "key_types"
"""The manifest's fact with the key types that `walk` returns, as JSON."""
OWN_ENTRIES: Final = "own_entries"
"""The manifest's fact with the structure that each rank had where they differ, as JSON."""
RankEntries = tuple[Mapping[str, Path], Mapping[str, str]]
"""The structure of one rank's state: the places of names in its order, and the key types of its dicts."""


class Owner(Enum):
    """The kind of object to which a leaf belongs. It determines what the checkpoint must record for a load.

    A module knows the names of all its tensors. A data loader may have any structure, even a different one on
    each rank, so the checkpoint records the structure.
    """

    PLAIN = "a dict, list or value of the program itself"
    FIXED = "a part whose structure is known: what a load fills, and the dict of `get_optimizer_state_dict`"
    MODULE = "a module"
    COPY = "a buffer of a module that DDP copies from another rank before each forward pass"
    EXTRA = "the extra state of a module"
    OPTIMIZER = "an optimizer"
    STATEFUL = "any other object with a state"

    def keeps_structure(self, path: Path) -> bool:
        """Return True if the structure at `path` is recorded: empty mappings, and the types of keys."""
        if self is Owner.OPTIMIZER:
            # An optimizer knows its parameters, but neither what it keeps for each nor what options contain.
            return len(path) > 3
        return self is Owner.PLAIN or (self in (Owner.STATEFUL, Owner.EXTRA) and len(path) > 1)


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One value of a state."""

    name: str
    path: Path
    value: Any
    owner: Owner
    _holder: Any
    _key: Any

    def require_place(self) -> None:
        """Raise `UsageError` if this leaf's place cannot take another value."""
        if not isinstance(self._holder, MutableMapping | list):
            raise UsageError(
                f"{self.name!r} is in a {type(self._holder).__name__}, which cannot be changed",
                fix="Use dicts and lists for the parts of the state that are loaded.",
            )

    def put(self, value: object) -> None:
        """Put `value` into this leaf's place."""
        self.require_place()
        self._holder[self._key] = value


class Room:
    """A place in a list for a value that a load provides; the list was entered when it was saved."""


def walk(
    state: Mapping[Any, Any],
    is_tensor: IsTensor,
    owner_of: Callable[[Any], Owner] = lambda _: Owner.FIXED,
    copied: Callable[[Any], frozenset[str]] = lambda _: frozenset(),
) -> tuple[list[Leaf], dict[str, str]]:
    """Return all leaves in the order of the state, and the key types that names hide, by the dict's name.

    Parts with a state are replaced by that state. `owner_of` and `copied` are called for each part: they
    return its owner, and the names below it whose owner is `COPY`.

    In names, all keys are text, and a reader turns text that looks like a positive integer into one. The type
    is "text" if such keys really are text, "literal" if Python literals restore the keys, and otherwise
    "unknown", for example for the members of an enum. It is "number" for integers, which a reader needs only
    where ranks have different types.
    """
    require_dict(state)
    # Returning the state of a sharded part is a collective call, so the walk must not fail between two of
    # them.
    values = [part.state_dict() if is_stateful(part) else part for part in state.values()]
    leaves: dict[str, Leaf] = {}
    keys_below: dict[str, list[Any]] = {}

    def visit(name: str, path: Path, value: Any, owner: Owner, place: tuple[Any, Any]) -> None:
        if owner is Owner.MODULE and len(path) == 2 and str(path[1]).endswith(EXTRA_STATE):
            owner = Owner.EXTRA
        if isinstance(value, Mapping):
            if owner.keeps_structure((*path, "")):
                # {"a": {"b": {...}}, "a.b": {...}} has two dicts of one name.
                keys_below.setdefault(name, []).extend(value)
            if value or not owner.keeps_structure(path):
                for inner_key, inner in value.items():
                    step = str(inner_key)
                    visit(f"{name}.{step}", (*path, step), inner, owner, (value, inner_key))
                return
            value = {}
        elif isinstance(value, list) and _is_entered(value, is_tensor):
            for number, inner in enumerate(value):
                visit(f"{name}.{number}", (*path, number), inner, owner, (value, number))
            return
        require_text(name)
        if name in leaves:
            raise UsageError(
                f"Two parts of the state have the name {name!r}",
                where=f"at {list(leaves[name].path)} and at {list(path)}",
                fix="Rename one of the keys: names of parts are their keys joined by dots.",
            )
        if owner is Owner.MODULE and name in copies:
            owner = Owner.COPY
        leaves[name] = Leaf(name, path, value, owner, *place)

    for (key, part), value in zip(state.items(), values, strict=True):
        copies = {f"{key}.{name}" for name in copied(part)}
        try:
            visit(str(key), (str(key),), value, owner_of(part), (state, key))
        except RecursionError as error:
            raise UsageError(
                f"{key!r} contains itself, or is nested too deeply",
                fix="Give every dict and list one place in the state.",
            ) from error
    return list(leaves.values()), {
        name: kind for name, keys in keys_below.items() if (kind := _key_type(keys))
    }


def _is_entered(values: list[Any], is_tensor: IsTensor) -> bool:
    return any(
        isinstance(entry, Mapping | Room)
        or is_tensor(entry)
        or (isinstance(entry, list) and _is_entered(entry, is_tensor))
        for entry in values
    )


def _key_type(keys: list[Any]) -> str:
    if all(type(key) is str for key in keys):
        return "text" if any(key.isdecimal() for key in keys) else ""
    if all(type(key) is int and key >= 0 for key in keys):
        return "number"
    restored = [literal_key(str(key)) for key in keys]
    is_same = all(type(key) is type(new) and key == new for key, new in zip(keys, restored, strict=True))
    return "literal" if is_same else "unknown"


INTEGER: Final = re.compile("0|[1-9][0-9]{0,4299}")
"""An integer as text. Python does not convert longer ones."""


def literal_key(text: str) -> Any:
    """Return the key whose Python literal is this text, or else the text itself."""
    try:
        key = ast.literal_eval(text)
        hash(key)
    except (ValueError, SyntaxError, TypeError):
        return text
    return key


def require_text(name: str) -> None:
    """Raise `UsageError` for a name that cannot be stored in a file."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The name {name!r} contains half of a character, so it is not valid text",
            fix="Use names that can be written as UTF-8.",
        ) from error


def require_dict(state: object) -> None:
    """Raise `UsageError` for a state that is not a dict, and so has no names."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise UsageError(f"The state is a {kind}, not a dict", fix='Give it a name, as in {"model": model}.')


class Stateful(Protocol):
    """An object with the two methods that modules and optimizers have."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, sharing memory with it if possible."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Replace the state."""


def is_stateful(part: object) -> TypeGuard[Stateful]:
    """Return True if a part of a state has both methods.

    `isinstance` with the protocol takes fifty times as long.
    """
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def is_optimizer_dict(part: Any) -> bool:
    """Return True for an optimizer's state dict, not for just any dict with its two keys."""
    has_state = isinstance(part, Mapping) and isinstance(part.get("state"), Mapping)
    groups = part.get("param_groups") if has_state else None
    return isinstance(groups, list) and all(parameters_of(group) is not None for group in groups)


def parameters_of(group: object) -> list[Any] | None:
    """Return the numbers or names of the parameters in an optimizer's group; None unless these are a list."""
    params = group.get("params") if isinstance(group, dict) else None
    is_listed = isinstance(params, list) and all(isinstance(entry, int | str) for entry in params)
    return params if is_listed else None


def read_entries(fact: str) -> list[RankEntries]:
    """Return the structure that each rank had, from the fact `OWN_ENTRIES`; empty if they did not differ.

    Ranks that had the same structure get the same object.
    """
    if not fact:
        return []
    noted = json.loads(fact)
    places = [(".".join(map(str, path)), tuple(path)) for path in noted["places"]]
    own = [(dict(places[number] for number in numbers), kinds) for numbers, kinds in noted["structures"]]
    return [own[number] for number in noted["ranks"]]


def matches_pattern(name: str, patterns: NamePatterns) -> bool:
    """Return True if at least one of the patterns matches `name`, case-sensitively."""
    all_patterns = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in all_patterns)


RANK_MARK = "@rank"
"""Separates, in a stored name, the leaf's name from the rank to which the object belongs: `rng@rank3`."""


def rank_object_name(name: str, rank: int) -> str:
    """Return the stored name of `rank`'s object if that differs from the common one."""
    return f"{name}{RANK_MARK}{rank}"


def is_of_one_rank(stored_name: str, paths: Mapping[str, tuple[str | int, ...]]) -> bool:
    """Return whether a name belongs to a single rank's value, and is not a state's own key of the same form.

    `paths` has the places of a checkpoint's names in the state, but none for a single rank's value.
    """
    return RANK_MARK in stored_name and paths.get(stored_name, (stored_name,)) == (stored_name,)


def require_unmarked(names: Collection[str]) -> None:
    """Raise `UsageError` for a name that could also be stored for a single rank's value of another leaf.

    `names` has the leaf names of all ranks. A single process is no exception, because several may load what
    it saves.
    """
    for name in names:
        of, mark, rank = name.rpartition(RANK_MARK)
        if mark and of in names and rank.isdecimal():
            raise UsageError(
                f"The state has {of!r} and {name!r}, the name of rank {rank}'s own value of the first",
                fix="Rename one of them.",
            )


def find_leaf_name(stored_name: str, held: Container[str]) -> str:
    """Return the leaf whose tensor this rank stores under `stored_name`; `held` has its leaves' names."""
    return stored_name if stored_name in held else stored_name.rpartition(RANK_MARK)[0]


def find_stored_name(
    name: str, rank: int, stored: Container[str], paths: Mapping[str, Path] = MappingProxyType({})
) -> str | None:
    """Return the stored name of `rank`'s object for the leaf `name`, or None if there is none.

    With `paths`, the places of the checkpoint's names, a key such as `x@rank1` of the saved state itself is
    not taken for rank 1's own value.
    """
    if name not in stored:
        return None
    own = rank_object_name(name, rank)
    return own if rank and own in stored and is_of_one_rank(own, paths) else name
