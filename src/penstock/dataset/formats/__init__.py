"""The formats of data files, one module each: what a file consists of, and how it is read.

`DataFormat` in `penstock.workload.enums` declares them. A format is imported when a data set asks for it,
and with it the library that it needs. What a data set asks for and its format cannot do is a `UsageError`
here, before the first byte.
"""

from pkgutil import resolve_name

from penstock.dataset.formats.format_protocol import FileFormat
from penstock.workload.spec import Dataset


def open_format(dataset: Dataset, seed: int, *, transfer_bytes: int | None = None) -> FileFormat:
    """The format of `dataset`, whose sample sizes are drawn by `seed`.

    `transfer_bytes` is the workload's `transfer_size`; only formats that are read as streams use it.
    """
    opener = resolve_name(f"{__name__}.{dataset.format.opener}")
    is_sized = dataset.format.is_stream and transfer_bytes is not None
    file_format: FileFormat = opener(dataset, seed, transfer_bytes) if is_sized else opener(dataset, seed)
    return file_format
