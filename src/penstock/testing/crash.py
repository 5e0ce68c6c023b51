"""Processes that die by SIGKILL at their n-th call of storage, one after another: what a commit must survive.

A program is a function at the top of a module that takes the `FileCalls` its storage is to use, with all else
bound by `functools.partial`. It runs in a child of a clean process, so that no thread or lock of the caller
goes along. Invariant: every child is ended and waited for, whatever happens.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from penstock.storage.files.calls import REAL_CALLS, FileCalls
from penstock.testing.file_faults import CallFault, CallLog, KillAtFileCall, faulty_calls

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

Program = Callable[[FileCalls], None]

LIMIT_S = 120.0
"""How long a child may take before it counts as hanging."""

PRELOADED = ("penstock.testing.known_steps",)
"""What the clean process imports once, for all of its children."""


def count_calls(program: Program) -> int:
    """How many calls of storage `program` makes when nobody kills it; it runs in a child."""
    context = _clean_context()
    mine, childs = context.Pipe(duplex=False)
    with mine:
        with childs:
            child = context.Process(target=_count, args=(program, childs))
            child.start()
        try:
            number: int = mine.recv()
        except EOFError:
            child.join(LIMIT_S)
            raise AssertionError(f"the program failed by itself, with exit code {child.exitcode}") from None
    child.join(LIMIT_S)
    return number


def killed_at(programs: Sequence[Program], number: int, *, victim: int = 0) -> list[int | None]:
    """Run one process for each of `programs`, of which the `victim` dies at its call `number`, from 1.

    The exit codes of all: -SIGKILL of the victim, or what it ends with where it makes fewer calls. None is a
    process that had to be ended because it hung.
    """
    context = _clean_context()
    with ExitStack() as exits:
        children = []
        for place, program in enumerate(programs):
            fault = number if place == victim else None
            child = context.Process(target=_run, args=(program, fault))
            exits.callback(_end, child)
            child.start()
            children.append(child)
        for child in children:
            child.join(LIMIT_S)
        return [child.exitcode for child in children]


def sweep(
    make_programs: Callable[[int], Sequence[Program]],
    check: Callable[[int], None],
    numbers: Iterable[int],
    *,
    victim: int = 0,
) -> int:
    """Kill at each of `numbers`, in a place of its own each, and `check` what is left; how many were killed.

    `make_programs(number)` prepares the place and gives the processes to run there.
    """
    num_killed = 0
    for number in numbers:
        codes = killed_at(make_programs(number), number, victim=victim)
        assert None not in codes, f"killed at call {number}, a rank hung: {codes}"
        assert codes[victim] in (0, -signal.SIGKILL), f"the victim of call {number} failed by itself: {codes}"
        num_killed += codes[victim] != 0
        check(number)
    return num_killed


def _clean_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _count(program: Program, answer: Connection) -> None:
    log = CallLog()
    program(faulty_calls(log))
    answer.send(len(log.names))


def _run(program: Program, number: int | None) -> None:
    faults: list[CallFault] = [] if number is None else [KillAtFileCall(number)]
    program(faulty_calls(*faults, base=REAL_CALLS))


def _end(child: ForkServerProcess) -> None:
    if child.is_alive():
        child.kill()
        child.join()
