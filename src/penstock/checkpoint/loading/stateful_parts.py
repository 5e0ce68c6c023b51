"""The parts of a state that a load fills, in the structure that the checkpoint has of them.

A fresh optimizer has no state yet, and a data loader may have another one than when it was saved: asked for
their state, they would leave most of the checkpoint where it is. So places are made for what the checkpoint
has of such parts and the load takes, and for nothing else: a place has no values before the load.
Optimizers number their parameters, torch's `get_optimizer_state_dict` names them: a checkpoint of either form
is loaded into both. Invariant: no part changes before all of it has arrived, or if nothing of it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch

from penstock.checkpoint.loading.load_requests import SKIPPED, Skipped, StoredNames, StoredPlaces
from penstock.checkpoint.plan.save_plan import RANK_MARK
from penstock.checkpoint.state.leaves import Leaf, Path, Stateful, is_stateful, literal_key
from penstock.checkpoint.state.regions import TensorFacts
from penstock.checkpoint.state.tensors import EXTRA_STATE, parameter_names
from penstock.errors import UsageError, name_some

logger = logging.getLogger(__name__)


class _Part(Protocol):
    """One entry of a state while it is loaded into `inner`."""

    inner: Any

    def add(self, path: Path, facts: TensorFacts | None) -> bool:
        """Make a place for what no rank took; False if this part can have no such place."""

    def take(self, loaded: Any) -> Any:
        """Let the part take what was loaded into `inner`, or instead of it; what then stands in the state."""


@dataclass(slots=True)
class _Plain:
    """A value that is filled or replaced where it is."""

    inner: Any

    def add(self, path: Path, facts: TensorFacts | None) -> bool:  # noqa: ARG002 - the same for all parts
        """Nothing is added."""
        return False

    def take(self, loaded: Any) -> Any:
        """It is what was loaded."""
        return loaded


@dataclass(slots=True)
class _ModuleState:
    """A module, which knows the names of its tensors, but not what its extra state was."""

    part: torch.nn.Module
    inner: dict[str, Any]
    places: _Places

    def add(self, path: Path, facts: TensorFacts | None) -> bool:
        """Any place is made in an extra state."""
        is_extra = str(path[0]).endswith(EXTRA_STATE) and path[0] in self.inner and len(path) > 1
        if is_extra:
            self.places.add(self.inner, path, facts)
        return is_extra

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
    places: _Places

    def add(self, path: Path, facts: TensorFacts | None) -> bool:
        """Any place is made."""
        self.places.add(self.inner, path, facts)
        return True

    def take(self, loaded: Any) -> Any:
        """Load the state."""
        self.places.end()
        self.part.load_state_dict(loaded)
        return self.part


@dataclass(slots=True)
class _OptimizerState:
    """An optimizer, whose state has the entries of the checkpoint, numbered or named as they are there."""

    key: str
    part: torch.optim.Optimizer
    inner: dict[str, Any]
    numbers: Mapping[int | str, int]
    """By number and, where it is known, by name the number of each parameter."""
    groups: Sequence[Sequence[int]]
    """The numbers of each group's parameters."""
    misfit: UsageError | None = None
    """Why it cannot be loaded."""

    def add(self, path: Path, facts: TensorFacts | None) -> bool:
        """Groups may have further options; further parameters are nobody's."""
        is_option = path[0] == "param_groups" and isinstance(path[1], int) and path[1] < len(self.groups)
        if is_option:
            _Places().add(self.inner, path, facts)
        return is_option

    def take(self, loaded: Any) -> Any:
        """Load the state under the optimizer's own numbers."""
        told = {number: name for name, number in self.numbers.items() if isinstance(name, str)}
        groups = []
        for place, (group, own) in enumerate(zip(loaded["param_groups"], self.groups, strict=True)):
            entries = list(group["params"])
            numbers = [self.numbers.get(entry) for entry in entries]
            # Names are taken in their order if no module in the state tells what they mean.
            if len(entries) != len(own) or (told and set(numbers) != set(own)):
                raise UsageError(
                    f"Group {place} of {self.key!r} has other parameters than in the checkpoint",
                    where=f"the checkpoint has {name_some(entries)}",
                    fix="Build the optimizer with the groups that it was saved with.",
                )
            names = self.part.param_groups[place].get("param_names") or [told[n] for n in own if n in told]
            _require_order(self.key, group, names)
            # Those of the checkpoint are in the order of its own parameters, which may be another one.
            option = {"param_names": names} if "param_names" in group and len(names) == len(own) else {}
            groups.append({**group, "params": list(own), **option})
        state = {self.numbers.get(entry, entry): slots for entry, slots in loaded["state"].items()}
        self.part.load_state_dict({**loaded, "state": state, "param_groups": groups})
        if converted := list(self._converted(state)):
            logger.warning("%r has converted what it was given: %s", self.key, name_some(converted))
        return self.part

    def _converted(self, given: Mapping[int | str, Any]) -> Iterator[str]:
        """What has another dtype since it was taken: torch's optimizers give states that of parameters."""
        parameters = chain.from_iterable(group["params"] for group in self.part.param_groups)
        for number, parameter in zip(chain.from_iterable(self.groups), parameters, strict=True):
            for slot, value in given.get(number, {}).items() if parameter.dtype != torch.float32 else ():
                taken = self.part.state[parameter].get(slot)
                if isinstance(taken, torch.Tensor) and taken.dtype != getattr(value, "dtype", taken.dtype):
                    yield f"state.{number}.{slot} from {value.dtype} to {taken.dtype}"


