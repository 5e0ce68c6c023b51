"""A whole state that its owner hands over and wants back as it was, keys, tuples, empty parts and all.

Frameworks that save "the checkpoint" as one dict meet the engine here: tensors become parts with names of
their own, the rest one object, the tree. Invariant: `load_tree` gives back what `save_tree` took, except that
tensors which shared memory no longer do.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass
from socket import gethostname
from typing import TYPE_CHECKING, Any, Final

import torch

from penstock.checkpoint.commit.catalog import AnyPath, open_parent
from penstock.checkpoint.commit.transaction import write_and_commit
from penstock.checkpoint.engine import LoadChoice, SaveChoice
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, open_checkpoint
from penstock.checkpoint.loading.loader import CheckpointLoader
from penstock.checkpoint.state.process_group import RankGroup
from penstock.checkpoint.state.tensors import is_tensor
from penstock.cluster.comm import SoloComm
from penstock.errors import DataDamaged, UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.saving.saver import Saver

TREE_NAME: Final = "penstock.tree"
TIMEOUT_S: Final = 1800.0

Path = tuple[Any, ...]
"""Keys of mappings as they are, and places in lists and tuples."""


@dataclass(frozen=True, slots=True)
class Split:
    """A state taken apart."""

    tree: Any
    """The state with None where a tensor was; containers are copies."""
    tensors: dict[str, torch.Tensor]
    paths: dict[str, Path]
    """Where in the tree each tensor belongs."""


def split(state: Any) -> Split:
    """Take a state apart. Containers of other kinds than dict, list and tuple are left whole, as objects."""
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, Path] = {}
    for path, tensor in _tensors_in(state, ()):
        name = ".".join(map(str, path))
        # Keys 1 and "1" have one name between them.
        while name in tensors or name == TREE_NAME:
            name += "~"
        tensors[name], paths[name] = tensor, path
    return Split(_without_tensors(state), tensors, paths)


def join(taken_apart: Split) -> Any:
    """Put a state together again, in the containers of its tree."""
    tree = taken_apart.tree
    for name, path in taken_apart.paths.items():
        tree = _with(tree, path, taken_apart.tensors[name])
    return tree


def alone() -> RankGroup:
    """Membership of this process and no other, whatever process groups there are."""
    return RankGroup(SoloComm(gethostname()))


def save_tree_in(worker: Executor, state: Any, path: AnyPath, saver: Saver) -> Future[None]:
    """Save a state as one checkpoint, from this process alone, in `worker`.

    The state may change when this returns.
    """
    storage, name = open_parent(path)
    group = alone()
    prepared = saver.prepare(_as_saved(state), group, SaveChoice())
    staged = prepared.stage("copy")

    def finish() -> None:
        write_and_commit(prepared, staged, storage, name, group.comm, timeout_s=TIMEOUT_S)

    # A state larger than the memory for copies is staged only while it is being written.
    future = worker.submit(finish)
    staged.wait_staged(TIMEOUT_S)
    return future


def save_tree(state: Any, path: AnyPath, saver: Saver) -> None:
    """Save a state as one checkpoint, from this process alone; committed when this returns."""
    storage, name = open_parent(path)
    group = alone()
    prepared = saver.prepare(_as_saved(state), group, SaveChoice())
    staged = prepared.stage("commit")
    write_and_commit(prepared, staged, storage, name, group.comm, timeout_s=TIMEOUT_S)


def load_tree(path: AnyPath, *, device: Any = "cpu", trust: bool = False) -> Any:
    """The state that was saved at `path`, in fresh memory on `device`, for this process alone.

    `UsageError` for a checkpoint that has no tree. Without `trust`, the tree must be plain data.
    """
    opened = open_checkpoint(path)
    if TREE_NAME not in {one.name for one in opened.index.objects}:
        raise UsageError(
            f"{opened.uri} is a checkpoint, but does not say what it was made of",
            fix="Load it into a state that has the parts wanted, with penstock.checkpoint.loading.",
        )
    state: dict[str, Any] = {TREE_NAME: None, **_room(opened, device)}
    with closing(CheckpointLoader()) as loader:
        loader.load_from(state, opened, alone(), LoadChoice(trust=trust))
    try:
        tree, paths = state.pop(TREE_NAME)
        return join(Split(tree, state, dict(paths)))
    except (LookupError, TypeError, ValueError) as error:
        raise DataDamaged(f"The tree does not fit its tensors: {error!r}", where=opened.uri) from error


def _as_saved(state: Any) -> dict[str, Any]:
    parts = split(state)
    return {**parts.tensors, TREE_NAME: (parts.tree, tuple(parts.paths.items()))}


def _room(opened: CheckpointSource, device: Any) -> dict[str, torch.Tensor]:
    return {
        facts.name: torch.empty(facts.shape, dtype=getattr(torch, facts.dtype), device=device)
        for facts in opened.index.tensors
    }


def _tensors_in(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if is_tensor(value):
        yield path, value
    for key, inner in _inside(value):
        yield from _tensors_in(inner, (*path, key))


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a container holds; nothing of those that could not be made anew from their parts."""
    if type(value) in (dict, OrderedDict):
        yield from value.items()
    elif type(value) in (list, tuple):
        yield from enumerate(value)


def _without_tensors(value: Any) -> Any:
    if is_tensor(value):
        return None
    if type(value) in (dict, OrderedDict):
        # Modules hang facts on the OrderedDict of their state, which a copy keeps.
        bare = copy.copy(value)
        bare.update((key, _without_tensors(inner)) for key, inner in value.items())
        return bare
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(inner) for inner in value)
    return value


def _with(tree: Any, path: Path, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    key, *rest = path
    inner = _with(tree[key], tuple(rest), tensor)
    if isinstance(tree, tuple):
        return (*tree[:key], inner, *tree[key + 1 :])
    tree[key] = inner
    return tree
