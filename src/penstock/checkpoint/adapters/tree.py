"""Saves and restores a whole state as it is, with its keys, tuples and empty parts.

For frameworks that save "the checkpoint" as one dict: each tensor becomes a part with a name of its own, the
rest becomes one object, the tree. Invariant: `load_tree` returns what `save_tree` took, except that tensors
which shared memory no longer do.
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
from penstock.checkpoint.engine import LoadChoice, SaveCancelled, SaveChoice
from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, open_checkpoint
from penstock.checkpoint.loading.loader import CheckpointLoader
from penstock.checkpoint.state.process_group import RankGroup
from penstock.checkpoint.state.tensors import is_tensor
from penstock.cluster.comm import SoloComm
from penstock.errors import DataDamaged, UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.saver import Saver

TREE_NAME: Final = "penstock.tree"
TIMEOUT_S: Final = 1800.0

Path = tuple[Any, ...]
"""Keys of mappings, and positions in lists and tuples."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """A state, split into its tensors and the rest."""

    tree: Any
    """The state with None where a tensor was; containers are copies."""
    tensors: dict[str, torch.Tensor]
    paths: dict[str, Path]
    """Where in the tree each tensor belongs."""


def split(state: Any) -> SplitState:
    """Split a state. Containers of other kinds than dict, list and tuple stay objects."""
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, Path] = {}
    for path, tensor in _find_tensors(state, ()):
        name = ".".join(map(str, path))
        # Keys 1 and "1" would get the same name.
        while name in tensors or name == TREE_NAME:
            name += "~"
        tensors[name], paths[name] = tensor, path
    return SplitState(_remove_tensors(state), tensors, paths)


def join(parts: SplitState) -> Any:
    """Join a state again, in the containers of its tree."""
    tree = parts.tree
    for name, path in parts.paths.items():
        tree = _insert(tree, path, parts.tensors[name])
    return tree


def solo_group() -> RankGroup:
    """The group of this process alone, whatever process groups exist."""
    return RankGroup(SoloComm(gethostname()))


def save_tree_in(worker: Executor, state: Any, path: AnyPath, saver: Saver) -> Future[None]:
    """Save a state as one checkpoint, from this process alone, in `worker`.

    The state may change when this returns.
    """
    storage, name = open_parent(path)
    group = solo_group()
    prepared = saver.prepare(_flatten(state), group, SaveChoice())
    staged = prepared.stage("copy")

    def finish() -> None:
        write_and_commit(prepared, staged, storage, name, group.comm, timeout_s=TIMEOUT_S)

    # A state larger than the memory for copies is staged only while it is being written.
    future = worker.submit(finish)
    try:
        staged.wait_staged(TIMEOUT_S)
    except SaveCancelled:
        future.result()  # What failed meanwhile has cancelled the copying, and is the cause.
        raise
    return future


def save_tree(state: Any, path: AnyPath, saver: Saver) -> None:
    """Save a state as one checkpoint, from this process alone; committed when this returns."""
    storage, name = open_parent(path)
    group = solo_group()
    prepared = saver.prepare(_flatten(state), group, SaveChoice())
    staged = prepared.stage("commit")
    write_and_commit(prepared, staged, storage, name, group.comm, timeout_s=TIMEOUT_S)


def load_tree(path: AnyPath, *, device: Any = "cpu", trust: bool = False) -> Any:
    """Load the state at `path` into new memory on `device`, for this process alone.

    `UsageError` if the checkpoint has no tree. Without `trust`, the tree must be plain data.
    """
    source = open_checkpoint(path)
    if TREE_NAME not in {stored.name for stored in source.index.objects}:
        raise UsageError(
            f"{source.uri} is a checkpoint without the structure of its state",
            fix="Load it with penstock.checkpoint.loading into a state that has the parts you need.",
        )
    state: dict[str, Any] = {TREE_NAME: None, **_allocate(source, device)}
    with closing(CheckpointLoader()) as loader:
        loader.load_from(state, source, solo_group(), LoadChoice(trust=trust))
    try:
        tree, paths = state.pop(TREE_NAME)
        return join(SplitState(tree, state, dict(paths)))
    except (LookupError, TypeError, ValueError) as error:
        raise DataDamaged(f"The tree does not fit its tensors: {error!r}", where=source.uri) from error


def _flatten(state: Any) -> dict[str, Any]:
    parts = split(state)
    return {**parts.tensors, TREE_NAME: (parts.tree, tuple(parts.paths.items()))}


def _allocate(source: CheckpointSource, device: Any) -> dict[str, torch.Tensor]:
    return {
        facts.name: torch.empty(facts.shape, dtype=getattr(torch, facts.dtype), device=device)
        for facts in source.index.tensors
    }


def _find_tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if is_tensor(value):
        yield path, value
    for key, inner in _iterate_children(value):
        yield from _find_tensors(inner, (*path, key))


def _iterate_children(value: Any) -> Iterator[tuple[Any, Any]]:
    """The children of a container; none for kinds that cannot be rebuilt from their parts."""
    if type(value) in (dict, OrderedDict):
        yield from value.items()
    elif type(value) in (list, tuple):
        yield from enumerate(value)


def _remove_tensors(value: Any) -> Any:
    if is_tensor(value):
        return None
    if type(value) in (dict, OrderedDict):
        # torch's modules attach metadata to the OrderedDict of their state, which a copy keeps.
        stripped = copy.copy(value)
        stripped.update((key, _remove_tensors(inner)) for key, inner in value.items())
        return stripped
    if type(value) in (list, tuple):
        return type(value)(_remove_tensors(inner) for inner in value)
    return value


def _insert(tree: Any, path: Path, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    key, *rest = path
    inner = _insert(tree[key], tuple(rest), tensor)
    if isinstance(tree, tuple):
        return (*tree[:key], inner, *tree[key + 1 :])
    tree[key] = inner
    return tree
