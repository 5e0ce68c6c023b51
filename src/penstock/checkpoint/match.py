"""Matches names in a checkpoint with leaves of a state, and creates the places that a load fills.

Three steps lead from a name in the state to bytes of the checkpoint:

1. `loading_into` gives each part of the state a place (an entry of a dict or list) for everything that the
   checkpoint has for it and that the load takes. Without this, a fresh optimizer, whose state is still empty,
   or a data loader whose structure has changed since the save would lack places for most of it. Afterwards,
   each part loads what has arrived.
2. `select_leaves` finds the stored name of each leaf: `only=` and `exclude=` select, `rename=` translates,
   and a value that belonged to this rank alone takes precedence over the common one.
3. `find_wanted` compares each leaf with what is stored under its name: shape, dtype, tensor or object.

Optimizers number their parameters, torch's helpers name them: a checkpoint of either form can be loaded into
a state of either form. Invariants: a place has no value before the load; a part changes only after everything
has arrived and has passed all checks on all ranks, and not at all if nothing for it is loaded; no parameter
receives another parameter's state, as far as groups, names or shapes distinguish them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from inspect import signature
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from penstock.checkpoint.state.regions import CheckpointIndex, Regions, StoredObject, TensorFacts
from penstock.checkpoint.state.tensors import bare_names, parameter_names
from penstock.checkpoint.state.walk import (
    EXTRA_STATE,
    INTEGER,
    RANK_MARK,
    Leaf,
    Path,
    RankEntries,
    Room,
    Stateful,
    find_stored_name,
    is_of_one_rank,
    is_optimizer_dict,
    is_stateful,
    literal_key,
    matches_pattern,
    parameters_of,
    rank_object_name,
)
from penstock.did_you_mean import nearest
from penstock.errors import UsageError, name_some
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.checkpoint.engine import LoadChoice
    from penstock.checkpoint.state.tensors import LocalShard, LocalState


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSelection:
    """The stored name of each selected leaf, by the leaf's name.

    `left` has the leaves that are not changed, `unused` the names in the checkpoint that are not read.
    """

    stored_names: Mapping[str, str]
    left: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    """The `left` leaves that the checkpoint lacks."""


def select_leaves(
    names: Iterable[str],
    stored: Collection[str],
    choice: LoadChoice,
    *,
    rank: int,
    paths: Mapping[str, Path] = MappingProxyType({}),
) -> LeafSelection:
    """Match the leaves of a state with the names in a checkpoint, whose places `paths` has.

    Raises `UsageError` if the checkpoint lacks a selected leaf, unless the choice is not strict.
    """
    stored_names: dict[str, str] = {}
    left = []
    missing = []
    asked_names = {name: asked_name(name, choice) for name in names}
    literal = set(asked_names.values())
    for name, asked in asked_names.items():
        if asked is None:
            left.append(name)
            continue
        # Stock torch saves a state that has both "x" and "x@rank1".
        is_literal = rank_object_name(asked, rank) in literal
        stored_name = find_stored_name(asked, 0 if is_literal else rank, stored, paths)
        if stored_name is not None:
            stored_names[name] = stored_name
        else:
            missing.append(name)
    if missing and choice.strict:
        raise _missing(missing, stored, choice)
    used = set(stored_names.values())

    def is_known(name: str) -> bool:
        # Another rank's own value belongs to the name that this rank takes.
        return name in used or (is_of_one_rank(name, paths) and name.partition(RANK_MARK)[0] in used)

    return LeafSelection(
        stored_names=stored_names,
        left=(*left, *missing),
        unused=tuple(name for name in stored if not is_known(name)),
        missing=tuple(missing),
    )


def apply_rename(name: str, rename: Mapping[str, str]) -> str:
    """Translate a leaf's name to the checkpoint's: `{"model.*": "module.*"}` replaces its beginning."""
    if name in rename:
        return rename[name]
    for pattern, target in rename.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return target.removesuffix("*") + name[len(pattern) - 1 :]
    return name


def asked_name(name: str, choice: LoadChoice) -> str | None:
    """Return the checkpoint's name for `name` in the state, or None if it is not to be loaded."""
    is_skipped = (choice.only is not None and not matches_pattern(name, choice.only)) or (
        choice.exclude is not None and matches_pattern(name, choice.exclude)
    )
    return None if is_skipped else apply_rename(name, choice.rename or {})


Pattern = tuple[str, str]
"""An option of a load, and one of its patterns."""


def find_idle(choice: LoadChoice, names: Iterable[str], stored: Iterable[str]) -> list[Pattern]:
    """List the patterns that match none of the `names` of this rank's state.

    A pattern of `exclude` that matches only `stored` names is not idle: a program may lack a part that the
    checkpoint has.
    """
    own = list(names)
    all_names = [*own, *stored]
    idle: list[Pattern] = []
    for option, patterns, matched in (("only", choice.only, own), ("exclude", choice.exclude, all_names)):
        for text in (patterns,) if isinstance(patterns, str) else patterns or ():
            idle += [] if any(matches_pattern(name, text) for name in matched) else [(option, text)]
    for text in choice.rename or ():
        is_idle = all(apply_rename(name, {text: "\0"}) == name for name in own)
        idle += [("rename", text)] if is_idle else []
    return idle


def require_matches(
    choice: LoadChoice, of_ranks: Sequence[Sequence[Pattern]], stored: Sequence[str], rank: int
) -> None:
    """Raise `UsageError` if nothing would be loaded; on rank 0, warn about patterns idle on all ranks.

    Idle patterns are not an error, because a job may exclude or rename what only some of its checkpoints
    have.
    """
    idle = [pattern for pattern in of_ranks[0] if all(pattern in other for other in of_ranks)]
    only = (choice.only,) if isinstance(choice.only, str) else choice.only
    if only is not None and all(("only", text) in idle for text in only):
        example = f", for example {stored[0]!r} in the checkpoint" if stored else ""
        raise UsageError(
            f"No part of the state matches only={(only[0] if len(only) == 1 else list(only))!r}",
            fix=f"Names are keys joined by dots{example}.",
        )
    if idle and rank == 0:
        logger.warning(
            "No part of the state matches %s", name_some([f"{option}={text!r}" for option, text in idle])
        )


class Skipped(Enum):
    """Marks what the checkpoint has but the load does not take: it gets no place."""

    SKIPPED = "skipped"


