"""The parts of a state that a load fills, in the structure that the checkpoint has of them.

A fresh optimizer has no state yet, and a data loader may have another one than when it was saved: asked for
their state, they would leave most of the checkpoint where it is. So places are made for what the checkpoint
has of such parts and the load takes, and for nothing else: a place has no values before the load.
Invariant: no part changes before all of it has arrived, or if nothing of it is loaded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from penstock.checkpoint.loading.load_requests import SKIPPED, StoredNames
from penstock.checkpoint.loading.optimizer_parts import (
    NamedState,
    OptimizerState,
    begin_optimizer,
    number_names,
)
from penstock.checkpoint.loading.places import (
    Places,
    copied,
    joined,
    new_place,
    set_entry,
)
from penstock.checkpoint.plan.save_plan import RANK_MARK
from penstock.checkpoint.state.tensors import parameter_names
from penstock.checkpoint.state.walk import EXTRA_STATE, Leaf, Stateful, is_stateful
from penstock.errors import UsageError, name_some

logger = logging.getLogger(__name__)


class _Part(Protocol):
    """One entry of a state while it is loaded into `inner`."""

    inner: Any

    def take(self, loaded: Any) -> Any:
        """Let the part take what was loaded into `inner`, or instead of it; what then stands in the state."""


@dataclass(slots=True)
class _EmptyPlaces:
    """Fills what is empty in a plain state with places for what is stored there: dicts, lists and None."""

    stored: StoredNames
    _emptied: list[tuple[Any, Any, Any]] = field(default_factory=list)
    _adopting: list[tuple[MutableMapping[Any, Any], set[str]]] = field(default_factory=list)
    """The dicts that were empty, with the stored names that got places in them."""

    def fill(self, state: MutableMapping[str, Any], prefixes: Mapping[str, str]) -> None:
        """Fill what is empty, wherever it is in `state`."""
        empty: dict[str, tuple[str, Any, Any]] = {}
        for key in state:
            if prefixes[key]:
                self._find(empty, (state, key), key, prefixes[key])
        below = self.stored.below_each({prefix: name for prefix, (name, *_) in empty.items()})
        for prefix, places in below.items():
            _, holder, key = empty[prefix]
            taken = {path: facts for path, facts in places.items() if facts is not SKIPPED}
            is_list = all(isinstance(path[0], int) for path in taken)
            is_dict = isinstance(holder[key], MutableMapping)
            if taken and (holder[key] is None or is_list or is_dict):
                self._begin(holder, key, holder[key] if is_dict else [] if is_list else {})
                making = Places(self.stored.key_types, prefix)
                for path, facts in taken.items():
                    making.put(holder[key], path, new_place(facts, None))
                if is_dict:
                    self._adopting.append((holder[key], {f"{prefix}{joined(path)}" for path in taken}))

    @property
    def adopted(self) -> set[str]:
        """The stored names that got places in dicts which were empty."""
        return set().union(*(names for _, names in self._adopting))

    def leave_empty(self, names: Collection[str]) -> None:
        """Empty the dicts again that would get one of these names, which other ranks have in their dict."""
        for adopting, adopted in self._adopting:
            if not adopted.isdisjoint(names):
                adopting.clear()

    def end(self) -> None:
        """After the load: let dicts that are empty now be the ones that were."""
        for holder, key, value in self._emptied:
            if isinstance(value, MutableMapping) and type(holder[key]) is dict and not holder[key]:
                holder[key] = value

    def undo(self) -> None:
        """Let everything be as empty as before."""
        for holder, key, value in reversed(self._emptied):
            if value is not None:
                value.clear()
            holder[key] = value

    def _find(
        self, empty: dict[str, tuple[str, Any, Any]], place: tuple[Any, Any], name: str, prefix: str
    ) -> None:
        """Put what is empty at a place, and may have something below it, into `empty` by prefix."""
        holder, key = place
        value = holder[key]
        is_dict = isinstance(value, MutableMapping)
        if value is None or (isinstance(value, MutableMapping | list) and not value):
            stored = prefix.removesuffix(".")
            facts = self.stored.facts(stored)
            if facts is not SKIPPED:
                # An empty list is a place for any object, as None is.
                if (is_dict or (facts is not None and value is None)) and self.stored.find(name) == stored:
                    self._begin(holder, key, new_place(facts, None))
            else:
                empty[prefix] = name, holder, key
        elif isinstance(value, MutableMapping | list):
            for step in list(value) if is_dict else range(len(value)):
                self._find(empty, (value, step), f"{name}.{step}", f"{prefix}{step}.")

    def _begin(self, holder: Any, key: Any, value: Any) -> None:
        self._emptied.append((holder, key, holder[key]))
        if not isinstance(holder[key], list):
            set_entry(holder, key, value)


@dataclass(slots=True)
class _Plain:
    """A value that is filled or replaced where it is."""

    inner: Any
    prefix: str
    places: _EmptyPlaces

    def take(self, loaded: Any) -> Any:
        """It is what was loaded."""
        return loaded


@dataclass(slots=True)
class _ModuleState:
    """A module, which knows the names of its tensors, but not what its extra state was."""

    part: torch.nn.Module
    inner: dict[str, Any]
    places: Places

    def take(self, loaded: Any) -> Any:
        """Load the state."""
        self.places.end()
        self.part.load_state_dict(loaded)
        return self.part


@dataclass(slots=True)
class _OwnState:
    """A part with `load_state_dict` that is no module: it gets the structure that was saved."""

    part: Stateful
    inner: Any
    places: Places

    def take(self, loaded: Any) -> Any:
        """Load the state."""
        self.places.end()
        self.part.load_state_dict(loaded)
        return self.part


@dataclass(slots=True)
class LoadedParts:
    """The state that is loaded into: `state` has the places of all leaves."""

    parts: Mapping[str, _Part]
    prefixes: Mapping[str, str]
    """By key of a part that has names below it, the beginning of these names in the checkpoint."""
    stored: StoredNames
    places: _EmptyPlaces
    """What was empty in plain parts."""
    state: dict[str, Any] = field(init=False)
    filled: Collection[str] = ()
    """The names in the state of what the load has filled, when it ends."""
    left: Collection[str] = ()
    """And those of what it has left as it was."""

    def __post_init__(self) -> None:
        self.state = {key: part.inner for key, part in self.parts.items()}

    def require_fit(self) -> None:
        """Raise the `UsageError` of a part that cannot be loaded."""
        for part in self.parts.values():
            if isinstance(part, OptimizerState) and part.misfit is not None:
                raise part.misfit

    def gets_copies(self, leaf: Leaf) -> bool:
        """Whether a leaf's part takes values as `load_state_dict` of no module does: from any memory."""
        return type(leaf.value) is torch.Tensor and isinstance(self.parts.get(str(leaf.path[0])), _OwnState)

    def is_left(self, key: str) -> bool:
        """Whether nothing of a part was filled, though it has something."""
        begin = f"{key}."
        has_left = any(name.startswith(begin) for name in self.left)
        return has_left and not any(name.startswith(begin) for name in self.filled)

    def untaken(self, unused: Iterable[str]) -> list[str]:
        """Those of the `unused` names of the checkpoint that are below these parts, and chosen."""
        owned = ((name, self.own_name(name)) for name in unused if not self.stored.is_of_others(name))
        found = [name for name, own in owned if own is not None and self.stored.find(own) is not None]
        # A dict that was empty on some ranks alone is taken with what other ranks had in it.
        above = (
            {each[: dot.start()] for each in self.stored.names for dot in re.finditer(r"\.", each)}
            if found
            else ()
        )
        return [name for name in found if name not in above]

    def own_names(self) -> Iterator[str]:
        """The names in this state of what the checkpoint has of its parts."""
        return (own for name in self.stored.names if (own := self.own_name(name)) is not None)

    def own_name(self, stored_name: str) -> str | None:
        """The name in this state of a name of the checkpoint; None if it belongs to no part of the state."""
        key = self._owner(stored_name)
        return None if key is None else f"{key}.{stored_name[len(self.prefixes[key]) :]}"

    def is_whole(self, stored_name: str) -> bool:
        """Whether a name belongs to a part that is meant as a whole. Any other dict names what it wants."""
        key = self._owner(stored_name)
        part = None if key is None else self.parts[key]
        if not isinstance(part, _Plain):
            return part is not None
        return isinstance(part.inner, Mapping) and {"state", "param_groups"} <= part.inner.keys()

    def _owner(self, stored_name: str) -> str | None:
        matching = (key for key, prefix in self.prefixes.items() if stored_name.startswith(prefix))
        return next(matching, None)

    def warn_of_other_ranks(self, num_saved: int, num_ranks: int) -> None:
        """Name the values of single ranks that are lost, or that others get, with another number of ranks."""
        if lost := self.of_other_ranks(num_ranks):
            logger.warning(
                "Saved by more ranks: not loaded, as they were of ranks that this job lacks: %s",
                name_some(lost, 10),
            )
        elif num_ranks > num_saved and (own := self.of_other_ranks(1)):
            names = dict.fromkeys(name.rpartition(RANK_MARK)[0] for name in own)
            logger.warning(
                "Saved by %d ranks: those from %d on get rank 0's values of %s, which were other ones on each"
                " rank. Give random generators another seed there",
                *(num_saved, num_saved, name_some(list(names), 10)),
            )

    def warn_of_all_entries(self, num_saved: int, names: Collection[str]) -> None:
        """Name the parts of which ranks had different entries, when they were not as many as now."""
        if owners := {owner for name in names if (owner := self._owner(name) or name) in self.parts}:
            logger.warning(
                "Saved by %d ranks, which had different entries in %s: what is new there gets those of all",
                num_saved,
                name_some(sorted(map(repr, owners))),
            )

    def of_other_ranks(self, num_ranks: int) -> list[str]:
        """The names of values that only ranks beyond those of this job had."""
        marked = filter(self.stored.is_of_one_rank, self.stored.names)
        return [
            f"{name}{mark}{rank}"
            for name, mark, rank in (each.rpartition(RANK_MARK) for each in marked)
            if rank.isdecimal() and int(rank) >= num_ranks and (self._owner(name) or name in self.parts)
        ]


