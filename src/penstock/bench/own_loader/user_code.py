"""User code named as MODULE:NAME: the factory of a loader, or the function of a step.

The module is looked up in the current folder first, as with `python -m`. This module only finds and calls the
code; the run decides when.
"""

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.cluster.comm import format_cause
from penstock.errors import OutOfSpace, PenstockError, StorageError, Unavailable, UsageError, name_some
from penstock.units import format_bytes

OWN_FOLDER: Final = str(Path(__file__).parents[2]) + os.sep
"""The folder of this package. User code may be below another folder of the same name."""
_DEEPEST: Final = 4
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - not a file that is written
_SHARED: Final = re.compile(r"shared memory|bus error|</?torch_|torch_shm|/dev/shm|psm_\w+", re.IGNORECASE)
_DESCRIPTORS: Final = re.compile(r"too many open files|received 0 items of ancdata", re.IGNORECASE)
_KILLED: Final = re.compile(r"worker \(pid.*?\) (is killed by signal: \w+|exited unexpectedly)")
_PLACE: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def names_user_code(text: str) -> bool:
    """Return True if `text` is MODULE:NAME rather than the name of something installed."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def load_user_code(text: str, *, where: str) -> Callable[..., Any]:
    """Import the callable that MODULE:NAME names. `where` is the option that names it, for errors."""
    module_name, _, name = text.partition(":")
    if not names_user_code(text):
        raise UsageError(f"{text!r} does not name a callable", where=where, fix="Write MODULE:NAME.")
    folder = str(Path.cwd())
    # Spawned workers inherit this path, too, and import the module by its name.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found: Any = None
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "") not in (module_name, module_name.partition(".")[0]):
            raise UsageError(
                f"{module_name} needs {error.name}, which is not installed", where=where, fix="Install it."
            ) from error
        raise UsageError(
            f"There is no module {module_name}",
            where=where,
            fix=f"Run in the folder that has {module_name.replace('.', '/')}.py, or install its package.",
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        functions = inspect.getmembers(sys.modules[module_name], inspect.isfunction)
        offered = [key for key, _ in functions if not key.startswith("_")]
        raise UsageError(
            f"{module_name} has no callable named {name}",
            where=where,
            fix=f"It has the functions {name_some(offered, 8)}." if offered else "Define a function.",
        )
    return found  # type: ignore[no-any-return]


def call_with_known(function: Callable[..., Any], known: Mapping[str, Any], *, where: str) -> Any:
    """Call `function` with those of the `known` arguments whose names are in its signature."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    unknown = [
        one.name
        for one in parameters
        if one.default is one.empty
        and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        and (one.kind not in by_name or one.name not in known)
    ]
    if unknown:
        raise UsageError(
            f"The factory requires arguments that Penstock does not pass: {', '.join(unknown)}",
            where=where,
            fix=f"Give them defaults; Penstock passes by name {', '.join(known)}.",
        )
    named = {one.name for one in parameters if one.kind in by_name}
    return function(**{name: value for name, value in known.items() if takes_all or name in named})


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedLoader:
    """The user's loader and step, by name, for other ranks and for records.

    If `batch_size` is None, the batches show it.
    """

    name: str
    step: str | None = None
    batch_size: int | None = None

    def document(self) -> dict[str, Any]:
        """Return the loader as plain data, with the keys of all loaders; its own settings are unknown."""
        return {
            "name": self.name,
            "step": self.step,
            "batch_size": self.batch_size,
            "threads": 0,
            "prefetch_batches": 0,
            "buffer_bytes": 0,
            "preprocess_threads": None,
        }


def make_loader(
    factory: Callable[..., Any], name: str, *, rank: int, num_ranks: int, epochs: int, seed: int
) -> Any:
    """Call the user's factory with the arguments in its signature.

    A failure is reported as the user's error.
    """
    known = {
        "rank": rank,
        "world_size": num_ranks,
        "ranks": num_ranks,
        "num_ranks": num_ranks,
        "epochs": epochs,
        "seed": seed,
    }
    try:
        loader = call_with_known(factory, known, where=name)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:  # a user's factory may raise anything
        raise explain_code(error, f"The factory {name}", "") from error
    if not hasattr(loader, "__iter__"):
        raise UsageError(
            f"The factory returned {type(loader).__name__}, over which nothing can iterate",
            where=name,
            fix="Return the iterable of batches: a DataLoader, or a generator.",
        )
    return loader


