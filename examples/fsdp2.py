"""FSDP2: a sharded model and its optimizer, saved in the background and resumed on any number of ranks.

torchrun --nproc-per-node 2 fsdp2.py run/fsdp2 20
torchrun --nproc-per-node 1 fsdp2.py run/fsdp2 40      # continues at step 21
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import penstock.checkpoint as pc


def make_model() -> torch.nn.Module:
    """A few layers, each sharded over all ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def main(path: str, steps: int) -> None:
    """Train until `steps`, from the newest step below `path`."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with pc.Manager(path, keep=2) as manager:
        manager.restore(state)
        first = state["step"] + 1
        for step in range(first, steps + 1):
            batch = torch.full((16, 256), 1.0 / step)
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            if step % 10 == 0:
                manager.save_async(step, state)
    if dist.get_rank() == 0:
        print(f"steps {first} to {steps} on {dist.get_world_size()} ranks, loss {loss.item():.6f}")
    dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]))
