"""A queue of reads and writes in the kernel: io_uring by its three system calls, without a library.

One thread keeps up to `slots` blocks in flight. Each slot has its entry of the submission queue and its
buffer for good; only the operation and the offset are written anew. Invariant: the ring is used by the thread
that opened it, and completions are posted in its own calls, so that program order is all the ordering it
needs.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final, Self

from penstock.errors import StorageError, Unavailable
from penstock.storage.aligned import address_of
from penstock.storage.files.system_calls import map_os_error

_SETUP: Final = 425
_ENTER: Final = 426
"""Numbers of the system calls, the same on every architecture."""
_GET_EVENTS: Final = 1
_EXT_ARG: Final = 8
_SINGLE_ISSUER: Final = 1 << 12
_DEFER_TASKRUN: Final = 1 << 13
_NEEDED_FEATURES: Final = 1 | 1 << 8
"""One mapping for both queues, and waits with a limit: Linux 5.11."""
_SQES_AT: Final = 0x1000_0000
_PARAMS: Final = struct.Struct("=30I")
_SQE: Final = struct.Struct("=BBHiQQIIQ")
_SQE_BYTES: Final = 64
_CQE_BYTES: Final = 16
READ: Final = 22
WRITE: Final = 23


class RequestRing:
    """Reads into and writes from `buffers`, one a slot, of the file `descriptor`; `uri` is for errors.

    `Unavailable` where the kernel has no io_uring, or forbids it.
    """

    def __init__(self, descriptor: int, buffers: Sequence[memoryview], uri: str) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        # All of full width: what an integer leaves of its register or its place on the stack is not zero.
        self._call.argtypes = (*[ctypes.c_long] * 5, ctypes.c_char_p, ctypes.c_size_t)
        self._call.restype = ctypes.c_long
        self._uri = uri
        self._buffers = buffers
        self._in_flight = 0
        self._pending = 0
        self._tail = self._head = 0
        self._descriptor, params = _set_up(len(buffers))
        submission, completion = params[10:20], params[20:30]
        ring_bytes = max(submission[6] + params[0] * 4, completion[5] + params[1] * _CQE_BYTES)
        self._memory = mmap.mmap(self._descriptor, (ring_bytes + 7) // 8 * 8)
        self._entries = mmap.mmap(self._descriptor, params[0] * _SQE_BYTES, offset=_SQES_AT)
        for slot, buffer in enumerate(buffers):
            entry = (READ, 0, 0, descriptor, 0, address_of(buffer), buffer.nbytes, 0, slot)
            _SQE.pack_into(self._entries, slot * _SQE_BYTES, *entry)
        self._codes = memoryview(self._entries)
        self._offsets = self._codes.cast("Q")
        words = memoryview(self._memory)
        self._words, self._results, self._tags = words.cast("I"), words.cast("i"), words.cast("Q")
        self._tail_at, self._order_at = submission[1] // 4, submission[6] // 4
        self._mask = self._words[submission[2] // 4]
        self._head_at, self._done_at = completion[0] // 4, completion[1] // 4
        self._done_mask = self._words[completion[2] // 4]
        self._done_from = completion[5]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is in flight, because the kernel moves it, then close."""
        self._pending = 0  # what was queued and not begun never is
        while self._in_flight:
            self._enter(1, None)
            self._reap()
        for view in (self._offsets, self._codes, self._words, self._results, self._tags):
            view.release()
        self._entries.close()
        self._memory.close()
        os.close(self._descriptor)

    def queue(self, slot: int, operation: int, offset: int) -> None:
        """Prepare `READ` or `WRITE` of a whole slot at an offset; the next `wait` begins it."""
        self._codes[slot * _SQE_BYTES] = operation
        self._offsets[slot * (_SQE_BYTES // 8) + 1] = offset
        self._words[self._order_at + (self._tail & self._mask)] = slot
        self._tail += 1
        self._pending += 1

    def wait(self, fewest: int, timeout_ns: int | None = None) -> list[int]:
        """Begin what was queued, wait for `fewest` ends or until the time is over: the slots that ended."""
        self._words[self._tail_at] = self._tail & 0xFFFF_FFFF
        self._enter(fewest, timeout_ns)
        ended = self._reap()
        for slot, moved in ended:
            if moved != self._buffers[slot].nbytes:
                self._fail(moved)
        return [slot for slot, _ in ended]

    def _reap(self) -> list[tuple[int, int]]:
        """The slots that ended, and what each moved: bytes, or an error's number below zero."""
        head, tail = self._head, self._words[self._done_at]
        ended: list[tuple[int, int]] = []
        while head != tail:
            at = self._done_from + (head & self._done_mask) * _CQE_BYTES
            ended.append((self._tags[at >> 3], self._results[(at >> 2) + 2]))
            head = (head + 1) & 0xFFFF_FFFF
        self._words[self._head_at] = self._head = head
        self._in_flight -= len(ended)
        return ended

    def _enter(self, fewest: int, timeout_ns: int | None) -> None:
        flags, argument, until = _GET_EVENTS, None, b""
        if timeout_ns is not None:
            until = struct.pack("=qq", *divmod(max(timeout_ns, 0), 10**9))
            flags, argument = _GET_EVENTS | _EXT_ARG, struct.pack("=QIIQ", 0, 0, 0, _address(until))
        result = self._call(
            _ENTER, self._descriptor, self._pending, fewest, flags, argument, len(argument or b"")
        )
        if result >= 0:
            self._pending -= result
            self._in_flight += result
            return
        number = ctypes.get_errno()
        if number not in (errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY):
            raise map_os_error(OSError(number, os.strerror(number)), "Moving a block of", self._uri)

    def _fail(self, moved: int) -> None:
        if moved < 0:
            raise map_os_error(OSError(-moved, os.strerror(-moved)), "Moving a block of", self._uri)
        raise StorageError(
            f"Only {moved} bytes of a block moved",
            uri=self._uri,
            fix="Check that nothing truncates the file meanwhile.",
        )


def _address(content: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0


def _set_up(slots: int) -> tuple[int, tuple[int, ...]]:
    """The ring's descriptor and parameters; older kernels get fewer flags."""
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_SINGLE_ISSUER | _DEFER_TASKRUN, 0):
        params = ctypes.create_string_buffer(_PARAMS.pack(0, 0, flags, *[0] * 27), _PARAMS.size)
        descriptor = libc.syscall(_SETUP, slots, params)
        if descriptor >= 0:
            values = _PARAMS.unpack(params.raw)
            if values[5] & _NEEDED_FEATURES == _NEEDED_FEATURES:
                return descriptor, values
            os.close(descriptor)
            number = errno.ENOSYS
        else:
            number = ctypes.get_errno()
        if number != errno.EINVAL:
            break
    raise Unavailable(
        f"This kernel gives no io_uring: {os.strerror(number)}",
        where="io_uring_setup",
        fix="Ask for sysctl kernel.io_uring_disabled=0 and a container profile that allows it, or leave it.",
    )
