"""A loader of your own: reads from any storage, shows up in traces, and resumes at the next sample.

penstock training generate unet3d --data data --set dataset.num_files_train=16 \
  --set dataset.record_length_bytes=256KiB --set dataset.record_length_bytes_stdev=0
python own_loader.py data/train run/own 8       # or s3://bucket/train, direct:///mnt/pfs/train, ...
python own_loader.py data/train run/own 16      # continues at sample 9
penstock trace summary run/own-traces
"""

import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import penstock.checkpoint as pc
from penstock.environment import process_environment
from penstock.storage import open_storage
from penstock.storage.protocol import read_object
from penstock.trace import span, steps, tracing_to


class Samples:
    """The samples of a data set, one file each. Its position is part of the checkpoint."""

    def __init__(self, uri: str) -> None:
        self._storage = open_storage(uri, process_environment())
        self._keys = sorted(entry.key for entry in self._storage.list())
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < len(self._keys):
            with span("read", cat="io", sample=self.position):
                content = read_object(self._storage, self._keys[self.position])
            self.position += 1
            yield torch.from_numpy(np.load(io.BytesIO(content))["x"]).float()

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self.position = state["position"]


def main(data: str, path: str, until: int) -> None:
    """Use each sample once, until sample number `until`."""
    samples, mean = Samples(data), torch.zeros(1)
    state = {"samples": samples, "mean": mean}
    with pc.Manager(path, keep=2) as manager, tracing_to(f"{path}-traces", rank=0, size=1):
        manager.restore(state)
        first = samples.position + 1
        for sample in steps(samples, "train"):
            mean += (sample.mean() - mean) / samples.position
            if samples.position == until:
                manager.save(until, state)
                break
    print(f"samples {first} to {samples.position}, mean {mean.item():.3f}")


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
