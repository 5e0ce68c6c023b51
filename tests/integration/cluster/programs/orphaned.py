"""A supervisor whose launcher is dead before it can be watched, and whose standard error is closed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from penstock.cluster.supervision.control_protocol import Failed, MessageChannel
from penstock.cluster.supervision.supervisor import Supervisor, SupervisorConfig, _run_role


def _forked(seconds: float) -> int:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(seconds)
        os._exit(0)
    return pid


def _say(failure: Failed) -> None:
    sys.stderr.write(failure.cause)
    sys.stderr.flush()


def main() -> None:
    dead = _forked(0)
    os.waitpid(dead, 0)
    rank = _forked(60)
    os.write(sys.stdout.fileno(), str(rank).encode())
    unread, broken = os.pipe()
    os.close(unread)
    os.dup2(broken, sys.stderr.fileno())
    ours, theirs = socket.socketpair()
    theirs.close()
    config = SupervisorConfig(rank=2, host="here", announce=_say)
    _run_role(
        lambda: Supervisor(config, MessageChannel(ours), rank=rank, ancestors={dead: "its launcher"}).run()
    )


if __name__ == "__main__":
    main()
