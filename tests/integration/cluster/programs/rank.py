"""One rank of the tests: `rank.py DIRECTORY SCENE [RANK]`. SCENE happens on RANK, all others wait for it.

Each rank writes the ids of all its processes to DIRECTORY before anything happens.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from penstock.cluster.comm import all_gather_results
from penstock.cluster.supervision import join_job
from penstock.environment import process_environment
from penstock.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

FOREVER_S = 60.0


def note(directory: Path, of_rank: int, **processes: int) -> None:
    for name, pid in processes.items():
        written = directory / f"{of_rank}.{name}.tmp"
        written.write_text(str(pid))
        written.rename(directory / f"{of_rank}.{name}")


def wait_in_barrier(comm: Comm) -> None:
    comm.barrier(awaiting="all ranks to come to the end", timeout_s=FOREVER_S)


def raise_error(comm: Comm) -> None:
    raise ValueError("the tank is empty")


def raise_usage(comm: Comm) -> None:
    raise UsageError("Nobody asks like that", fix="Ask otherwise.")


def raise_unavailable(comm: Comm) -> None:
    raise Unavailable("No tank here")


def leave_with_3(comm: Comm) -> None:
    sys.exit(3)


def kill_itself(comm: Comm) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_itself(comm: Comm) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(FOREVER_S)


def kill_supervisor(comm: Comm) -> None:
    """Kill it once the other supervisors have reached it: their ranks may be ahead of them."""
    supervisor = psutil.Process(os.getppid())
    while sum(one.status == psutil.CONN_ESTABLISHED for one in supervisor.net_connections()) <= comm.size:
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def leave_quietly(comm: Comm) -> None:
    sys.exit(0)


def crash(comm: Comm) -> None:
    ctypes.string_at(0)


def raise_everywhere(comm: Comm) -> None:
    raise ValueError(f"the tank of rank {comm.rank} is empty")


def say_much(comm: Comm) -> None:
    sys.stdout.write(json.dumps({"much": ["x" * 80] * 20_000}) + "\n")


def break_the_comm(comm: Comm) -> None:
    comm.gather(threading.Lock(), awaiting="locks", timeout_s=FOREVER_S)


def sleep_through(comm: Comm) -> None:
    time.sleep(FOREVER_S)


SCENES: dict[str, Callable[[Comm], None]] = {
    "barrier": wait_in_barrier,
    "raise": raise_error,
    "usage": raise_usage,
    "unavailable": raise_unavailable,
    "exit3": leave_with_3,
    "kill": kill_itself,
    "interrupt": interrupt_itself,
    "kill-supervisor": kill_supervisor,
    "sleep": sleep_through,
    "exit0": leave_quietly,
    "crash": crash,
    "raise-everywhere": raise_everywhere,
    "much": say_much,
    "unsendable": break_the_comm,
}


def write_forever(directory: Path, rank: int) -> None:
    block = bytes(1 << 20)
    with (directory / f"{rank}.bytes").open("wb", buffering=0) as file:
        deadline_s = time.monotonic() + FOREVER_S
        while time.monotonic() < deadline_s:
            os.pwrite(file.fileno(), block, 0)
            os.fsync(file.fileno())


def hold_the_interpreter() -> None:
    """Keep the interpreter lock in C code, deaf to every signal handler written in Python."""
    sum(range(1 << 40))


def be_stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(FOREVER_S)


def start_workers(directory: Path, rank: int, *, rank_finishes: bool) -> None:
    """A worker as data loaders have them, a plain child, and one that detached itself twice over.

    A Python program that finishes sends its workers SIGTERM and waits for them, without limit.
    """
    # Forked workers inherit every descriptor, spawned ones none: both must end.
    fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    make = fork.Process if "forked" in sys.argv else spawn.Process
    target = partial(time.sleep, FOREVER_S) if rank_finishes else be_stubborn
    worker = make(target=target, daemon=True)
    worker.start()
    assert worker.pid is not None
    child = subprocess.Popen(["sleep", str(FOREVER_S)])
    shell = "setsid sleep 60 >/dev/null 2>&1 </dev/null & echo $!"
    detached = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    note(directory, rank, worker=worker.pid, child=child.pid, detached=int(detached.stdout))


def others_wait(comm: Comm, scene: str, directory: Path) -> None:
    if scene == "write":
        write_forever(directory, comm.rank)
    elif scene == "compute":
        hold_the_interpreter()
    elif scene == "cleanup":
        partial = directory / f"{comm.rank}.partial"
        # The signal may come at any moment from here on, even before there is anything to clean up.
        try:
            partial.write_text("half an object")
            time.sleep(FOREVER_S)
        finally:
            partial.unlink(missing_ok=True)
    else:
        SCENES[scene](comm)


def main() -> None:
    directory, scene, others, actor = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    with join_job(process_environment()) as comm:
        if comm.rank == 0:
            sys.stdout.write(f'{{"size": {comm.size}, "host": "{comm.host}"}}\n')
        else:
            sys.stdout.write(f"noise of rank {comm.rank}\n")
        note(directory, comm.rank, rank=os.getpid(), supervisor=os.getppid())
        if "workers" in sys.argv:
            start_workers(directory, comm.rank, rank_finishes=scene == "barrier")
        comm.barrier(awaiting="all ranks to have written their process ids", timeout_s=30.0)
        if scene == "timeout":
            if comm.rank == actor:
                time.sleep(FOREVER_S)
            comm.barrier(awaiting="all ranks to drink", timeout_s=1.0)
        elif scene == "collect":
            work = raise_error if comm.rank == actor else (lambda _comm: None)
            all_gather_results(comm, lambda: work(comm), awaiting="all ranks to drink", timeout_s=10.0)
        elif comm.rank == actor:
            SCENES[scene](comm)
        elif scene != "barrier":
            others_wait(comm, others, directory)
        else:
            wait_in_barrier(comm)
    if scene == "barrier" and "verdict" in sys.argv:
        sys.exit(5 if comm.rank == 0 else 0)


if __name__ == "__main__":
    main()
