"""Files that a command may write: new ones, and earlier ones of its own that it does not read."""

from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.errors import UsageError


def refuse_overwriting(
    path: Path, inputs: Iterable[Path], *, kind: str, is_kind: Callable[[Path], bool]
) -> None:
    """Raise UsageError if writing `path` would destroy an input, or a file that is not of this `kind`."""
    if not path.exists():
        return
    if any(path.samefile(one) for one in inputs):
        raise UsageError("The output is one of the inputs", where=str(path), fix="Name another file.")
    if path.is_dir() or not is_kind(path):
        raise UsageError(f"File exists and is not {kind}", where=str(path), fix="Name another file.")
