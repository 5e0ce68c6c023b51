"""A queue of reads and writes in the kernel: io_uring by its three system calls, without a library.

One thread keeps blocks of one file in flight. What comes next is planned ahead in the kernel's own memory,
many operations at once, and ends are read from there, many at once: between the two an operation costs no
more than its share of a system call. Invariants: a block of memory belongs to one operation from plan to end;
the ring is used by the thread that opened it, and ends are posted in its own calls, so that program order is
all the ordering it needs. What has begun and ended is counted by the kernel, in 32 bits: one ring is for
fewer than 2**32 operations, and more are an error.
"""

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StorageError, Unavailable
from penstock.storage.aligned import address_of
from penstock.storage.files.system_calls import libc, map_os_error

_SETUP: Final = 425
_ENTER: Final = 426
_REGISTER: Final = 427
"""Numbers of the system calls, the same on every architecture."""
_GET_EVENTS: Final = 1
_EXT_ARG: Final = 8
_REGISTER_BUFFERS: Final = 0
_COMPLETION_SLOTS: Final = 1 << 3
_SINGLE_ISSUER: Final = 1 << 12
_DEFER_TASKRUN: Final = 1 << 13
_NEEDED_FEATURES: Final = 1 | 1 << 8
"""One mapping for both queues, and waits with a limit: Linux 5.11."""
_ENTRIES_AT: Final = 0x1000_0000
_PARAMS: Final = struct.Struct("=30I")
_ENTRY: Final = np.dtype(
    {
        "names": ["code", "file", "offset", "address", "length", "tag"],
        "formats": ["u1", "i4", "u8", "u8", "u4", "u8"],
        "offsets": [0, 4, 8, 16, 24, 32],
        "itemsize": 64,
    }
)
_ENDED: Final = np.dtype([("tag", "u8"), ("moved", "i4"), ("flags", "u4")])
_BLOCK_BITS: Final = np.uint64(16)
_BLOCK_MASK: Final = np.uint64((1 << 16) - 1)
"""A tag is the number of an operation, and in its lowest bits that of its block of memory."""
_CODES: Final = {False: (22, 23), True: (4, 5)}
"""Read and write, into memory as it is, and into memory that the kernel has already looked up."""


