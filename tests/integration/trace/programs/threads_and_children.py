"""Threads, a child with a thread of its own, relative names, names to escape, vectored calls at offsets."""

import os
import sys
import threading
from pathlib import Path

os.chdir(sys.argv[1])
for name in ('naïve "q" \\ x<y>.txt', "plain.bin"):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.pwritev(fd, [b"abc", b"de"], 7)
    os.preadv(fd, [bytearray(4)], 7)
    os.close(fd)


def write(number: int) -> None:
    """Write a file of ten bytes."""
    with Path(f"t{number}").open("wb", buffering=0) as file:
        file.write(b"x" * 10)


threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
pid = os.fork()
if not pid:
    thread = threading.Thread(target=write, args=(3,))
    thread.start()
    thread.join()
    os._exit(0)
os.waitpid(pid, 0)
