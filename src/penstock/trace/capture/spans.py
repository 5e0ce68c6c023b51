"""Spans of a user's own program: what it computes, saves and reads, beside the I/O that it causes.

    with penstock.trace.span("evaluate", step=12): ...
    @penstock.trace.traced(cat="compute")
    for batch in penstock.trace.steps(loader, "train"): ...

They trace if `PENSTOCK_TRACE` names a folder, or into the one given to `tracing_to`; otherwise they cost one
look-up. Invariant: a span never changes what it wraps, and exceptions pass through.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.environment import TRACE, TRACE_RANK, process_environment
from penstock.trace.capture.recorder import TraceRecorder, clock_ns, get_recorder
from penstock.trace.capture.trace_writer import span_kind

Given = ParamSpec("Given")
Result = TypeVar("Result")
Item = TypeVar("Item")
Value = int | float | str | bool

_CHOSEN: ContextVar[TraceRecorder | None] = ContextVar("recorder", default=None)


@contextmanager
def tracing_to(folder: str | Path, *, rank: int | None = None, size: int = 1) -> Iterator[None]:
    """Trace the spans of this thread or task into `folder`; the trace is complete when the block ends.

    A program of several processes gives each its `rank` of `size`.
    """
    recorder = get_recorder(str(folder), "" if rank is None else f"{rank}/{size}")
    chosen = _CHOSEN.set(recorder)
    try:
        yield
    finally:
        _CHOSEN.reset(chosen)
        recorder.flush()


@contextmanager
def span(name: str, *, cat: str = "app", **args: Value) -> Iterator[None]:
    """Trace the block as one event `name` of category `cat`, with `args` such as `step=` and `epoch=`."""
    recorder = _CHOSEN.get() or _from_environment()
    if recorder is None:
        yield
        return
    began_ns = clock_ns()
    try:
        yield
    finally:
        recorder.record(span_kind(name, cat), began_ns, args=args or None)


def traced(
    name: str | None = None, *, cat: str = "app"
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: every call is a span of category `cat` with the name of the function, or `name`."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            with span(name or function.__qualname__, cat=cat):
                return function(*args, **kwargs)

        return call

    return decorate


def steps(
    items: Iterable[Item], name: str = "loop", *, cat: str = "compute", **args: Value
) -> Iterator[Item]:
    """Iterate over `items` with two spans per step, which begin with `name`.

    `NAME.wait` is the wait for the next item, `NAME.step` the loop's body, of category `cat`.
    """
    source = iter(items)
    number = 0
    while True:
        with span(f"{name}.wait", cat="wait", step=number, **args):
            try:
                item = next(source)
            except StopIteration:
                return
        with span(f"{name}.step", cat=cat, step=number, **args):
            yield item
        number += 1


@cache
def _from_environment() -> TraceRecorder | None:
    """The recorder of the folder in `PENSTOCK_TRACE`, if it is set."""
    environment = process_environment()
    folder = environment.get(TRACE)
    return get_recorder(folder, environment.get(TRACE_RANK, "")) if folder else None
