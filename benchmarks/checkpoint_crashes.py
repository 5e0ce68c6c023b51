"""Saves killed at every storage operation, ours beside stock `dcp.save`: what can be restored afterwards.

    PYTHONPATH=. python benchmarks/checkpoint_crashes.py [every]     kill at every n-th operation (default: 1)

Both save the same state of tensors to two files, once as a new step and once over the step that is there,
and die by SIGKILL instead of making their n-th operation. Then the newest step is loaded, and compared bit
for bit with what was ever saved. Nothing here is timed.
"""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from tests.support.child_processes import exit_code_of
from tests.support.crash import killed_at
from tests.support.known_states import (
    blank_state,
    known_state,
    restored,
    same_state,
    save_state,
    save_state_alone,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import PenstockError

Outcome = Literal["a saved step", "a mix of two steps, silently", "nothing: the newest fails to load"]
OUTCOMES: tuple[Outcome, ...] = (
    "a saved step",
    "a mix of two steps, silently",
    "nothing: the newest fails to load",
)
STEPS = {"a new step": 2, "over the step": 1}


def main() -> None:
    """Print the table; the exit code is 1 if one of our saves left something that no save made."""
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    warnings.simplefilter("ignore")
    print(f"{'saved by':<10} {'as':<14} {'kills':>5}  " + "  ".join(OUTCOMES))
    ours_failed = False
    for saver, sweep in (("penstock", sweep_ours), ("dcp.save", sweep_stock)):
        for kind, step in STEPS.items():
            found = Counter(sweep(step, every))
            ours_failed |= saver == "penstock" and set(found) != {OUTCOMES[0]}
            cells = "  ".join(f"{found[outcome]:>{len(outcome)}}" for outcome in OUTCOMES)
            print(f"{saver:<10} {kind:<14} {found.total():>5}  {cells}", flush=True)
    sys.exit(1 if ours_failed else 0)


def sweep_ours(step: int, every: int) -> Iterator[Outcome]:
    """What each kill of our save leaves."""
    for number, root in _places(every):
        save_state(root, 1, 0)
        (code,) = killed_at([partial(save_state_alone, root=root, step=step, generation=1)], number)
        if code == 0:
            return
        yield _outcome(partial(restored, root))


def sweep_stock(step: int, every: int) -> Iterator[Outcome]:
    """What each kill of torch's own save leaves."""
    for number, root in _places(every):
        save_stock(root, 1, 0)
        if exit_code_of(save_stock, root, step, 1, number) != -signal.SIGKILL:
            return
        yield _outcome(partial(load_stock, root))


def _places(every: int) -> Iterator[tuple[int, Path]]:
    """Numbers of operations, each with an empty place that is gone when the next is asked for."""
    number = 1
    while True:
        folder = Path(tempfile.mkdtemp(prefix="penstock-crash-"))
        yield number, folder / "run"
        shutil.rmtree(folder)
        number += every


def _outcome(look: Callable[[], Any]) -> Outcome:
    try:
        look()
    except AssertionError:
        return OUTCOMES[1]
    except (PenstockError, CheckpointException, RuntimeError, KeyError, ValueError, EOFError):
        return OUTCOMES[2]
    return OUTCOMES[0]


def save_stock(root: Path, step: int, generation: int, deadly: int = 0) -> None:
    """Save with torch's own writer, two threads, and die instead of the operation `deadly`, from 1."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with _Deadly(deadly):
        writer = FileSystemWriter(root / f"step-{step}", thread_count=2)
        save(known_state(step, generation, 0), storage_writer=writer)


def load_stock(root: Path) -> None:
    """Load the newest step that has metadata, as trainers do; AssertionError where it is of two saves."""
    complete = [path for path in root.iterdir() if (path / ".metadata").exists()]
    newest = max(complete, key=lambda path: int(path.name.removeprefix("step-")))
    state = blank_state(0)
    load(state, checkpoint_id=newest)
    known = known_state(int(newest.name.removeprefix("step-")), state["generation"], 0)
    assert same_state(state, known), "the values are of no single save"


class _Deadly:
    """Counts what torch's writer asks of storage: folders, files, writes, fsyncs, renames, removals."""

    def __init__(self, deadly: int) -> None:
        self._deadly = deadly
        self._seen = 0
        self._patches = [
            patch.object(FileSystem, name, self._counted(getattr(FileSystem, name)))
            for name in ("mkdir", "rename", "rm_file")
        ]
        self._patches.append(patch.object(os, "fsync", self._counted(os.fsync)))
        self._patches.append(
            patch.object(FileSystem, "create_stream", self._stream(FileSystem.create_stream))
        )

    def __enter__(self) -> None:
        for each in self._patches:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _count(self) -> None:
        self._seen += 1
        if self._seen == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._count()
            return call(*arguments, **named)

        return counted

    def _stream(self, create: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def counted(file_system: Any, path: Any, mode: str) -> Iterator[Any]:
            self._count()
            with create(file_system, path, mode) as stream:
                yield stream if "r" in mode else _Writes(stream, self._count)

        return counted


class _Writes:
    """A stream whose writes are counted and reach the kernel at once, so that a kill loses none before it."""

    def __init__(self, stream: Any, count: Callable[[], None]) -> None:
        self._stream = stream
        self._count = count

    def write(self, content: Any) -> Any:
        self._count()
        written = self._stream.write(content)
        self._stream.flush()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if __name__ == "__main__":
    main()
