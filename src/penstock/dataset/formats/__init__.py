"""The formats of data files, one module each: what a file consists of, and how it is read.

`DataFormat` in `penstock.workload.enums` declares them. A format is imported when a data set asks for it,
and with it the library that it needs. What a data set asks for and its format cannot do is a `UsageError`
here, before the first byte.
"""

from pkgutil import resolve_name

from penstock.dataset.formats.format_protocol import FileFormat
from penstock.workload.spec import Dataset


def open_format(dataset: Dataset, seed: int) -> FileFormat:
    """The format of `dataset`, whose sample sizes are drawn by `seed`."""
    file_format: FileFormat = resolve_name(f"{__name__}.{dataset.format.opener}")(dataset, seed)
    return file_format
