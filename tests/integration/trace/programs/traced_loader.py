"""Reads a few files through torch's DataLoader with two workers: `traced_loader.py FOLDER fork|spawn`."""

from __future__ import annotations

import sys

import torch

from penstock.environment import process_environment
from penstock.storage import open_storage
from penstock.storage.protocol import read_object, write_object


class Files(torch.utils.data.Dataset[int]):
    """Objects of 1000 bytes."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return len(read_object(open_storage(self.uri, process_environment()), str(index)))


def main() -> None:
    storage = open_storage(sys.argv[1], process_environment())
    for index in range(12):
        write_object(storage, str(index), [bytes(1000)])
    loader = torch.utils.data.DataLoader(
        Files(sys.argv[1]), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[2]
    )
    assert sum(int(batch.sum()) for batch in loader) == 12_000


if __name__ == "__main__":
    main()
