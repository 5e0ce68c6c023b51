"""Run the benchmarks beside their peers and set every ratio beside its last record: what `make bench` does.

Whatever got worse is repeated before it counts. Exits with 1 when a ratio fell by more than 20 % and, on the
machine of the record, our own figure did too: a peer that got faster is said, and is no regression of ours.

    python benchmarks/run.py                       all of them
    python benchmarks/run.py storage_probe         one of them
    python benchmarks/run.py --record              and make the new ratios the records
"""

import argparse
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib import import_module

import numpy as np

from harness import Ratio, Record, fallen, is_ours, read_record, write_record

BENCHMARKS = (
    "storage_probe",
    "content",
    "formats",
    "training",
    "small_files",
    "trace_load",
    "trace_capture",
    "parity",
    "checkpoint_pipe",
    "checkpoint_clients",
    "checkpoint_engine",
    "checkpoint_limits",
    "checkpoint_ranks",
    "checkpoint_peers",
    "checkpoint_adapters",
    "checkpoint_metadata",
    "checkpoint_levels",
    "submission_check",
)


def main() -> int:
    """Run what was asked for; 1 if something got slower."""
    arguments = _parse(sys.argv[1:])
    benchmarks, machine = arguments.benchmarks or BENCHMARKS, _machine()
    slower: list[str] = []
    begin_s = time.monotonic()
    for number, benchmark in enumerate(benchmarks, 1):
        elapsed_s = time.monotonic() - begin_s
        print(f"\n{benchmark} ({number} of {len(benchmarks)}, {elapsed_s:.0f} s so far)", flush=True)
        print(f"  ours / theirs, median [low .. high] of at most {arguments.repetitions} rounds", flush=True)
        record = read_record(benchmark)
        ratios = _measure(benchmark, record, arguments.repetitions)
        for ratio in ratios:
            print("  " + ratio.line(record.ratios.get(ratio.name)), flush=True)
        for ratio in fallen(ratios, record):
            if is_ours(ratio, record, machine):
                slower.append(f"{benchmark}: {ratio.name}")
            else:
                print(f"  the peer got faster, ours did not get slower: {ratio.name}")
        if arguments.record:
            print(f"  recorded in {write_record(benchmark, ratios, machine)}")
    print(f"\n{len(benchmarks)} benchmarks in {(time.monotonic() - begin_s) / 60:.1f} minutes")
    for name in slower:
        print(f"SLOWER by more than 20 %, twice: {name}", file=sys.stderr)
    return 1 if slower else 0


def _measure(benchmark: str, record: Record, repetitions: int) -> list[Ratio]:
    """The ratios, measured a second time where the first time was worse; the better of both counts."""
    measure = import_module(benchmark).measure
    ratios: list[Ratio] = measure(repetitions)
    if not fallen(ratios, record):
        return ratios
    print("  worse than its record, so once more ...", flush=True)
    again: dict[str, Ratio] = {ratio.name: ratio for ratio in measure(repetitions)}
    return [max(ratio, again[ratio.name], key=lambda one: one.median) for ratio in ratios]


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="make the new ratios the records")
    arguments = parser.parse_args(words)
    unknown = set(arguments.benchmarks) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}")
    return arguments


def _machine() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
