"""From a model to its checkpoint layout: which rank holds which part of which file. Pure.

Three kinds of model: a transformer by its dimensions, explicit sizes in DLIO's keys, and files listed one by
one. A transformer's total follows from its parameters alone, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.bench.model_state.state_layout import (
    FileGroup,
    Mesh,
    StateLayout,
    even_share,
    stage_of_layer,
    without_empty,
)
from penstock.errors import UsageError
from penstock.workload.choices import CheckpointMode, CheckpointWriters, Datatype

if TYPE_CHECKING:
    from penstock.bench.model_state.state_layout import Numbers
    from penstock.workload.checkpoint_model import CheckpointModel
    from penstock.workload.spec import Model, Transformer

DATATYPE_BYTES: Final = {
    Datatype.INT8: 1,
    Datatype.UINT8: 1,
    Datatype.FP16: 2,
    Datatype.BF16: 2,
    Datatype.FP32: 4,
    Datatype.FP64: 8,
}
OPTIMIZER_STATES: Final = 3
"""Adam in mixed precision: a copy of the parameters and two moments."""

_MODEL: Final = "model_states-{rank}.pt"
_WHOLE: Final = "model_{mp}_model_states.pt"
_LAYER: Final = "layer_%d-model_{mp}_model_states.pt"
_SHARDED: Final = "zero_pp_rank_{dp}_mp_rank_{mp}_model_states.pt"
_OPTIMIZER: Final = "zero_pp_rank_{dp}_mp_rank_{mp}_optim_states.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """A model on `num_processes` (None: the number it is laid out for), with `scale` of its bytes."""

    model: CheckpointModel
    num_processes: int | None = None
    scale: Fraction = Fraction(1)
    mode: CheckpointMode = CheckpointMode.DEFAULT


def plan_layout(request: LayoutRequest) -> StateLayout:
    """The layout that is asked for; `UsageError` where model and processes do not fit together."""
    if not 0 < request.scale <= 1:
        raise UsageError(
            f"A scale of {float(request.scale):g} makes no checkpoint",
            where="--scale",
            fix="Choose from 0 to 1.",
        )
    spec = request.model.workload.model
    if spec.parallelism.zero_stage == 3 and spec.parallelism.pipeline > 1:
        raise UsageError(
            f"ZeRO 3 divides all layers among all replicas, which leaves nothing to "
            f"{spec.parallelism.pipeline} stages of a pipeline",
            where="model.parallelism",
            fix="Set pipeline to 1, or zero_stage to at most 2.",
        )
    mesh, num_processes, num_carried = _places(request)
    layout = StateLayout(
        mesh=mesh,
        num_processes=num_processes,
        num_carried=num_carried,
        groups=without_empty(_groups(request.model, mesh)),
        num_parameters=count_parameters(spec) if spec.transformer and spec.num_layers else None,
    )
    if not layout.groups:
        raise UsageError(
            f"{request.model.name} holds no bytes",
            where="model",
            fix="Give it model_size_bytes, layer_parameters, or a transformer with num_layers.",
        )
    return layout.scaled(request.scale)


def count_parameters(model: Model) -> int:
    """Every parameter of a transformer once: embedding, layers, final norm, output head."""
    assert model.transformer is not None
    assert model.num_layers is not None
    dims = model.transformer
    edges = 2 * dims.vocab_size * dims.hidden_size + dims.hidden_size
    return edges + model.num_layers * sum(layer_tensors(dims))


def layer_tensors(dims: Transformer) -> tuple[int, ...]:
    """Elements of one layer's tensors: norm, attention in and out, norm, feed-forward up and down.

    Keys and values have `hidden x kv heads / heads` columns together, also where a head has no whole width.
    """
    hidden, ffn = dims.hidden_size, dims.ffn_hidden_size
    kv_columns = hidden * dims.num_kv_heads // dims.num_attention_heads
    attention = hidden * (hidden + 2 * kv_columns)
    return hidden, attention, hidden * hidden, hidden, 2 * ffn * hidden, ffn * hidden


def _places(request: LayoutRequest) -> tuple[Mesh, int, int]:
    """The mesh, how many processes there are, and how many ranks of the mesh they carry."""
    spec, own = request.model.workload.model, request.model.num_ranks
    split = spec.parallelism
    model_parallel = split.tensor * split.pipeline
    if request.model.files:
        split_mesh = Mesh(data=own or request.num_processes or 1)
        return _carried(split_mesh, request)
    own_replicas = split.data or max(1, (own or model_parallel) // model_parallel)
    asked = request.num_processes or own or model_parallel * own_replicas
    if request.mode is CheckpointMode.SUBSET:
        return _carried(Mesh(tensor=split.tensor, pipeline=split.pipeline, data=own_replicas), request)
    if asked % model_parallel == 0 and _follows_ranks(request):
        mesh = Mesh(tensor=split.tensor, pipeline=split.pipeline, data=asked // model_parallel)
        return mesh, asked, asked
    return _carried(Mesh(tensor=split.tensor, pipeline=split.pipeline, data=own_replicas), request)


def _follows_ranks(request: LayoutRequest) -> bool:
    """Whether more or fewer replicas leave the total as it is, or the model names no number of them."""
    spec = request.model.workload.model
    return spec.transformer is not None or request.model.num_ranks is None


def _carried(mesh: Mesh, request: LayoutRequest) -> tuple[Mesh, int, int]:
    num_processes = request.num_processes or mesh.num_ranks
    if num_processes > mesh.num_ranks:
        raise UsageError(
            f"{request.model.name} is laid out for {mesh.num_ranks} ranks (tensor {mesh.tensor} x "
            f"pipeline {mesh.pipeline} x data {mesh.data}), not for {num_processes}",
            where="--ranks",
            fix=f"Use at most {mesh.num_ranks}, or a multiple of {mesh.model_parallel}.",
        )
    is_subset = request.mode is CheckpointMode.SUBSET
    return mesh, num_processes, num_processes if is_subset else mesh.num_ranks


def _groups(model: CheckpointModel, mesh: Mesh) -> Iterator[FileGroup]:
    spec = model.workload.model
    if model.files:
        yield from _listed(model, mesh)
    elif spec.transformer is not None and spec.num_layers is not None:
        yield from _transformer(spec, mesh)
    elif spec.layer_parameters or spec.optimization_groups:
        yield from _explicit(spec, mesh)
    else:
        everyone = model.workload.checkpoint.type is CheckpointWriters.ALL_RANKS
        ranks = np.arange(mesh.num_ranks if everyone else 1, dtype=np.int64)
        yield _even(_MODEL, ranks, spec.model_size_bytes)


def _transformer(spec: Model, mesh: Mesh) -> Iterator[FileGroup]:
    """Model files first, then the optimizer's, each rank's share of all parameters."""
    assert spec.transformer is not None
    assert spec.num_layers is not None
    dims, num_layers = spec.transformer, spec.num_layers
    embedding = dims.vocab_size * dims.hidden_size
    width = DATATYPE_BYTES[spec.model_datatype]
    if spec.parallelism.zero_stage < 3 and mesh.pipeline > 1:
        layers = [(embedding,), *([layer_tensors(dims)] * num_layers), (embedding,), (dims.hidden_size,)]
        for number, tensors in enumerate(layers):
            yield _layer(number, tensors, mesh=mesh, num_layers=num_layers, width=width)
    else:
        tensors = (embedding, *(layer_tensors(dims) * num_layers), embedding, dims.hidden_size)
        yield _model_file(tensors, mesh=mesh, zero_stage=spec.parallelism.zero_stage, width=width)
    yield _optimizer(count_parameters(spec), spec, mesh)


def _layer(number: int, tensors: tuple[int, ...], *, mesh: Mesh, num_layers: int, width: int) -> FileGroup:
    """One layer on the ranks of its stage: embedding is layer 0, output head and norm follow the last one."""
    if number == 0:
        stage = 0
    elif number > num_layers:
        stage = mesh.pipeline - 1
    else:
        stage = stage_of_layer(number, num_layers=num_layers, num_stages=mesh.pipeline)
    ranks = mesh.ranks_of_stage(stage)
    return FileGroup(name=_LAYER % number, ranks=ranks, size_bytes=width * _divided(tensors, mesh, ranks))


def _model_file(tensors: tuple[int, ...], *, mesh: Mesh, zero_stage: int, width: int) -> FileGroup:
    """All layers in one file: of the first replica's ranks, or of all of them with a share each."""
    if zero_stage < 3:
        ranks = np.arange(mesh.model_parallel, dtype=np.int64)
        return FileGroup(name=_WHOLE, ranks=ranks, size_bytes=width * _divided(tensors, mesh, ranks))
    ranks = np.arange(mesh.num_ranks, dtype=np.int64)
    own = even_share(_divided(tensors, mesh, ranks), mesh.data, mesh.replica_of(ranks))
    return FileGroup(name=_SHARDED, ranks=ranks, size_bytes=width * own)


