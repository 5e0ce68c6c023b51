"""Optimizers in a state that a load fills: raw ones, and the dicts of `get_optimizer_state_dict`.

Optimizers number their parameters, torch's helpers name them: a checkpoint of either form is loaded into
both.
Invariant: no parameter gets the state of another one where groups, names or shapes tell them apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from penstock.checkpoint.loading.load_requests import SKIPPED, Skipped, StoredNames, StoredPlaces
from penstock.checkpoint.loading.places import Places, copied, joined
from penstock.checkpoint.state.regions import TensorFacts
from penstock.checkpoint.state.tensors import bare_name
from penstock.checkpoint.state.walk import Path
from penstock.errors import UsageError, name_some
from penstock.units import format_count

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OptimizerState:
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
                    fix=f"Build it with the groups that it was saved with, or exclude={f'{self.key}.*'!r}.",
                )
            own_names = self.part.param_groups[place].get("param_names")
            names = own_names or [told[n] for n in own if n in told]
            _require_order(self.key, group, names)
            _require_same(self.key, place, group, own_names)
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
class NamedState:
    """The dict of `get_optimizer_state_dict`, for a checkpoint that numbers the parameters."""

    key: str
    own: dict[str, Any]
    inner: dict[str, Any]

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


def begin_optimizer(
    key: str, part: torch.optim.Optimizer, stored: StoredNames, prefix: str, names: Mapping[int, str]
) -> OptimizerState:
    """Make places in an optimizer's state for what the checkpoint has of it."""
    raw = part.state_dict()
    groups = [list(group["params"]) for group in raw["param_groups"]]
    parameters = list(chain.from_iterable(group["params"] for group in part.param_groups))
    by_number = dict(zip(chain.from_iterable(groups), parameters, strict=True))
    by_name = {
        names[id(parameter)]: number for number, parameter in by_number.items() if id(parameter) in names
    }
    by_name.update(_names_of_groups(raw["param_groups"]))
    entries: dict[str, dict[Path, TensorFacts | Skipped | None]] = {}
    options: dict[str | int, dict[str, bool]] = {}
    for path, facts in stored.below(prefix, key).items():
        if path[0] == "state" and len(path) > 2:
            entries.setdefault(str(path[1]), {})[path[2:]] = facts
        elif path[0] == "param_groups" and len(path) > 2 and isinstance(path[1], int):
            options.setdefault(path[1], {})[str(path[2])] = facts is not SKIPPED
    is_named = bool(entries) and not entries.keys() & set(map(str, by_number))
    shown = {number: name for name, number in by_name.items()} if is_named else {}
    state = {entry: slots for entry, slots in raw["state"].items() if entry not in by_number}
    without, cut = [], []
    for number, parameter in by_number.items():
        entry, own = shown.get(number, number), raw["state"].get(number, {})
        given = entries.get(str(entry), {})
        skipped = [f"{entry}.{joined(path)}" for path, facts in given.items() if facts is SKIPPED]
        if len(skipped) < len(given):
            state[entry] = copied(own)
            Places(stored.key_types, f"{prefix}state.{entry}.", parameter).fit(state[entry], given)
            cut += [] if own else skipped
        elif given or any(stored.find(f"{key}.state.{entry}.{slot}") is None for slot in own):
            state.update({entry: own} if own else {})
        elif parameter.requires_grad:
            without.append(entry)
    # It keeps all of its state with its first parameter.
    if entries and without and not isinstance(part, torch.optim.LBFGS):
        logger.warning("The checkpoint has no state of the parameters %s of %r", name_some(without), key)
    inner = {**raw, "state": state}
    # Groups may have further options, which schedulers and newer versions of torch add.
    inner["param_groups"] = [
        {name: None for name, is_chosen in options.get(place, {}).items() if is_chosen}
        | {**group, "params": [shown.get(number, number) for number in group["params"]]}
        for place, group in enumerate(raw["param_groups"])
    ]
    numbers: dict[int | str, int] = {number: number for number in by_number}
    numbers.update(by_name)
    order = None if is_named else _order_error(key, entries, by_number)
    misfit = _other_optimizer_error(key, part, options) or _cut_error(key, cut) or order
    return OptimizerState(key, part, inner, numbers, groups, misfit)


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


def _require_same(key: str, place: int, group: Mapping[str, Any], own: Sequence[str] | None) -> None:
    """Raise `UsageError` if a group that numbers its parameters has those of other names."""
    saved = group.get("param_names")
    if not (saved and own) or isinstance(group["params"][0], str):
        return
    other = [
        pair for pair in zip(map(bare_name, saved), map(bare_name, own), strict=False) if pair[0] != pair[1]
    ]
    if other:
        raise UsageError(
            f"Group {place} of {key!r} has other parameters than in the checkpoint: {other[0][1]!r} is where"
            f" {other[0][0]!r} was",
            fix=f"Build the optimizer that was saved, or load none of it: exclude='{key}.*'. If only names"
            f" are new, exclude='{key}.param_groups.*.param_names'.",
        )


def _other_optimizer_error(
    key: str, part: torch.optim.Optimizer, options: Mapping[str | int, Mapping[str, bool]]
) -> UsageError | None:
    """The error for an optimizer with other groups, or of another class, than the one that was saved.

    Its parameters would get the state of others, or a state that it does not know. `options` has by group the
    options of the checkpoint, and whether each is to be loaded.
    """
    taken = [names for names in options.values() if any(names.values())]
    if not taken:
        return None
    if len(options) != len(part.param_groups):
        return UsageError(
            f"{key!r} has {format_count(len(part.param_groups), 'group')} of parameters,"
            f" and the checkpoint has {len(options)}",
            fix=f"Build it with the groups that it was saved with, or load none of it: exclude='{key}.*'.",
        )
    for names, group in zip(taken, part.param_groups, strict=False):
        lacking = sorted(part.defaults.keys() - names.keys())
        unknown = sorted(name for name, is_taken in names.items() if is_taken and name not in group)
        # Schedulers add options, and so do newer versions of torch: only both together tell another class.
        if lacking and set(unknown) - _OPTIONS_OF_SCHEDULERS:
            return UsageError(
                f"{key!r} is {type(part).__name__}, and was saved from another optimizer: it has"
                f" {name_some(lacking)}, the checkpoint has {name_some(unknown)} instead",
                fix=f"Build the optimizer that was saved, or load none of it: exclude='{key}.*'.",
            )
    return None


_OPTIONS_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


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
                f" 'state.{number}.{joined(path)}' is {list(stored)} in the checkpoint,"
                f" parameter {number} is {list(own)} here",
                fix="Make it with its parameters in the order of the save. Names instead of numbers, as"
                " get_optimizer_state_dict saves them, allow any order.",
            )
    return None


def _names_of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The names of optimizers that were made from named parameters."""
    return {
        name: number
        for group in groups
        for name, number in zip(group.get("param_names", ()), group["params"], strict=False)
    }


def number_names(part: Any, places: StoredPlaces) -> dict[str, Any] | None:
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
    groups = [copied(own) | {"params": [numbers[n] for n in own["params"]]} for own in part["param_groups"]]
    return {**part, "state": state, "param_groups": groups}
