"""Compute the files and bytes of every rank's part of a checkpoint from the model and its parallelism.

A model is described in one of three ways: a transformer by its dimensions, explicit sizes in DLIO's keys, or
files listed one by one. A transformer's total follows from its parameters alone, to the byte. Pure. A
thousand ranks with a hundred layers take about a hundred arrays, never a list of all files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.transfer.pipeline import PlannedObject
from penstock.units import format_count
from penstock.workload.enums import CheckpointMode, CheckpointWriters, Datatype
from penstock.workload.load_workload import CheckpointModel
from penstock.workload.spec import Model, Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """One file of `size_bytes` on each of `ranks` (ascending).

    `name` may contain `{rank}`, `{mp}` (the rank's position in its replica), `{dp}` (the number of its
    replica), `{epoch}` and `{step}`.
    """

    name: str
    ranks: Numbers
    size_bytes: Numbers

    def scaled(self, scale: Fraction) -> FileGroup:
        """Return the same files with `scale` times their bytes, rounded; none becomes empty."""
        distinct, places = np.unique(self.size_bytes, return_inverse=True)
        sizes = [max(1, round(size * scale)) for size in distinct.tolist()]
        return replace(self, size_bytes=np.array(sizes, dtype=np.int64)[places])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The files of a checkpoint. `num_processes` processes carry the first `num_carried` ranks of the mesh.

    Usually each process carries one rank. On a machine that is too small for the model's parallelism, each
    carries several consecutive ranks, so that the checkpoint is complete. In subset mode, only a part of the
    mesh's ranks is carried, and the checkpoint is smaller.
    """

    mesh: Mesh
    num_processes: int
    num_carried: int
    groups: tuple[FileGroup, ...]
    num_parameters: int | None = None
    full_bytes: int = 0
    """The bytes of one checkpoint with a scale of 1."""

    @property
    def is_subset(self) -> bool:
        """True if only a part of the mesh's ranks is carried."""
        return self.num_carried < self.mesh.num_ranks

    @property
    def is_folded(self) -> bool:
        """True if processes carry more than one rank each."""
        return self.num_processes < self.num_carried

    @property
    def total_bytes(self) -> int:
        """The bytes of one checkpoint, over all processes."""
        return int(self.bytes_of_processes().sum())

    @property
    def num_files(self) -> int:
        """The number of files of one checkpoint, over all processes."""
        return sum(int(np.searchsorted(group.ranks, self.num_carried)) for group in self.groups)

    def bytes_of_processes(self) -> Numbers:
        """Return the bytes of one checkpoint that each process writes."""
        totals = np.zeros(self.num_processes, dtype=np.int64)
        for group in self.groups:
            carried = int(np.searchsorted(group.ranks, self.num_carried))
            process = ((group.ranks[:carried] + 1) * self.num_processes - 1) // self.num_carried
            np.add.at(totals, process, group.size_bytes[:carried])
        return totals

    def ranks_of(self, process: int) -> range:
        """Return the ranks of the mesh that a process carries."""
        first, end = (edge * self.num_carried // self.num_processes for edge in (process, process + 1))
        return range(first, end)

    def files_of(self, process: int, *, epoch: int = 1, step: int = 1) -> Iterator[PlannedObject]:
        """Yield a process's files of one checkpoint, in the order of writing.

        An object's key is the file's name.
        """
        carried = self.ranks_of(process)
        model_parallel = self.mesh.model_parallel
        for group in self.groups:
            first, end = np.searchsorted(group.ranks, (carried.start, carried.stop)).tolist()
            for place in range(first, end):
                rank = int(group.ranks[place])
                name = group.name.format(
                    rank=rank, mp=rank % model_parallel, dp=rank // model_parallel, epoch=epoch, step=step
                )
                yield PlannedObject(name, int(group.size_bytes[place]))


def checkpoint_folder(epoch: int, step: int) -> str:
    """Return the folder of one checkpoint, as DLIO names it."""
    return f"global_epoch{epoch}_step{step}"


def without_empty(groups: Iterable[FileGroup]) -> tuple[FileGroup, ...]:
    """Return the groups without their empty files: with fewer elements than ranks, some get none."""
    non_empty = ((group, group.size_bytes > 0) for group in groups)
    return tuple(
        replace(group, ranks=group.ranks[full], size_bytes=group.size_bytes[full])
        for group, full in non_empty
        if full.any()
    )


Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks, numbered along tensor parallelism first, then pipeline stages, then replicas, as in DLIO."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def model_parallel(self) -> int:
        """The number of ranks that together hold one replica of the model."""
        return self.tensor * self.pipeline

    @property
    def num_ranks(self) -> int:
        """The number of all ranks."""
        return self.model_parallel * self.data


def even_share(whole: Numbers | int, parts: int, place: Numbers) -> Numbers:
    """Return part `place` of `whole`, divided into `parts` as equally as whole numbers allow."""
    shares: Numbers = whole * (place + 1) // parts - whole * place // parts
    return shares


def stage_of_layer(layer: int, *, num_layers: int, num_stages: int) -> int:
    """Return the stage of a layer from 1 to `num_layers`.

    Without an even split, early stages have one layer more.
    """
    short, num_long = divmod(num_layers, num_stages)
    in_long_stages = num_long * (short + 1)
    if layer <= in_long_stages:
        return (layer - 1) // (short + 1)
    return num_long + (layer - 1 - in_long_stages) // short


DATATYPE_BYTES: Final = {
    Datatype.INT8: 1,
    Datatype.UINT8: 1,
    Datatype.FP16: 2,
    Datatype.BF16: 2,
    Datatype.FP32: 4,
    Datatype.FP64: 8,
}
OPTIMIZER_STATES: Final = 3
"""Adam in mixed precision has a copy of the parameters and two moments."""

_MODEL: Final = "model_states-{rank}.pt"
_WHOLE: Final = "model_{mp}_model_states.pt"
_LAYER: Final = "layer_%d-model_{mp}_model_states.pt"
_SHARDED: Final = "zero_pp_rank_{dp}_mp_rank_{mp}_model_states.pt"
_OPTIMIZER: Final = "zero_pp_rank_{dp}_mp_rank_{mp}_optim_states.pt"


def plan_layout(
    model: CheckpointModel,
    *,
    num_processes: int | None = None,
    scale: Fraction = Fraction(1),
    mode: CheckpointMode = CheckpointMode.DEFAULT,
) -> StateLayout:
    """Lay out a model with `scale` times its bytes; `UsageError` if model and processes do not fit.

    If `num_processes` is None, it is the number of ranks in the model's own parallelism.
    """
    if not 0 < scale <= 1:
        raise UsageError(
            f"The scale is {float(scale):g}, which leaves no checkpoint",
            where="--scale",
            fix="Choose a scale above 0, up to 1.",
        )
    spec = model.workload.model
    if spec.parallelism.zero_stage == 3 and spec.parallelism.pipeline > 1:
        raise UsageError(
            f"ZeRO 3 divides all layers among all replicas, so there is nothing left to divide among "
            f"{spec.parallelism.pipeline} pipeline stages",
            where="model.parallelism",
            fix="Set pipeline to 1, or zero_stage to at most 2.",
        )
    mesh = _choose_mesh(model, num_processes, is_subset=mode is CheckpointMode.SUBSET)
    num_processes = num_processes or mesh.num_ranks
    if num_processes > mesh.num_ranks:
        raise UsageError(
            f"{model.workload.full_name} is laid out for {format_count(mesh.num_ranks, 'rank')} (tensor "
            f"{mesh.tensor} x "
            f"pipeline {mesh.pipeline} x data {mesh.data}), not for {num_processes}",
            where="--ranks",
            fix=f"Use at most {mesh.num_ranks}, or a multiple of {mesh.model_parallel}.",
        )
    groups = without_empty(_groups(model, mesh))
    layout = StateLayout(
        mesh=mesh,
        num_processes=num_processes,
        num_carried=num_processes if mode is CheckpointMode.SUBSET else mesh.num_ranks,
        groups=groups,
        num_parameters=count_parameters(spec) if spec.transformer and spec.num_layers else None,
    )
    if not layout.groups:
        raise UsageError(
            f"{model.workload.full_name} holds no bytes",
            where="model",
            fix="Give it model_size_bytes, layer_parameters, or a transformer with num_layers.",
        )
    scaled = groups if scale == 1 else tuple(group.scaled(scale) for group in groups)
    return replace(layout, full_bytes=layout.total_bytes, groups=scaled)


def count_parameters(model: Model) -> int:
    """Return the number of a transformer's parameters: embedding, layers, final norm and output head."""
    assert model.transformer is not None
    assert model.num_layers is not None
    dims = model.transformer
    edges = 2 * dims.vocab_size * dims.hidden_size + dims.hidden_size
    return edges + model.num_layers * sum(layer_tensors(dims))


def layer_tensors(dims: Transformer) -> tuple[int, ...]:
    """Return the sizes of one layer's tensors: norm, attention in and out, norm, feed-forward up and down.

    Keys and values have `hidden x kv heads / heads` columns each, even if a head's width is not a whole
    number.
    """
    hidden, ffn = dims.hidden_size, dims.ffn_hidden_size
    kv_columns = hidden * dims.num_kv_heads // dims.num_attention_heads
    attention = hidden * (hidden + 2 * kv_columns)
    return hidden, attention, hidden * hidden, hidden, 2 * ffn * hidden, ffn * hidden


def _choose_mesh(model: CheckpointModel, num_processes: int | None, *, is_subset: bool) -> Mesh:
    """Choose the model's own mesh, or one with as many replicas as the processes need."""
    spec, model_ranks = model.workload.model, model.num_ranks
    split = spec.parallelism
    model_parallel = split.tensor * split.pipeline
    if model.files:
        return Mesh(data=model_ranks or num_processes or 1)
    replicas = split.data or max(1, (model_ranks or model_parallel) // model_parallel)
    wanted = num_processes or model_ranks or model_parallel * replicas
    # The number of replicas does not change a transformer's total; files of other models may name their
    # ranks.
    follows_processes = spec.transformer is not None or model_ranks is None
    if not is_subset and follows_processes and wanted % model_parallel == 0:
        replicas = wanted // model_parallel
    return Mesh(tensor=split.tensor, pipeline=split.pipeline, data=replicas)


def _groups(model: CheckpointModel, mesh: Mesh) -> Iterator[FileGroup]:
    spec = model.workload.model
    if model.files:
        yield from _listed(model, mesh)
    elif spec.transformer is not None and spec.num_layers is not None:
        yield from _transformer(spec, mesh)
    elif spec.layer_parameters or spec.optimization_groups:
        yield from _explicit(spec, mesh)
    else:
        by_all_ranks = model.workload.checkpoint.type is CheckpointWriters.ALL_RANKS
        ranks = np.arange(mesh.num_ranks if by_all_ranks else 1, dtype=np.int64)
        yield _even(_MODEL, ranks, spec.model_size_bytes)


def _transformer(spec: Model, mesh: Mesh) -> Iterator[FileGroup]:
    """Yield the model's files, then the optimizer's, with each rank's share of all parameters."""
    assert spec.transformer is not None
    assert spec.num_layers is not None
    dims, num_layers = spec.transformer, spec.num_layers
    embedding = dims.vocab_size * dims.hidden_size
    layers = [(embedding,), *([layer_tensors(dims)] * num_layers), (embedding,), (dims.hidden_size,)]
    yield from _model_files(layers, spec, mesh, num_layers=num_layers)
    yield _optimizer(count_parameters(spec), spec, mesh)


def _model_files(
    layers: Sequence[tuple[int, ...]], spec: Model, mesh: Mesh, *, num_layers: int, first: int = 0
) -> Iterator[FileGroup]:
    """Yield a file for each layer if there is a pipeline but not ZeRO-3, otherwise one for all layers."""
    width, stage = DATATYPE_BYTES[spec.model_datatype], spec.parallelism.zero_stage
    if stage == 3 or mesh.pipeline == 1:
        tensors = tuple(tensor for layer in layers for tensor in layer)
        yield _model_file(tensors, mesh=mesh, zero_stage=stage, width=width)
        return
    for number, tensors in enumerate(layers, first):
        yield _layer(number, tensors, mesh=mesh, num_layers=num_layers, width=width)


def _layer(number: int, tensors: tuple[int, ...], *, mesh: Mesh, num_layers: int, width: int) -> FileGroup:
    """Return the files of one layer on the ranks of its stage.

    The embedding is layer 0; the output head and the final norm follow the last layer.
    """
    if number == 0:
        stage = 0
    elif number > num_layers:
        stage = mesh.pipeline - 1
    else:
        stage = stage_of_layer(number, num_layers=num_layers, num_stages=mesh.pipeline)
    ranks = np.arange(mesh.tensor, dtype=np.int64) + stage * mesh.tensor  # ranks of the first replica
    return FileGroup(name=_LAYER % number, ranks=ranks, size_bytes=width * _divided(tensors, mesh, ranks))


def _model_file(tensors: tuple[int, ...], *, mesh: Mesh, zero_stage: int, width: int) -> FileGroup:
    """Return one file per rank, with its part of all layers.

    These ranks are the first replica's; with ZeRO stage 3, every rank has a file with its share.
    """
    if zero_stage < 3:
        ranks = np.arange(mesh.model_parallel, dtype=np.int64)
        return FileGroup(name=_WHOLE, ranks=ranks, size_bytes=width * _divided(tensors, mesh, ranks))
    ranks = np.arange(mesh.num_ranks, dtype=np.int64)
    elements = even_share(_divided(tensors, mesh, ranks), mesh.data, ranks // mesh.model_parallel)
    return FileGroup(name=_SHARDED, ranks=ranks, size_bytes=width * elements)


def _divided(tensors: tuple[int, ...], mesh: Mesh, ranks: Numbers) -> Numbers:
    """Return the elements of these tensors that each rank holds. Every tensor is divided, norms included."""
    places = np.arange(mesh.tensor, dtype=np.int64)
    distinct, counts = np.unique(np.array(tensors, dtype=np.int64), return_counts=True)
    by_place = sum(
        (
            count * even_share(elements, mesh.tensor, places)
            for elements, count in zip(distinct, counts, strict=True)
        ),
        start=np.zeros(mesh.tensor, dtype=np.int64),
    )
    elements: Numbers = by_place[ranks % mesh.tensor]
    return elements


def _optimizer(num_parameters: int, spec: Model, mesh: Mesh) -> FileGroup:
    """Return the optimizer's states, divided evenly among all ranks, or one replica's without ZeRO."""
    num_ranks = mesh.num_ranks if spec.parallelism.zero_stage else mesh.model_parallel
    ranks = np.arange(num_ranks, dtype=np.int64)
    width = OPTIMIZER_STATES * DATATYPE_BYTES[spec.optimizer_datatype]
    return FileGroup(
        name=_OPTIMIZER, ranks=ranks, size_bytes=width * even_share(num_parameters, num_ranks, ranks)
    )


def _explicit(spec: Model, mesh: Mesh) -> Iterator[FileGroup]:
    """Yield the files that DLIO's older keys describe: the model, its layers and the optimizer's groups."""
    writers = np.arange(
        mesh.num_ranks if spec.parallelism.zero_stage else mesh.model_parallel, dtype=np.int64
    )
    model_writers = writers if spec.parallelism.zero_stage == 3 else writers[: mesh.model_parallel]
    yield _even(_MODEL, model_writers, spec.model_size_bytes)
    if spec.layer_parameters and spec.num_layers:
        layers = [spec.layer_parameters] * spec.num_layers
        yield from _model_files(layers, spec, mesh, num_layers=spec.num_layers, first=1)
    elements = OPTIMIZER_STATES * sum(spec.optimization_groups)
    yield _even(_OPTIMIZER, writers, elements * DATATYPE_BYTES[spec.optimizer_datatype])


def _listed(model: CheckpointModel, mesh: Mesh) -> Iterator[FileGroup]:
    """Yield the files that a model's card lists."""
    for rule in model.files:
        ranks = np.arange(0, mesh.num_ranks, rule.every, dtype=np.int64)
        for index in range(rule.count):
            yield _even(rule.name.replace("{index}", str(index)), ranks, sum(rule.parts))


def _even(name: str, ranks: Numbers, size_bytes: int) -> FileGroup:
    return FileGroup(name=name, ranks=ranks, size_bytes=np.full(len(ranks), size_bytes, dtype=np.int64))
