"""Checkpoints in an object store: saved, listed, verified and restored, with the credentials in `AWS_*`.

python s3.py s3://bucket/run
"""

import sys

import torch

import penstock.checkpoint as pc


def main(uri: str) -> None:
    """Save three steps of which two are kept, and restore the newest into a fresh model."""
    model = torch.nn.Linear(512, 512)
    with pc.Manager(uri, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": model, "step": step})
        print("steps", manager.steps())
    fresh = {"model": torch.nn.Linear(512, 512), "step": 0}
    with pc.Manager(uri) as manager:
        print("restored step", manager.restore(fresh))
    assert torch.equal(fresh["model"].weight, model.weight)


main(sys.argv[1])
