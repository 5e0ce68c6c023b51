"""Computes under PyTorch's profiler while another thread writes and syncs a file."""

import os
import sys
import threading
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

folder = Path(sys.argv[1])
is_done = threading.Event()


def write() -> None:
    """Write until the computation has ended."""
    with (folder / "data.bin").open("wb", buffering=0) as file:
        while not is_done.is_set():
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
            file.seek(0)


writer = threading.Thread(target=write)
writer.start()
weights = torch.randn(512, 512, requires_grad=True)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for _ in range(20):
        with record_function("step"):
            torch.autograd.backward((weights @ weights).sum())
is_done.set()
writer.join()
profiler.export_chrome_trace(str(folder / "t" / "training.pt.trace.json"))
