"""Which place a rank has in tensor, pipeline and data parallelism, and how numbers divide among places.

Pure; everything works on one number and on arrays of them alike. Invariant: shares of a whole add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def share(whole: Numbers | int, parts: int, place: Numbers) -> Numbers:
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
