"""Collective operations as rounds of messages, for jobs of many ranks: trees, and tables that are routed.

Each operation is a generator: it yields a `Round` (what this rank sends, and whom it hears from) and is sent
the messages that it received. `BaseComm.run` carries them between processes; a simulation carries those of
thousands of ranks within one. Invariant: in one round no rank hears from more than `FAN_IN` others, and no
rank receives more than what it or those behind it on a route asked for.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from penstock.errors import PenstockError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.cluster.comm import PointToPoint

    Ints = NDArray[np.int64]

Result = TypeVar("Result")
Number = TypeVar("Number", int, float)

Reduction = Literal["sum", "min", "max"]

FAN_IN = 64
"""Two hops of a route then serve 4,096 ranks, three 262,144."""

FEW_RANKS = 16
"""Up to so many, one rank may hear all others at a time."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank sends, and the ranks that it receives one message each from."""

    sends: Sequence[tuple[int, bytes]] = ()
    sources: Sequence[int] = ()
    size_bytes: int | None = None
    """Of each of these messages; None: they differ, and say it themselves."""


Rounds = Generator[Round, list[bytes], Result]


def reduce_values(values: list[Number], op: Reduction) -> Number:
    """`values` combined in rank order: the same bits on every rank and in every run."""
    folds: dict[str, Callable[[list[Number]], Number]] = {"sum": sum, "min": min, "max": max}
    if op not in folds:
        raise UsageError(f"{op!r} is not a reduction", fix=f"Use one of {', '.join(folds)}.")
    return folds[op](values)


class Carrying(Generic[Result]):
    """An operation whose messages are being carried."""

    def __init__(self, rounds: Rounds[Result]) -> None:
        self._rounds = rounds
        self._results: list[Result] = []
        self._refusal: PenstockError | None = None
        self.round: Round | None = None
        """The next one; None after the last."""

    def advance(self, received: list[bytes] | None) -> None:
        """Let the operation use what was received, and say what is next."""
        self.round = None
        try:
            self.round = next(self._rounds) if received is None else self._rounds.send(received)
        except StopIteration as stop:
            self._results.append(stop.value)
        except PenstockError as error:
            self._refusal = error

    def run(self, move: Callable[[Round], list[bytes]]) -> None:
        """Carry all messages by `move`, which sends and receives those of a round."""
        while self.round is not None:
            self.advance(move(self.round))

    def result(self) -> Result:
        """What the operation returned, or the error that it raised on all ranks."""
        if self._refusal is not None:
            raise self._refusal
        return self._results[0]


BEGINNING = "all ranks to begin "
"""How what is awaited begins where ranks have yet to tell each other which call they make."""

CARRIED, NUM_TAGS = 20_011, 8_192
"""Tags of messages of `BaseComm.carry`. Other transfers between the same ranks use small numbers, and MPI
promises tags up to 32,767."""


def name_call(number: int, awaiting: str) -> int:
    """A number that differs between calls: ranks that are in different ones must not hear each other."""
    about = BEGINNING if awaiting.startswith(BEGINNING) else awaiting
    return zlib.crc32(f"{number} {about}".encode())


_SIZE = struct.Struct("<q")


def move_messages(
    transfer: PointToPoint, round_: Round, *, call: int, awaiting: str, timeout_s: float
) -> list[bytes]:
    """Send and receive the messages of one round of `call`; sizes travel first where they differ."""
    tag = CARRIED + call % NUM_TAGS

    def move(sends: list[tuple[int, bytes]], sizes: list[tuple[int, int]]) -> list[bytearray]:
        buffers = [bytearray(size) for _, size in sizes]
        pending = [
            transfer.receive(source, memoryview(buffer), tag=tag)
            for (source, _), buffer in zip(sizes, buffers, strict=True)
        ]
        pending += [transfer.send(to, memoryview(bytearray(content)), tag=tag) for to, content in sends]
        for each in pending:
            each.wait(awaiting=awaiting, timeout_s=timeout_s)
        return buffers

    if round_.size_bytes is not None:
        sizes = [(source, round_.size_bytes) for source in round_.sources]
        return [bytes(buffer) for buffer in move(list(round_.sends), sizes)]
    heads = move(
        [(to, _SIZE.pack(len(content))) for to, content in round_.sends],
        [(source, _SIZE.size) for source in round_.sources],
    )
    sizes = [(source, _SIZE.unpack(head)[0]) for source, head in zip(round_.sources, heads, strict=True)]
    moved = iter(move([each for each in round_.sends if each[1]], [each for each in sizes if each[1]]))
    return [bytes(next(moved)) if size else b"" for _, size in sizes]