SKIPPED = Skipped.SKIPPED
StoredPlaces = Mapping[Path, TensorFacts | Skipped | None]
"""What is stored at each place; None stands for an object."""


class StoredNames:
    """The names in a checkpoint as one load sees them, with their places in the nested state.

    With `rename={"model.*": "net.*"}`, `asked("model.bias")` is "net.bias"; it is None for a name that the
    load leaves out. `entries` is the structure that each rank had when the checkpoint was saved, in parts
    where it differed. With a different number of ranks, the names that a rank lacked come after its own.
    `key_types` is None if the checkpoint does not have the types of keys.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        choice: LoadChoice,
        *,
        rank: int = 0,
        key_types: Mapping[str, str] | None = None,
        entries: Sequence[RankEntries] = (),
        are_as_many: bool = True,
        read: Callable[[StoredObject], Any],
    ) -> None:
        self.asked = partial(asked_name, choice=choice)
        self.has_types = key_types is not None
        key_types = key_types or {}
        own, own_types = entries[rank] if entries else ({}, key_types)
        self.key_types = own_types if are_as_many else {**key_types, **own_types}
        self.converts = choice.convert_dtypes
        self._rename = choice.rename or {}
        self.rank = rank
        num_holders = Counter(chain.from_iterable(places for places, _ in entries))
        self.of_some = {name for name, number in num_holders.items() if number < len(entries)}
        """The names that not all ranks had."""
        self._lacking = self.of_some.difference(own) if are_as_many else set()
        self._paths = {**own, **index.paths, **own}
        self._objects = index.objects
        self._read = read
        facts: dict[str, TensorFacts | None] = {one.name: one for one in index.tensors}
        facts |= {stored.name: None for stored in index.objects}
        # Places are in the order of the state that was saved.
        self._facts = {name: facts[name] for name in self._paths if name in facts} | facts
        self.names = tuple(self._facts)

    def prefix(self, key: str) -> str:
        """Return the prefix, in the checkpoint, of the names that belong to the part `key` of the state."""
        return apply_rename(f"{key}.", self._rename)

    def lacks(self, prefix: str) -> bool:
        """Return True if, when the checkpoint was saved, only other ranks had anything below `prefix`."""
        return any(name.startswith(prefix) for name in self._lacking)

    def is_of_one_rank(self, name: str) -> bool:
        """Return True if the value belonged to one rank alone."""
        return is_of_one_rank(name, self._paths)

    def is_of_others(self, name: str) -> bool:
        """Return True if the name is a single rank's own value, or an entry that only other ranks had."""
        return name in self._lacking or self.is_of_one_rank(name)

    def facts(self, name: str) -> TensorFacts | Skipped | None:
        """Return the facts of what is stored under `name` for this rank; SKIPPED if nothing is."""
        if name in self._lacking:
            return SKIPPED
        stored_name = find_stored_name(name, self.rank, self._facts, self._paths)
        return SKIPPED if stored_name is None else self._facts[stored_name]

    def below(self, stored_prefix: str, own_key: str) -> StoredPlaces:
        """Return the checkpoint's places below `stored_prefix`, such as "opt.", for the part `own_key`.

        Values of single ranks are left out, because they have the same places as the common ones.
        """
        found: dict[Path, TensorFacts | Skipped | None] = {}
        for name in self.names:
            path = self._paths.get(name, ()) if name.startswith(stored_prefix) else ()
            rest, above = path, ""
            while rest and above != stored_prefix:
                above, rest = f"{above}{rest[0]}.", rest[1:]
            if rest and not self.is_of_others(name):
                # Patterns match names in the state, which may differ from those in the checkpoint because of
                # rename=.
                is_chosen = self.asked(f"{own_key}.{name[len(stored_prefix) :]}") == name
                found[rest] = self.facts(name) if is_chosen else SKIPPED
        return found

    def are_numbers(self, key: str, entries: Collection[str], names: Collection[str]) -> bool:
        """Return True if the checkpoint numbers the parameters of optimizer `key`, False if it names them.

        It has state for these `entries`; the state calls the parameters by these `names`. A name may itself
        be a number, as in a `ParameterList`, so the entries alone do not tell, but the saved groups do. They
        are read now, unless the load takes them anyway and checks them then.
        """
        has_numbers = any(map(str.isdecimal, entries))
        if not has_numbers and (not entries or not {*names}.isdisjoint(entries)):
            return False
        names_are_text = not any(map(str.isdecimal, names))
        if has_numbers and names_are_text and self.asked(f"{key}.param_groups.0.params") in self._facts:
            return True
        kinds = {
            isinstance(entry, str)
            for each in self._objects
            if each.name.startswith(f"{self.prefix(key)}param_groups.") and each.name.endswith(".params")
            for entry in parameters_of({"params": self._read(each)}) or ()
        }
        if has_numbers and len(kinds) != 1:
            raise UsageError(
                f"{name_some(sorted(entries))} in the state of {key!r} may be names or numbers of parameters:"
                " the checkpoint has no groups that tell",
                fix="Load a checkpoint that has the groups of its optimizers, or exclude this optimizer.",
            )
        return kinds == {False}


class MissingName(UsageError, RuntimeError):
    """The checkpoint lacks a name that the state has.

    Also a `RuntimeError`, which torch's planners raise for this.
    """


def _missing(missing: list[str], stored: Collection[str], choice: LoadChoice) -> MissingName:
    wanted = apply_rename(missing[0], choice.rename or {})
    similar = nearest(wanted, list(stored)[:10_000])
    hint = f"The most similar name is {similar!r}. " if similar else ""
    prefix, _, rest = wanted.partition(".")
    if rest in stored:
        hint = f"It holds {rest!r}, without {prefix!r}: rename={{'{prefix}.*': ''}} finds it. "
    deeper = [name for name in stored if name.endswith(f".{wanted}")]
    if len(deeper) == 1:
        above = deeper[0].removesuffix(f".{wanted}")
        hint = f"It holds {deeper[0]!r}, below {above!r}: rename={{'*': '{above}.*'}} finds it. "
    return MissingName(
        f"Missing key in checkpoint: it does not hold {name_some([repr(wanted), *missing[1:]], 1)}",
        fix=f"{hint}Map names with rename=, skip parts with exclude=, or keep missing parts unchanged with"
        " strict=False.",
    )


