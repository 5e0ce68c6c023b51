"""Libraries that only an extra installs, and the hint to install a missing one.

The base install serves the engine, storage, the probe and the command line. Other packages import their
libraries only where they need them; `missing_library` turns a failed import into the command that installs
it.
"""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

from penstock.errors import Unavailable

DISTRIBUTION: Final = "penstock-io"
"""The name to install. On the public package index, `penstock` is somebody else's project."""

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "PIL": ("bench",),
        "darshan": ("darshan",),
        "dask": ("dask",),
        "distributed": ("dask",),
        "duckdb": ("trace",),
        "google_crc32c": ("bench",),
        "h5py": ("bench",),
        "jinja2": ("pages", "bench", "trace"),
        "minio": ("minio",),
        "mpi4py": ("mpi",),
        "numba": ("bench",),
        "pyarrow": ("bench", "trace"),
        "s3dlio": ("s3dlio",),
        "s3torchconnectorclient": ("s3torchconnector",),
        "torch": ("torch",),
        "zstandard": ("zstd", "torch"),
    }
)
"""The extras that install each top-level module. The first is suggested unless the caller needs another."""


def install_command(*extras: str) -> str:
    """Return the command that installs some extras, such as `pip install 'penstock-io[trace]'`."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'" if extras else f"pip install {DISTRIBUTION}"


def missing_library(error: ModuleNotFoundError, *, extra: str | None = None) -> Unavailable | None:
    """Return the error that says how to install a missing module, or None if no extra installs it (a defect).

    If `extra`, which the caller needs in any case, installs the module, suggests that one.
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    extras = EXTRAS[library]
    name = extra if extra in extras else extras[0]
    return Unavailable(f"The library {library} is not installed", fix=f"Run: {install_command(name)}")


@contextmanager
def explained_imports(extra: str | None = None) -> Iterator[None]:
    """Raise `Unavailable`, naming the extra to install, if a library is missing inside this block.

    SIGINT and SIGTERM wait until the block ends, because torch aborts the process if its import is
    interrupted.
    """
    try:
        with _deferred_signals():
            yield
    except ModuleNotFoundError as error:
        missing = missing_library(error, extra=extra)
        if missing is None:
            raise
        raise missing from error


@contextmanager
def _deferred_signals() -> Iterator[None]:
    arrived: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    # Only a handler that is a Python function can raise inside the block.
    deferred = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in deferred:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in deferred.items():
            signal.signal(number, handler)
        for arrival in arrived:
            signal.raise_signal(arrival)
