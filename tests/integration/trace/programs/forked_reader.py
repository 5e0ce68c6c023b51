"""Writes a file, which a forked worker opens and reads again."""

import os
import sys
from pathlib import Path

path = Path(sys.argv[1]) / "shared.bin"
path.write_bytes(bytes(1000))
pid = os.fork()
if not pid:
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, 30)
    os.close(fd)
    sys.exit(0)
os.waitpid(pid, 0)
