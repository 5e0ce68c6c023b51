"""Launches two ranks, as torchrun does; each writes a file, and so does a process that it forks."""

import os
import subprocess
import sys
import time
from pathlib import Path


def launch(folder: str) -> None:
    own = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "SECRET": "hush"}
    command = [sys.executable, __file__, folder]
    ranks = [subprocess.Popen(command, env={**own, "RANK": str(rank)}) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))


def write(folder: str, rank: str) -> None:
    (Path(folder) / f"own-{rank}.bin").write_bytes(bytes(1000))
    forked = os.fork()
    if not forked:
        (Path(folder) / f"forked-{rank}.bin").write_bytes(bytes(1000))
        os._exit(0)
    os.waitpid(forked, 0)
    # Ranks are noted from outside, ten times a second.
    time.sleep(1)


if __name__ == "__main__":
    if "RANK" in os.environ:
        write(sys.argv[1], os.environ["RANK"])
    else:
        launch(sys.argv[1])