def new_place(facts: TensorFacts | None, parameter: torch.Tensor | None) -> Any:
    """Return a place to load into: None for an object, memory for a tensor.

    The memory is like that of the `parameter` if both have the same shape.
    """
    if facts is None:
        return None
    dtype = getattr(torch, facts.dtype)
    if parameter is not None and facts.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Optimizers keep scalars, such as step counts, in host memory unless loading puts them elsewhere.
    device = parameter.device if parameter is not None and facts.shape else "cpu"
    return torch.empty(facts.shape, dtype=dtype, device=device)


def copied(value: Any) -> Any:
    """Copy dicts and lists but not their leaves, so that a part keeps its own containers until it loads."""
    if isinstance(value, Mapping):
        again: Any = copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, inner in value.items():
            again[key] = copied(inner)
        return again
    return [copied(inner) for inner in value] if type(value) is list else value


@dataclass(slots=True)
class Places:
    """Creates containers, tensors and other places for what the checkpoint has of a part."""

    key_types: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    """The prefix of the part's dicts in `key_types`."""
    parameter: torch.Tensor | None = None
    """The parameter whose optimizer state this is. For such a state, all places are created at once."""
    emptied: Emptied = field(default_factory=list)
    has_types: bool = False
    """True if dicts get the saved types of keys even where they have such keys."""

    def fit(self, own: Any, stored: StoredPlaces, at: Path = ()) -> None:
        """Give `own` the containers and places that are stored and not skipped.

        Surplus list items and numbered entries are removed. Surplus entries of other dicts are kept: the
        checkpoint lacks them.
        """
        below: dict[str | int, dict[Path, TensorFacts | Skipped | None]] = {}
        for path, facts in stored.items():
            below.setdefault(path[0], {})[path[1:]] = facts
        if stored and isinstance(own, list):
            del own[1 + max((step for step in below if isinstance(step, int)), default=-1) :]
        elif (
            stored
            and isinstance(own, MutableMapping)
            and not any(isinstance(key, str) and not key.isdecimal() for key in own)
        ):
            for extra in [key for key in own if str(key) not in below]:
                del own[extra]
        keys = {} if isinstance(own, list) else self._keys(own, below, at)
        if at and isinstance(own, MutableMapping):
            # As saved: first the keys that the checkpoint has, in its order.
            before = {str(key): value for key, value in own.items()}
            others = {key: value for key, value in own.items() if str(key) not in below}
            ordered = {
                keys.get(step, step): before.get(str(step), NOTHING)
                for step, rests in below.items()
                if str(step) in before or {*rests.values()} != {SKIPPED}
            }
            own.clear()
            own.update(ordered)
            own.update(others)
        for step, rests in below.items():
            taken = {rest: facts for rest, facts in rests.items() if facts is not SKIPPED}
            if not taken:
                continue
            if isinstance(own, list):
                assert isinstance(step, int), "places inside lists are numbers"
                own.extend([None] * (step + 1 - len(own)))
            key: Any = keys.get(step, step)
            value = own[key] if isinstance(own, list) else own.get(key, NOTHING)
            if taken.keys() != {()}:
                rests.pop((), None)
                is_list = all(isinstance(rest[0], int) for rest in rests)
                if not isinstance(value, list if is_list else Mapping):
                    own[key] = [] if is_list else {}
                self.fit(own[key], rests, (*at, step))
            elif value is NOTHING or not _is_place(own, value, taken[()]):
                if isinstance(value, MutableMapping):
                    value.clear()
                    self.emptied.append((own, key, value))
                set_entry(own, key, new_place(taken[()], self.parameter))

    def _keys(
        self, holder: Mapping[Any, Any], steps: Collection[str | int], at: Path
    ) -> dict[str | int, Any]:
        """Map the parts of a path that the checkpoint stores as text to the state's own keys: "0" to 0."""
        all_steps = [step for step in steps if isinstance(step, str)]
        unknown = [step for step in all_steps if step not in holder]
        own = {str(key): key for key in holder if not isinstance(key, str)}
        # The last key may be empty text, with a dot before it that belongs to the name.
        kind = self.key_types.get(".".join([*self.prefix.split(".")[:-1], *map(str, at)]))
        if self.has_types and at and kind != "unknown":
            holder, own, unknown = {}, {}, [] if kind == "text" else all_steps
        # Text that looks like an integer is treated as one, unless other such keys in the state are text.
        decimal = [key for key in (*holder, *unknown) if isinstance(key, str) and key.isdecimal()]
        counts = kind in (None, "number", "unknown") and all(
            key not in holder and INTEGER.fullmatch(key) for key in decimal
        )
        return {
            step: own[step]
            if step in own
            else int(step)
            if counts and step.isdecimal()
            else literal_key(step)
            if kind == "literal"
            else step
            for step in unknown
        }


NOTHING = object()
"""Stands for the value of a key that a dict lacks."""

Emptied = list[tuple[Any, Any, Any]]
"""Holders, keys and original values of what was empty, or was emptied for a load."""


def restore_empty(emptied: Emptied) -> None:
    """After the load, put back the original dicts, perhaps of other types, where a dict is still empty."""
    for holder, key, value in emptied:
        if isinstance(value, MutableMapping) and type(holder[key]) is dict and not holder[key]:
            holder[key] = value


def set_entry(holder: Any, key: Any, value: Any) -> None:
    """Set an entry of a dict or list.

    In a list, a value that is still to come gets a `Room`, so that names lead into the list.
    """
    holder[key] = Room() if value is None and isinstance(holder, list) else value


def _is_place(holder: Any, value: Any, facts: TensorFacts | None) -> bool:
    """Return True if the stored value can be loaded here.

    Items of a list of plain values are not places: such a list is one value.
    """
    if facts is None:
        return not isinstance(holder, list) and not isinstance(value, Mapping | list | torch.Tensor)
    if type(value) is not torch.Tensor:
        # Sharded tensors are checked against the checkpoint when they are requested, like those of modules.
        return isinstance(value, torch.Tensor)
    return tuple(value.shape) == facts.shape and str(value.dtype) == f"torch.{facts.dtype}"


@dataclass(slots=True)
class _Part:
    """One entry of a state while it is loaded into `inner`.

    Values without a state have exactly this class.
    """

    inner: Any

    def take(self, loaded: Any) -> None:
        """Load what has arrived into the program's object, if that has not happened in place."""


