"""What a loader does with the bytes of a block: decode the samples, and compare some with their generator.

Samples are copied out of the loader's buffers, as a trainer would need them, and then dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from penstock.bench.loader.loader_protocol import BlockRequest
from penstock.dataset.content import Content
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.formats.format_protocol import Extent, FileFormat, SupportsSums
from penstock.errors import StorageError

SAMPLED: Final = 16
"""One in this many blocks is checked by `ContentCheck.SAMPLE`."""


class ContentCheck(StrEnum):
    """How many of the blocks that are read are compared with what was generated."""

    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"

    def includes(self, block: int) -> bool:
        """Whether the block of this number, in a rank's order, is checked."""
        return self is ContentCheck.FULL or (self is ContentCheck.SAMPLE and block % SAMPLED == 0)


@dataclass(frozen=True, slots=True)
class FormatDecoder:
    """A `Decoder` that knows the data set's format and recipe."""

    kind: FileFormat
    recipe: DatasetRecipe

    def decode(self, block: BlockRequest, pieces: Sequence[Extent]) -> None:
        """Decode, and check a block that is to be; `StorageError` names the first wrong sample."""
        decoded = np.array(self.kind.decode(block.plan, block.survey, pieces, block.samples))
        if not block.is_checked:
            if isinstance(self.kind, SupportsSums):
                self.kind.check_sums(block.plan, pieces)
            return
        content = Content(self.recipe.seed, block.plan.index, self.recipe.reduction)
        expected = self.kind.expected(block.plan, content, block.samples)
        for sample, stored, right in zip(block.samples, decoded, expected, strict=True):
            # Bytes are compared, because content has NaNs, which equal nothing.
            if np.ascontiguousarray(stored).tobytes() != np.ascontiguousarray(right).tobytes():
                raise StorageError(
                    f"Sample {sample} of {block.plan.name} is not what was generated",
                    uri=block.plan.name,
                    fix="`penstock training verify` names all wrong files; delete them and generate again.",
                )
