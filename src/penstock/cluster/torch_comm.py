"""Ranks under torch.distributed: the default group, one that a trainer passes, or one made by its ranks.

Messages are tensors in main memory, so the group needs a gloo backend. `torch.distributed.new_group` names a
group that only some ranks make by the number of groups that each of them has: ranks with different numbers
never find each other, and a reused name leads to dead addresses; `make_group` does not. Invariants: torch's
own errors become `RankError`s; no two groups made here in a job share a name, and only the ranks of a group
take part in making it.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.cluster.comm import BaseComm, PollingWait
from penstock.cluster.rounds import FAN_IN
from penstock.environment import Environment
from penstock.errors import RankError, Unavailable, UsageError, WaitTimeout

LONGEST_CALL = timedelta(days=7)
"""gloo's own limit, which must not come first: each call of a `Comm` has one of its own."""


class TorchComm(BaseComm):
    """All ranks of `group` (default: the default group). It stays the caller's, unless `at_close` ends it."""

    def __init__(
        self,
        host: str,
        group: dist.ProcessGroup | None = None,
        *,
        at_close: Callable[[], None] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "torch.distributed is not initialized", fix="Call init_process_group before joining."
            )
        if "gloo" not in str(dist.get_backend_config(group)):
            raise UsageError(
                f"The process group uses {dist.get_backend(group)}, which cannot send main memory",
                fix='Pass torch.distributed.new_group(backend="gloo").',
            )
        super().__init__(dist.get_rank(group), dist.get_world_size(group), host)
        self.carrier = f"torch.distributed of torch {torch.__version__}"
        self._group = group
        self._at_close = at_close

    def close(self) -> None:
        """End the group, if it was made for this communicator; collective."""
        if self._at_close is not None:
            self._at_close()

    def transfer(self) -> TorchPointToPoint:
        """A transfer between the same ranks, in a group of its own, so that no collective is in its way."""
        ranks = dist.get_process_group_ranks(self._group)
        own = dist.new_group(ranks, LONGEST_CALL, backend="gloo", use_local_synchronization=True)
        assert isinstance(own, dist.ProcessGroup), "this process is in the group of its own communicator"
        return TorchPointToPoint(own, self.host)

    def _message_transfer(self) -> TorchPointToPoint:
        group = dist.group.WORLD if self._group is None else self._group
        assert group is not None, "a communicator has a process group"
        return TorchPointToPoint(group, self.host)

    def _finish(self, work: dist.Work | None, wait: PollingWait) -> None:
        assert work is not None, "this process is not in the group, so it has no communicator for it"
        wait.until(work.is_completed)
        work.wait()

    def _move_nothing(self, wait: PollingWait) -> None:
        self._finish(dist.all_reduce(torch.zeros(1, device="cpu"), group=self._group, async_op=True), wait)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        size_bytes = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64, device="cpu")
        self._finish(dist.broadcast(size_bytes, source, group=self._group, async_op=True), wait)
        received = (
            torch.empty(int(size_bytes), dtype=torch.uint8, device="cpu")
            if payload is None
            else _tensor(payload)
        )
        self._finish(dist.broadcast(received, source, group=self._group, async_op=True), wait)
        return received.numpy().tobytes()

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        def gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            self._finish(dist.all_gather(parts, own, group=self._group, async_op=True), wait)

        heads = _Heads.gathered(payload, self.size, gather)
        return heads.payloads or heads.gather_rest(gather)

    def _gather_bytes_on_rank0(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        def gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            self._finish(dist.all_gather(parts, own, group=self._group, async_op=True), wait)

        def gather_on_rank0(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            to = dist.get_global_rank(self._group, 0) if self._group is not None else 0
            self._finish(dist.gather(own, parts or None, to, group=self._group, async_op=True), wait)

        heads = _Heads.gathered(payload, self.size, gather)
        return heads.payloads or heads.gather_rest(gather_on_rank0, receives=self.rank == 0)


class TorchPointToPoint:
    """Point to point through gloo, whose waits release the GIL and the core."""

    def __init__(self, group: dist.ProcessGroup, host: str) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._place = f"rank {self.rank} on {host}"

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> TorchPendingTransfer:
        """Begin to send the whole of `buffer`."""
        return self._begin(dist.isend, buffer, group_dst=to, tag=tag)

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> TorchPendingTransfer:
        """Begin to fill the whole of `buffer`."""
        return self._begin(dist.irecv, buffer, group_src=source, tag=tag)

    def close(self) -> None:
        """End the group that was made for this transfer."""
        dist.destroy_process_group(self._group)

    def _begin(
        self, begin: Callable[..., dist.Work | None], buffer: memoryview, **ends: int
    ) -> TorchPendingTransfer:
        if not buffer.nbytes:
            return TorchPendingTransfer(None, self._place)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        try:
            return TorchPendingTransfer(begin(tensor, group=self._group, **ends), self._place)
        except RuntimeError as error:
            raise broken_connection(error, "a connection", self._place) from error


class TorchPendingTransfer:
    """One send or receive of gloo; None is one of no bytes."""

    def __init__(self, work: dist.Work | None, place: str) -> None:
        self._work = work
        self._place = place

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Return when the bytes have left, or arrived."""
        if self._work is None:
            return
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "imed out" in str(error):
                raise WaitTimeout(awaiting, timeout_s) from error
            raise broken_connection(error, awaiting, self._place) from error


def broken_connection(error: RuntimeError, awaiting: str, place: str) -> RankError:
    """The error of a connection that gloo lost."""
    return RankError(
        f"The connection between ranks broke while waiting for {awaiting}: {error}",
        where=place,
        fix="Look for a rank that died, or for a network that drops connections.",
    )


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def join_torchrun(environment: Environment, host: str) -> TorchComm:
    """Make the default group from the variables of torchrun, unless there is one already."""
    if not dist.is_available():
        raise Unavailable(
            "This torch was built without torch.distributed", fix="Install a torch wheel from its makers."
        )
    begins_here = not dist.is_initialized()
    if begins_here:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(  # type: ignore[attr-defined] # documented, but not in torch's stubs
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            world_size=size,
            is_master=rank == 0 and not agent_serves,
        )
        # A restarted job finds the agent's old store: its attempts must not meet each other's keys.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(f"penstock/{attempt}", store)  # type: ignore[attr-defined] # likewise
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=LONGEST_CALL)
    return TorchComm(host, at_close=dist.destroy_process_group if begins_here else None)


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
        self._last_work: Any = None

    def close(self) -> None:
        """Release the group; its threads and connections end with its last user."""
        if self._left_early is not None and self._group is not None:
            # Its end would wait for a call to which other ranks do not come: it ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = self._last_work = None

    def transfer(self) -> GroupTransfer:
        """Point-to-point transfers between the same ranks; gloo keeps them apart from collectives."""
        return GroupTransfer(self._group, f"rank {self.rank} on {self.host}")

    def _message_transfer(self) -> GroupTransfer:
        return self.transfer()

    def _finish(self, work: Any, wait: PollingWait) -> None:
        # Kept until the next one: let go of last by a thread of gloo, its tensors need the interpreter there,
        # and one that is about to end takes the process down with SIGABRT.
        self._last_work = work
        wait.until(work.is_completed)
        work.wait()

    def _move_nothing(self, wait: PollingWait) -> None:
        self._finish(self._group.allreduce([torch.zeros(1, device="cpu")]), wait)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        size_bytes = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64, device="cpu")
        self._finish(self._group.broadcast(size_bytes, 0), wait)
        received = _padded(int(size_bytes), payload)
        self._finish(self._group.broadcast(received, 0), wait)
        return received.numpy().tobytes()

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        def gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            self._finish(self._group.allgather([parts], [own]), wait)

        heads = _Heads.gathered(payload, self.size, gather)
        return heads.payloads or heads.gather_rest(gather)

    def _gather_bytes_on_rank0(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        def gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            self._finish(self._group.allgather([parts], [own]), wait)

        def gather_on_rank0(parts: list[torch.Tensor], own: torch.Tensor) -> None:
            self._finish(self._group.gather(parts, own, 0), wait)

        heads = _Heads.gathered(payload, self.size, gather)
        return heads.payloads or heads.gather_rest(gather_on_rank0, receives=self.rank == 0)


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


HEAD_BYTES: Final = 512
"""gloo gathers equal shapes alone. What each of few ranks gathers mostly fits into so many bytes with its
size, and travels once instead of after the sizes; of many ranks only sizes go first."""

Gather = Callable[[list[torch.Tensor], torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _Heads:
    """The sizes of all ranks' payloads, and the payloads if all are short."""

    payload: bytes
    sizes: list[int]
    payloads: list[bytes]

    @classmethod
    def gathered(cls, payload: bytes, num_ranks: int, gather: Gather) -> _Heads:
        """Begin to gather."""
        size_of = struct.Struct("<q")
        room = HEAD_BYTES - size_of.size if num_ranks < FAN_IN else 0
        parts = [torch.empty(size_of.size + room, dtype=torch.uint8, device="cpu") for _ in range(num_ranks)]
        gather(parts, _padded(size_of.size + room, size_of.pack(len(payload)) + payload[:room]))
        heads = [part.numpy().tobytes() for part in parts]
        sizes = [size_of.unpack_from(head)[0] for head in heads]
        are_whole = max(sizes) <= room
        texts = [head[size_of.size :][:size] for head, size in zip(heads, sizes, strict=True)]
        return cls(payload, sizes, texts if are_whole else [])

    def gather_rest(self, gather: Gather, *, receives: bool = True) -> list[bytes]:
        """All payloads, each sent with as many bytes as the longest has."""
        longest = max(self.sizes)
        sizes = self.sizes if receives else []
        parts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
        gather(parts, _padded(longest, self.payload))
        return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _padded(size_bytes: int, payload: bytes | None) -> torch.Tensor:
    """`payload`, padded with zeros to `size_bytes`."""
    padded = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return padded
