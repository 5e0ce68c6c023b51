"""Kill processes by SIGKILL at their n-th system call of file storage, for each n: crash tests of commits.

A program is a function at the top of a module that takes the `FileCalls` for its storage; its other arguments
are bound by `functools.partial`. It runs in a child of a clean process, so that it inherits no thread or lock
of the caller. Invariant: every child is ended and waited for.
"""

import signal
from collections.abc import Callable, Iterable, Sequence

from tests.support.child_processes import LIMIT_S, clean_context, ending, run_children
from tests.support.file_faults import CallFault, CallLog, KillAtFileCall, NoSync, faulty_calls

from penstock.storage.files.system_calls import FileCalls

Program = Callable[[FileCalls], None]


def count_calls(program: Program) -> int:
    """How many system calls `program` makes when it is not killed; it runs in a child."""
    (number,) = run_children([(_count, (program,))], LIMIT_S)
    assert isinstance(number, int)
    return number


def killed_at(programs: Sequence[Program], number: int, *, victim: int = 0) -> list[int | None]:
    """Run one process for each of `programs`, of which the `victim` dies at its call `number`, from 1.

    The exit codes of all: the victim's is -SIGKILL, or its own if it makes fewer calls. None is a process
    that hung and had to be killed.
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
    """Kill at each of `numbers`, each time in a new place, and `check` what is left; the number of kills.

    `make_programs(number)` prepares the place and returns the programs to run there.
    """
    num_killed = 0
    for number in numbers:
        codes = killed_at(make_programs(number), number, victim=victim)
        assert None not in codes, f"after the kill at call {number} a rank hung: {codes}"
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