@dataclass(slots=True)
class _StatefulPart(_Part):
    """A part with `load_state_dict`.

    A module knows the names of its tensors, but not the structure of its saved extra state. Any other part
    receives the structure that was saved.
    """

    part: Stateful
    emptied: Emptied

    def take(self, loaded: Any) -> None:
        """Load the state that has arrived into the part."""
        restore_empty(self.emptied)
        self.part.load_state_dict(loaded)


@dataclass(slots=True)
class _OptimizerState(_Part):
    """An optimizer, loaded with the checkpoint's entries, which are numbered or named as they were saved."""

    key: str
    part: torch.optim.Optimizer
    numbers: Mapping[int | str, int]
    """The number of each parameter, by number and, unless the checkpoint has numbers, by name."""
    name_of: Mapping[int, str]
    """The names of parameters, as far as they are known, by number."""
    groups: Sequence[Sequence[int]]
    """The numbers of the parameters in each group."""
    is_numbered: bool
    """True if the checkpoint has state under the numbers of parameters."""

    def check(self, loaded: Any) -> None:
        """Raise `UsageError` if a group of the checkpoint has different parameters."""
        for place, (group, own) in enumerate(zip(loaded["param_groups"], self.groups, strict=True)):
            entries = parameters_of(group) or ()
            numbers = {self.numbers.get(entry) for entry in entries}
            # If no module in the state tells what the names mean, parameters are matched in order.
            if len(entries) != len(own) or ((self.is_numbered or self.name_of) and numbers != {*own}):
                raise UsageError(
                    f"Group {place} of {self.key!r} has different parameters from the checkpoint's",
                    where=f"the checkpoint has {name_some(entries or [group['params']])}",
                    fix=f"Build it with the groups that it was saved with, or exclude={f'{self.key}.*'!r}.",
                )
        _require_names(
            self.key,
            loaded["param_groups"],
            [[self.name_of[number] for number in own if number in self.name_of] for own in self.groups],
            is_named="param_names" in self.part.param_groups[0],
        )

    def take(self, loaded: Any) -> None:
        """Load the state that has arrived, under the optimizer's own numbers."""
        groups = []
        for group, own in zip(loaded["param_groups"], self.groups, strict=True):
            names = [self.name_of[number] for number in own if number in self.name_of]
            # The checkpoint's names are in the order of its own parameters, which may differ.
            option = {"param_names": names} if "param_names" in group and len(names) == len(own) else {}
            groups.append({**group, "params": list(own), **option})
        state = {self.numbers.get(entry, entry): slots for entry, slots in loaded["state"].items()}
        given = {**loaded, "state": state, "param_groups": groups}
        # Hooks may change their copy in place.
        self.part.load_state_dict(copied(given))
        converted = [text[1:] for text in _converted(given, self.part.state_dict())]
        if converted:
            logger.warning("%r has converted what it loaded: %s", self.key, name_some(converted))


def _converted(given: Any, taken: Any) -> Iterator[str]:
    """Describe what an optimizer has changed in what it was `given`: dtypes of tensors, and plain values."""
    if isinstance(given, list) and isinstance(taken, list):
        given, taken = dict(enumerate(given)), dict(enumerate(taken))
    if isinstance(given, Mapping) and isinstance(taken, Mapping):
        for key in given.keys() & taken.keys():
            yield from (f".{key}{text}" for text in _converted(given[key], taken[key]))
    elif isinstance(given, torch.Tensor) and isinstance(taken, torch.Tensor) and given.dtype != taken.dtype:
        yield f" from {given.dtype} to {taken.dtype}"
    # NaN equals itself only as text.
    elif isinstance(given, bool | int | float | str | tuple | None) and repr(given) != repr(taken):
        yield f" from {given!r} to {taken!r}"


@dataclass(slots=True)
class _NamedState(_Part):
    """The dict of `get_optimizer_state_dict`, for a checkpoint that numbers the parameters."""

    key: str
    own: dict[str, Any]

    def check(self, loaded: Any) -> None:
        """Raise `UsageError` if a group of the checkpoint has different parameters."""
        for own, group in zip(self.own["param_groups"], loaded["param_groups"], strict=True):
            entries = parameters_of(group) or ()
            if len(own["params"]) != len(entries) or _has_names(entries):
                raise UsageError(
                    f"The groups of {self.key!r} have different parameters from the checkpoint's",
                    fix="Build the optimizer with the groups that it was saved with.",
                )
        _require_names(
            self.key,
            loaded["param_groups"],
            [own["params"] for own in self.own["param_groups"]],
            is_named=False,
        )

    def take(self, loaded: Any) -> None:
        """Copy the options of the groups back; everything else was loaded in place."""
        for own, group in zip(self.own["param_groups"], loaded["param_groups"], strict=True):
            own.update(group, params=own["params"])