def combine(
    rank: int,
    size: int,
    own: bytes,
    merge: Callable[[bytes, bytes], bytes],
    conclude: Callable[[bytes], bytes] = lambda total: total,
    *,
    sizes_bytes: tuple[int | None, int | None] = (None, None),
) -> Rounds[bytes]:
    """What `conclude` makes of all ranks' values, merged in any order, on every rank.

    Through a tree in which each rank has two others below it: 2 values up and 1 down are received at most. Of
    few ranks all others are right below rank 0, which takes the fewest steps. `sizes_bytes` are those of a
    value and of the conclusion, if they are the same everywhere.
    """
    size_up, size_down = sizes_bytes
    below = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
    if size <= FEW_RANKS:
        below = [] if rank else list(range(1, size))
    total = own
    if below:
        for value in (yield Round((), below, size_up)):
            total = merge(total, value)
    if rank:
        above = (rank - 1) // 2 if size > FEW_RANKS else 0
        yield Round([(above, total)], (), size_up)
        (answer,) = yield Round((), [above], size_down)
    else:
        answer = conclude(total)
    if below:
        yield Round([(child, answer) for child in below], (), size_down)
    return answer


def lowest_of_all(rank: int, size: int, own: bytes) -> Rounds[bytes]:
    """The lowest of the values that are not b"", compared byte by byte, on every rank."""

    def merge(one: bytes, other: bytes) -> bytes:
        return min(filter(None, (one, other)), default=b"")

    return (yield from combine(rank, size, own, merge))


def first_of_all(rank: int, size: int, own: bytes) -> Rounds[bytes]:
    """The value of the lowest rank that has one (not b""), on every rank."""
    total = yield from lowest_of_all(rank, size, struct.pack(">Q", rank) + own if own else b"")
    return total[8:]


def tell_rank0(rank: int, size: int, own: bytes) -> Rounds[list[bytes]]:
    """The values of all of a few ranks on rank 0, which hears all at a time; nothing elsewhere."""
    if rank:
        yield Round([(0, own)])
        return []
    return [own, *(yield Round((), range(1, size)))]


def tell_all(rank: int, size: int, own: bytes) -> Rounds[bytes]:
    """Rank 0's value on every one of a few ranks, for which rank 0 does not wait."""
    if rank:
        (own,) = yield Round((), [0])
    else:
        yield Round([(other, own) for other in range(1, size)])
    return own


def from_rank0(rank: int, size: int, value: bytes, same: str = "") -> Rounds[bytes]:
    """Rank 0's value, on every rank once all have called; `UsageError` unless all gave the `same`."""
    own = _digest(same)

    def merge(one: bytes, other: bytes) -> bytes:
        return one if one == other else bytes(len(own))

    def conclude(total: bytes) -> bytes:
        return b"\1" + value if total == own else b"\0"

    answer = yield from combine(rank, size, own, merge, conclude, sizes_bytes=(len(own), None))
    if answer == b"\0":
        yield from _refuse_others(rank, size, same)
    return answer[1:]


def any_failed(rank: int, size: int, *, has_failed: bool, same: str = "") -> Rounds[bool]:
    """Whether one of the ranks has failed; `UsageError` if none has, but not all gave the `same`."""
    if same and (yield from all_equal(rank, size, _digest(same), is_known=not has_failed)):
        return False
    is_any = yield from any_of_all(rank, size, own=has_failed)
    if same and not is_any:
        yield from _refuse_others(rank, size, same)
    return is_any


def _digest(same: str) -> bytes:
    return hashlib.sha256(same.encode()).digest()[:8] if same else b"-"


def _refuse_others(rank: int, size: int, own: str) -> Rounds[None]:
    given = [text.decode() for text in (yield from all_of_all(rank, size, own.encode()))]
    other = next(number for number, text in enumerate(given) if text != given[0])
    raise UsageError(
        f"The ranks gave different folders: rank 0 {given[0]}, rank {other} {given[other]}",
        fix="Give the same path on all ranks; where hosts mount it elsewhere, make a link.",
    )


