"""Places in a part of a state for what a checkpoint has of it.

A part that gets back the structure that was saved has no places for most of that yet: containers are made,
and in them memory for tensors and room for other values. Invariant: a place has no value before the load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.checkpoint.loading.load_requests import SKIPPED, Skipped, StoredPlaces
from penstock.checkpoint.state.regions import TensorFacts
from penstock.checkpoint.state.walk import Path, Room, literal_key


def joined(path: Path) -> str:
    """The name of a place below a part."""
    return ".".join(map(str, path))


def new_place(facts: TensorFacts | None, parameter: torch.Tensor | None) -> Any:
    """A place to load into: for a tensor memory, like its parameter's where the shape is the same."""
    if facts is None:
        return None
    dtype = getattr(torch, facts.dtype)
    if parameter is not None and facts.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Optimizers keep single numbers, as the count of steps, in host memory unless they load them elsewhere.
    device = parameter.device if parameter is not None and facts.shape else "cpu"
    return torch.empty(facts.shape, dtype=dtype, device=device)


def copied(value: Any) -> Any:
    """New dicts and lists around the same leaves: the part keeps its own until it loads."""
    if isinstance(value, Mapping):
        again: Any = copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, inner in value.items():
            again[key] = copied(inner)
        return again
    return [copied(inner) for inner in value] if type(value) is list else value


@dataclass(slots=True)
class Places:
    """Makes containers, tensors and other places where the checkpoint has something of a part."""

    key_types: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    """Before the names of the part's dicts in `key_types`."""
    parameter: torch.Tensor | None = None
    """Of which this is the state in an optimizer: there, all places are made at once."""
    _emptied: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def fit(self, own: Any, stored: StoredPlaces, at: Path = ()) -> None:
        """Let `own` have the containers and places that are stored and not skipped.

        What lists and numbered entries have beyond the stored ones goes; what else a dict has more is missing
        in the checkpoint.
        """
        below: dict[str | int, dict[Path, TensorFacts | Skipped | None]] = {}
        for path, facts in stored.items():
            below.setdefault(path[0], {})[path[1:]] = facts
        if stored:
            _drop_rest(own, below)
        for step, rests in below.items():
            taken = {rest: facts for rest, facts in rests.items() if facts is not SKIPPED}
            if not taken or not has_entry(own, (step,)):
                for rest, facts in taken.items():
                    self.put(own, (step, *rest), new_place(facts, self.parameter), at)
                continue
            key = own_key(own, step)
            if taken.keys() == {()}:
                if not _is_place(own, own[key], taken[()]):
                    self._leave(own, key, taken[()])
                continue
            rests.pop((), None)
            if not isinstance(own[key], Mapping | list):
                own[key] = [] if isinstance(next(iter(rests))[0], int) else {}
            self.fit(own[key], rests, (*at, step))

    def end(self) -> None:
        """After the load: let dicts that are empty now be of the kinds that they were."""
        for holder, key, emptied in self._emptied:
            if type(holder[key]) is dict and not holder[key]:
                holder[key] = emptied

    def _leave(self, own: Any, key: Any, facts: TensorFacts | None) -> None:
        if isinstance(own[key], MutableMapping):
            own[key].clear()
            self._emptied.append((own, key, own[key]))
        set_entry(own, key, new_place(facts, self.parameter))

    def put(self, holder: Any, path: Path, value: Any, at: Path = ()) -> None:
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
                set_entry(holder, key, inner)
            holder = holder[key]

    def _new_key(self, holder: Any, step: str | int, at: Path) -> Any:
        key = own_key(holder, step)
        if key in holder or not isinstance(key, str):
            return key
        kind = self.key_types.get(f"{self.prefix}{'.'.join(map(str, at))}".removesuffix("."))
        if kind is None and _counts(holder) and key.isdecimal() and str(int(key)) == key:
            return int(key)
        return literal_key(key) if kind == "literal" else key


def set_entry(holder: Any, key: Any, value: Any) -> None:
    """Set an entry. Lists whose entries have names are entered for a value that is to come, too."""
    holder[key] = Room() if value is None and isinstance(holder, list) else value


def _drop_rest(own: Any, stored: Collection[str | int]) -> None:
    """Drop what a list, or a dict that numbers its entries, has beyond what is stored."""
    if isinstance(own, list):
        del own[1 + max((step for step in stored if isinstance(step, int)), default=-1) :]
    elif isinstance(own, MutableMapping) and not any(
        isinstance(key, str) and not key.isdecimal() for key in own
    ):
        for key in [key for key in own if str(key) not in stored]:
            del own[key]


def _is_place(holder: Any, value: Any, facts: TensorFacts | None) -> bool:
    """Whether what is stored can be loaded here. Lists of plain values are one value, which was not saved."""
    if facts is None:
        return not isinstance(holder, list) and not isinstance(value, Mapping | list | torch.Tensor)
    if type(value) is not torch.Tensor:
        # Sharded tensors are checked against the checkpoint when they are requested, as those of modules.
        return isinstance(value, torch.Tensor)
    return tuple(value.shape) == facts.shape and str(value.dtype) == f"torch.{facts.dtype}"


def own_key(holder: Any, step: str | int) -> Any:
    """The key of a step of a place, which is text even where the state counts with integers."""
    if not isinstance(holder, Mapping) or step in holder:
        return step
    return next((key for key in holder if not isinstance(key, str) and str(key) == step), step)


def has_entry(holder: Any, path: Path) -> bool:
    """Whether there is anything at a place."""
    for step in path:
        if isinstance(holder, Mapping):
            key = own_key(holder, step)
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