def _begin_optimizer(
    key: str, part: torch.optim.Optimizer, stored: StoredNames, names: Mapping[int, str]
) -> _OptimizerState:
    """Create places in an optimizer's state for what the checkpoint has of it."""
    raw, prefix = part.state_dict(), stored.prefix(key)
    groups = [group["params"] for group in raw["param_groups"]]
    parameters = chain.from_iterable(group["params"] for group in part.param_groups)
    by_number = dict(zip(chain.from_iterable(groups), parameters, strict=True))
    by_name = {
        names[id(parameter)]: number for number, parameter in by_number.items() if id(parameter) in names
    }
    for group in raw["param_groups"]:
        # Optimizers that were created from named parameters know their names.
        by_name.update(zip(group.get("param_names", ()), group["params"], strict=False))
    entries: dict[Any, dict[Path, TensorFacts | Skipped | None]] = {}
    options: dict[int, dict[Path, TensorFacts | Skipped | None]] = {}
    places = stored.below(prefix, key)
    for path, facts in places.items():
        # State that belongs to no parameter may also be a single value.
        is_single = len(path) == 2 and not (path[1] in by_name or str(path[1]).isdecimal())
        if path[0] == "state" and (len(path) > 2 or is_single):
            entries.setdefault(str(path[1]), {})[path[2:]] = facts
        elif path[0] == "param_groups" and len(path) > 2 and isinstance(path[1], int):
            options.setdefault(path[1], {})[path[2:]] = facts
    if any(facts is not SKIPPED for facts in places.values()):
        _require_same_optimizer(key, part, options)
    is_numbered = stored.are_numbers(key, entries, by_name)
    state = {entry: copied(slots) for entry, slots in raw["state"].items() if entry not in by_number}
    if is_numbered:
        # An optimizer may also keep state that belongs to no parameter.
        others = {
            (entry, *path): facts
            for entry, slots in entries.items()
            if not entry.isdecimal()
            for path, facts in slots.items()
        }
        Places(stored.key_types, f"{prefix}state.").fit(state, others)
        entries = {number: entries.get(str(number), {}) for number in by_number}
        _require_same_order(key, entries, by_number)
    name_of = {number: name for name, number in by_name.items()}
    # A wrapper's named_parameters() has names that get_optimizer_state_dict shortens.
    shown = (
        name_of | {number: name for name, number in by_name.items() if name in entries}
        if entries and not is_numbered
        else {}
    )
    without = []
    for number, parameter in by_number.items():
        entry, own = shown.get(number, number), raw["state"].get(number, {})
        given = entries.get(entry, {})
        skipped = [f"{entry}.{'.'.join(map(str, path))}" for path, facts in given.items() if facts is SKIPPED]
        if len(skipped) < len(given):
            if skipped and not own:
                raise UsageError(
                    f"{key!r} has no state yet, and would get only a part of it: {name_some(skipped)} is"
                    " skipped",
                    fix=f"Load all of its state, none of it (exclude='{key}.state.*'), or let it make a step"
                    " first.",
                )
            state[entry] = copied(own)
            Places(stored.key_types, f"{prefix}state.{entry}.", parameter).fit(state[entry], given)
        elif given or any(stored.asked(f"{key}.state.{entry}.{slot}") is None for slot in own):
            if own:
                state[entry] = own
        elif parameter.requires_grad and not stored.lacks(f"{prefix}state.{entry}."):
            without.append(entry)
    # LBFGS keeps all of its state with its first parameter.
    if entries and without and not isinstance(part, torch.optim.LBFGS):
        logger.warning("The checkpoint has no state for the parameters %s of %r", name_some(without), key)
    # Groups may have additional options, which schedulers and newer versions of torch add.
    all_options = []
    for place, group in enumerate(raw["param_groups"]):
        own_options = copied({**group, "params": [shown.get(number, number) for number in group["params"]]})
        Places(stored.key_types, f"{prefix}param_groups.{place}.").fit(own_options, options.get(place, {}))
        all_options.append(own_options)
    numbers = ({} if is_numbered else by_name) | {number: number for number in by_number}
    inner = {**raw, "state": state, "param_groups": all_options}
    return _OptimizerState(inner, key, part, numbers, name_of, groups, is_numbered)


def _has_names(params: Iterable[object]) -> bool:
    return any(isinstance(entry, str) for entry in params)


def _require_names(
    key: str, groups: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]], *, is_named: bool
) -> None:
    """Raise `UsageError` if the parameters that groups number differ, or are in a different order.

    `own` are the names in each group. Different names mean different parameters only if the optimizer
    `is_named`, i.e. was created from named parameters.
    """
    pairs = [
        pair
        for group, names in zip(groups, own, strict=True)
        if not _has_names(group["params"])
        for pair in zip(group.get("param_names") or (), names, strict=False)
    ]
    columns = [bare_names(names) for names in zip(*pairs, strict=True)]
    is_reordered = len(set(map(frozenset, columns))) == 1
    for was, now in zip(*columns, strict=True):
        if was != now and is_reordered:
            raise UsageError(
                f"{key!r} has its parameters in a different order than when it was saved: {was!r} was where"
                f" {now!r} is",
                fix="Create it with its parameters in the order of the save.",
            )
        if was != now and is_named:
            raise UsageError(
                f"{key!r} has different parameters from the checkpoint's: {now!r} is where {was!r} was",
                fix=f"Build the optimizer that was saved, or load none of it: exclude='{key}.*'. If only"
                f" names are new, exclude='{key}.param_groups.*.param_names'.",
            )


def _require_same_optimizer(
    key: str, part: torch.optim.Optimizer, options: Mapping[int, StoredPlaces]
) -> None:
    """Raise `UsageError` if the saved optimizer had different groups or was of a different class.

    Otherwise, parameters would receive other parameters' state, or a state that the optimizer does not know.
    `options` has, for each group, what the checkpoint has of its options, whether or not the load takes them.
    """
    if options and len(options) != len(part.param_groups):
        raise UsageError(
            f"{key!r} has {format_count(len(part.param_groups), 'group')} of parameters,"
            f" and the checkpoint has {len(options)}",
            fix=f"Build it with the groups that it was saved with, or load none of it: exclude='{key}.*'.",
        )
    for places, group in zip(options.values(), part.param_groups, strict=False):
        names = {str(path[0]) for path in places}
        was, now = map(_OPTIONS_OF_TORCH.intersection, (names, group))
        # Schedulers, users and newer versions of torch add options, so a difference indicates another class
        # only if the rest are options of another class of torch, or if each side lacks some of the other's.
        if (
            (was != now and {was, now} <= _OPTIONS_OF_CLASSES)
            or was - _OPTIONS_OF_NEWER_TORCH in _OLD_OPTIONS_OF_CLASSES - {now - _OPTIONS_OF_NEWER_TORCH}
            or (
                part.defaults.keys() - names - _OPTIONS_OF_NEWER_TORCH
                and names - group.keys() - _OPTIONS_OF_SCHEDULERS
            )
        ):
            raise UsageError(
                f"{key!r} is {type(part).__name__}, and was saved from another optimizer: only one of the two"
                f" has {name_some(sorted(names ^ group.keys()), 10)}",
                fix=f"Build the optimizer that was saved, or load none of it: exclude='{key}.*'.",
            )


_OPTIONS_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_OPTIONS_OF_NEWER_TORCH = {
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}
"""Options that versions of torch added to classes that existed before."""
_OPTIONS_OF_CLASSES = {
    frozenset(signature(kind).parameters)
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and torch.optim.Optimizer in kind.__bases__
}
_OPTIONS_OF_TORCH = frozenset().union(*_OPTIONS_OF_CLASSES)
_OLD_OPTIONS_OF_CLASSES = {options - _OPTIONS_OF_NEWER_TORCH for options in _OPTIONS_OF_CLASSES}