def _divided(tensors: tuple[int, ...], mesh: Mesh, ranks: Numbers) -> Numbers:
    """Elements that each rank holds of these tensors; every one is divided, norms too."""
    places = np.arange(mesh.tensor, dtype=np.int64)
    distinct, counts = np.unique(np.array(tensors, dtype=np.int64), return_counts=True)
    by_place = sum(
        (
            count * even_share(elements, mesh.tensor, places)
            for elements, count in zip(distinct, counts, strict=True)
        ),
        start=np.zeros(mesh.tensor, dtype=np.int64),
    )
    own: Numbers = by_place[mesh.tensor_of(ranks)]
    return own


def _optimizer(num_parameters: int, spec: Model, mesh: Mesh) -> FileGroup:
    """Its states, divided evenly among all ranks, or without ZeRO among those of the first replica."""
    num_ranks = mesh.num_ranks if spec.parallelism.zero_stage else mesh.model_parallel
    ranks = np.arange(num_ranks, dtype=np.int64)
    width = OPTIMIZER_STATES * DATATYPE_BYTES[spec.optimizer_datatype]
    return FileGroup(
        name=_OPTIMIZER, ranks=ranks, size_bytes=width * even_share(num_parameters, num_ranks, ranks)
    )


def _explicit(spec: Model, mesh: Mesh) -> Iterator[FileGroup]:
    """DLIO's older keys: elements of a layer, divided by tensors; elements of a rank's optimizer groups."""
    writers = np.arange(
        mesh.num_ranks if spec.parallelism.zero_stage else mesh.model_parallel, dtype=np.int64
    )
    model_writers = writers if spec.parallelism.zero_stage == 3 else writers[: mesh.model_parallel]
    yield _even(_MODEL, model_writers, spec.model_size_bytes)
    width = DATATYPE_BYTES[spec.model_datatype]
    for number in range(1, (spec.num_layers or 0) + 1):
        stage = stage_of_layer(number, num_layers=spec.num_layers or 1, num_stages=mesh.pipeline)
        ranks = mesh.ranks_of_stage(stage)
        sizes = width * _divided(spec.layer_parameters, mesh, ranks)
        yield FileGroup(name=_LAYER % number, ranks=ranks, size_bytes=sizes)
    elements = OPTIMIZER_STATES * sum(spec.optimization_groups)
    yield _even(_OPTIMIZER, writers, elements * DATATYPE_BYTES[spec.optimizer_datatype])


def _listed(model: CheckpointModel, mesh: Mesh) -> Iterator[FileGroup]:
    """Files as a card names them."""
    for rule in model.files:
        ranks = np.arange(0, mesh.num_ranks, rule.every, dtype=np.int64)
        for index in range(rule.count):
            yield _even(rule.name.replace("{index}", str(index)), ranks, sum(rule.parts))


def _even(name: str, ranks: Numbers, size_bytes: int) -> FileGroup:
    return FileGroup(name=name, ranks=ranks, size_bytes=np.full(len(ranks), size_bytes, dtype=np.int64))
