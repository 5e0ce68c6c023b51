"""A separate gloo group that is made by its ranks alone, beside the groups of a trainer.

`torch.distributed.new_group` names a group that only some ranks make by the number of groups that each of
them has: ranks with different numbers never find each other, and a reused name leads to dead addresses.
Invariant: no two groups made in a job share a name, and only the ranks of a group take part in making it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.cluster.comm import BaseComm, PollingWait
from penstock.cluster.torch_comm import LONGEST_CALL, TorchPendingTransfer, broken_connection


def make_group(ranks: Sequence[int]) -> Any:
    """Make a gloo group of these ranks, numbered as in the job. Collective over them."""
    name = "penstock/" + hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    store = _get_default_store()
    # Each rank counts its groups; ranks make their common groups in the same order, so they count alike.
    number = store.add(f"{name}/{dist.get_rank()}", 1)
    own_store = dist.PrefixStore(f"{name}/{number}/", store)  # type: ignore[attr-defined] # not in torch's stubs
    group_of = getattr(dist, "ProcessGroupGloo")  # noqa: B009 - likewise
    return group_of(own_store, list(ranks).index(dist.get_rank()), len(ranks), LONGEST_CALL)


class GroupComm(BaseComm):
    """The communicator of a group from `make_group`."""

    def __init__(self, host: str, group: Any) -> None:
        super().__init__(group.rank(), group.size(), host)
        self._group: Any = group

    def close(self) -> None:
        """Release the group; its connections close with its last user."""
        self._group = None

    def transfer(self) -> GroupTransfer:
        """Point-to-point transfers between the same ranks; gloo keeps them apart from collectives."""
        return GroupTransfer(self._group, f"rank {self.rank} on {self.host}")

    def _message_transfer(self) -> GroupTransfer:
        return self.transfer()

    def _finish(self, work: Any, wait: PollingWait) -> None:
        wait.until(work.is_completed)
        work.wait()

    def _move_nothing(self, wait: PollingWait) -> None:
        self._finish(self._group.allreduce([torch.zeros(1)]), wait)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        size_bytes = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64)
        self._finish(self._group.broadcast(size_bytes, 0), wait)
        received = _tensor(int(size_bytes), payload)
        self._finish(self._group.broadcast(received, 0), wait)
        return received.numpy().tobytes()

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._finish(self._group.allgather([sizes], [torch.tensor([len(payload)])]), wait)
        # gloo only gathers equal shapes, so each rank sends as many bytes as the longest payload has.
        longest = max(int(size) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._finish(self._group.allgather([parts], [_tensor(longest, payload)]), wait)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def _gather_bytes_on_rank0(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._finish(self._group.allgather([sizes], [torch.tensor([len(payload)])]), wait)
        longest = max(int(size) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size if self.rank == 0 else 0)]
        self._finish(self._group.gather(parts, _tensor(longest, payload), 0), wait)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=False)]


class GroupTransfer:
    """Point-to-point transfers in a group from `make_group`."""

    def __init__(self, group: Any, place: str) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group: Any = group
        self._place = place

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> TorchPendingTransfer:
        """Begin to send the whole of `buffer`."""
        return self._begin("send", buffer, to, tag)

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> TorchPendingTransfer:
        """Begin to fill the whole of `buffer`."""
        return self._begin("recv", buffer, source, tag)

    def close(self) -> None:
        """Release the group."""
        self._group = None

    def _begin(self, verb: str, buffer: memoryview, peer: int, tag: int) -> TorchPendingTransfer:
        if not buffer.nbytes:
            return TorchPendingTransfer(None, self._place)
        try:
            work = getattr(self._group, verb)([torch.frombuffer(buffer, dtype=torch.uint8)], peer, tag)
        except RuntimeError as error:
            raise broken_connection(error, "a connection", self._place) from error
        return TorchPendingTransfer(work, self._place)


def _tensor(size_bytes: int, payload: bytes | None) -> torch.Tensor:
    """`payload`, padded with zeros to `size_bytes`."""
    padded = torch.zeros(size_bytes, dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return padded
