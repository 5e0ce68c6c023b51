"""Ranks under torch.distributed: the default group, a trainer's group, or one that its ranks create.

Messages are tensors in main memory, so the group needs a gloo backend. If only some ranks create a group,
`torch.distributed.new_group` names it by the number of groups that each of them has. Ranks with different
numbers then never find each other, and a reused name leads to dead addresses. `make_group` avoids both.
Invariants: torch's own errors become `RankError`s; no two groups created here in a job have the same name,
and only the ranks of a group take part in creating it.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.cluster.comm import Comm, PollingWait, broken_connection, format_cause
from penstock.environment import Environment
from penstock.errors import RankFailed, Unavailable, UsageError, WaitTimeout, name_some

LONGEST_CALL = timedelta(days=7)
"""gloo's own limit, which must never be the first to pass, because each call of a `Comm` has its own limit.
"""
HEAD_BYTES = 504
"""The part of a payload that travels together with its size. Most payloads of a save fit into it."""


class TorchComm(Comm):
    """All ranks of `group`, which belongs to the caller unless `at_close` ends it."""

    def __init__(self, host: str, group: Any = None, *, at_close: Callable[[], None] | None = None) -> None:
        if group is None or isinstance(group, dist.ProcessGroup):
            group = _require_gloo(group)
        super().__init__(group.rank(), group.size(), host)
        self.carrier = f"torch.distributed of torch {torch.__version__}"
        self._group: Any = group
        self._at_close = at_close
        self._last_work: Any = None

    def close(self) -> None:
        """Release the group, and end it if it was created for this communicator. Collective."""
        if self._at_close is not None:
            self._at_close()
        if self._left_early is not None and self._group is not None:
            # Ending the group would wait for a call that other ranks do not make, so it lives until the
            # process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = self._last_work = None

    def transfer(self) -> TorchPointToPoint:
        """Open transfers in the same group. gloo keeps them apart from collectives."""
        return TorchPointToPoint(self._group, f"rank {self.rank} on {self.host}")

    def _finish(self, work: Any, wait: PollingWait) -> None:
        # Kept until the next call. If a thread of gloo released it last, freeing its tensors would need the
        # interpreter in that thread, and if the interpreter is about to end, the process would abort with
        # SIGABRT.
        self._last_work = work
        wait.until(work.is_completed)
        work.wait()

    def _move_nothing(self, wait: PollingWait) -> None:
        self._finish(self._group.allreduce([torch.zeros(1, device="cpu")]), wait)

    # gloo transfers only equal shapes. Heads travel first: each has the size of a payload and its first
    # bytes, which are all of a short payload. Longer payloads follow, padded to the longest.

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        head = _make_head(payload or b"")
        self._finish(self._group.broadcast(head, 0), wait)
        size_bytes, beginning = _read_head(head)
        if size_bytes <= HEAD_BYTES:
            return beginning
        whole = _padded(payload or b"", size_bytes)
        self._finish(self._group.broadcast(whole, 0), wait)
        return whole.numpy().tobytes() if payload is None else payload

    def _gather_bytes(self, payload: bytes, wait: PollingWait, *, only_on_rank0: bool) -> list[bytes]:
        heads = [_make_head(b"") for _ in range(self.size)]
        self._finish(self._group.allgather([heads], [_make_head(payload)]), wait)
        read = [_read_head(head) for head in heads]
        longest = max(size_bytes for size_bytes, _ in read)
        if longest <= HEAD_BYTES:
            return [beginning for _, beginning in read]
        parts = [_padded(b"", longest) for _ in read]
        whole = _padded(payload, longest)
        if only_on_rank0:
            parts = parts if self.rank == 0 else []
            self._finish(self._group.gather(parts, whole, 0), wait)
        else:
            self._finish(self._group.allgather([parts], [whole]), wait)
        return [
            part[:size_bytes].numpy().tobytes() for part, (size_bytes, _) in zip(parts, read, strict=False)
        ]

    def _scatter_bytes(
        self, payloads: Sequence[bytes] | None, sizes: Sequence[int], wait: PollingWait
    ) -> bytes:
        own = _padded(b"", max(sizes))
        parts = [_padded(part, max(sizes)) for part in payloads or ()]
        self._finish(self._group.scatter(own, parts, 0), wait)
        return own[: sizes[self.rank]].numpy().tobytes()


def _require_gloo(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or else the default one, if it can send main memory."""
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


def _padded(content: bytes, size_bytes: int) -> torch.Tensor:
    """Return `content`, padded with zeros to `size_bytes`."""
    padded = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return padded


