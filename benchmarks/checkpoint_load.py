"""Loading a state of 1 GiB beside a raw read of the same files and torch's own load.

The page cache is emptied of the files before each pass, and destinations have been touched. Goals: 0.85 of
raw O_DIRECT reads with every checksum verified; the same for stock checkpoints, which have none.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from harness import Ratio, interleave
from penstock.checkpoint.engine import LoadChoice
from penstock.checkpoint.loading.load import Loader
from penstock.checkpoint.members import meeting
from penstock.checkpoint.opened import open_checkpoint
from penstock.checkpoint.pipe.memory import WarmMemory
from penstock.checkpoint.step_writer import save

NUM_TENSORS = 64
TENSOR_BYTES = 16 << 20
SIZE_BYTES = NUM_TENSORS * TENSOR_BYTES
BLOCK_BYTES = 8 << 20
STREAMS = 4


def measure(repetitions: int) -> list[Ratio]:
    """Ours beside each peer."""
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=os.environ.get("PENSTOCK_BENCH_DIR")))
        undo.callback(shutil.rmtree, folder)
        warnings.filterwarnings("ignore", module="torch.distributed")
        sides = Sides(folder)
        undo.callback(sides.close)
        pairs = (
            ("load, verified / raw O_DIRECT", sides.load_ours, sides.read_raw),
            ("load of a stock checkpoint / raw O_DIRECT", sides.load_stock, sides.read_raw),
            ("load beside dcp.load", sides.load_ours, sides.torch_load),
        )
        ratios: list[Ratio] = []
        for name, ours, theirs in pairs:
            ratios += interleave(
                sides.side(name, ours), sides.side(name, theirs), repetitions=repetitions, unit="GiB/s"
            )
        return ratios


class Sides:
    """Every way to read the same state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = {f"w{number}": torch.randn(TENSOR_BYTES // 4) for number in range(NUM_TENSORS)}
        save(self._state, folder / "ours")
        torch_save(self._state, checkpoint_id=folder / "stock")
        self._memory = WarmMemory(STREAMS * BLOCK_BYTES)
        self._memory.touch()
        self._loader = Loader()

    def close(self) -> None:
        """Let the loader's buffers go."""
        self._loader.close()

    def side(self, name: str, work: Callable[[], None]) -> Callable[[], Mapping[str, float]]:
        """`work` after the page cache was emptied, as a side of a comparison."""

        def timed() -> Mapping[str, float]:
            self._empty_cache()
            start_s = time.perf_counter()
            work()
            return {name: SIZE_BYTES / 2**30 / (time.perf_counter() - start_s)}

        return timed

    def load_ours(self) -> None:
        """Our checkpoint, every item's sum verified."""
        self._load("ours")

    def load_stock(self) -> None:
        """A stock checkpoint, whose payloads lie anywhere."""
        self._load("stock")

    def torch_load(self) -> None:
        """Our checkpoint by torch's own reader."""
        torch_load(self._state, checkpoint_id=self._folder / "ours")

    def read_raw(self) -> None:
        """The same files by bare preadv into warm huge pages, as many streams and bytes a request as ours."""
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

    def _load(self, name: str) -> None:
        with meeting() as members:
            opened = open_checkpoint(self._folder / name)
            self._loader.load_opened(self._state, opened, members, LoadChoice())

    def _empty_cache(self) -> None:
        for path in self._folder.rglob("*.distcp"):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    for ratio in measure(repetitions=5):
        print(ratio.line(None))
