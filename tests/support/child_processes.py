"""Run functions in child processes of a fork server, which imports their modules once and starts no thread.

Forking it is therefore safe, unlike forking the test process. A child shares only its arguments with the
test, and no child outlives its `with` block.
"""

import importlib.util
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Self

PRELOADED = (
    "penstock.checkpoint.manager.manager",
    "penstock.checkpoint.api",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
)
"""Imported once by the fork server, for all of its children; modules that cannot be imported are ignored.

The first DTensor of a process imports torch._dynamo, which takes a CPU second or two in every rank.
"""

LIMIT_S = 240.0
"""How long a child may take before it counts as hanging."""


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """A reference to a function by its file, which a child can load from outside of sys.path."""

    module: str
    path: str
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        """The reference to a function at the top of its module."""
        return cls(function.__module__, function.__code__.co_filename, function.__qualname__)

    def load(self) -> Callable[..., Any]:
        """The function; its module is loaded from the file if necessary."""
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[self.module])
        function: Callable[..., Any] = getattr(sys.modules[self.module], self.name)
        return function


def clean_context() -> ForkServerContext:
    """The multiprocessing context of such children, for functions at the top of importable modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


@contextmanager
def ending(children: Sequence[ForkServerProcess]) -> Iterator[None]:
    """Kill `children` that are still running when the block ends."""
    try:
        yield
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()


def exit_code_of(function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> int | None:
    """The exit code of a child that calls `function`: minus the signal if killed; None if it hung."""
    child = clean_context().Process(target=_run, args=(FunctionRef.of(function), arguments))
    child.start()
    with ending([child]):
        child.join(limit_s)
        return child.exitcode


def run_children(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], limit_s: float) -> list[Any]:
    """Call each function in its own child, all at once; their results.

    Functions may be in test modules. AssertionError has the traceback of each failed child, or that it hung.
    """
    context = clean_context()
    pairs = [context.Pipe(duplex=False) for _ in calls]
    children = [
        context.Process(target=_call, args=(theirs, FunctionRef.of(function), arguments))
        for (_, theirs), (function, arguments) in zip(pairs, calls, strict=True)
    ]
    for child in children:
        child.start()
    # The last copy must be in the child, so that its death is an EOFError here.
    for _, theirs in pairs:
        theirs.close()
    with ending(children):
        # Before the children are joined: one with an answer larger than the pipe waits until it is read.
        answers = _answers([mine for mine, _ in pairs], limit_s)
    failed = [
        f"child {number}: {outcome}" for number, (succeeded, outcome) in enumerate(answers) if not succeeded
    ]
    assert not failed, "\n".join(failed)
    return [outcome for _, outcome in answers]


def _answers(readers: Sequence[Connection], limit_s: float) -> list[tuple[bool, Any]]:
    answers: list[tuple[bool, Any]] = [(False, f"no answer in {limit_s:g} s")] * len(readers)
    waiting = {reader: number for number, reader in enumerate(readers)}
    end_s = time.monotonic() + limit_s
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        for reader in wait(list(waiting), left_s):
            assert isinstance(reader, Connection)
            number = waiting.pop(reader)
            try:
                answers[number] = reader.recv()
            except EOFError:
                answers[number] = False, "it was killed"
            reader.close()
    return answers


def _hear_signals() -> None:
    # A loader of an earlier test may have started the fork server, which then blocks Ctrl-C for its workers.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _run(function: FunctionRef, arguments: tuple[Any, ...]) -> None:
    _hear_signals()
    function.load()(*arguments)


def _call(answer: Connection, function: FunctionRef, arguments: tuple[Any, ...]) -> None:
    _hear_signals()
    with ExitStack() as exits:
        exits.push(partial(_report_error, answer))
        answer.send((True, function.load()(*arguments)))


def _report_error(
    answer: Connection, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
) -> None:
    """Send the traceback of any exception that ends a child, SystemExit included."""
    if error is not None:
        answer.send((False, "".join(traceback.format_exception(error))))