class RequestRing:
    """Reads into and writes from `blocks` of memory, all of one size, of the file `descriptor`.

    At most `depth` operations may be in flight; all other blocks are for those that are planned. `uri` is for
    errors. `Unavailable` where the kernel has no io_uring, or forbids it. `turn` begins all operations before
    a number, waits for 0 or 1 ends, and returns how many have ended in all.
    """

    def __init__(self, descriptor: int, blocks: Sequence[memoryview], depth: int, uri: str) -> None:
        self._uri = uri
        self._block_bytes = blocks[0].nbytes
        self._addresses = np.array([address_of(block) for block in blocks], dtype=np.uint64)
        self.ahead = len(blocks) - depth
        self._free = np.arange(len(blocks), dtype=np.uint64)
        self._num_free = len(blocks)
        self._planned = self._collected = 0
        self._descriptor, params = _set_up(self.ahead, len(blocks))
        self._map(params)
        self._fields["file"][:], self._fields["length"][:] = descriptor, self._block_bytes
        self._codes = _CODES[self._register()]
        self._until = (ctypes.c_int64 * 2)()
        self.turn = self._make_turn()

    def _make_turn(self) -> Callable[[int, int], int]:
        """The call as a function that has all it needs at hand: to look that up was half of its cost.

        Arguments of the call that exist already cost half as much, too, as ones that are made for it.
        """
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        count = ctypes.c_long()
        ring = ctypes.c_long(_ENTER), ctypes.c_long(self._descriptor), count
        none, one = ((*ring, ctypes.c_long(fewest)) for fewest in (0, 1))
        plain = ctypes.c_long(_GET_EVENTS), ctypes.c_void_p(), ctypes.c_size_t()
        self._limit = (ctypes.c_uint64 * 3)(0, 0, ctypes.addressof(self._until))
        limit = ctypes.c_void_p(ctypes.addressof(self._limit)), ctypes.c_size_t(ctypes.sizeof(self._limit))
        ways = (*none, *plain), (*one, *plain), (*one, ctypes.c_long(_GET_EVENTS | _EXT_ARG), *limit)
        words, begun_at, tail_at = self._words, self._begun_at, self._tail_at
        head_at, ended_at = self._head_at, self._ended_at

        def turn(number: int, way: int) -> int:
            words[tail_at] = number
            count.value = number - words[begun_at]
            if call(*ways[way]) < 0:
                self._check(ctypes.get_errno())
            words[head_at] = ended = words[ended_at]
            return ended

        return turn

    def _map(self, params: tuple[int, ...]) -> None:
        submission, completion = params[10:20], params[20:30]
        slots, ends = params[:2]
        ring_bytes = max(submission[6] + slots * 4, completion[5] + ends * _ENDED.itemsize)
        self._memory = mmap.mmap(self._descriptor, (ring_bytes + 7) // 8 * 8)
        self._entry_memory = mmap.mmap(self._descriptor, slots * _ENTRY.itemsize, offset=_ENTRIES_AT)
        self._words = memoryview(self._memory).cast("I")
        self._begun_at, self._tail_at = submission[0] // 4, submission[1] // 4
        self._head_at, self._ended_at = completion[0] // 4, completion[1] // 4
        # Entries are taken in the order in which they lie.
        np.frombuffer(self._memory, np.uint32, slots, submission[6])[:] = np.arange(slots)
        entries = np.frombuffer(self._entry_memory, _ENTRY, slots)
        self._fields: dict[str, NDArray[np.generic]] = {name: entries[name] for name in _ENTRY.fields or ()}
        self._slots = slots
        self._ends = np.frombuffer(self._memory, _ENDED, ends, completion[5])

    def _register(self) -> bool:
        """Let the kernel look up the memory once; who may lock little memory goes without."""
        first, last = self._addresses.min(), self._addresses.max()
        vector = (ctypes.c_uint64 * 2)(int(first), int(last - first) + self._block_bytes)
        result: int = libc().syscall(_REGISTER, self._descriptor, _REGISTER_BUFFERS, vector, 1)
        return result == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is in flight, because the kernel moves it, then close."""
        begun = self._words[self._begun_at]
        while self._words[self._ended_at] < begun:
            self.turn(begun, 1)
        del self.turn
        self._words.release()
        self._fields.clear()
        del self._ends
        self._entry_memory.close()
        self._memory.close()
        os.close(self._descriptor)

    @property
    def room(self) -> int:
        """How many operations can be planned now, provided that all planned ones have begun."""
        return min(self.ahead, self._slots - self._planned % self._slots)

    def plan(self, offsets: NDArray[np.int64], is_write: NDArray[np.bool_]) -> NDArray[np.uint64]:
        """Prepare the next operations, as many as there is `room` for; the blocks that they move."""
        first, number = self._planned % self._slots, offsets.size
        self._num_free -= number
        # Blocks that were used last are still in the processor's cache.
        blocks = self._free[self._num_free : self._num_free + number].copy()
        read, write = self._codes
        values = {
            "code": np.where(is_write, write, read),
            "offset": offsets,
            "address": self._addresses[blocks],
            "tag": np.arange(self._planned, self._planned + number, dtype=np.uint64) << _BLOCK_BITS | blocks,
        }
        for name, value in values.items():
            self._fields[name][first : first + number] = value
        self._planned += number
        return blocks

    def turn_until(self, number: int, timeout_ns: int) -> int:
        """A turn that waits for an end, but no longer than this."""
        self._until[0], self._until[1] = divmod(max(timeout_ns, 0), 10**9)
        return self.turn(number, 2)

    def _check(self, reason: int) -> None:
        if reason not in (errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY):
            raise map_os_error(OSError(reason, os.strerror(reason)), "Moving a block", self._uri)

    def collect(self) -> NDArray[np.int64]:
        """The operations that ended since the last time, in order; an error if one did not move its block.

        To be called before each plan: ends are kept for so long, and their blocks are free from then on.
        """
        first, number = self._collected % self._ends.size, self._words[self._head_at] - self._collected
        ended = self._ends[first : first + number]
        if ended.size < number:
            ended = np.append(ended, self._ends[: number - ended.size])
        self._collected += number
        moved, tags = ended["moved"], ended["tag"]
        if not (moved == self._block_bytes).all():
            self._fail(int(moved[moved != self._block_bytes][0]))
        self._free[self._num_free : self._num_free + number] = tags & _BLOCK_MASK
        self._num_free += number
        return (tags >> _BLOCK_BITS).astype(np.int64)

    def _fail(self, moved: int) -> None:
        if moved < 0:
            raise map_os_error(OSError(-moved, os.strerror(-moved)), "Moving a block", self._uri)
        raise StorageError(
            f"Only {moved} bytes of a block moved",
            uri=self._uri,
            fix="Check that nothing truncates the file meanwhile.",
        )


def _set_up(slots: int, ends: int) -> tuple[int, tuple[int, ...]]:
    """The ring's descriptor and parameters; older kernels get fewer flags."""
    for flags in (_SINGLE_ISSUER | _DEFER_TASKRUN, 0):
        wanted = _PARAMS.pack(0, ends, flags | _COMPLETION_SLOTS, *[0] * 27)
        params = ctypes.create_string_buffer(wanted, _PARAMS.size)
        descriptor = libc().syscall(_SETUP, slots, params)
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
