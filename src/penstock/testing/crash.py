"""Processes that die by SIGKILL at their n-th call of storage, one after another: what a commit must survive.

A program is a function at the top of a module that takes the `FileCalls` its storage is to use, with all else
bound by `functools.partial`. It runs in a child of a clean process, so that no thread or lock of the caller
goes along. Invariant: every child is ended and waited for, whatever happens.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence

from penstock.storage.files.system_calls import FileCalls
from penstock.testing.child_processes import LIMIT_S, clean_context, ending, run_children
from penstock.testing.file_faults import CallFault, CallLog, KillAtFileCall, NoSync, faulty_calls

Program = Callable[[FileCalls], None]


def count_calls(program: Program) -> int:
    """How many calls of storage `program` makes when nobody kills it; it runs in a child."""
    (number,) = run_children([(_count, (program,))], LIMIT_S)
    assert isinstance(number, int)
    return number


def killed_at(programs: Sequence[Program], number: int, *, victim: int = 0) -> list[int | None]:
    """Run one process for each of `programs`, of which the `victim` dies at its call `number`, from 1.

    The exit codes of all: -SIGKILL of the victim, or what it ends with where it makes fewer calls. None is a
    process that had to be ended because it hung.
    """
    context = clean_context()
    children = [
        context.Process(target=_run, args=(program, number if place == victim else None))
        for place, program in enumerate(programs)
    ]
    for child in children:
        child.start()
    with ending(children):
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


def _count(program: Program) -> int:
    log = CallLog()
    program(faulty_calls(NoSync(), log))
    return len(log.names)


def _run(program: Program, number: int | None) -> None:
    faults: list[CallFault] = [] if number is None else [KillAtFileCall(number)]
    program(faulty_calls(NoSync(), *faults))
