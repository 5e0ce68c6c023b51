"""What JPEG and PNG share: a file is one sample of exactly the size asked for, and is read whole.

A file's bytes follow from its size and content, so a lossy format is verified by its bytes, without decoding.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.dataset.formats.format_base import ReadWhole, make_damage_error, read_range, refuse_compression
from penstock.dataset.formats.format_protocol import (
    ContentSource,
    Extent,
    FilePart,
    FilePlan,
    FileSink,
    FileSurvey,
    Sample,
)
from penstock.dataset.formats.sample_shape import draw_bytes
from penstock.errors import UsageError
from penstock.workload.dataset_size import record_bytes

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset


class ImageFormat(ReadWhole, ABC):
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

    def plan(self, index: int, name: str) -> FilePlan:
        """Of the size drawn, where such an image exists; else of the nearest one."""
        drawn = round(record_bytes(self._dataset))
        if not self._dataset.record_dims:
            drawn = draw_bytes(self._dataset, self._seed, index)
        size_bytes = min(max(drawn, self.smallest_bytes), self.largest_bytes)
        return FilePlan(
            name=name,
            index=index,
            num_samples=1,
            dims=self.dims(size_bytes),
            dtype="|u1",
            sample_bytes=size_bytes,
            block_samples=1,
            parts=(FilePart(size_bytes=size_bytes),),
        )

    def emit(self, plan: FilePlan, _part: int, out: FileSink) -> None:
        """The whole image."""
        out.raw(self.encode(plan.sample_bytes, out.content))

    def decode(self, plan: FilePlan, _found: FileSurvey, pieces: Sequence[Extent], samples: range) -> Sample:
        """Pixels, as Pillow decodes them."""
        if not samples:
            return np.empty((0, *plan.dims), dtype=np.uint8)
        return _pixels(plan, read_range(plan, pieces, 0, plan.sample_bytes))

    def expected(self, plan: FilePlan, content: ContentSource, samples: range) -> Sample:
        """Pixels of the image as it is generated."""
        return _pixels(plan, self.encode(plan.sample_bytes, content))[samples.start : samples.stop]

    @abstractmethod
    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Rows, columns and colours of the image which fills that many bytes."""

    @abstractmethod
    def encode(self, size_bytes: int, content: ContentSource) -> memoryview:
        """The file."""


def _pixels(plan: FilePlan, text: memoryview) -> Sample:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only who decodes needs Pillow

    try:
        with Image.open(io.BytesIO(text)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise make_damage_error(plan, str(error)) from error
    if pixels.shape != plan.dims:
        raise make_damage_error(plan, f"its image is {pixels.shape}, and {plan.dims} was planned")
    return pixels[np.newaxis]
