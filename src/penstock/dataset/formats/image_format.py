"""What the formats of single images share: a file is one sample of exactly the bytes asked for, read whole.

Between `FileFormat` and the two kinds of image. Invariant: a file's bytes follow from its size and content,
so a lossy format is verified by its bytes, without decoding it.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.dataset.formats.format_base import ReadWhole, bytes_at, damaged, refuse_compression
from penstock.dataset.formats.format_protocol import Content, Extent, FileMap, Part, Pen, Plan, Sample
from penstock.dataset.formats.sample_shape import draw_bytes
from penstock.errors import UsageError
from penstock.workload.dataset_size import record_bytes

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset


class PictureFormat(ReadWhole, ABC):
    """One image a file; memory holds one file."""

    smallest_bytes: ClassVar[int]
    largest_bytes: ClassVar[int]

    def __init__(self, dataset: Dataset, seed: int) -> None:
        refuse_compression(dataset)
        name = dataset.format.value
        if dataset.num_samples_per_file != 1:
            raise UsageError(
                f"A {name} file holds one image, not {dataset.num_samples_per_file}",
                where="dataset.num_samples_per_file",
                fix="Set it to 1, or choose a format of many samples.",
            )
        if not self.smallest_bytes <= record_bytes(dataset) <= self.largest_bytes:
            raise UsageError(
                f"A {name} file cannot have {float(record_bytes(dataset)):g} bytes",
                where="dataset.record_length_bytes",
                fix=f"Ask for {self.smallest_bytes} to {self.largest_bytes} bytes.",
            )
        self._dataset = dataset
        self._seed = seed

    def plan(self, index: int, name: str) -> Plan:
        """Of the size drawn, where such an image exists; else of the nearest one."""
        drawn = round(record_bytes(self._dataset))
        if not self._dataset.record_dims:
            drawn = draw_bytes(self._dataset, self._seed, index)
        size_bytes = min(max(drawn, self.smallest_bytes), self.largest_bytes)
        return Plan(
            name=name,
            index=index,
            num_samples=1,
            dims=self.dims(size_bytes),
            dtype="|u1",
            sample_bytes=size_bytes,
            block_samples=1,
            parts=(Part(size_bytes=size_bytes),),
        )

    def lay(self, plan: Plan, _part: int, pen: Pen) -> None:
        """The whole image."""
        pen.literal(self.encode(plan.sample_bytes, pen.content))

    def decode(self, plan: Plan, _found: FileMap, pieces: Sequence[Extent], samples: range) -> Sample:
        """Pixels, as Pillow decodes them."""
        if not samples:
            return np.empty((0, *plan.dims), dtype=np.uint8)
        return _pixels(plan, bytes_at(plan, pieces, 0, plan.sample_bytes))

    def expected(self, plan: Plan, content: Content, samples: range) -> Sample:
        """Pixels of the image as it is generated."""
        return _pixels(plan, self.encode(plan.sample_bytes, content))[samples.start : samples.stop]

    @abstractmethod
    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Rows, columns and colours of the image which fills that many bytes."""

    @abstractmethod
    def encode(self, size_bytes: int, content: Content) -> memoryview:
        """The file."""


def _pixels(plan: Plan, text: memoryview) -> Sample:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only who decodes needs Pillow

    try:
        with Image.open(io.BytesIO(text)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise damaged(plan, str(error)) from error
    if pixels.shape != plan.dims:
        raise damaged(plan, f"its image is {pixels.shape}, and {plan.dims} was planned")
    return pixels[np.newaxis]
