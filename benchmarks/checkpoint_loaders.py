"""Every way to load one state that `checkpoint_engine` sets beside ours, and what a part of it takes.

The page cache is emptied of the files before each way, and destinations have been touched.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from penstock.checkpoint.api import save
from penstock.checkpoint.engine import LoadChoice, borrowed_comm
from penstock.checkpoint.formats.checkpoint_source import open_checkpoint
from penstock.checkpoint.loader import CheckpointLoader
from penstock.transfer.buffers import WarmMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.checkpoint.metadata import MetadataIndex

BLOCK_BYTES = 8 << 20
STREAMS = 6
SHARE = 8
"""A part is one of so many equal ones, by rows."""


class Loaders:
    """Ways to load `state`, saved by us and by torch below `folder`; tensors have rows."""

    def __init__(self, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
        self._folder = folder
        self._state = dict(state)
        save(self._state, folder / "ours")
        torch_save(self._state, checkpoint_id=folder / "stock")
        self._memory = WarmMemory(STREAMS * BLOCK_BYTES)
        self._memory.touch()
        self._loader = CheckpointLoader()

    def close(self) -> None:
        """Let the loader's buffers go."""
        self._loader.close()

    def ours(self) -> None:
        """Our checkpoint, every item's sum verified."""
        self._load(self._state, "ours")

    def stock_by_ours(self) -> None:
        """A stock checkpoint, whose payloads lie anywhere."""
        self._load(self._state, "stock")

    def ours_by_torch(self) -> None:
        """Our checkpoint by torch's own reader."""
        torch_load(self._state, checkpoint_id=self._folder / "ours")

    def stock_by_torch(self) -> None:
        """Torch's own checkpoint by torch's own reader."""
        torch_load(self._state, checkpoint_id=self._folder / "stock")

    def raw(self) -> None:
        """Our files by bare preadv into warm huge pages, as many streams and bytes a request as ours."""
        paths = sorted((self._folder / "ours").glob("*.distcp"))
        files = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size) for path in paths]
        todo = ((file, at) for file, size in files for at in range(0, size, BLOCK_BYTES))
        lock = threading.Lock()

        def work(stream: int) -> None:
            buffer = self._memory.view[stream * BLOCK_BYTES : (stream + 1) * BLOCK_BYTES]
            while True:
                with lock:
                    request = next(todo, None)
                if request is None:
                    return
                os.preadv(request[0], [buffer], request[1])

        with ThreadPoolExecutor(STREAMS) as threads:
            for done in [threads.submit(work, stream) for stream in range(STREAMS)]:
                done.result()
        for file, _ in files:
            os.close(file)

    def part_bytes_by_ours(self) -> int:
        """Bytes that the disk gave for one part of every tensor."""
        return self._read_bytes(lambda: self._load(self._parts(), "ours"))

    def part_bytes_by_torch(self) -> int:
        """The same by torch from its own checkpoint."""
        return self._read_bytes(lambda: torch_load(self._parts(), checkpoint_id=self._folder / "stock"))

    def empty_cache(self) -> None:
        """Let nothing of any file be in memory."""
        for path in self._folder.rglob("*.distcp"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _load(self, state: Mapping[str, object], name: str) -> None:
        with borrowed_comm() as comm:
            checkpoint = open_checkpoint(self._folder / name)
            self._loader.load_from(state, checkpoint, comm, LoadChoice())

    def _parts(self) -> dict[str, object]:
        return {name: tensor.as_subclass(Rows) for name, tensor in self._state.items()}

    def _read_bytes(self, work: Callable[[], None]) -> int:
        self.empty_cache()
        before = _storage_bytes()
        work()
        return _storage_bytes() - before


class Rows(torch.Tensor):
    """A tensor of whose rows this process holds the second of `SHARE` equal parts, as torch's interface says.

    A subclass, for torch's planners lose what is no tensor.
    """

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the part lies."""
        rows, columns = self.shape
        return [ChunkStorageMetadata(torch.Size((rows // SHARE, 0)), torch.Size((rows // SHARE, columns)))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of the part."""
        begin = index.offset[0] if index.offset is not None else 0
        return self.as_subclass(torch.Tensor)[begin : begin + self.shape[0] // SHARE]


def _storage_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
