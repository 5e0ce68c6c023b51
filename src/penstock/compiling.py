"""Machine code of byte loops, made by numba once and kept for later processes.

Invariant: a loop that is loaded was made from this very source on this very kind of processor. The cache has
a folder for each source, compiler and processor, so ranks that start at once, nodes that differ and another
version of this package never meet in one file.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]  # it has no types
import numba

from penstock.environment import Environment, process_environment, user_cache_folder

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.Lock()
"""Held while numba's setting of the process is another one than its own."""


def compile_loop(
    function: Callable[..., Any],
    signature: str,
    environment: Environment | None = None,
    *,
    parts: tuple[ModuleType, ...] = (),
) -> Callable[..., Any]:
    """`function` as machine code for one numba `signature`; it runs without the GIL.

    `parts` are the other modules whose functions it is compiled from. Takes milliseconds from the cache and
    some tenths of a second without. A cache that is full, read-only or damaged costs that time and a warning,
    never the run.
    """
    folder = _cache_folder((function, *parts), process_environment() if environment is None else environment)
    if folder is not None:
        try:
            return _compile_cached(function, signature, folder)
        except (OSError, EOFError, pickle.PickleError) as error:
            logger.warning("Compiling for this run alone; delete %s, it is of no use: %s", folder, error)
    return numba.njit(signature, nogil=True)(function)


def is_cached(
    function: Callable[..., Any],
    environment: Environment | None = None,
    *,
    parts: tuple[ModuleType, ...] = (),
) -> bool:
    """Whether `compile_loop` would find this function in the cache, so that nothing needs to be said."""
    folder = _cache_folder((function, *parts), process_environment() if environment is None else environment)
    return folder is not None and any(folder.rglob(f"*.{function.__name__}-*.nbi"))


def _compile_cached(function: Callable[..., Any], signature: str, folder: Path) -> Callable[..., Any]:
    # numba knows one cache folder for the whole process, and looks it up when a function is declared.
    settings: Any = numba.config
    with _ONE_AT_A_TIME:
        usual, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
        try:
            return numba.njit(signature, nogil=True, cache=True)(function)
        finally:
            settings.CACHE_DIR = usual


def _cache_folder(parts: Iterable[Callable[..., Any] | ModuleType], environment: Environment) -> Path | None:
    """Where machine code of these modules for this processor is kept; None where nothing can be."""
    source = b"".join(Path(inspect.getfile(part)).read_bytes() for part in parts)
    settings: Any = numba.config
    processor = f"{llvmlite.binding.get_host_cpu_name()} {llvmlite.binding.get_host_cpu_features().flatten()}"
    pretended = f"{settings.CPU_NAME} {settings.CPU_FEATURES}"
    maker = f"{numba.__version__} {llvmlite.__version__} {processor} {pretended}"
    try:
        base = user_cache_folder(environment)
        folder = base / f"loops-{hashlib.sha256(source + maker.encode()).hexdigest()[:24]}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        logger.warning("Compiling for this run alone, for want of a cache folder: %s", error)
        return None
    # Left to itself, numba would turn from a folder that it cannot write to one that versions share.
    return folder if os.access(folder, os.W_OK) else None