def from_first(rank: int, ranks: Sequence[int], value: bytes) -> Rounds[bytes]:
    """The value of the first of some ranks, on all of them; each of them names the same `ranks`."""
    place = ranks.index(rank)
    if place:
        (value,) = yield Round((), [ranks[(place - 1) // 2]])
    below = [ranks[child] for child in (2 * place + 1, 2 * place + 2) if child < len(ranks)]
    if below:
        yield Round([(child, value) for child in below])
    return value


def all_of_all(rank: int, size: int, own: bytes) -> Rounds[list[bytes]]:
    """Every rank's bytes, on every rank, in the order of the ranks: for a few bytes of each."""
    told = yield from route_texts(rank, size, [(0, own)])
    packed = b"".join(struct.pack("<I", len(text)) + text for _, text in told)
    packed = zlib.decompress((yield from from_rank0(rank, size, zlib.compress(packed, 1))))
    found, at = [], 0
    while at < len(packed):
        begin = at + 4
        at = begin + int.from_bytes(packed[at:begin], "little")
        found.append(packed[begin:at])
    return found


def any_of_all(rank: int, size: int, *, own: bool) -> Rounds[bool]:
    """Whether it is true on some rank: one byte from each."""
    return (yield from mask_of_all(rank, size, int(own))) != 0


def all_equal(rank: int, size: int, own: bytes, *, is_known: bool = True) -> Rounds[bool]:
    """Whether all ranks have the same bytes, of one length, and none says that its own are not known."""
    differ = bytes(len(own) + 1)

    def merge(one: bytes, other: bytes) -> bytes:
        return one if one == other else differ

    return (
        yield from combine(
            rank,
            size,
            b"\1" + own if is_known else differ,
            merge,
            lambda total: total[:1],
            sizes_bytes=(len(differ), 1),
        )
    ) == b"\1"


def mask_of_all(rank: int, size: int, own: int, *, num_bytes: int = 1) -> Rounds[int]:
    """The bits that some rank has set."""

    def merge(one: bytes, other: bytes) -> bytes:
        return (int.from_bytes(one) | int.from_bytes(other)).to_bytes(num_bytes)

    total = yield from combine(rank, size, own.to_bytes(num_bytes), merge, sizes_bytes=(num_bytes, num_bytes))
    return int.from_bytes(total)


def largest_of_all(rank: int, size: int, own: Sequence[int]) -> Rounds[list[int]]:
    """The largest of each number."""
    layout = struct.Struct(f"<{len(own)}q")

    def merge(one: bytes, other: bytes) -> bytes:
        return layout.pack(*map(max, layout.unpack(one), layout.unpack(other)))

    total = yield from combine(rank, size, layout.pack(*own), merge, sizes_bytes=(layout.size, layout.size))
    return list(layout.unpack(total))


def count_before(rank: int, size: int, own: Sequence[int]) -> Rounds[list[tuple[int, int]]]:
    """Of each number, the sum over all lower ranks, and that over all ranks."""
    import numpy as np  # noqa: PLC0415 - commands that only speak of ranks start without it

    to_first, width = np.zeros(1, dtype=np.int64), len(own)
    counts = yield from route(rank, size, to_first, np.array([[rank, *own]], dtype=np.int64))
    answers, ranks = np.zeros((0, 2 * width), dtype=np.int64), to_first[:0]
    if rank == 0:
        counts = counts[np.argsort(counts[:, 0])]
        ends, ranks = np.cumsum(counts[:, 1:], axis=0), counts[:, 0]
        answers = np.concatenate([ends - counts[:, 1:], np.broadcast_to(ends[-1], ends.shape)], axis=1)
    answer = yield from route(rank, size, ranks, answers)
    sums: list[int] = answer[0].tolist()
    return list(zip(sums[:width], sums[width:], strict=True))


def route(rank: int, size: int, to: Ints, rows: Ints) -> Rounds[Ints]:
    """Send each row to the rank in `to`; the rows for this rank, in no particular order.

    The distance to go is written in digits of base `FAN_IN`, and each hop takes the next digit. So every rank
    has at most 63 neighbours in a hop, for any number of ranks.
    """
    import numpy as np  # noqa: PLC0415 - commands that only speak of ranks start without it

    table = np.concatenate([np.asarray(to)[:, None], rows], axis=1)
    del to, rows
    step = 1
    while step < size:
        digit = (table[:, 0] - rank) % size // step % FAN_IN
        table = table[np.argsort(digit, kind="stable")]
        ends = np.cumsum(np.bincount(digit, minlength=FAN_IN)).tolist()
        digits = range(1, min(FAN_IN, (size - 1) // step + 1))
        sends = [
            ((rank + number * step) % size, _packed(table[ends[number - 1] : ends[number]]))
            for number in digits
        ]
        kept = table[: ends[0]].copy()
        del table
        received = yield Round(sends, [(rank - number * step) % size for number in digits])
        del sends
        parts = [_unpacked(message, kept.shape[1]) for message in received if message]
        table = np.concatenate([kept, *parts]) if parts else kept
        step *= FAN_IN
    return table[:, 1:]


def _packed(table: Ints) -> bytes:
    """As bytes, in four bytes a number if all fit; the last byte says so."""
    import numpy as np  # noqa: PLC0415 - commands that only speak of ranks start without it

    if not len(table):
        return b""
    narrow = table.astype(np.int32)
    if (narrow == table).all():
        return narrow.tobytes() + b"\4"
    return table.tobytes() + b"\10"


def _unpacked(message: bytes, width: int) -> Ints:
    import numpy as np  # noqa: PLC0415 - commands that only speak of ranks start without it

    kind = np.int32 if message[-1] == 4 else np.int64
    numbers = np.frombuffer(message, dtype=kind, count=(len(message) - 1) // np.dtype(kind).itemsize)
    return numbers.reshape(-1, width).astype(np.int64)


def ranks_alike(rank: int, size: int, name: bytes) -> Rounds[list[int]]:
    """The ranks that have the same name as this one, this one among them."""
    import numpy as np  # noqa: PLC0415 - commands that only speak of ranks start without it

    key = int.from_bytes(hashlib.sha256(name).digest()[:15])
    own = np.array([[rank, key & (1 << 60) - 1, key >> 60]], dtype=np.int64)
    rows = yield from route(rank, size, own[:, 1] % size, own)
    rows = rows[np.lexsort(rows.T)]
    answers: list[tuple[int, bytes]] = []
    _, number = np.unique(rows[:, 1:], axis=0, return_inverse=True)
    for group in range(int(number.max(initial=-1)) + 1):
        alike = rows[number.reshape(-1) == group, 0]
        answers += ((other, alike.astype("<u4").tobytes()) for other in alike.tolist())
    ((_, told),) = yield from route_texts(rank, size, answers)
    found: list[int] = np.sort(np.frombuffer(told, dtype="<u4")).tolist()
    return found


def exchange(rank: int, ranks: Sequence[int], own: bytes) -> Rounds[dict[int, bytes]]:
    """What each of a few ranks says to the others; each of them names the same `ranks`."""
    others = [other for other in ranks if other != rank]
    received = (yield Round([(other, own) for other in others], others)) if others else []
    return {rank: own, **dict(zip(others, received, strict=True))}


_HEAD = struct.Struct("<III")


def route_texts(rank: int, size: int, texts: Iterable[tuple[int, bytes]]) -> Rounds[list[tuple[int, bytes]]]:
    """`route` for bytes of any length, each with the rank that it goes to; those for this rank, with senders.

    Of one sender in the order in which it gave them, all in the order of the senders.
    """
    under_way = [(to, rank, text) for to, text in texts]
    step = 1
    while step < size:
        by_digit: dict[int, list[tuple[int, int, bytes]]] = {}
        for message in under_way:
            by_digit.setdefault((message[0] - rank) % size // step % FAN_IN, []).append(message)
        digits = range(1, min(FAN_IN, (size - 1) // step + 1))
        sends = [
            (
                (rank + number * step) % size,
                b"".join(
                    part
                    for to, source, text in by_digit.get(number, ())
                    for part in (_HEAD.pack(to, source, len(text)), text)
                ),
            )
            for number in digits
        ]
        received = yield Round(sends, [(rank - number * step) % size for number in digits])
        under_way = by_digit.get(0, [])
        for content in received:
            position = 0
            while position < len(content):
                to, source, length = _HEAD.unpack_from(content, position)
                position += _HEAD.size
                under_way.append((to, source, content[position : position + length]))
                position += length
        step *= FAN_IN
    under_way.sort(key=lambda message: message[1])
    return [(source, text) for _, source, text in under_way]
