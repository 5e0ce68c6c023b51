"""The files of a checkpoint: groups of similar files over ranks, and what each process writes.

Pure. A thousand ranks with a hundred layers are some hundred arrays, never a list of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StateFile:
    """One file of a checkpoint; its name is relative to the checkpoint's folder."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """One file on each of `ranks` (ascending), of `size_bytes`.

    `name` may hold `{rank}`, `{mp}` (its place in one replica), `{dp}` (its replica), `{epoch}`, `{step}`.
    """

    name: str
    ranks: Numbers
    size_bytes: Numbers

    def scaled(self, scale: Fraction) -> FileGroup:
        """The same files with `scale` of their bytes, to half a byte, and none of them empty."""
        distinct, places = np.unique(self.size_bytes, return_inverse=True)
        sizes = [max(1, round(size * scale)) for size in distinct.tolist()]
        return replace(self, size_bytes=np.array(sizes, dtype=np.int64)[places])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """Where a checkpoint's bytes are. `num_processes` carry the first `num_carried` ranks of the mesh.

    Usually each carries one; on a machine that is too small for the model's parallelism each carries several,
    neighbours, so that all of the checkpoint is there. In subset mode fewer ranks than the mesh has are
    carried, and the checkpoint is smaller.
    """

    mesh: Mesh
    num_processes: int
    num_carried: int
    groups: tuple[FileGroup, ...]
    num_parameters: int | None = None

    @property
    def is_subset(self) -> bool:
        """Whether a part stands for the whole."""
        return self.num_carried < self.mesh.num_ranks

    @property
    def is_folded(self) -> bool:
        """Whether processes carry more than a rank each."""
        return self.num_processes < self.num_carried

    @property
    def total_bytes(self) -> int:
        """One checkpoint, over all processes."""
        return int(self.bytes_of_processes().sum())

    @property
    def num_files(self) -> int:
        """The files of one checkpoint, over all processes."""
        return sum(int(np.searchsorted(group.ranks, self.num_carried)) for group in self.groups)

    def bytes_of_processes(self) -> Numbers:
        """How much each process writes of one checkpoint."""
        totals = np.zeros(self.num_processes, dtype=np.int64)
        for group in self.groups:
            carried = int(np.searchsorted(group.ranks, self.num_carried))
            process = ((group.ranks[:carried] + 1) * self.num_processes - 1) // self.num_carried
            np.add.at(totals, process, group.size_bytes[:carried])
        return totals

    def ranks_of(self, process: int) -> range:
        """The ranks of the mesh that a process carries."""
        first, end = (edge * self.num_carried // self.num_processes for edge in (process, process + 1))
        return range(first, end)

    def files_of(self, process: int, *, epoch: int = 1, step: int = 1) -> Iterator[StateFile]:
        """A process's files of one checkpoint, in the order in which they are written."""
        carried = self.ranks_of(process)
        model_parallel = self.mesh.model_parallel
        for group in self.groups:
            first, end = np.searchsorted(group.ranks, (carried.start, carried.stop)).tolist()
            for place in range(first, end):
                rank = int(group.ranks[place])
                name = group.name.format(
                    rank=rank, mp=rank % model_parallel, dp=rank // model_parallel, epoch=epoch, step=step
                )
                yield StateFile(name, int(group.size_bytes[place]))

    def scaled(self, scale: Fraction) -> StateLayout:
        """The same files with `scale` of their bytes."""
        if scale == 1:
            return self
        return replace(self, groups=tuple(group.scaled(scale) for group in self.groups))


def checkpoint_folder(epoch: int, step: int) -> str:
    """The folder of one checkpoint, as DLIO names it."""
    return f"global_epoch{epoch}_step{step}"


def without_empty(groups: Iterable[FileGroup]) -> tuple[FileGroup, ...]:
    """Groups without files that would be empty, as where fewer elements than ranks are divided."""
    kept = ((group, group.size_bytes > 0) for group in groups)
    return tuple(
        replace(group, ranks=group.ranks[full], size_bytes=group.size_bytes[full])
        for group, full in kept
        if full.any()
    )


Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks counted through tensors first, then stages of the pipeline, then replicas, as DLIO does."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one replica of the model together."""
        return self.tensor * self.pipeline

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.model_parallel * self.data

    def tensor_of(self, ranks: Numbers) -> Numbers:
        """Places among the ranks that divide each tensor."""
        return ranks % self.tensor

    def stage_of(self, ranks: Numbers) -> Numbers:
        """Places in the pipeline."""
        return ranks // self.tensor % self.pipeline

    def replica_of(self, ranks: Numbers) -> Numbers:
        """Which copy of the model ranks belong to."""
        return ranks // self.model_parallel

    def ranks_of_stage(self, stage: int) -> Numbers:
        """The first replica's ranks that hold this stage."""
        return np.arange(self.tensor, dtype=np.int64) + stage * self.tensor


def even_share(whole: Numbers | int, parts: int, place: Numbers) -> Numbers:
    """What falls to `place` of `parts` that are as equal as whole numbers allow."""
    shares: Numbers = whole * (place + 1) // parts - whole * place // parts
    return shares


def stage_of_layer(layer: int, *, num_layers: int, num_stages: int) -> int:
    """Where layer 1 to `num_layers` lives: early stages have one more where they do not divide evenly."""
    short, num_long = divmod(num_layers, num_stages)
    in_long_stages = num_long * (short + 1)
    if layer <= in_long_stages:
        return (layer - 1) // (short + 1)
    return num_long + (layer - 1 - in_long_stages) // short