def _make_head(payload: bytes) -> torch.Tensor:
    return _padded(len(payload).to_bytes(8) + payload[:HEAD_BYTES], 8 + HEAD_BYTES)


def _read_head(head: torch.Tensor) -> tuple[int, bytes]:
    """Return the size of a payload, and its first bytes."""
    content = head.numpy().tobytes()
    size_bytes = int.from_bytes(content[:8])
    return size_bytes, content[8 : 8 + size_bytes]


class TorchPointToPoint:
    """Point-to-point transfers through gloo, whose waits release the GIL and the core."""

    def __init__(self, group: Any, place: str) -> None:
        self._group: Any = group
        self._place = place

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> TorchPendingTransfer:
        """Begin to send all of `buffer`."""
        return self._begin("send", buffer, to, tag)

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> TorchPendingTransfer:
        """Begin to fill all of `buffer`."""
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
    """One send or receive of gloo. `work` is None if there are no bytes to transfer."""

    def __init__(self, work: Any, place: str) -> None:
        self._work = work
        self._place = place

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Wait until the bytes have been sent or received."""
        if self._work is None:
            return
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if "imed out" in str(error):
                raise WaitTimeout(awaiting, timeout_s) from error
            raise broken_connection(error, awaiting, self._place) from error


def join_torchrun(environment: Environment, host: str) -> TorchComm:
    """Create the default group from torchrun's variables, unless it exists already."""
    if not dist.is_available():
        raise Unavailable(
            "This torch was built without torch.distributed", fix="Install an official wheel of torch."
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
        # A restarted job finds the agent's old store, in which attempts must not see each other's keys.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(f"penstock/{attempt}", store)  # type: ignore[attr-defined] # likewise
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=LONGEST_CALL)
    return TorchComm(host, at_close=dist.destroy_process_group if begins_here else None)


def make_group(ranks: Sequence[int], timeout_s: float) -> Any:
    """Create a gloo group of these ranks, numbered as in the job. Collective over them.

    gloo waits for all ranks without noticing signals, so it is only called once all have arrived. If a rank
    leaves before that, the others raise `RankFailed`.
    """
    name = "penstock/" + hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    store, own_rank = _get_default_store(), dist.get_rank()
    # Each rank counts its groups. Ranks create their common groups in the same order, so their counts agree.
    number = store.add(f"{name}/{own_rank}", 1)
    own_store = dist.PrefixStore(f"{name}/{number}/", store)  # type: ignore[attr-defined] # not in torch's stubs
    group_of = getattr(dist, "ProcessGroupGloo")  # noqa: B009 - as above
    make = partial(group_of, own_store, list(ranks).index(own_rank), len(ranks), LONGEST_CALL)
    try:
        _await_all(own_store, ranks, timeout_s)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        left = f"{own_rank} {gethostname()} it left while the ranks made a group: {format_cause(error)}"
        with suppress(RuntimeError):
            # If all arrived first, gloo waits for this rank on the others, where nothing could end it.
            if own_store.compare_set(_SETTLED, "", left) == _ALL_ARRIVED.encode():
                make()
        raise
    return make()


_LONGEST_WAIT_S = 0.2
"""The limit of one wait in the store, during which no signal is noticed."""
_SETTLED, _ALL_ARRIVED = "settled", "all arrived"
"""A key that is set once: to this value by the last rank to arrive, or by a rank that leaves before that."""


def _await_all(store: Any, ranks: Sequence[int], timeout_s: float) -> None:
    """Wait until all of these ranks have called this function. `WaitTimeout` names those that have not."""
    began_s = time.monotonic()
    awaiting, place = "all ranks to make a group", f"rank {dist.get_rank()}"
    try:
        store.add(f"arrived/{dist.get_rank()}", 1)
        if store.add("arrived", 1) == len(ranks):
            store.compare_set(_SETTLED, "", _ALL_ARRIVED)
        while not store.check([_SETTLED]):
            left_s = began_s + timeout_s - time.monotonic()
            if left_s <= 0:
                absent = [rank for rank in ranks if not store.check([f"arrived/{rank}"])]
                raise WaitTimeout(awaiting, timeout_s, where=f"absent: ranks {name_some(absent)}")
            with suppress(RuntimeError):
                store.wait([_SETTLED], timedelta(seconds=min(left_s, _LONGEST_WAIT_S)))
        settled = store.get(_SETTLED).decode()
    except RuntimeError as error:
        raise broken_connection(error, awaiting, place) from error
    if settled != _ALL_ARRIVED:
        rank, host, cause = settled.split(" ", 2)
        raise RankFailed(int(rank), host, cause)