def _require_same_order(
    key: str, entries: Mapping[int, StoredPlaces], parameters: Mapping[int, torch.Tensor]
) -> None:
    """Raise `UsageError` if an optimizer numbers its parameters in a different order from the saved one.

    Shapes prove this if a slot has the shapes of all parameters, but in a different order. States of other
    shapes, such as factored ones and scalars, prove nothing.
    """
    slots: dict[Path, list[tuple[Path, Path, int]]] = {}
    for number, parameter in parameters.items():
        for path, facts in entries[number].items():
            if isinstance(facts, TensorFacts):
                slots.setdefault(path, []).append((facts.shape, tuple(parameter.shape), number))
    for path, rows in slots.items():
        misfits = [row for row in rows if row[0] != row[1]]
        if misfits and sorted(row[0] for row in misfits) == sorted(row[1] for row in misfits):
            stored, own, number = misfits[0]
            raise UsageError(
                f"{key!r} has its parameters in a different order than when it was saved:"
                f" 'state.{number}.{'.'.join(map(str, path))}' is {list(stored)} in the checkpoint,"
                f" parameter {number} is {list(own)} here",
                fix="Create it with its parameters in the order of the save. Names instead of numbers, as"
                " get_optimizer_state_dict saves them, allow any order.",
            )


def number_names(key: str, part: Any, stored: StoredNames) -> dict[str, Any] | None:
    """Number the parameters in a dict of `get_optimizer_state_dict`, to load a raw optimizer's checkpoint.

    Numbers follow the order of the parameters in the groups, as in a raw optimizer, never the order of the
    names as text. Returns None if the checkpoint also has names.
    """
    names = list(chain.from_iterable(group.get("params", ()) for group in part["param_groups"]))
    places = stored.below(stored.prefix(key), key)
    entries = {str(path[1]) for path in places if path[0] == "state" and len(path) > 2}
    if not (_has_names(names) and stored.are_numbers(key, entries, names)):
        return None
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers.get(name, name): slots for name, slots in part["state"].items()}
    groups = [copied(own) | {"params": [numbers[n] for n in own["params"]]} for own in part["param_groups"]]
    return {**part, "state": state, "param_groups": groups}


@dataclass(slots=True)
class _EmptyPlaces:
    """Fills empty dicts, lists and Nones in a plain state with places for what is stored there."""

    stored: StoredNames
    emptied: Emptied = field(default_factory=list)
    _adopting: list[tuple[MutableMapping[Any, Any], set[str]]] = field(default_factory=list)
    """The dicts that were empty, and the stored names that got places in each."""

    def fill(self, state: MutableMapping[str, Any]) -> None:
        """Fill the empty places anywhere in `state`."""
        empty: list[tuple[Any, Any, str, str]] = []
        for key in state:
            if prefix := self.stored.prefix(key):
                self._find(empty, state, key, key, prefix)
        # An empty dict may occur in several places, so all places are found before any is filled.
        for holder, key, name, prefix in empty:
            value, places = holder[key], self.stored.below(prefix, name)
            taken = {path: facts for path, facts in places.items() if facts is not SKIPPED}
            is_list = all(isinstance(path[0], int) for path in taken)
            is_dict = isinstance(value, MutableMapping)
            if taken and (value is None or is_list or is_dict):
                self._begin(holder, key, value if is_dict else [] if is_list else {})
                Places(self.stored.key_types, prefix).fit(holder[key], taken)
                if is_dict:
                    names = {f"{prefix}{'.'.join(map(str, path))}" for path in taken}
                    self._adopting.append((holder[key], names))

    def _find(
        self, empty: list[tuple[Any, Any, str, str]], holder: Any, key: Any, name: str, prefix: str
    ) -> None:
        """Add to `empty` the empty places, at `key` or below, under which something may be stored."""
        value, stored_name = holder[key], prefix.removesuffix(".")
        is_container = isinstance(value, MutableMapping | list)
        if is_container and value:
            for step in list(value) if isinstance(value, MutableMapping) else range(len(value)):
                self._find(empty, value, step, f"{name}.{step}", f"{prefix}{step}.")
        elif is_container or value is None:
            facts = self.stored.facts(stored_name)
            if facts is SKIPPED:
                empty.append((holder, key, name, prefix))
            # Like None, an empty list is a place for any object.
            elif (
                isinstance(value, MutableMapping) or (facts is not None and value is None)
            ) and self.stored.asked(name) == stored_name:
                self._begin(holder, key, new_place(facts, None))

    @property
    def adopted(self) -> set[str]:
        """The stored names that got places in formerly empty dicts."""
        return set().union(*(names for _, names in self._adopting))

    def leave_empty(self, names: Collection[str]) -> None:
        """Empty again the dicts that took any of these names, because dicts of other ranks take them."""
        for adopting, adopted in self._adopting:
            if not adopted.isdisjoint(names):
                adopting.clear()

    def undo(self) -> None:
        """Restore everything that was empty."""
        for holder, key, value in reversed(self.emptied):
            if value is not None:
                value.clear()
            holder[key] = value

    def _begin(self, holder: Any, key: Any, value: Any) -> None:
        self.emptied.append((holder, key, holder[key]))
        if not isinstance(holder[key], list):
            set_entry(holder, key, value)