@contextmanager
def loading_into(
    state: Mapping[str, Any], stored: StoredNames, prefixes: Mapping[str, str]
) -> Iterator[LoadedParts]:
    """Yield the state to load into; afterwards parts with `load_state_dict` load theirs, others are replaced.

    `prefixes` has by key the beginning of the names that the checkpoint has for this part. If the body
    raises, no part is changed.
    """
    names = parameter_names(state)
    empty = _EmptyPlaces(stored)
    parts = {
        key: _begin(key, part, stored, prefixes[key], names) or _Plain(part, prefixes[key], empty)
        for key, part in state.items()
    }
    containers = (Mapping, list)
    fixed = [key for key, part in parts.items() if not isinstance(part.inner, (*containers, torch.Tensor))]
    if fixed and not isinstance(state, MutableMapping):
        raise UsageError(
            f"The state is a {type(state).__name__}, in which {name_some(fixed)} cannot be replaced",
            fix="Load into a dict.",
        )
    plain = {key: part.inner for key, part in parts.items() if isinstance(part, _Plain)}
    empty.fill(plain, prefixes)
    for key, inner in plain.items():
        parts[key].inner = inner
    asked = {key: prefixes[key] for key, part in parts.items() if isinstance(part.inner, containers)}
    loading = LoadedParts(parts, {key: prefix for key, prefix in asked.items() if prefix}, stored, empty)
    with ExitStack() as after_failure:
        after_failure.callback(empty.undo)
        yield loading
        after_failure.pop_all()
    empty.end()
    for key, part in parts.items():
        if loading.is_left(key):
            continue
        taken = part.take(loading.state[key])
        if taken is not state[key] and isinstance(state, MutableMapping):
            state[key] = taken


