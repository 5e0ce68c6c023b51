"""Megatron's queue with its own writer and with ours, forked for each save of 512 MiB: stall, time, CPU.

    python benchmarks/checkpoint_adapters.py [MIB]        a state of so many MiB, by default 512

Both take turns in each round. The stall is from the planning of a save until the trainer may go on, most of
which is the kernel's fork; its CPU seconds are those of the trainer's thread, and vary less. A first step
after it is one write to each page of the state, which costs more while a forked process shares them. Above 1,
ours takes less. Goals: a stall of at most Megatron's own (1.0), and a shorter save.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from checkpoint_engine import GIB, alone_in_a_group, cpu_s, folder_for_files
from checkpoint_savers import MegatronSaver
from harness import Ratio, compare, take_turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness import Side

TENSOR_BYTES = 32 << 20
DEFAULT_BYTES = 512 << 20
UNIT = "GiB/s"


def measure(repetitions: int, size_bytes: int = DEFAULT_BYTES) -> list[Ratio]:
    """Our writer beside Megatron's, both behind its queue."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    warnings.filterwarnings("ignore", module="megatron")
    state = {f"w{number}": torch.randn(TENSOR_BYTES // 4) for number in range(size_bytes // TENSOR_BYTES)}
    with alone_in_a_group(), folder_for_files() as folder:
        megatron = MegatronSaver.if_installed(folder, state)
        if megatron is None:
            return []
        sides = [
            _side(name, megatron, writer_of, state)
            for name, writer_of in (("ours", megatron.our_writer), ("Megatron's", megatron.own_writer))
        ]
        seen = take_turns(sides, repetitions=repetitions)
    return [
        compare(seen, f"{what} of Megatron's writer / of ours", (f"ours {what}", f"Megatron's {what}"), UNIT)
        for what in ("stall", "CPU of the stall", "stall and next step", "save", "CPU")
    ]


def _side(name: str, megatron: MegatronSaver, writer_of: Any, state: Mapping[str, torch.Tensor]) -> Side:
    size_gib = sum(tensor.nbytes for tensor in state.values()) / GIB

    def side() -> Mapping[str, float]:
        os.sync()
        begin_cpu_s, begin_own_s, begin_s = cpu_s(), time.thread_time(), time.perf_counter()
        end = megatron.stall(writer_of)
        stall_s, stall_cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_own_s
        for tensor in state.values():
            tensor.view(-1, 1024)[:, 0] += 1
        step_s = time.perf_counter() - begin_s
        end()
        whole_s, whole_cpu_s = time.perf_counter() - begin_s, cpu_s() - begin_cpu_s
        took = {
            "stall": stall_s,
            "CPU of the stall": stall_cpu_s,
            "stall and next step": step_s,
            "save": whole_s,
            "CPU": whole_cpu_s,
        }
        return {f"{name} {what}": size_gib / seconds for what, seconds in took.items()}

    side()
    return side


if __name__ == "__main__":
    wanted = int(sys.argv[1]) << 20 if len(sys.argv) > 1 else DEFAULT_BYTES
    # A stall spreads by a factor of three, so that few rounds say nothing.
    for ratio in measure(21, wanted):
        print(ratio.line(None))