@dataclass(slots=True)
class LoadedParts:
    """The state that a load fills: `state` has the places of all leaves."""

    parts: Mapping[str, _Part]
    prefixes: Mapping[str, str]
    """For each part with names below it, the prefix of these names in the checkpoint."""
    stored: StoredNames
    places: _EmptyPlaces
    """The empty places of plain parts."""
    state: dict[str, Any]
    filled: Collection[str] = ()
    """The names, in the state, of what the load fills; set once all ranks have matched them."""
    left: Collection[str] = ()
    """The names, in the state, of what the load leaves unchanged."""

    def gets_copies(self, leaf: Leaf) -> bool:
        """Return True if the leaf's part copies the values it loads, so that they may be in any memory.

        Modules are loaded in place.
        """
        part = self.parts.get(str(leaf.path[0]))
        return (
            isinstance(part, _StatefulPart)
            and not isinstance(part.part, torch.nn.Module)
            and type(leaf.value) is torch.Tensor
        )

    def holds_copy(self, leaf: Leaf) -> bool:
        """Return True if the leaf is in a copy of its part, which belongs to no object of the program."""
        part = self.parts.get(str(leaf.path[0]))
        if isinstance(part, _NamedState):
            return leaf.path[1] == "param_groups"
        return isinstance(part, _StatefulPart | _OptimizerState)

    def check(self) -> None:
        """Raise `UsageError` if a part cannot take what has arrived. No object of the program changes."""
        left = self.left_parts()
        for key, part in self.parts.items():
            if isinstance(part, _OptimizerState | _NamedState) and key not in left:
                part.check(self.state[key])

    def take(self) -> None:
        """Let each part except plain ones load what has arrived."""
        left = self.left_parts()
        with _optimizers_keep_dtypes(but_floats=self.stored.converts):
            for key, part in self.parts.items():
                if key not in left:
                    part.take(self.state[key])

    def left_parts(self) -> set[str]:
        """Return the keys of the parts that have leaves, none of which was filled."""
        # There may be 100,000 names, so all beginnings are collected instead of searched for.
        return _beginnings(self.left) - _beginnings(self.filled if self.left else ())

    def untaken(self, unused: Iterable[str]) -> list[str]:
        """Return the `unused` names in the checkpoint that are below these parts and selected."""
        owned = ((name, self.own_name(name)) for name in unused if not self.stored.is_of_others(name))
        found = [name for name, own in owned if own is not None and self.stored.asked(own) is not None]
        # A dict that was empty on some ranks only is taken together with what other ranks had in it.
        above = _beginnings(each.rpartition(".")[0] for each in self.stored.names) if found else ()
        return [name for name in found if name not in above]

    def own_name(self, stored_name: str) -> str | None:
        """Return this state's name for a name in the checkpoint, or None if no part of the state has it."""
        key = self._owner(stored_name)
        return None if key is None else f"{key}.{stored_name[len(self.prefixes[key]) :]}"

    def is_whole(self, stored_name: str) -> bool:
        """Return True if a name belongs to a part that is loaded as a whole.

        Any other dict selects what it needs.
        """
        key = self._owner(stored_name)
        part = None if key is None else self.parts[key]
        if type(part) is not _Part:
            return part is not None
        return is_optimizer_dict(part.inner)

    def _owner(self, stored_name: str) -> str | None:
        return next((key for key, prefix in self.prefixes.items() if stored_name.startswith(prefix)), None)

    def require_as_many_ranks(self, num_saved: int, num_ranks: int) -> None:
        """Raise `UsageError` for parameters or optimizer states that differed between the ranks that saved.

        Such values are shards, and this job, with a different number of ranks, has different shards. An
        optimizer's state that not all ranks had is a shard, too; a parameter that not all ranks had is not,
        because it belongs to a pipeline stage.
        """
        of_ranks = {name.rpartition(RANK_MARK)[0] for name in self.of_other_ranks(0)}
        names = sorted(of_ranks | self.stored.of_some)
        found = [name for name in names if self._is_shard(name, is_own=name in of_ranks)]
        if found:
            key = self._owner(found[0])
            raise UsageError(
                f"{name_some(found, 3)} had different values on each of the {num_saved} ranks that saved"
                f" them, and this job has {num_ranks}",
                fix=f"Load with as many ranks, or leave them out: exclude='{key}.*'. Any number of ranks can"
                " load what torch's get_model_state_dict and get_optimizer_state_dict return.",
            )

    def _is_shard(self, stored_name: str, *, is_own: bool) -> bool:
        key, own = self._owner(stored_name), self.own_name(stored_name)
        if key is None or own is None or self.stored.asked(own) != stored_name:
            return False
        part, inner = self.parts[key], own[len(key) + 1 :]
        if isinstance(part, _OptimizerState):
            return inner.startswith("state.")
        return (
            is_own
            and isinstance(part, _StatefulPart)
            and isinstance(part.part, torch.nn.Module)
            and inner in dict(part.part.named_parameters())
        )

    def warn_of_other_ranks(self, num_saved: int, num_ranks: int) -> None:
        """Warn about ranks' own values and entries that another number of ranks cannot restore as saved."""
        if lost := self.of_other_ranks(num_ranks):
            logger.warning(
                "Saved by more ranks: not loaded, because they belong to ranks that this job lacks: %s",
                name_some(lost, 10),
            )
        elif num_ranks > num_saved and (own := self.of_other_ranks(1)):
            names = dict.fromkeys(name.rpartition(RANK_MARK)[0] for name in own)
            logger.warning(
                "Saved by %d ranks: ranks from %d onward get rank 0's values of %s, which differed between "
                "ranks. Give random number generators a different seed there",
                num_saved,
                num_saved,
                name_some(list(names), 10),
            )

        owners = {self._owner(name) or name for name in self.stored.of_some} & self.parts.keys()
        if owners and num_ranks != num_saved:
            logger.warning(
                "Saved by %d ranks, which had different entries in %s: new parts get the entries of all",
                num_saved,
                name_some(sorted(map(repr, owners))),
            )

    def of_other_ranks(self, num_ranks: int) -> list[str]:
        """Return the names of values that belonged to ranks with numbers from `num_ranks` onward."""
        marked = filter(self.stored.is_of_one_rank, self.stored.names)
        return [
            f"{name}{mark}{rank}"
            for name, mark, rank in (each.rpartition(RANK_MARK) for each in marked)
            if rank.isdecimal() and int(rank) >= num_ranks and (self._owner(name) or name in self.parts)
        ]


def _beginnings(names: Iterable[str]) -> set[str]:
    """Return all beginnings of each name, as "m", "m.layer" and "m.layer.bias"."""
    return {head for name in names for head in accumulate(name.split("."), "{}.{}".format)}