@dataclass(slots=True)
class _NamedState:
    """The dict of `get_optimizer_state_dict`, for a checkpoint that numbers the parameters."""

    key: str
    own: dict[str, Any]
    inner: dict[str, Any]

    def add(self, path: Path, facts: TensorFacts | None) -> bool:  # noqa: ARG002 - the same for all parts
        """Nothing is added."""
        return False

    def take(self, loaded: Any) -> Any:
        """Copy the options of the groups back; the rest was loaded in place."""
        for own, group in zip(self.own["param_groups"], loaded["param_groups"], strict=True):
            if len(own["params"]) != len(group["params"]):
                raise UsageError(
                    f"The groups of {self.key!r} have other parameters than in the checkpoint",
                    fix="Build the optimizer with the groups that it was saved with.",
                )
            _require_order(self.key, group, own.get("param_names"))
            own.update((option, value) for option, value in group.items() if option != "params")
        return self.own


@dataclass(slots=True)
class LoadedParts:
    """The state that is loaded into: `state` has the places of all leaves."""

    parts: Mapping[str, _Part]
    prefixes: Mapping[str, str]
    """By key of a part that has names below it, the beginning of these names in the checkpoint."""
    stored: StoredNames
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
            if isinstance(part, _OptimizerState) and part.misfit is not None:
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
        owned = ((name, self.own_name(name)) for name in unused if not self.stored.is_of_one_rank(name))
        return [name for name, own in owned if own is not None and self.stored.find(own) is not None]

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

    def of_other_ranks(self, num_ranks: int) -> list[str]:
        """The names of values that only ranks beyond those of this job had."""
        marked = filter(self.stored.is_of_one_rank, self.stored.names)
        return [
            f"{name}{mark}{rank}"
            for name, mark, rank in (each.rpartition(RANK_MARK) for each in marked)
            if rank.isdecimal() and int(rank) >= num_ranks and (self._owner(name) or name in self.parts)
        ]

    def add(self, names: Collection[str]) -> set[str]:
        """Make places for stored names that no rank took; returns those that found one."""
        added = set()
        for key, prefix in self.prefixes.items():
            for path, facts in self.stored.below(prefix, key).items():
                name = f"{prefix}{_joined(path)}"
                if name in names and facts is not SKIPPED and self.parts[key].add(path, facts):
                    added.add(name)
        return added


@contextmanager
def loading_into(
    state: Mapping[str, Any], stored: StoredNames, prefixes: Mapping[str, str]
) -> Iterator[LoadedParts]:
    """Yield the state to load into; afterwards parts with `load_state_dict` load theirs, others are replaced.

    `prefixes` has by key the beginning of the names that the checkpoint has for this part. If the body
    raises, no part is changed.
    """
    names = parameter_names(state)
    parts = {key: _begin(key, part, stored, prefixes[key], names) for key, part in state.items()}
    containers = (Mapping, list)
    asked = {key: prefixes[key] for key, part in parts.items() if isinstance(part.inner, containers)}
    loading = LoadedParts(parts, {key: prefix for key, prefix in asked.items() if prefix}, stored)
    fixed = [key for key, part in parts.items() if not isinstance(part.inner, (*containers, torch.Tensor))]
    if fixed and not isinstance(state, MutableMapping):
        raise UsageError(
            f"The state is a {type(state).__name__}, in which {name_some(fixed)} cannot be replaced",
            fix="Load into a dict.",
        )
    yield loading
    for key, part in parts.items():
        if loading.is_left(key):
            continue
        taken = part.take(loading.state[key])
        if taken is not state[key] and isinstance(state, MutableMapping):
            state[key] = taken


