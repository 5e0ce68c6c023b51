"""Which of DLIO's workloads and test command lines load, and why the others do not.

    python scripts/dlio_configurations.py CHECKOUT_OF_DLIO

Nothing is run: each YAML file of its configurations, and the overrides that its tests lay over `default`, are
read as `penstock-dlio` reads them.
"""

import sys
from itertools import product
from pathlib import Path

from penstock.cli.dlio import require_runnable_stages
from penstock.errors import UsageError
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_settings

GENERATES = ("workflow.generate_data=True", "workflow.train=False")
TRAINS = ("workflow.train=True", "workflow.generate_data=True", "train.epochs=1")
FORMATS = ("png", "npz", "jpeg", "tfrecord", "hdf5", "csv", "indexed_binary", "mmap_indexed_binary")
TIMES = (
    ("type=uniform", "min=1.0", "max=2.0"),
    ("type=normal", "mean=1.0", "stdev=1.0"),
    ("type=gamma", "shape=1.0", "scale=1.0"),
    ("type=exponential", "scale=1.0"),
    ("type=poisson", "lam=1.0"),
    ("mean=1.0",),
    ("mean=1.0", "stdev=1.0"),
)
MODEL = ("model.model_size=1024", "model.optimization_groups=[128]", "model.layer_parameters=[128]")


def command_lines() -> list[tuple[str, tuple[str, ...]]]:
    """What DLIO's tests lay over its default workload, by the behavior that they test."""
    lines: list[tuple[str, tuple[str, ...]]] = [("first command", ("workflow.generate_data=True",))]
    lines += [(f"generate {name}", (*GENERATES, f"dataset.format={name}")) for name in FORMATS]
    lines += [
        (f"train {name} by {loader}", (*TRAINS, f"dataset.format={name}", f"reader.data_loader={loader}"))
        for name, loader in product(FORMATS, ("pytorch", "tensorflow"))
    ]
    lines += [
        (f"{threads} workers by {start}", (*TRAINS, f"reader.read_threads={threads}", context))
        for threads, start in ((0, "None"), (1, "fork"), (2, "spawn"), (2, "forkserver"))
        for context in (f"reader.multiprocessing_context={start}",)
    ]
    for parts in TIMES:
        law = parts[0].partition("=")[2]
        lines.append((f"time {law}", (*TRAINS, *(f"train.computation_time.{part}" for part in parts))))
    lines += [
        (
            f"checkpoints, {layers} layers, ZeRO {zero}",
            (
                *TRAINS,
                *MODEL,
                "workflow.checkpoint=True",
                f"model.num_layers={layers}",
                f"model.parallelism.zero_stage={zero}",
            ),
        )
        for layers, zero in ((1, 0), (2, 0), (1, 1), (2, 1), (2, 3))
    ]
    lines.append(("profiling", (*TRAINS, "workflow.profiling=True", "profiling.profiler=iostat")))
    lines.append(("evaluation off", (*TRAINS, "workflow.evaluation=False")))
    return lines


def main() -> int:
    """Print a line for each, and how many were taken."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    files = sorted(Path(sys.argv[1]).glob("dlio_benchmark/configs/workload/*.yaml"))
    asked: list[tuple[str, str, tuple[str, ...]]] = [(path.stem, str(path), ()) for path in files]
    asked += [(name, "default", settings) for name, settings in command_lines()]
    num_taken = 0
    for name, workload, settings in asked:
        try:
            loaded = load(workload, overrides=parse_settings(settings), prefers_dlio=True)
            require_runnable_stages(loaded.workload)
            verdict, num_taken = f"taken, {len(loaded.remarks)} remarks", num_taken + 1
        except UsageError as error:
            verdict = f"refused: {error}"
        print(f"{name:<36} {verdict}")
    print(f"{num_taken} of {len(asked)} are taken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
