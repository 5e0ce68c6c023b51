"""Saves and loads a few checkpoints with torch: `saving_checkpoints.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
for step in range(2):
    for layer in range(3):
        with (folder / f"layer-{layer}-{step}.pt").open("wb") as file:
            torch.save({"weights": torch.zeros(100_000 * (layer + 1)), "step": step}, file)
    (folder / "latest.tmp").write_text(str(step))
    (folder / "latest.tmp").rename(folder / "latest")
for layer in range(3):
    with (folder / f"layer-{layer}-1.pt").open("rb") as file:
        assert torch.load(file)["weights"].numel() == 100_000 * (layer + 1)