def _begin(key: str, part: Any, stored: StoredNames, prefix: str, names: Mapping[int, str]) -> _Part | None:
    if isinstance(part, torch.nn.Module):
        return _begin_module(key, part, stored, prefix)
    if is_stateful(part):
        own = part.state_dict()
        if isinstance(part, torch.optim.Optimizer) and {"state", "param_groups"} <= own.keys():
            return begin_optimizer(key, part, stored, prefix, names)
        places = stored.below(prefix, key) if prefix else {}
        own, making = copied(own), Places(stored.key_types, prefix)
        making.fit(own, places)
        return _OwnState(part, own, making)
    if isinstance(part, dict) and {"state", "param_groups"} <= part.keys() and prefix:
        numbered = number_names(part, stored.below(prefix, key))
        if numbered is not None:
            return NamedState(key, part, numbered)
    return None


def _begin_module(key: str, part: torch.nn.Module, stored: StoredNames, prefix: str) -> _ModuleState:
    own, making = part.state_dict(), Places(stored.key_types, prefix)
    extra = [name for name in own if name.endswith(EXTRA_STATE)]
    if extra and prefix:
        places = stored.below(prefix, key)
        holder = {name: copied(own[name]) for name in extra}
        making.fit(holder, {path: facts for path, facts in places.items() if path[0] in holder})
        own.update(holder)
    return _ModuleState(part, own, making)
