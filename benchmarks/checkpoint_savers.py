"""Every way to save one state that `checkpoint_engine` sets beside ours: the raw disk, plain copies, peers.

Durability is inside the timed part for all, removing what was written outside. A way is called, and what it
returns is called when the clock has stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from penstock.checkpoint.adapters.async_writer import AsyncWriter
from penstock.checkpoint.manager.manager import Manager
from penstock.transfer.buffers import WarmMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNK_BYTES = 16 << 20
STREAMS = 2
SPARE_BYTES = 128 << 20
"""Staging memory beside the state, for envelopes and the ends of files."""

Ending = Callable[[], None]


class Savers:
    """Ways to save `state`, whose tensors lie in a row in main memory, below `folder`."""

    def __init__(self, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
        self._folder = folder
        self._state = dict(state)
        self.size_bytes = sum(each.nbytes for each in state.values())
        self.small_staging_bytes = self.size_bytes // 4
        self._memory = WarmMemory(STREAMS * CHUNK_BYTES)
        self._memory.touch()
        self._warm = np.ones(self.size_bytes, dtype=np.uint8)
        self._manager = _manager(folder / "run", self.size_bytes + SPARE_BYTES)
        self._small = _manager(folder / "small", self.small_staging_bytes)
        self._step = 0

    def close(self) -> None:
        """Let the managers go."""
        self._manager.close()
        self._small.close()

    def ours(self) -> Ending:
        """Staged, written, summed, committed."""
        self._step += 1
        self._manager.save(self._step, self._state)
        return self._removal(f"run/step-{self._step}")

    def our_stall(self) -> Ending:
        """Until the trainer may go on, with staging memory for all of the state."""
        return self._async(self._manager, "run")

    def our_stall_with_less(self) -> Ending:
        """The same with staging memory for a quarter of it."""
        return self._async(self._small, "small")

    def raw(self) -> Ending:
        """Bare O_DIRECT writes of one warm huge-page buffer a thread."""
        (self._folder / "raw").mkdir()
        with ThreadPoolExecutor(STREAMS) as threads:
            for done in [threads.submit(self._raw_file, number) for number in range(STREAMS)]:
                done.result()
        return self._removal("raw")

    def copy(self) -> Ending:
        """A plain copy into memory that was used before."""
        start = 0
        for tensor in self._state.values():
            np.copyto(self._warm[start : start + tensor.nbytes], tensor.reshape(-1).view(torch.uint8).numpy())
            start += tensor.nbytes
        return nothing

    def least(self) -> Ending:
        """What nobody who writes, stages and sums can do without: raw writes, one copy, one pass of XXH3."""
        end = self.raw()
        self.copy()
        for tensor in self._state.values():
            xxhash.xxh3_128_digest(tensor.numpy().data)
        return end

    def torch_dcp(self) -> Ending:
        """`dcp.save` as it comes, which is with fsync."""
        save(self._state, checkpoint_id=self._folder / "dcp")
        return self._removal("dcp")

    def torch_dcp_async(self) -> Ending:
        """`dcp.async_save` as it comes, to its very end."""
        async_save(self._state, checkpoint_id=self._folder / "dcp").result()  # type: ignore[union-attr]
        return self._removal("dcp")

    def torch_stall(self) -> Ending:
        """`dcp.async_save` as it comes, until the trainer may go on."""
        future = async_save(self._state, checkpoint_id=self._folder / "dcp")
        remove = self._removal("dcp")

        def end() -> None:
            future.result()  # type: ignore[union-attr] # a future without a staging executor
            remove()

        return end

    def torch_plain(self) -> Ending:
        """`torch.save` and fsync."""
        path = self._folder / "state.pt"
        torch.save(self._state, path)
        _sync(path)
        return path.unlink

    def safetensors(self) -> Ending:
        """`safetensors.torch.save_file` and fsync."""
        path = self._folder / "state.safetensors"
        save_file(self._state, path)
        _sync(path)
        return path.unlink

    def _async(self, manager: Manager, name: str) -> Ending:
        self._step += 1
        handle = manager.save_async(self._step, self._state)
        remove = self._removal(f"{name}/step-{self._step}")

        def end() -> None:
            handle.result()
            remove()

        return end

    def _removal(self, name: str) -> Ending:
        return lambda: shutil.rmtree(self._folder / name, ignore_errors=True)

    def _raw_file(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        descriptor = os.open(self._folder / f"raw/{number}", flags, 0o600)
        buffer = self._memory.view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        try:
            os.posix_fallocate(descriptor, 0, self.size_bytes // STREAMS)
            for offset in range(0, self.size_bytes // STREAMS, CHUNK_BYTES):
                assert os.pwrite(descriptor, buffer, offset) == CHUNK_BYTES
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class MegatronSaver:
    """Megatron core's writer, in two processes that it forks."""

    def __init__(self, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: PLC0415 - may lack

        # It spawns a process for this queue, which would import torch in the timed part of the first save.
        queue = multiprocessing.get_context("fork").Manager().Queue()
        filesystem_async._results_queue = queue  # noqa: SLF001 - nothing public sets it
        self._writer_of = filesystem_async.FileSystemWriterAsync
        self._folder = folder / "megatron"
        self._state = dict(state)

    @classmethod
    def if_installed(cls, folder: Path, state: Mapping[str, torch.Tensor]) -> MegatronSaver | None:
        """The saver, or None where Megatron core is not there."""
        try:
            return cls(folder, state)
        except ImportError:
            return None

    def save(self) -> Ending:
        """Its own planning, writing, fsync and metadata, waited for."""
        planned, writer = self._planned(self.own_writer)
        function, _, arguments = writer.get_save_function_and_args()
        function(*arguments)
        self._finalize(planned)
        return self.remove

    def stall(self, writer_of: Callable[[Path], Any] | None = None) -> Ending:
        """Until the trainer may go on: the state is forked, and copied page by page as the trainer writes."""
        from megatron.core.dist_checkpointing.strategies.async_utils import (  # noqa: PLC0415 - may lack
            AsyncCallsQueue,
            AsyncRequest,
        )

        planned, writer = self._planned(writer_of or self.own_writer)
        function, preload, arguments = writer.get_save_function_and_args()
        queue = AsyncCallsQueue(persistent=False)
        finish = [lambda: self._finalize(planned)]
        with without_cuda():
            queue.schedule_async_request(AsyncRequest(function, arguments, finish, preload_fn=preload))

        def end() -> None:
            with without_cuda():
                queue.maybe_finalize_async_calls(blocking=True)
                queue.close()
            self.remove()

        return end

    def own_writer(self, folder: Path) -> Any:
        """Megatron's writer."""
        return self._writer_of(folder, thread_count=STREAMS)

    def our_writer(self, folder: Path) -> Any:
        """Ours in its place."""
        return AsyncWriter(folder, writers=STREAMS)

    def remove(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._folder)

    def _planned(self, writer_of: Callable[[Path], Any]) -> tuple[Any, Any]:
        from megatron.core.dist_checkpointing.strategies.state_dict_saver import (  # noqa: PLC0415 - may lack
            save_state_dict_async_plan,
        )

        self._folder.mkdir()
        writer = writer_of(self._folder)
        return save_state_dict_async_plan(self._state, writer)[0], writer

    def _finalize(self, planned: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.state_dict_saver import (  # noqa: PLC0415 - may lack
            save_state_dict_async_finalize,
        )

        with without_cuda():
            save_state_dict_async_finalize(*planned)


def without_cuda() -> Any:
    """Megatron asks for CUDA's leave on every machine."""
    if torch.cuda.device_count():
        return nullcontext()
    return patch.multiple(torch.cuda, synchronize=lambda *_: None, current_device=lambda: "cpu")


def nothing() -> None:
    """A copy leaves nothing to remove."""


def _manager(place: Path, staging_bytes: int) -> Manager:
    return Manager(place, staging_bytes=staging_bytes)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