def announce_epoch(loader: Any, epoch: int, name: str) -> None:
    """Call `set_epoch` on the loader's sampler and data set if they have it, as trainers do."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for part in {id(one): one for one in (*parts, getattr(loader, "dataset", None))}.values():
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            try:
                set_epoch(epoch)
            except Exception as error:  # a user's sampler may raise anything
                raise explain_code(error, f"set_epoch of the loader {name}", "") from error


class SampleCounter:
    """Counts the samples of a batch by the first dimension of its first array, or else by its length.

    A list of arrays is either one sample each or one column each, as collation makes them; the first batch
    shows which. `batch_size` is the loader's own, if it has one: it tells a pair of columns from two samples.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        self._batch_size = batch_size
        self._has_columns: bool | None = None

    def __call__(self, batch: Any) -> int:
        """Return the number of samples in `batch`; 1 if unknown."""
        return next(self._sizes(batch, 0), 1)

    def _sizes(self, part: Any, depth: int) -> Iterator[int]:
        shape = getattr(part, "shape", None)
        if shape is not None and not callable(shape):
            yield from map(int, shape[:1])
        elif depth > _DEEPEST or isinstance(part, str | bytes | bytearray | memoryview):
            return
        elif isinstance(part, Mapping):
            found = [size for value in part.values() for size in self._sizes(value, depth + 1)]
            first = next(iter(part.values()), None)
            yield from found or ([len(first)] if isinstance(first, Sequence) else [])
        elif isinstance(part, tuple) and (
            found := [size for one in part for size in self._sizes(one, depth + 1)]
        ):
            yield found[0]
        elif isinstance(part, Sequence):
            sizes = [size for one in part if hasattr(one, "shape") for size in self._sizes(one, depth + 1)]
            yield sizes[0] if self._are_columns(sizes, len(part)) else len(part)

    def _are_columns(self, sizes: list[int], num_parts: int) -> bool:
        if len(set(sizes)) != 1 or len(sizes) != num_parts:
            return False
        if self._has_columns is None:
            is_given = self._batch_size in (sizes[0], num_parts)
            likely = num_parts == 1 or sizes[0] > num_parts
            self._has_columns = sizes[0] == self._batch_size if is_given else likely
        return self._has_columns


def find_batch_size(loader: Any) -> int | None:
    """Return the number of samples per batch that the loader was created with; None if unknown."""
    for part in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(size := getattr(part, "batch_size", None), int):
            return size
    return None


def explain_failure(error: BaseException, *, loader: str, epoch: int, step: int) -> PenstockError:
    """Return the error to report to the user when the loader fails."""
    text = "".join(traceback.format_exception(error))
    # Torch's message contains a worker's traceback, which may name a file of the user's in /dev/shm.
    message = _PLACE.sub("", text if isinstance(error, OSError) else _last_line(str(error)))
    when = f"at step {step} of epoch {epoch}"
    if _SHARED.search(message):
        return OutOfSpace(
            f"Shared memory is full: the loader {loader} failed {when} ({_last_line(str(error))})",
            where=_describe_shared_memory(),
            fix="Give the container more (--shm-size), or use fewer workers, smaller batches or a smaller "
            "prefetch_factor.",
        )
    if _DESCRIPTORS.search(text):
        return Unavailable(
            f"Descriptors ran out: the loader {loader} failed {when}",
            where="RLIMIT_NOFILE",
            fix="Raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system').",
        )
    killed = _KILLED.search(str(error))
    if lost_connection(error) or (killed and not _PLACE.search(str(error))):
        cause = killed.group(0) if killed else format_cause(error)
        return StorageError(
            f"A worker of the loader {loader} died {when}: {cause}",
            fix="`dmesg` says whether memory ran out: fewer workers, smaller batches or a smaller "
            "prefetch_factor need less.",
        )
    return explain_code(error, f"The loader {loader}", when)


def lost_connection(error: BaseException) -> bool:
    """Return True if torch was fetching a batch, and the worker that had it is gone."""
    innermost = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    return isinstance(error, OSError | EOFError) and "multiprocessing" in "".join(innermost)


def explain_code(error: BaseException, who: str, when: str) -> StorageError:
    """Return the error to report if the user's code fails, with the innermost line of that code."""
    message, kind = _last_line(str(error)), type(error).__name__
    return StorageError(
        f"{f'{who} failed {when}'.rstrip()}: {message if message.startswith(kind) else f'{kind}: {message}'}",
        where=_find_place("".join(traceback.format_exception(error))),
        fix="Run it alone to see the whole traceback.",
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _find_place(text: str) -> str:
    """Return the innermost line of a traceback that is neither in torch nor in this package."""
    places = [
        f"{path}:{line} in {function}"
        for path, line, function in _PLACE.findall(text)
        if "-packages/torch" not in path and not path.startswith(OWN_FOLDER)
    ]
    return places[-1] if places else ""


def _describe_shared_memory() -> str:
    with suppress(OSError):
        found = os.statvfs(_SHARED_MEMORY)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return f"{_SHARED_MEMORY} has {format_bytes(free)} free of {format_bytes(total)}"
    return _SHARED_MEMORY
