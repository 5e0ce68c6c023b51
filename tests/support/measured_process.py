"""Commands whose time and memory are measured, by a small process between them and the tests.

A process begins with the memory of the one that forked it as its peak, and that of the tests is large.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MEASURE = """
import json, os, subprocess, sys, time
begin = time.monotonic()
with open(sys.argv[1], "w") as output:
    child = subprocess.Popen(sys.argv[2:], stdout=output)
_, status, used = os.wait4(child.pid, 0)
cpu_s = used.ru_utime + used.ru_stime
print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - begin, cpu_s, used.ru_maxrss >> 10]))
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a command returned, and what it took, its children included."""

    returncode: int
    took_s: float
    cpu_s: float
    mib: int


def run_measured(command: Sequence[str], output: Path) -> Measured:
    """Run a command with its output to a file."""
    measure = [sys.executable, "-c", _MEASURE, str(output), *command]
    done = subprocess.run(measure, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(*json.loads(done.stdout))
