"""Run the benchmarks beside their peers and set every ratio beside its last record: what `make bench` does.

Whatever got worse is repeated before it counts. Exits with 1 when a ratio fell by more than 20 %.

    python benchmarks/run.py                       all of them
    python benchmarks/run.py storage_probe         one of them
    python benchmarks/run.py --record              and make the new ratios the records
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module

import numpy as np

from harness import Ratio, read_record, regressions, write_record

BENCHMARKS = (
    "storage_probe",
    "content",
    "formats",
    "training",
    "trace_load",
    "trace_capture",
    "parity",
    "checkpoint_pipe",
    "checkpoint_clients",
    "checkpoint_engine",
    "checkpoint_metadata",
    "checkpoint_levels",
    "submission_check",
)


def main() -> int:
    """Run what was asked for; 1 if something got slower."""
    arguments = _parse(sys.argv[1:])
    worse: list[str] = []
    for benchmark in arguments.benchmarks or BENCHMARKS:
        print(f"\n{benchmark}: ours / theirs, median [low .. high] of {arguments.repetitions}", flush=True)
        record = read_record(benchmark)
        ratios, fallen = _measure(benchmark, record, arguments.repetitions)
        for ratio in ratios:
            print("  " + ratio.line(record.get(ratio.name)))
        worse.extend(f"{benchmark}: {name}" for name in fallen)
        if arguments.record:
            print(f"  recorded in {write_record(benchmark, ratios, _machine())}")
    for name in worse:
        print(f"SLOWER by more than 20 %, twice: {name}", file=sys.stderr)
    return 1 if worse else 0


def _measure(benchmark: str, record: Mapping[str, float], repetitions: int) -> tuple[list[Ratio], list[str]]:
    """The ratios, measured a second time where the first time was worse; the better of both counts."""
    measure = import_module(benchmark).measure
    ratios: list[Ratio] = measure(repetitions)
    if not regressions(ratios, record):
        return ratios, []
    print("  worse than its record, so once more ...", flush=True)
    again: dict[str, Ratio] = {ratio.name: ratio for ratio in measure(2 * repetitions + 1)}
    ratios = [max(ratio, again[ratio.name], key=lambda one: one.median) for ratio in ratios]
    return ratios, regressions(ratios, record)


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
