"""Which levels pay off on this machine? Train and save with five configurations, and compare what each costs.

torchrun --nproc-per-node 4 levels_study.py /local/ssd/study /pfs/me/study
torchrun --nproc-per-node 4 levels_study.py fast slow --megabytes 16 --checkpoints 3 --steps 5
penstock trace compare fast-traces/durable fast-traces/xor_flushed

On one machine each rank stands for a host with a cache of its own. The second folder is the durable level.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

import penstock.checkpoint as pc
from penstock.trace import span, tracing_to

STEP_S = 0.05


def open_manager(name: str, fast: Path, slow: Path, rank: int, ranks: int) -> pc.Manager:
    """Steps go straight to the durable level, or to caches: in one copy or with parity, flushed or not."""
    if name == "durable":
        return pc.Manager(slow / name, keep=2)
    return pc.Manager(
        slow / name,
        keep=2,
        cache=fast / name / f"host-{rank}",
        failure_domain=f"host-{rank}",
        redundancy=pc.Xor(group=ranks) if name.startswith("xor") else pc.Single(),
        flush=pc.Flush(by="trainer") if name.endswith("flushed") else None,
    )


def longest(seconds: float) -> float:
    """The time of the slowest rank."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def main() -> None:
    """Save the same checkpoints with each configuration, and print how long training waits for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fast", type=Path)
    parser.add_argument("slow", type=Path)
    parser.add_argument("--megabytes", type=int, default=128, help="size of each rank's state")
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="training steps between two checkpoints")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = {f"rank_{rank}": torch.rand(options.megabytes << 18)}
    traces = Path(f"{options.fast}-traces")
    if rank == 0:
        print(f"{'configuration':16} {'save waits':>12} {'step takes':>12} {'close waits':>12}")
    for name in ("durable", "single", "single_flushed", "xor", "xor_flushed"):
        save_s, step_s = 0.0, 0.0
        with tracing_to(traces / name, rank=rank, size=ranks):
            manager = open_manager(name, options.fast, options.slow, rank, ranks)
            for number in range(1, options.checkpoints + 1):
                dist.barrier()
                began_s = time.monotonic()
                with span("Checkpoint.save", cat="checkpoint", step=number):
                    manager.save(number, state)
                saved_s = time.monotonic()
                for _ in range(options.steps):
                    with span("train.step", cat="compute", step=number):
                        time.sleep(STEP_S)  # an accelerator computes
                        state[f"rank_{rank}"].mul_(0.999)  # and the host works
                save_s += saved_s - began_s
                step_s += time.monotonic() - saved_s
            began_s = time.monotonic()
            manager.close()  # waits until all pending steps are durable
        times = [save_s / options.checkpoints, step_s / options.checkpoints / max(options.steps, 1)]
        columns = [longest(seconds) for seconds in (*times, time.monotonic() - began_s)]
        if rank == 0:
            print(f"{name:16} " + " ".join(f"{seconds * 1000:9.1f} ms" for seconds in columns))
            for folder in (options.fast / name, options.slow / name):
                shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
