"""Which leaves of a state are loaded, and under which names the checkpoint has them.

Pure. Invariant: every leaf of the state is either selected or listed among those that were left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.patterns import matches
from penstock.checkpoint.plan.objects import OWN_MARK, stored_name_for
from penstock.errors import UsageError
from penstock.suggest import nearest

if TYPE_CHECKING:
    from penstock.checkpoint.engine import LoadChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """`stored_names` by leaf name; `left` leaves stay as they are, `unused` names nobody asked for."""

    stored_names: Mapping[str, str]
    left: tuple[str, ...]
    unused: tuple[str, ...]


def select(names: Iterable[str], stored: Collection[str], choice: LoadChoice, *, rank: int) -> Selection:
    """Match the leaves of a state with what a checkpoint holds.

    `UsageError` for a leaf that it does not hold, unless the choice is not strict.
    """
    found: dict[str, str] = {}
    left = []
    missing = []
    for name in names:
        if not _is_chosen(name, choice):
            left.append(name)
            continue
        stored_name = stored_name_for(renamed(name, choice.rename or {}), rank, stored)
        if stored_name is not None:
            found[name] = stored_name
        else:
            missing.append(name)
    if missing and choice.strict:
        raise _missing(missing, stored, choice)
    used = set(found.values())
    unused = (name for name in stored if name not in used and name.partition(OWN_MARK)[0] not in used)
    return Selection(stored_names=found, left=(*left, *missing), unused=tuple(unused))


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """What the checkpoint calls the leaf `name`: `{"model.*": "module.*"}` gives it another beginning."""
    if name in rename:
        return rename[name]
    for pattern, target in rename.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return target.removesuffix("*") + name[len(pattern) - 1 :]
    return name


def _is_chosen(name: str, choice: LoadChoice) -> bool:
    if choice.only is not None and not matches(name, choice.only):
        return False
    return choice.exclude is None or not matches(name, choice.exclude)


def _missing(missing: list[str], stored: Collection[str], choice: LoadChoice) -> UsageError:
    looked_for = renamed(missing[0], choice.rename or {})
    near = nearest(looked_for, list(stored)[:10_000])
    hint = f"The nearest name there is {near!r}. " if near else ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return UsageError(
        f"The checkpoint does not hold {looked_for!r}{more}",
        fix=f"{hint}Map names with rename=, leave parts out with exclude=, or keep what is missing as it is"
        " with strict=False.",
    )
