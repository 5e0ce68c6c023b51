"""Machine code of byte loops, compiled once by numba and cached for later processes.

Invariant: a loop from the cache was compiled from the same source for the same kind of processor. The cache
has a folder for each source, compiler and processor, so that different processors and different versions of
this package never share a file.
"""

import hashlib
import inspect
import logging
import os
import pickle
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.environment import (
    Environment,
    find_other_writer,
    process_environment,
    settings_refused,
)

with nullcontext() if "numba" in sys.modules else settings_refused(".numba_config.yaml", "numba"):
    import llvmlite.binding  # type: ignore[import-untyped]  # has no types
    import numba

# numba looks for its configuration file again whenever it compiles.
numba.core.config._config_fname = ""  # noqa: SLF001

logger = logging.getLogger(__name__)

_CACHE_DIR_LOCK = threading.Lock()
"""Held while numba's cache folder, which is a setting of the whole process, is replaced by ours."""


def compile_loop(
    function: Callable[..., Any],
    signature: str,
    environment: Environment | None = None,
    *,
    parts: tuple[ModuleType, ...] = (),
) -> Callable[..., Any]:
    """Compile `function` to machine code for one numba `signature`. The result runs without the GIL.

    `parts` are the other modules whose functions it includes. This takes milliseconds with the cache, and
    a few tenths of a second without. A cache that is full, read-only or damaged costs that time and causes a
    warning, but never makes the run fail.
    """
    folder = _cache_folder((function, *parts), process_environment() if environment is None else environment)
    if folder is not None:
        try:
            return _compile_cached(function, signature, folder)
        except (OSError, EOFError, pickle.PickleError) as error:
            logger.warning(
                "Compiling for this run only, because the cache in %s is unusable (delete it): %s",
                folder,
                error,
            )
    return numba.njit(signature, nogil=True)(function)


def _compile_cached(function: Callable[..., Any], signature: str, folder: Path) -> Callable[..., Any]:
    # numba has one cache folder for the whole process, and looks it up when a function is declared.
    settings: Any = numba.config
    with _CACHE_DIR_LOCK:
        usual, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)
        finally:
            settings.CACHE_DIR = usual


def _cache_folder(parts: Iterable[Callable[..., Any] | ModuleType], environment: Environment) -> Path | None:
    """Return the folder for these modules' machine code on this processor, or None if it is not writable."""
    source = b"".join(Path(inspect.getfile(part)).read_bytes() for part in parts)
    settings: Any = numba.config
    processor = f"{llvmlite.binding.get_host_cpu_name()} {llvmlite.binding.get_host_cpu_features().flatten()}"
    overrides = f"{settings.CPU_NAME} {settings.CPU_FEATURES}"
    compiler = f"{numba.__version__} {llvmlite.__version__} {processor} {overrides}"
    try:
        # `Path.home` raises RuntimeError if the user has no home, as in some containers.
        base = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "penstock"
        folder = base / f"loops-{hashlib.sha256(source + compiler.encode()).hexdigest()[:24]}"
        # numba unpickles the files in this folder, so nobody else may change it or put another in its place.
        for each in (*reversed(folder.parents), folder):
            each.mkdir(mode=0o700, exist_ok=True)
            is_sticky = each not in (base, folder) and each.lstat().st_mode & stat.S_ISVTX
            if reason := find_other_writer(each, 0 if is_sticky else 0o022):
                logger.warning("Compiling for this run only, because %s", reason)
                return None
    except (OSError, RuntimeError) as error:
        logger.warning("Compiling for this run only, because there is no cache folder: %s", error)
        return None
    # With a read-only folder, numba would use another folder, which several versions share.
    return folder if os.access(folder, os.W_OK) else None
