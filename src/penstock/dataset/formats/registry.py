"""Which class knows which format; loaded when a data set asks for it, and with it the library it needs.

Invariant: what a data set asks for and its format cannot do is a `UsageError` here, before the first byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, cast

from penstock.workload.choices import Compression, Format

if TYPE_CHECKING:
    from penstock.dataset.formats.format_protocol import FileFormat
    from penstock.workload.spec import Dataset

_HOME: Final[Mapping[Format, tuple[str, str]]] = MappingProxyType(
    {
        Format.CSV: ("csvtext", "CsvFormat"),
        Format.HDF5: ("hdf5", "Hdf5Format"),
        Format.HDF5_OPT: ("hdf5", "Hdf5Format"),
        Format.INDEXED_BINARY: ("indexed", "IndexedFormat"),
        Format.JPEG: ("jpeg", "JpegFormat"),
        Format.MMAP_INDEXED_BINARY: ("indexed", "IndexedFormat"),
        Format.NPY: ("npy", "NpyFormat"),
        Format.NPZ: ("npz", "NpzFormat"),
        Format.PARQUET: ("parquet", "ParquetFormat"),
        Format.PNG: ("png", "PngFormat"),
        Format.SYNTHETIC: ("synthetic", "SyntheticFormat"),
        Format.TFRECORD: ("tfrecord", "TFRecordFormat"),
    }
)


def open_format(dataset: Dataset, seed: int, *, transfer_bytes: int | None = None) -> FileFormat:
    """The format of `dataset`, whose sample sizes are drawn by `seed`.

    `transfer_bytes` is the workload's `transfer_size`; it counts where files are streams: TFRecord.
    """
    module, name = _HOME[dataset.format]
    if dataset.format is Format.NPZ and dataset.compression is not Compression.NONE:
        name = "CompressedNpzFormat"
    kind = getattr(import_module(f"penstock.dataset.formats.{module}"), name)
    if dataset.format is Format.TFRECORD and transfer_bytes is not None:
        return cast("FileFormat", kind(dataset, seed, transfer_bytes))
    return cast("FileFormat", kind(dataset, seed))
