"""Files of samples, format by format: what they are made of, how they are read. Start at `open_format`."""

from penstock.dataset.formats.registry import open_format

__all__ = ["open_format"]