@contextmanager
def loading_into(state: Mapping[str, Any], stored: StoredNames) -> Iterator[LoadedParts]:
    """Yield the state to load into.

    The body of the `with` block calls `take`, so that parts with `load_state_dict` load their state; plain
    parts are replaced after the block, unless it raises. Raises `UsageError` for a part that cannot be
    loaded.
    """
    names = parameter_names(state)
    parts = {key: _begin(key, part, stored, names) or _Part(part) for key, part in state.items()}
    containers = (Mapping, list)
    fixed = [key for key, part in parts.items() if not isinstance(part.inner, (*containers, torch.Tensor))]
    if fixed and not isinstance(state, MutableMapping):
        raise UsageError(
            f"The state is a {type(state).__name__}, in which {name_some(fixed)} cannot be replaced",
            fix="Load into a dict.",
        )
    empty = _EmptyPlaces(stored)
    with ExitStack() as after_failure:
        after_failure.callback(empty.undo)
        plain = {key: part.inner for key, part in parts.items() if type(part) is _Part}
        empty.fill(plain)
        for key, inner in plain.items():
            parts[key].inner = inner
        prefixes = {
            key: stored.prefix(key) for key, part in parts.items() if isinstance(part.inner, containers)
        }
        below = {key: prefix for key, prefix in prefixes.items() if prefix}
        loading = LoadedParts(parts, below, stored, empty, {key: part.inner for key, part in parts.items()})
        yield loading
        after_failure.pop_all()
    restore_empty(empty.emptied)
    left = loading.left_parts()
    for key, part in parts.items():
        is_plain = type(part) is _Part and key not in left
        if is_plain and loading.state[key] is not state[key] and isinstance(state, MutableMapping):
            state[key] = loading.state[key]


_FLOATS_CHANGE: ContextVar[bool | None] = ContextVar("floats change", default=None)
"""None unless this thread loads parts; True if floating-point states take the dtype of their parameter."""


@contextmanager
def _optimizers_keep_dtypes(*, but_floats: bool) -> Iterator[None]:
    """Let torch's optimizers keep the dtypes of the states that they load, wherever these optimizers are.

    Conversions by hooks and by optimizers of other packages remain.
    """
    before = _FLOATS_CHANGE.set(but_floats)
    try:
        with _KEPT_DTYPES:
            yield
    finally:
        _FLOATS_CHANGE.reset(before)


class _KeptDtypes:
    """While any thread loads, replaces torch's method that converts a state to the dtype of its parameter.

    torch converts even quantized values and counters. In threads that do not load, the method works as usual.
    """

    _NAME = "_process_value_according_to_param_policy"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_loads = 0
        self._usual: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._num_loads += 1
            if self._num_loads == 1:
                self._usual = torch.optim.Optimizer.__dict__.get(self._NAME)
                if self._usual is not None:
                    setattr(torch.optim.Optimizer, self._NAME, staticmethod(partial(_move, self._usual)))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_loads -= 1
            if self._num_loads == 0 and self._usual is not None:
                setattr(torch.optim.Optimizer, self._NAME, self._usual)


_KEPT_DTYPES = _KeptDtypes()


def _move(convert: Any, parameter: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any) -> Any:
    changes = _FLOATS_CHANGE.get()
    if changes is None or (changes and value.is_floating_point()):
        return convert(parameter, value, *more, **named)
    nothing = torch.empty(0, dtype=value.dtype, device=value.device)
    return value.to(convert(parameter, nothing, *more, **named).device)


def _begin(key: str, part: Any, stored: StoredNames, names: Mapping[int, str]) -> _Part | None:
    """Create the places that a part needs, if it has a state or is the dict of `get_optimizer_state_dict`."""
    prefix = stored.prefix(key)
    making = Places(stored.key_types, prefix, has_types=stored.has_types)
    if isinstance(part, torch.nn.Module):
        own = part.state_dict()
        extra = {name: copied(value) for name, value in own.items() if name.endswith(EXTRA_STATE)}
        if extra and prefix:
            places = stored.below(prefix, key)
            making.fit(extra, {path: facts for path, facts in places.items() if path[0] in extra})
            own.update(extra)
        return _StatefulPart(own, part, making.emptied)
    if is_stateful(part):
        own = part.state_dict()
        if isinstance(part, torch.optim.Optimizer) and is_optimizer_dict(own):
            return _begin_optimizer(key, part, stored, names)
        # An entry like those below it: what was saved may be a list, or a single value, instead of a dict.
        name, making.prefix = prefix.removesuffix("."), ""
        whole, places = {name: copied(own)}, stored.below(prefix, key) if prefix else {}
        if stored.asked(key) == name:
            places = {(): stored.facts(name), **places}
        making.fit(whole, {(name, *path): facts for path, facts in places.items()})
        return _StatefulPart(whole[name], part, making.emptied)
    if is_optimizer_dict(part) and prefix:
        numbered = number_names(key, part, stored)
        if numbered is not None:
            return _NamedState(numbered, key, part)
    return None


def find_wanted(
    local_state: LocalState,
    selection: LeafSelection,
    tensors: Sequence[TensorFacts],
    objects: Iterable[str],
    *,
    converts: bool,
) -> tuple[Regions, list[tuple[str, LocalShard]], dict[str, int]]:
    """Return the stored regions that this rank needs, the leaf and shard for each, and the objects by leaf.

    The checkpoint has these `tensors` and `objects`. Raises `UsageError` if it does not match the state;
    `converts` allows dtypes to differ.
    """
    numbers = {facts.name: number for number, facts in enumerate(tensors)}
    object_numbers = {name: number for number, name in enumerate(objects)}
    wanted_objects: dict[str, int] = {}
    rows: list[tuple[int, Sequence[int], Sequence[int]]] = []
    shards: list[tuple[str, LocalShard]] = []
    own = {facts.name: facts for facts in local_state.holdings.tensors}
    for name, stored_name in selection.stored_names.items():
        if name in own and stored_name in numbers:
            number = numbers[stored_name]
            here, there = own[name], tensors[number]
            if here.shape != there.shape:
                raise UsageError(
                    f"Size mismatch: {name!r} is {list(here.shape)} in the state and"
                    f" {list(there.shape)} in the checkpoint",
                    fix="Build the state with the configuration it was saved with, or skip this part with"
                    " exclude=.",
                )
            if here.dtype != there.dtype and not converts:
                raise UsageError(
                    f"{name!r} is {here.dtype} in the state and {there.dtype} in the checkpoint",
                    fix="Give the state the checkpoint's dtype, or convert it with convert_dtypes=True.",
                )
            for shard in local_state.shards[name]:
                rows.append((number, shard.offsets, shard.sizes))
                shards.append((name, shard))
        elif name not in own and stored_name in object_numbers:
            wanted_objects[name] = object_numbers[stored_name]
        else:
            own_kind, kind = ("a tensor", "an object") if name in own else ("an object", "a tensor")
            raise UsageError(
                f"{name!r} is {own_kind} in the state, but {stored_name!r} is {kind} in the checkpoint",
                fix="Give the state the same kind of value, or skip this part with exclude=.",
            )
    return Regions.from_rows(rows), shards, wanted_objects
