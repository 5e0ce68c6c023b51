"""Saves and restores a whole state with its structure: keys, tuples and empty containers.

For frameworks that save "the checkpoint" as one dict: each tensor becomes a part with its own name, and
everything else becomes one object, the tree. Invariant: `load_tree` returns what `save_tree` received, except
that tensors no longer share memory.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from contextlib import closing
from functools import partial
from socket import gethostname
from typing import Any, Final

import torch

from penstock.checkpoint.commit.checkpoints import AnyPath, open_parent, write_and_commit
from penstock.checkpoint.engine import TRANSFER_TIMEOUT_S, LoadChoice, SaveCancelled, SaveChoice
from penstock.checkpoint.formats.checkpoint_source import open_checkpoint
from penstock.checkpoint.loader import CheckpointLoader
from penstock.checkpoint.saver import Saver
from penstock.checkpoint.state.tensors import is_tensor
from penstock.cluster.comm import SoloComm
from penstock.errors import DataDamaged, UsageError

TREE_NAME: Final = "penstock.tree"

Path = tuple[Any, ...]
"""Keys of mappings, and positions in lists and tuples."""


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, Path]]:
    """Return the tree of a state, its tensors by name, and the position of each in the tree.

    In the tree, None replaces each tensor, and containers are copies. Containers other than dict, list and
    tuple remain objects.
    """
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, Path] = {}

    def strip(value: Any, path: Path) -> Any:
        if is_tensor(value):
            name = ".".join(map(str, path))
            # The keys 1 and "1" would get the same name.
            while name in tensors or name == TREE_NAME:
                name += "~"
            tensors[name], paths[name] = value, path
            return None
        if type(value) in (dict, OrderedDict):
            # torch's modules attach metadata to the OrderedDict of their state, which a copy keeps.
            stripped = copy.copy(value)
            stripped.update((key, strip(inner, (*path, key))) for key, inner in value.items())
            return stripped
        if type(value) in (list, tuple):
            return type(value)(strip(inner, (*path, number)) for number, inner in enumerate(value))
        return value

    return strip(state, ()), tensors, paths


def join(tree: Any, tensors: Mapping[str, torch.Tensor], paths: Mapping[str, Path]) -> Any:
    """Put the tensors back into the containers of their tree."""
    for name, path in paths.items():
        tree = _insert(tree, path, tensors[name])
    return tree


def _insert(tree: Any, path: Path, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    key, *rest = path
    inner = _insert(tree[key], tuple(rest), tensor)
    if isinstance(tree, tuple):
        return (*tree[:key], inner, *tree[key + 1 :])
    tree[key] = inner
    return tree


def save_tree(state: Any, path: AnyPath, saver: Saver, worker: Executor | None = None) -> Future[Any]:
    """Save a state as one checkpoint, from this process alone, in `worker` if there is one.

    The state may change once this returns; without a `worker`, the checkpoint is then already committed.
    """
    storage, name = open_parent(path)
    comm = SoloComm(gethostname())
    tree, tensors, paths = split(state)
    prepared = saver.prepare({**tensors, TREE_NAME: (tree, tuple(paths.items()))}, comm, SaveChoice())
    staged = prepared.stage("commit" if worker is None else "copy")

    finish = partial(write_and_commit, prepared, staged, storage, name, comm)
    if worker is None:
        finish()
        done: Future[Any] = Future()
        done.set_result(None)
        return done
    # If the state is larger than the memory for copies, staging ends only while files are being written.
    future = worker.submit(finish)
    try:
        staged.wait_staged(TRANSFER_TIMEOUT_S)
    except SaveCancelled:
        future.result()  # a failure has cancelled the copying: raise it, because it is the cause
        raise
    return future


def load_tree(path: AnyPath, *, device: Any = "cpu", trust: bool = False) -> Any:
    """Load the state at `path` into new memory on `device`, for this process alone.

    Raises `UsageError` if the checkpoint has no tree. Without `trust`, the tree must be plain data.
    """
    source = open_checkpoint(path)
    if TREE_NAME not in {stored.name for stored in source.index.objects}:
        raise UsageError(
            f"{source.uri} is a checkpoint without the structure of its state",
            fix="Load it with penstock.checkpoint.load into a state that has the parts you need.",
        )
    state: dict[str, Any] = {TREE_NAME: None}
    for facts in source.index.tensors:
        state[facts.name] = torch.empty(facts.shape, dtype=getattr(torch, facts.dtype), device=device)
    comm = SoloComm(gethostname())
    with closing(CheckpointLoader()) as loader:
        loader.load_from(state, source, comm, LoadChoice(trust=trust))
    try:
        tree, paths = state.pop(TREE_NAME)
        return join(tree, state, dict(paths))
    except (LookupError, TypeError, ValueError) as error:
        raise DataDamaged(f"The tree does not fit its tensors: {error!r}", where=source.uri) from error