def _begin(key: str, part: Any, stored: StoredNames, prefix: str, names: Mapping[int, str]) -> _Part:
    if isinstance(part, torch.nn.Module):
        return _begin_module(key, part, stored, prefix)
    if is_stateful(part):
        own = part.state_dict()
        if isinstance(part, torch.optim.Optimizer) and {"state", "param_groups"} <= own.keys():
            return _begin_optimizer(key, part, stored, prefix, names)
        places = stored.below(prefix, key) if prefix else {}
        own, making = _copied(own), _Places(stored.key_types, prefix)
        making.fit(own, places)
        return _OwnState(part, own, making)
    if isinstance(part, dict) and {"state", "param_groups"} <= part.keys() and prefix:
        numbered = _numbered(part, stored.below(prefix, key))
        if numbered is not None:
            return _NamedState(key, part, numbered)
    return _Plain(part)


def _begin_module(key: str, part: torch.nn.Module, stored: StoredNames, prefix: str) -> _ModuleState:
    own, making = part.state_dict(), _Places(stored.key_types, prefix)
    extra = [name for name in own if name.endswith(EXTRA_STATE)]
    if extra and prefix:
        places = stored.below(prefix, key)
        holder = {name: _copied(own[name]) for name in extra}
        making.fit(holder, {path: facts for path, facts in places.items() if path[0] in holder})
        own.update(holder)
    return _ModuleState(part, own, making)


def _begin_optimizer(
    key: str, part: torch.optim.Optimizer, stored: StoredNames, prefix: str, names: Mapping[int, str]
) -> _OptimizerState:
    raw = part.state_dict()
    groups = [list(group["params"]) for group in raw["param_groups"]]
    parameters = list(chain.from_iterable(group["params"] for group in part.param_groups))
    by_number = dict(zip(chain.from_iterable(groups), parameters, strict=True))
    by_name = {
        names[id(parameter)]: number for number, parameter in by_number.items() if id(parameter) in names
    }
    by_name.update(_names_of_groups(raw["param_groups"]))
    entries: dict[str, dict[Path, TensorFacts | Skipped | None]] = {}
    for path, facts in stored.below(prefix, key).items():
        if path[0] == "state" and len(path) > 2:
            entries.setdefault(str(path[1]), {})[path[2:]] = facts
    is_named = bool(entries) and not entries.keys() & set(map(str, by_number))
    shown = {number: name for name, number in by_name.items()} if is_named else {}
    state = {entry: slots for entry, slots in raw["state"].items() if entry not in by_number}
    without, cut = [], []
    for number, parameter in by_number.items():
        entry, own = shown.get(number, number), raw["state"].get(number, {})
        given = entries.get(str(entry), {})
        skipped = [f"{entry}.{_joined(path)}" for path, facts in given.items() if facts is SKIPPED]
        if len(skipped) < len(given):
            state[entry] = _copied(own)
            _Places(stored.key_types, f"{prefix}state.{entry}.", parameter).fit(state[entry], given)
            cut += [] if own else skipped
        elif given or any(stored.find(f"{key}.state.{entry}.{slot}") is None for slot in own):
            state.update({entry: own} if own else {})
        elif parameter.requires_grad:
            without.append(entry)
    # It keeps all of its state with its first parameter.
    if entries and without and not isinstance(part, torch.optim.LBFGS):
        logger.warning("The checkpoint has no state of the parameters %s of %r", name_some(without), key)
    inner = {**raw, "state": state}
    inner["param_groups"] = [
        {**group, "params": [shown.get(number, number) for number in group["params"]]}
        for group in raw["param_groups"]
    ]
    numbers: dict[int | str, int] = {number: number for number in by_number}
    numbers.update(by_name)
    order = None if is_named else _order_error(key, entries, by_number)
    return _OptimizerState(key, part, inner, numbers, groups, _cut_error(key, cut) or order)


def _require_order(key: str, group: Mapping[str, Any], own: Sequence[str] | None) -> None:
    """Raise `UsageError` if a group that numbers its parameters has these names in another order."""
    saved = group.get("param_names")
    if not (saved and own) or isinstance(group["params"][0], str) or saved == own:
        return
    if sorted(saved) == sorted(own):
        first = next(number for number, pair in enumerate(zip(saved, own, strict=True)) if pair[0] != pair[1])
        raise UsageError(
            f"{key!r} has its parameters in another order than when it was saved: {saved[first]!r} was where"
            f" {own[first]!r} is",
            fix="Make it with its parameters in the order of the save.",
        )


