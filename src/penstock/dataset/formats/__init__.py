"""The formats of data files, one module each: what a file consists of, and how it is read.

`DataFormat` in `penstock.workload.enums` declares them. A format, and with it the library that it needs, is
imported when a data set requests it. If a data set requests something that its format does not support,
`UsageError` is raised here, before any byte is written.
"""

from pkgutil import resolve_name

from penstock.dataset.formats.format_protocol import FileFormat
from penstock.workload.spec import Dataset


def open_format(dataset: Dataset, seed: int) -> FileFormat:
    """Return the format of `dataset`; sample sizes are drawn from `seed`."""
    file_format: FileFormat = resolve_name(f"{__name__}.{dataset.format.opener}")(dataset, seed)
    return file_format
