"""The cost of being followed: CPU of a run that writes its status each second and its metrics every five.

    python benchmarks/following.py [--seconds 60]

The run does nothing but count 100 steps a second, so that all CPU is that of being followed; the same without
followers is subtracted. The limit: a thousandth of a core.
"""

import argparse
import json
import subprocess
import sys
from tempfile import TemporaryDirectory

LIMIT = 1e-3
PROGRAM = """
import json, sys, time
from pathlib import Path
from penstock.progress import RunName
from penstock.results.run_status import Meter, TextCollectorFile
folder, seconds, is_followed = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "followed"
with Meter([TextCollectorFile(folder)] if is_followed else []) as meter:
    if is_followed:
        meter.attach(RunName(folder=folder, kind="training", workload="w", ranks=1000))
    meter.begin("epoch 1 of 1, steps", 10**6)
    end_s, began = time.monotonic() + seconds, time.process_time()
    while time.monotonic() < end_s:
        meter.enter("reading")
        meter.enter("computing")
        meter.advance(1)
        meter.count(steps=1, samples=7, read_bytes=10**9, computing_s=.3, sample_wait_s=.01, rank_wait_s=.0)
        time.sleep(0.01)
    print(json.dumps(time.process_time() - began))
"""


def measure(seconds: float, how: str) -> float:
    """CPU seconds a second, and so shares of a core."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM, folder, str(seconds), how]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        spent_s: float = json.loads(done.stdout)
    return spent_s / seconds


def main() -> None:
    """Measure both, and compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    alone, followed = measure(seconds, "alone"), measure(seconds, "followed")
    share = followed - alone
    verdict = "within" if share < LIMIT else "ABOVE"
    print(f"counting alone {alone:.3%} of a core, followed {followed:.3%}")
    print(f"being followed costs {share:.3%}: {verdict} the limit of {LIMIT:.1%}")


if __name__ == "__main__":
    main()
