"""The tensors of a state that this rank holds: plain ones, DTensors and ShardedTensors as regions in memory.

The boundary between torch and the planners. Invariant: a shard's memory is the state's own memory, so reading
into it loads the state, and writing from it saves the current values.
"""

from __future__ import annotations

import logging
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from penstock.checkpoint.formats.dcp_item import object_bytes, open_item, read_data
from penstock.checkpoint.formats.restricted_pickle import MOST_LEVELS, UNREADABLE, is_too_deep
from penstock.checkpoint.formats.torch_save import is_plain
from penstock.checkpoint.plan.save_plan import HeldObject, Holdings
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.checkpoint.state.walk import (
    Leaf,
    NamePatterns,
    Owner,
    is_optimizer_dict,
    is_stateful,
    matches_pattern,
    walk,
)
from penstock.errors import DataDamaged, PenstockError, UsageError, name_some

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """A region of a tensor that this rank holds, and the memory of its elements, which may be strided."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    memory: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalState:
    """The part of a state that this rank holds: its holdings for planners, its memory, its packed objects."""

    leaves: tuple[Leaf, ...]
    holdings: Holdings
    shards: Mapping[str, Sequence[LocalShard]]
    """The shards of each tensor, by its name; none if this rank has no part of a sharded tensor."""
    objects: Mapping[str, bytes]
    """The leaves that are not tensors, as torch saves them; empty for a load."""

    def view(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return the memory of a region, which must be inside one of the shards of tensor `name`."""
        for shard in self.shards[name]:
            if shard.offsets == offsets and shard.sizes == sizes:
                return shard.memory
            bounds = zip(shard.offsets, shard.sizes, offsets, sizes, strict=True)
            if all(own <= at and at + size <= own + extent for own, extent, at, size in bounds):
                return narrow_region(shard.memory, shard.offsets, offsets, sizes)
        raise UsageError(
            f"This rank holds no piece of {name!r} with {list(sizes)} elements at {list(offsets)}",
            fix="Write and read only what the plan assigns to this rank.",
        )


def flatten_bytes(memory: torch.Tensor) -> torch.Tensor:
    """Return the bytes of contiguous memory of any dtype, on any device."""
    if memory.numel() < 2:
        # The memory is contiguous whatever its strides say, but viewing it as a different dtype needs a
        # stride of 1.
        memory = memory.as_strided((memory.numel(),), (1,))
    flat = memory if memory.dim() == 1 else memory.reshape(-1)
    return flat.view(torch.uint8)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_words(memory: torch.Tensor) -> torch.Tensor:
    """Return the same memory with an element type of equal width that numpy has (not bfloat16)."""
    return memory.view(_WORDS[memory.element_size()])


