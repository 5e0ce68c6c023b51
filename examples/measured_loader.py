"""Your Dataset and DataLoader, measured as they are: where does each second of waiting go?

penstock training run --loader measured_loader:make_loader --batch-time 20ms --results runs --try workers=4
penstock training run --loader measured_loader:make_loader --step measured_loader:train --results runs
"""

import io
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset[Any]):
    """Compressed arrays on a storage that answers after 10 ms."""

    def __init__(self) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, x=np.arange(128 * 128 * 3, dtype=np.uint8).reshape(128, 128, 3))
        self.content = buffer.getvalue()

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        image = np.load(io.BytesIO(self.content))["x"]
        return self.transform(torch.from_numpy(image))

    def transform(self, image: torch.Tensor) -> torch.Tensor:
        """What is done to each image."""
        return image.float().div(255).permute(2, 0, 1)


def make_loader(rank: int, world_size: int) -> DataLoader[Any]:
    """Called once on each rank with what it asks for."""
    images = Images()
    sampler = DistributedSampler(images, num_replicas=world_size, rank=rank)
    return DataLoader(images, batch_size=4, num_workers=2, sampler=sampler)


MODEL = torch.nn.Conv2d(3, 8, 3)


def train(batch: torch.Tensor) -> None:
    """A step, for --step."""
    MODEL(batch).mean().backward()
