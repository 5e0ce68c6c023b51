"""What JPEG and PNG share: a file is one sample of exactly the size asked for, and is read whole.

A file's bytes follow from its size and content, so a lossy format is verified by its bytes, without decoding.
"""

import io
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from penstock.dataset.formats import format_base
from penstock.dataset.formats import format_protocol as fp
from penstock.errors import UsageError
from penstock.workload.sizing import record_bytes
from penstock.workload.spec import Dataset


class ImageFormat(format_base.ReadWhole):
    """One image a file; memory holds one file."""

    smallest_bytes: ClassVar[int]
    largest_bytes: ClassVar[int]

    def __init__(self, dataset: Dataset, seed: int) -> None:
        super().__init__(dataset, seed)
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

    def _draw_shape(self, index: int) -> format_base.SampleShape:
        """Of the size drawn, where such an image exists; else of the nearest one."""
        drawn = round(record_bytes(self._dataset))
        if not self._dataset.record_dims:
            drawn = format_base.draw_bytes(self._dataset, self._seed, index)
        size_bytes = min(max(drawn, self.smallest_bytes), self.largest_bytes)
        return format_base.SampleShape(self.dims(size_bytes), "|u1", size_bytes)

    def _file_bytes(self, plan: fp.FilePlan) -> int:
        return plan.sample_bytes

    def emit(self, plan: fp.FilePlan, _part: int, out: fp.FormatSink) -> None:
        """The whole image."""
        out.raw(self.encode(plan.sample_bytes, out.content))

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Pixels, as Pillow decodes them."""
        if not samples:
            return np.empty((0, *plan.dims), dtype=np.uint8)
        return _pixels(plan, format_base.read_range(plan, pieces, 0, plan.sample_bytes))

    def expected(self, plan: fp.FilePlan, content: fp.ContentSource, samples: range) -> fp.Sample:
        """Pixels of the image as it is generated."""
        return _pixels(plan, self.encode(plan.sample_bytes, content))[samples.start : samples.stop]

    @abstractmethod
    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Rows, columns and colours of the image which fills that many bytes."""

    @abstractmethod
    def encode(self, size_bytes: int, content: fp.ContentSource) -> memoryview:
        """The file."""


def _pixels(plan: fp.FilePlan, text: memoryview) -> fp.Sample:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only who decodes needs Pillow

    try:
        with Image.open(io.BytesIO(text)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise format_base.make_damage_error(plan, str(error)) from error
    if pixels.shape != plan.dims:
        raise format_base.make_damage_error(plan, f"its image is {pixels.shape}, and {plan.dims} was planned")
    return pixels[np.newaxis]