def narrow_region(
    memory: torch.Tensor, own_offsets: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return the part of `memory` with this region; `memory` begins at `own_offsets` of the tensor."""
    for dim, (own, begin, extent) in enumerate(zip(own_offsets, offsets, sizes, strict=True)):
        memory = memory.narrow(dim, begin - own, extent)
    return memory


_SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
_DTENSOR = ("torch.distributed.tensor", "DTensor")
_ASYNC_TENSOR = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """Return a class of torch in a tuple, which is empty if the class's module is not loaded.

    Loading the module takes half a second, and unless it is loaded, no value can have the class.
    """
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def _is_a(value: object, of_torch: tuple[str, str]) -> bool:
    kind: Any = type(value)
    return _is_class_of(kind, *of_torch)


@lru_cache(1024)
def _is_class_of(kind: Any, module: str, name: str) -> bool:
    # The answer stays valid: a class that exists is not derived from one that is loaded later.
    return issubclass(kind, _loaded(module, name))


def is_tensor(value: object) -> bool:
    """Return True for a value that is saved as a tensor: any strided torch tensor, sharded or not.

    Also true for instances of classes with `__create_chunk_list__` and `__get_tensor_shard__`, through which
    torch's distributed checkpoints request chunks.
    """
    if _is_a(value, _SHARDED_TENSOR):  # a ShardedTensor refuses to tell whether it is quantized
        return True
    if isinstance(value, torch.Tensor):
        # Quantized and nested tensors consist of more than their elements, which have no meaning alone.
        return value.layout == torch.strided and not (value.is_quantized or value.is_nested)
    return hasattr(type(value), "__create_chunk_list__")


def has_placements(value: object) -> bool:
    """Return True for a tensor that itself tells which part a rank holds, and which ranks hold replicas."""
    return (
        _is_a(value, _SHARDED_TENSOR)
        or _is_a(value, _DTENSOR)
        or hasattr(type(value), "__create_chunk_list__")
    )


def owner_of(part: Any) -> Owner:
    """Return the owner of the leaves in one part of a state."""
    if isinstance(part, torch.nn.Module):
        return Owner.MODULE
    if isinstance(part, torch.optim.Optimizer):
        return Owner.OPTIMIZER
    if is_stateful(part):
        return Owner.STATEFUL
    return Owner.FIXED if is_optimizer_dict(part) else Owner.PLAIN


def collect_for_load(state: Mapping[str, Any]) -> LocalState:
    """Return the part of `state` that this rank holds, for a load into it."""
    leaves, _ = walk(state, is_tensor)
    return _collect(leaves, {}, is_saved=False)


def collect_for_save(
    state: Mapping[str, Any],
    *,
    only: NamePatterns | None = None,
    dtype: torch.dtype | None = None,
    is_alone: bool = True,
    owner_of: Callable[[Any], Owner] = owner_of,
) -> LocalState:
    """Return this rank's part of `state`, for a save of names matching `only`, with floats as `dtype`.

    Packs everything that is not a tensor. Unless the rank `is_alone`, other ranks may hold different values.
    """
    leaves, key_types = walk(state, is_tensor, owner_of, _copied_buffers)
    if only is not None:
        chosen = [leaf for leaf in leaves if matches_pattern(leaf.name, only)]
        if leaves and not chosen:
            raise UsageError(
                f"No part of the state matches only={only!r}",
                fix=f"Names are keys joined by dots, for example {leaves[0].name!r}.",
            )
        leaves = chosen
    local_state = _collect(leaves, key_types, is_saved=True)
    holdings = local_state.holdings
    if not is_alone and (numbering := number_parameters(state)):
        saved = {facts.name.partition(".state.")[0] for facts in holdings.tensors}
        holdings = replace(holdings, numbering=tuple(held for held in numbering if held.name in saved))
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        tensors = tuple(
            replace(facts, dtype=name, element_bytes=dtype.itemsize)
            if getattr(torch, facts.dtype).is_floating_point
            else facts
            for facts in holdings.tensors
        )
        holdings = replace(holdings, tensors=tensors)
    return replace(local_state, holdings=holdings)


def _copied_buffers(part: Any) -> frozenset[str]:
    """Return the names of buffers that DDP takes from the first rank of its group before each forward pass.

    Between two passes they differ, as BatchNorm's statistics do, and only the first rank's are useful.
    """
    if isinstance(part, DistributedDataParallel) and part.broadcast_buffers and part.process_group.rank():
        names = {name for name, _ in part.module.named_buffers()} - set(part.parameters_to_ignore)
        return frozenset(f"module.{name}" for name in names)
    return frozenset()


def _collect(leaves: Sequence[Leaf], key_types: dict[str, str], *, is_saved: bool) -> LocalState:
    tensors: list[TensorFacts] = []
    rows: list[tuple[int, Sequence[int], Sequence[int]]] = []
    shards: dict[str, list[LocalShard]] = {}
    objects: dict[str, bytes] = {}
    for leaf in leaves:
        if is_tensor(leaf.value):
            is_copy = leaf.owner is Owner.COPY
            shards[leaf.name] = [] if is_copy else local_shards(leaf.name, leaf.value)
            rows += [(len(tensors), shard.offsets, shard.sizes) for shard in shards[leaf.name]]
            kind: torch.dtype = leaf.value.dtype
            dtype, shape = str(kind).removeprefix("torch."), tuple(leaf.value.size())
            tensors.append(TensorFacts(leaf.name, dtype, shape, kind.itemsize))
        elif is_saved:
            objects[leaf.name] = _pack_leaf(leaf)
    return LocalState(
        tuple(leaves),
        Holdings(
            tensors=tuple(tensors),
            regions=Regions.from_rows(rows),
            objects=tuple(
                HeldObject(name=name, size_bytes=len(content), digest=xxhash.xxh3_128_digest(content))
                for name, content in objects.items()
            ),
            paths={leaf.name: leaf.path for leaf in leaves},
            # Modules and optimizers' options know their own names, which may differ between pipeline stages.
            entries=tuple(leaf.name for leaf in leaves if leaf.owner.keeps_structure(leaf.path)),
            key_types=key_types,
        ),
        shards,
        objects,
    )


_bare_name = partial(re.compile(r"(?<![^.])_(orig_mod|(checkpoint|fsdp)_wrapped_module)\.").sub, "")
"""Removes what compiled and wrapped modules add to names of parameters; `get_state_dict` omits it, too."""


def bare_names(names: Iterable[str]) -> list[str]:
    """Return the names of a model's parameters without those of wrappers.

    DDP puts "module." before all names. If only some begin with it, it is the name of a submodule, which
    tells parameters apart.
    """
    bare = [*map(_bare_name, names)]
    is_wrapped = all(name.startswith("module.") for name in bare)
    return [name.removeprefix("module.") for name in bare] if is_wrapped else bare


def parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of all modules' parameters, as in `get_state_dict`, by the parameter's identity."""
    names: dict[int, str] = {}
    for module in state.values():
        if isinstance(module, torch.nn.Module):
            bare = module.module if isinstance(module, DistributedDataParallel) else module
            for name, parameter in bare.named_parameters():
                names.setdefault(id(parameter), _bare_name(name))
    return names


def number_parameters(state: Mapping[str, Any]) -> tuple[HeldObject, ...]:
    """Return, for each optimizer with state, a digest of its parameters' names, ordered by number."""
    optimizers = {
        key: part for key, part in state.items() if isinstance(part, torch.optim.Optimizer) and part.state
    }
    if not optimizers:
        return ()
    names = parameter_names(state)
    numbered = []
    for key, optimizer in optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        text = "\n".join(names.get(id(parameter), "") for parameter in parameters)
        numbered.append(
            HeldObject(name=key, size_bytes=len(parameters), digest=xxhash.xxh3_128_digest(text.encode()))
        )
    return tuple(numbered)


def local_shards(name: str, value: Any) -> list[LocalShard]:
    """Return this rank's regions of a tensor, including empty ones of DTensors without rows here."""
    if _is_a(value, _SHARDED_TENSOR):
        return [
            LocalShard(
                tuple(shard.metadata.shard_offsets),
                tuple(shard.metadata.shard_sizes),
                _plain(name, shard.tensor),
            )
            for shard in value.local_shards()
        ]
    if _is_a(value, _DTENSOR):
        return _pieces_of_dtensor(name, value)
    if hasattr(type(value), "__create_chunk_list__"):
        return _pieces_of_chunks(name, value)
    plain = _plain(name, value)
    return [LocalShard((0,) * plain.dim(), tuple(plain.size()), plain)]


def device_mesh_sizes(leaves: Sequence[Leaf]) -> dict[str, int]:
    """Return the size of each dimension of the state's device mesh, outermost first; empty without a mesh.

    Of several meshes, the one with the most dimensions is taken, because the others are parts of it.
    """
    meshes = [leaf.value.device_mesh for leaf in leaves if _is_a(leaf.value, _DTENSOR)]
    if not meshes:
        return {}
    largest = max(meshes, key=lambda mesh: mesh.ndim)
    names = largest.mesh_dim_names or tuple(f"dim_{number}" for number in range(largest.ndim))
    return dict(zip(names, map(int, largest.mesh.shape), strict=True))


def _pieces_of_dtensor(name: str, value: Any) -> list[LocalShard]:
    if value.device_mesh.get_coordinate() is None:
        return []
    if any(placement.is_partial() for placement in value.placements):
        raise UsageError(
            f"{name!r} is a DTensor of partial sums: no rank holds its values",
            fix="Reduce it first, for example with redistribute(placements=[Replicate()]).",
        )
    local = value.to_local()
    if (offsets := _even_offsets(value, local)) is not None:
        return [LocalShard(offsets, tuple(local.size()), _plain(name, local))]
    chunks = value.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.size()):
        raise UsageError(
            f"The part of {name!r} on this rank, {list(local.size())}, is not one rectangular region",
            where=f"placements {value.placements}",
            fix="Save it with even shards, or redistribute it to Shard placements first.",
        )
    return [LocalShard(tuple(chunks[0].offsets), tuple(chunks[0].sizes), _plain(name, local))]