def _cut_error(key: str, skipped: Sequence[str]) -> UsageError | None:
    """The error for a parameter that would get only some of its state: no optimizer begins with that."""
    if not skipped:
        return None
    return UsageError(
        f"{key!r} has no state yet, and would get only a part of it: {name_some(skipped)} is skipped",
        fix=f"Load all of its state, none of it (exclude='{key}.state.*'), or let it make a step first.",
    )


def _order_error(
    key: str, entries: Mapping[str, StoredPlaces], parameters: Mapping[int, torch.Tensor]
) -> UsageError | None:
    """The error for an optimizer that numbers its parameters in another order than the one that was saved.

    Shapes tell it where a slot's shapes over all parameters are those of the parameters, but not one by one.
    States of any other shape, as factored ones and single numbers, do not have the sizes of their parameters.
    """
    slots: dict[Path, list[tuple[Path, Path, int]]] = {}
    for number, parameter in parameters.items():
        for path, facts in entries.get(str(number), {}).items():
            if isinstance(facts, TensorFacts):
                slots.setdefault(path, []).append((facts.shape, tuple(parameter.shape), number))
    for path, rows in slots.items():
        misfits = [row for row in rows if row[0] != row[1]]
        if misfits and sorted(row[0] for row in misfits) == sorted(row[1] for row in misfits):
            stored, own, number = misfits[0]
            return UsageError(
                f"{key!r} has its parameters in another order than when it was saved:"
                f" 'state.{number}.{_joined(path)}' is {list(stored)} in the checkpoint,"
                f" parameter {number} is {list(own)} here",
                fix="Make it with its parameters in the order of the save. Names instead of numbers, as"
                " get_optimizer_state_dict saves them, allow any order.",
            )
    return None


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _names_of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The names of optimizers that were made from named parameters."""
    return {
        name: number
        for group in groups
        for name, number in zip(group.get("param_names", ()), group["params"], strict=False)
    }


def _numbered(part: Any, places: StoredPlaces) -> dict[str, Any] | None:
    """The dict of `get_optimizer_state_dict` with numbers, if the checkpoint numbers the parameters."""
    names = list(chain.from_iterable(group.get("params", ()) for group in part["param_groups"]))
    entries = {str(path[1]) for path in places if path[0] == "state" and len(path) > 2}
    numbers = {name: number for number, name in enumerate(names)}
    is_named = all(isinstance(name, str) for name in names)
    if not (names and is_named and entries) or entries & numbers.keys():
        return None
    if not entries <= set(map(str, numbers.values())):
        return None
    state = {numbers[name]: slots for name, slots in part["state"].items()}
    groups = [_copied(own) | {"params": [numbers[n] for n in own["params"]]} for own in part["param_groups"]]
    return {**part, "state": state, "param_groups": groups}


def _place(facts: TensorFacts | None, parameter: torch.Tensor | None) -> Any:
    """A place to load into: for a tensor memory, like its parameter's where the shape is the same."""
    if facts is None:
        return None
    dtype = getattr(torch, facts.dtype)
    if parameter is not None and facts.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Optimizers keep single numbers, as the count of steps, in host memory unless they load them elsewhere.
    device = parameter.device if parameter is not None and facts.shape else "cpu"
    return torch.empty(facts.shape, dtype=dtype, device=device)


def _copied(value: Any) -> Any:
    """New dicts and lists around the same leaves: the part keeps its own until it loads."""
    if isinstance(value, Mapping):
        again: Any = copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, inner in value.items():
            again[key] = _copied(inner)
        return again
    return [_copied(inner) for inner in value] if type(value) is list else value


