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
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.cluster.comm import Comm, PollingWait, broken_connection
from penstock.environment import Environment
from penstock.errors import Unavailable, UsageError, WaitTimeout

LONGEST_CALL = timedelta(days=7)
"""gloo's own limit, which must not come first: each call of a `Comm` has one of its own."""

HEAD_BYTES: Final = 512
"""gloo moves equal shapes only. A short payload travels with its size in one message of this many bytes; a
long one follows in a second message, padded to the longest."""
_SIZE: Final = struct.Struct("<q")
_ROOM: Final = HEAD_BYTES - _SIZE.size
_BROADCAST: Final = struct.Struct("<qq")
"""The head of a scatter: the size of this rank's part, and the size of the message that follows; -1: the
part follows in a broadcast."""


class TorchComm(Comm):
    """All ranks of `group`, which stays the caller's unless `at_close` ends it."""

    def __init__(self, host: str, group: Any = None, *, at_close: Callable[[], None] | None = None) -> None:
        if group is None or isinstance(group, dist.ProcessGroup):
            group = _require_gloo(group)
        super().__init__(group.rank(), group.size(), host)
        self.carrier = f"torch.distributed of torch {torch.__version__}"
        self._group: Any = group
        self._at_close = at_close
        self._last_work: Any = None

    def close(self) -> None:
        """Release the group, and end it if it was made for this communicator; collective."""
        if self._at_close is not None:
            self._at_close()
        if self._left_early is not None and self._group is not None:
            # Its end would wait for a call to which other ranks do not come: it ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = self._last_work = None

    def transfer(self) -> TorchPointToPoint:
        """Open transfers in the same group; gloo keeps them apart from collectives."""
        return TorchPointToPoint(self._group, f"rank {self.rank} on {self.host}")

    def _finish(self, work: Any, wait: PollingWait) -> None:
        # Kept until the next one: let go of last by a thread of gloo, its tensors need the interpreter there,
        # and one that is about to end takes the process down with SIGABRT.
        self._last_work = work
        wait.until(work.is_completed)
        work.wait()

    def _move_nothing(self, wait: PollingWait) -> None:
        self._finish(self._group.allreduce([torch.zeros(1, device="cpu")]), wait)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        head = _padded(HEAD_BYTES, b"" if payload is None else _SIZE.pack(len(payload)) + payload[:_ROOM])
        self._finish(self._group.broadcast(head, 0), wait)
        content = head.numpy().tobytes()
        (size_bytes,) = _SIZE.unpack_from(content)
        if size_bytes <= _ROOM:
            return content[_SIZE.size : _SIZE.size + size_bytes]
        return self._broadcast_rest(size_bytes, payload, wait)

    def _broadcast_rest(self, size_bytes: int, payload: bytes | None, wait: PollingWait) -> bytes:
        whole = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        if payload is not None:
            whole = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._finish(self._group.broadcast(whole, 0), wait)
        return payload if payload is not None else whole.numpy().tobytes()

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        def gather(content: bytes, size_bytes: int) -> list[torch.Tensor]:
            parts = [torch.empty(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
            self._finish(self._group.allgather([parts], [_padded(size_bytes, content)]), wait)
            return parts

        heads = gather(_SIZE.pack(len(payload)) + payload[:_ROOM], HEAD_BYTES)
        sizes = [_size_in(head) for head in heads]
        if max(sizes) <= _ROOM:
            return _cut(heads, sizes, _SIZE.size)
        return _cut(gather(payload, max(sizes)), sizes)

    def _gather_bytes_on_rank0(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        # All ranks have to know whether a second message follows, and of which size.
        largest = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        self._finish(self._group.allreduce([largest], dist.ReduceOp.MAX), wait)
        size_bytes = _SIZE.size + int(largest[0])
        num_parts = self.size if self.rank == 0 else 0
        parts = [torch.empty(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(num_parts)]
        self._finish(
            self._group.gather(parts, _padded(size_bytes, _SIZE.pack(len(payload)) + payload), 0), wait
        )
        return _cut(parts, [_size_in(part) for part in parts], _SIZE.size)

    def _scatter_bytes(self, payloads: Sequence[bytes] | None, wait: PollingWait) -> bytes:
        def scatter(size_bytes: int, contents: Sequence[bytes]) -> bytes:
            own = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            self._finish(
                self._group.scatter(own, [_padded(size_bytes, content) for content in contents], 0), wait
            )
            return own.numpy().tobytes()

        heads, longest = [], max(map(len, payloads or ()), default=0)
        if payloads is not None:
            is_same = all(part is payloads[0] for part in payloads)
            follows = 0 if longest <= HEAD_BYTES - _BROADCAST.size else -1 if is_same else longest
            heads = [
                _BROADCAST.pack(len(part), follows) + part[: HEAD_BYTES - _BROADCAST.size]
                for part in payloads
            ]
        head = scatter(HEAD_BYTES, heads)
        size_bytes, follows = _BROADCAST.unpack_from(head)
        if follows == 0:
            return head[_BROADCAST.size : _BROADCAST.size + size_bytes]
        if follows == -1:
            return self._broadcast_rest(size_bytes, payloads[0] if payloads else None, wait)
        return scatter(follows, payloads or ())[:size_bytes]


def _require_gloo(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one, if it can send main memory."""
    if not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialized", fix="Call init_process_group before joining."
        )
    if "gloo" not in str(dist.get_backend_config(group)):
        raise UsageError(
            f"The process group uses {dist.get_backend(group)}, which cannot send main memory",
            fix='Pass torch.distributed.new_group(backend="gloo").',
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None, "torch.distributed is initialized"
    return group


def _padded(size_bytes: int, content: bytes) -> torch.Tensor:
    """`content`, padded with zeros to `size_bytes`."""
    padded = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return padded


def _size_in(head: torch.Tensor) -> int:
    """The size that a message begins with."""
    return int(head[: _SIZE.size].view(torch.int64)[0])


def _cut(parts: Sequence[torch.Tensor], sizes: Sequence[int], begin: int = 0) -> list[bytes]:
    """Each part without what it was padded with."""
    return [part[begin : begin + size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


class TorchPointToPoint:
    """Point-to-point transfers through gloo, whose waits release the GIL and the core."""

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


class TorchPendingTransfer:
    """One send or receive of gloo; None for one of no bytes."""

    def __init__(self, work: Any, place: str) -> None:
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
    # Each rank counts its groups; ranks make their common groups in the same order, so their counts agree.
    number = store.add(f"{name}/{dist.get_rank()}", 1)
    own_store = dist.PrefixStore(f"{name}/{number}/", store)  # type: ignore[attr-defined] # not in torch's stubs
    group_of = getattr(dist, "ProcessGroupGloo")  # noqa: B009 - likewise
    return group_of(own_store, list(ranks).index(dist.get_rank()), len(ranks), LONGEST_CALL)