def _even_offsets(value: Any, local: torch.Tensor) -> tuple[int, ...] | None:
    """Return the offsets of this rank's part, or None if torch has to compute them.

    It has to if, for example, a dimension is sharded twice. It then lists the indices of all rows, which for
    one-dimensional float32 takes twice the memory of the shard.
    """
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - whoever has a DTensor has loaded it

    coordinate, offsets = value.device_mesh.get_coordinate() or (), [0] * value.dim()
    sharded: set[int] = set()
    for placement, size, place in zip(value.placements, value.device_mesh.shape, coordinate, strict=True):
        if type(placement) is Shard and placement.dim not in sharded:
            sharded.add(placement.dim)
            rows = -(-value.size(placement.dim) // size)
            offsets[placement.dim] = rows * place
            if not 0 < local.size(placement.dim) == min(rows, value.size(placement.dim) - rows * place):
                return None
        elif type(placement) is not Replicate:
            return None
    return tuple(offsets)


def _pieces_of_chunks(name: str, value: Any) -> list[LocalShard]:
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415 - slow, and rarely needed

    shards = []
    for number, chunk in enumerate(value.__create_chunk_list__()):
        index = MetadataIndex(name, chunk.offsets, number)
        memory = _plain(name, value.__get_tensor_shard__(index))
        shards.append(LocalShard(tuple(chunk.offsets), tuple(chunk.sizes), memory))
    return shards


def _plain(name: str, value: Any) -> torch.Tensor:
    if value.is_meta:
        raise UsageError(
            f"{name!r} is on the meta device and has no values",
            fix="Materialize it first, for example with module.to_empty(device=...).",
        )
    if is_lazy(value):
        raise UsageError(
            f"{name!r} belongs to a lazy module and has no shape yet",
            fix="Run one batch through the module first.",
        )
    if _is_a(value, _ASYNC_TENSOR):
        value = value.wait()
    if hasattr(type(value), "__tensor_flatten__"):
        raise UsageError(
            f"{name!r} is a {type(value).__name__}, whose elements are in other tensors inside it",
            fix="Put those into the state: value.__tensor_flatten__() names them.",
        )
    # Such a value, for example a MaskedTensor, only looks like a tensor of its dtype.
    answers_itself = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if answers_itself and value.numel() > 0 and not value.data_ptr():
        raise UsageError(
            f"{name!r} is a {type(value).__name__}, which has no memory of its own",
            fix="Put the tensors that it is made of into the state.",
        )
    plain: torch.Tensor = value.detach()
    return plain


_SCALARS = frozenset({type(None), bool, int, float, str})


class UnpicklableValue(UsageError, TypeError):
    """A value of the state cannot be pickled, and so cannot be saved."""


def _pack_leaf(leaf: Leaf) -> bytes:
    """Pack the value of a leaf as torch saves it."""
    try:
        if type(leaf.value) in _SCALARS and len(text := repr(leaf.value)) < 100:
            return _pack_plain(leaf.value, text)
        return object_bytes(leaf.value)
    except (pickle.PickleError, OSError, *UNREADABLE) as error:
        raise UnpicklableValue(
            f"{leaf.name!r} cannot be saved: its {type(leaf.value).__name__} cannot be pickled ({error})",
            fix="Keep it out of the state, or save what it is made of instead.",
        ) from error


@lru_cache(4096, typed=True)
def _pack_plain(value: Any, text: str) -> bytes:  # noqa: ARG001 - tells 0.0 from -0.0
    # Optimizers repeat the same options thousands of times, and in every save.
    return object_bytes(value)


def tell_of_entries(parts: Sequence[str], *, are_noted: bool) -> None:
    """Report on rank 0 that ranks have different entries in some parts."""
    if are_noted:
        logger.info("Not all ranks have the same entries in %s: each gets back its own", name_some(parts))
    elif parts:
        logger.warning(
            "Not all ranks have the same entries in %s, and they are too many to note whose is which: a part"
            " that has none yet when it is loaded gets the entries of all ranks",
            name_some(parts),
        )


def warn_of_losses(local_state: LocalState, rank: int, warned: set[str], checked: set[bytes]) -> None:
    """Report once, during a save, what a load will not restore unchanged.

    That is: objects that need `trust`, keys that come back as text, and whatever tensors of custom classes
    have in addition to their elements. Attributes of plain tensors and parameters, of which trainers set
    thousands, are not reported. `checked` has the digests of the objects of the last save, whose pickles need
    no second look.
    """
    level = logging.WARNING if rank == 0 else logging.INFO
    objects = {held.name: held.digest for held in local_state.holdings.objects}
    scalars = {leaf.name for leaf in local_state.leaves if type(leaf.value) in _SCALARS}
    for name, digest in objects.items():
        if name in scalars or digest in checked or name in warned:
            continue
        try:
            archive, record = open_item(local_state.objects[name], "an object of the state")
        except DataDamaged as error:
            raise UnpicklableValue(
                f"{name!r} cannot be saved, because no load could read it: {error.what}",
            ) from error
        if is_too_deep(archive.value):
            raise UnpicklableValue(
                f"{name!r} cannot be saved: it is nested more than {MOST_LEVELS} levels deep",
                fix="Save it in a flatter form: a load might need more than Python's stack.",
            )
        if is_plain(archive.value):
            continue
        try:
            read_data(archive.value, record, name, "")
        except PenstockError as error:
            logger.log(level, "%r cannot be loaded without trust=True: %s", name, error.what)
            warned.add(name)
    checked.clear()
    checked.update(objects.values())
    unknown = [name for name, kind in local_state.holdings.key_types.items() if kind == "unknown"]
    if set(unknown) - warned:
        logger.log(
            level,
            "Keys of %s are saved as text: a part that has no keys yet when it is loaded gets text keys, and"
            " whole numbers for text that looks like one",
            name_some([repr(name) for name in unknown]),
        )
    known = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, *_loaded(*_DTENSOR), *_loaded(*_ASYNC_TENSOR))
    found = [
        f"{leaf.name!r} ({type(leaf.value).__name__}: {name_some(sorted(names))})"
        for leaf in local_state.leaves
        if type(leaf.value) not in known
        and isinstance(leaf.value, torch.Tensor)
        and is_tensor(leaf.value)
        and (names := vars(leaf.value).keys() - {"_is_param"})
    ]
    if set(found) - warned:
        logger.log(
            level, "Attributes of tensors are not saved: %s. Put them into the state", name_some(found)
        )
    warned.update(unknown, found)