@dataclass(slots=True)
class _Places:
    """Makes containers, tensors and other places where the checkpoint has something of a part."""

    key_types: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    """Before the names of the part's dicts in `key_types`."""
    parameter: torch.Tensor | None = None
    """Of which this is the state in an optimizer: there, all places are made at once."""
    _emptied: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def fit(self, own: Any, stored: StoredPlaces, at: Path = ()) -> None:
        """Let `own` have the containers and places that are stored and not skipped.

        Where a dict has nothing yet, that is left until no rank has taken a name. What lists and numbered
        entries have beyond the stored ones goes; what else a dict has more is missing in the checkpoint.
        """
        below: dict[str | int, dict[Path, TensorFacts | Skipped | None]] = {}
        for path, facts in stored.items():
            below.setdefault(path[0], {})[path[1:]] = facts
        if stored:
            _drop_rest(own, below)
        for step, rests in below.items():
            taken = {rest: facts for rest, facts in rests.items() if facts is not SKIPPED}
            if not taken or not _has(own, (step,)):
                if self.parameter is not None or isinstance(own, list):
                    for rest, facts in taken.items():
                        self._put(own, (step, *rest), _place(facts, self.parameter), at)
                continue
            key = _own_key(own, step)
            if taken.keys() == {()}:
                if not _is_place(own[key], taken[()]):
                    self._leave(own, key, taken[()])
                continue
            rests.pop((), None)
            if not isinstance(own[key], Mapping | list):
                own[key] = [] if isinstance(next(iter(rests))[0], int) else {}
            self.fit(own[key], rests, (*at, step))

    def add(self, own: Any, path: Path, facts: TensorFacts | None) -> None:
        """Make a place. A dict that is empty on one rank and not on another one stays."""
        if not (_has(own, path) and _at(own, path)):
            self._put(own, path, _place(facts, None))

    def end(self) -> None:
        """After the load: let dicts that are empty now be of the kinds that they were."""
        for holder, key, emptied in self._emptied:
            if type(holder[key]) is dict and not holder[key]:
                holder[key] = emptied

    def _leave(self, own: Any, key: Any, facts: TensorFacts | None) -> None:
        if isinstance(own[key], MutableMapping):
            own[key].clear()
            self._emptied.append((own, key, own[key]))
        own[key] = _place(facts, self.parameter)

    def _put(self, holder: Any, path: Path, value: Any, at: Path = ()) -> None:
        """Put a value at a place; missing dicts and lists on the way are made."""
        for number, step in enumerate(path):
            is_last = number + 1 == len(path)
            inner = value if is_last else [] if isinstance(path[number + 1], int) else {}
            key: Any = step
            if isinstance(holder, list):
                assert isinstance(step, int), "places inside lists are numbers"
                holder.extend([None] * (step + 1 - len(holder)))
                own = holder[step]
            else:
                key = self._new_key(holder, step, (*at, *path[:number]))
                own = holder.get(key)
            if is_last or not isinstance(own, Mapping | list):
                holder[key] = inner
            holder = holder[key]

    def _new_key(self, holder: Any, step: str | int, at: Path) -> Any:
        key = _own_key(holder, step)
        if key in holder or not isinstance(key, str):
            return key
        kind = self.key_types.get(f"{self.prefix}{'.'.join(map(str, at))}".removesuffix("."))
        if kind is None and _counts(holder) and key.isdecimal():
            return int(key)
        return literal_key(key) if kind == "literal" else key


def _drop_rest(own: Any, stored: Collection[str | int]) -> None:
    """Drop what a list, or a dict that numbers its entries, has beyond what is stored."""
    if isinstance(own, list):
        del own[1 + max((step for step in stored if isinstance(step, int)), default=-1) :]
    elif isinstance(own, MutableMapping) and not any(
        isinstance(key, str) and not key.isdecimal() for key in own
    ):
        for key in [key for key in own if str(key) not in stored]:
            del own[key]


def _at(holder: Any, path: Path) -> Any:
    for step in path:
        holder = holder[_own_key(holder, step)]
    return holder


def _is_place(value: Any, facts: TensorFacts | None) -> bool:
    """Whether what is stored can be loaded here."""
    if facts is None:
        return not isinstance(value, Mapping | list | torch.Tensor)
    if type(value) is not torch.Tensor:
        # Sharded tensors are checked against the checkpoint when they are requested, as those of modules.
        return isinstance(value, torch.Tensor)
    return tuple(value.shape) == facts.shape and str(value.dtype) == f"torch.{facts.dtype}"


def _own_key(holder: Any, step: str | int) -> Any:
    """The key of a step of a place, which is text even where the state counts with integers."""
    if not isinstance(holder, Mapping) or step in holder:
        return step
    return next((key for key in holder if not isinstance(key, str) and str(key) == step), step)


def _has(holder: Any, path: Path) -> bool:
    for step in path:
        if isinstance(holder, Mapping):
            key = _own_key(holder, step)
            if key not in holder:
                return False
        elif isinstance(holder, list):
            key = step
            if not isinstance(step, int) or step >= len(holder):
                return False
        else:
            return False
        holder = holder[key]
    return True


def _counts(holder: Mapping[Any, Any]) -> bool:
    """Whether keys that look like integers are some; where there is none yet, this can only be guessed."""
    return not any(isinstance(key, str) and key.isdecimal() for key in holder)
