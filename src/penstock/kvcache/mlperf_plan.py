"""The workload of MLPerf Storage v3.0's key-value cache benchmark, as a plan: users, queue, tiers, evictions.

Users of three kinds send requests at their own pace. A worker takes the request with the highest priority
first, reads the entries of earlier turns, writes the request's own entry, and reads that entry once for every
32 tokens of the response. All of this happens in virtual time, on storage of a given speed, so the same seed
gives the same operations.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.kvcache.block_trace import Integers
from penstock.kvcache.io_plan import OPERATION, IoPlan, Op, TierNumber
from penstock.kvcache.models import KvModel
from penstock.submission.edition import CacheOption

_KINDS: Final = (
    ((512, 4096), (50, 200), (0.1, 0.5)),
    ((4096, 25_000), (100, 500), (0.2, 1.0)),
    ((4096, 16_384), (200, 800), (0.3, 1.5)),
)
"""Kinds of users: the ranges of context and response in tokens, and of the seconds between requests."""
LEVELS: Final = ("batch", "responsive", "interactive")
"""Levels of priority, in rising order: a worker takes the highest first."""
_INTERACTIVE, _RESPONSIVE = 0.15, 0.50
_NEW_CONVERSATION: Final = 0.2
_MOST_TURNS: Final = 50
_DECODE_TOKENS: Final = 32
PREFILL_ONLY_TOKENS: Final = 10_000
_SYSTEM_PROMPT: Final = 0.2
_MOST_WORKERS: Final = 500
_CPU_FILL, _CPU_ENTRY = 0.8, 0.95
FEWEST_USERS: Final = 4
VIRTUAL_BYTES_PER_S: Final = 50 << 30

REQUEST: Final = np.dtype(
    [
        ("arrival_s", "<f8"),
        ("user", "<i4"),
        ("context", "<i8"),
        ("answer", "<i8"),
        ("level", "u1"),
        ("first_turn", "<i8"),
        ("asks_prefix", "?"),
        ("is_taken", "?"),
        ("taken_s", "<f8"),
        ("turn_hits", "<i4"),
        ("turn_misses", "<i4"),
        ("hit_tokens", "<i8"),
    ]
)
Requests = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSettings:
    """One option of the benchmark for one rank. `scale` shrinks entries, tiers and the number of users."""

    number: int
    option: CacheOption
    model: KvModel
    seed: int
    scale: Fraction = Fraction(1)
    duration_s: float
    capacity_bytes: int | None = None

    @property
    def num_users(self) -> int:
        """The number of users on this rank."""
        return max(min(FEWEST_USERS, self.option.num_users), round(self.option.num_users * self.scale))

    @property
    def cpu_bytes(self) -> int:
        """The bytes of host memory that the cache may take."""
        return int((self.option.cpu_gib << 30) * self.scale)


def plan_option(settings: OptionSettings) -> IoPlan:
    """Simulate one option; equal seeds give equal operations."""
    requests = _draw_requests(settings)
    cache = _Cache(settings, requests)
    cache.simulate()
    rows = cache.rows()
    return IoPlan(
        name=f"mlperf-v3-option-{settings.number}",
        operations=rows,
        parts=1,
        input_tokens=requests["context"],
        output_tokens=requests["answer"],
        hit_tokens=requests["hit_tokens"],
        requests=requests,
        bytes_per_token=ceil(settings.model.bytes_per_token * settings.scale),
        capacity_bytes=settings.capacity_bytes,
        facts={
            "model": settings.model.name,
            "option": settings.number,
            "users": settings.num_users,
            "duration_s": settings.duration_s,
            "scale": str(settings.scale),
            "seed": settings.seed,
            "virtual_bytes_per_s": VIRTUAL_BYTES_PER_S,
            "requests_taken": int(requests["is_taken"].sum()),
        },
    )


def _draw_requests(settings: OptionSettings) -> Requests:
    """Draw the requests of all users, in the order of their arrival."""
    parts = [_draw_user(settings, user) for user in range(settings.num_users)]
    begin, shifted = 0, []
    for part in parts:
        part["first_turn"] += begin
        begin += len(part)
        shifted.append(part)
    drawn = np.concatenate(shifted)
    order = np.argsort(drawn["arrival_s"], kind="stable")
    requests: Requests = drawn[order]
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    requests["first_turn"] = places[requests["first_turn"]]
    return requests


def _draw_user(settings: OptionSettings, user: int) -> Requests:
    """Draw one user's requests; `first_turn` is the place of the first request of each conversation."""
    random = np.random.Generator(np.random.PCG64([settings.seed, user]))
    of_context, of_answer, of_think_s = _KINDS[int(random.integers(len(_KINDS)))]
    level_draw = random.random()
    think_s = random.uniform(*of_think_s)
    context, answer = int(random.integers(*of_context)), int(random.integers(*of_answer))
    num = max(1, int(settings.duration_s / (think_s * 0.8)) + 1)
    times_s = np.cumsum(think_s * random.uniform(0.8, 1.2, num))
    rows = np.zeros(num, REQUEST)
    rows["arrival_s"], rows["user"] = times_s, user
    rows["context"] = random.integers(max(1, context // 4), context + 1, num)
    rows["answer"] = random.integers(max(1, answer // 4), answer + 1, num)
    rows["level"] = 2 if level_draw < _INTERACTIVE else 1 if level_draw < _RESPONSIVE else 0
    rows["asks_prefix"] = random.random(num) < _SYSTEM_PROMPT
    rows["first_turn"] = _first_turns(random.random(num) < _NEW_CONVERSATION)
    kept: Requests = rows[times_s < settings.duration_s]
    return kept


def _first_turns(ends: NDArray[np.bool_]) -> Integers:
    """Return the place of the first turn of each conversation; `ends` marks the last turns."""
    first, turns, places = 0, 0, np.empty(len(ends), np.int64)
    for place, is_end in enumerate(ends.tolist()):
        if turns == _MOST_TURNS:
            first, turns = place, 0
        places[place] = first
        turns += 1
        if is_end:
            first, turns = place + 1, 0
    return places


@dataclass(slots=True)
class _Tier:
    """Entries in the order of their last use, with their bytes."""

    limit: int | None
    used: int = 0
    entries: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def add(self, entry: int, size: int) -> None:
        self.entries[entry] = size
        self.used += size

    def drop(self, entry: int) -> int:
        size = self.entries.pop(entry)
        self.used -= size
        return size


class _Cache:
    """The simulation: workers, their queue, and the entries in host memory and on storage."""

    def __init__(self, settings: OptionSettings, requests: Requests) -> None:
        self._settings = settings
        self._requests = requests
        self._cpu = _Tier(settings.cpu_bytes)
        self._storage = _Tier(settings.capacity_bytes)
        self._visible_s: dict[int, float] = {}
        self._busy_until_s: dict[int, float] = {}
        self._columns: dict[str, array[Any]] = {
            name: array("d" if name == "time_s" else "q") for name in _RECORDED
        }
        self._num_workers = min(settings.num_users, _MOST_WORKERS)
        self._rate = float(VIRTUAL_BYTES_PER_S * settings.scale) / self._num_workers
        arrivals = requests["arrival_s"].tolist()
        self._sizes = np.ceil(
            requests["context"] * float(settings.model.bytes_per_token * settings.scale)
        ).astype(np.int64)
        self._arrivals: list[float] = arrivals
        self._turns = _turns_before(requests)

    def simulate(self) -> None:
        """Let the workers take requests until the time is up."""
        free = [(0.0, worker) for worker in range(self._num_workers)]
        waiting: list[tuple[int, int]] = []
        following = 0
        while free:
            now, worker = heapq.heappop(free)
            if not waiting and following < len(self._arrivals):
                now = max(now, self._arrivals[following])
            while following < len(self._arrivals) and self._arrivals[following] <= now:
                heapq.heappush(waiting, (-int(self._requests["level"][following]), following))
                following += 1
            if not waiting or now >= self._settings.duration_s:
                continue
            _, request = heapq.heappop(waiting)
            heapq.heappush(free, (self._serve(request, now), worker))

    def rows(self) -> NDArray[np.void]:
        """Return the operations in the order of virtual time."""
        rows = np.zeros(len(self._columns["entry"]), OPERATION)
        for name, column in self._columns.items():
            rows[name] = np.frombuffer(column, np.float64 if name == "time_s" else np.int64)
        ordered: NDArray[np.void] = rows[np.argsort(rows["time_s"], kind="stable")]
        return ordered

    def _serve(self, request: int, now: float) -> float:
        """Do all that one worker does for a request; return the time at which it is done."""
        row, taken = self._requests[request], now
        row["is_taken"], row["taken_s"] = True, taken
        for entry in self._turns[request]:
            if self._visible_s.get(entry, now + 1) <= now:
                row["turn_hits"] += 1
                row["hit_tokens"] += self._requests["context"][entry]
                now = self._read(request, entry, now)
            else:
                row["turn_misses"] += 1
        now = self._write(request, taken, now)
        if row["context"] < PREFILL_ONLY_TOKENS and request in self._visible_s:
            for _ in range(1 + ceil(int(row["answer"]) / _DECODE_TOKENS)):
                now = self._read(request, request, now)
        return now

    def _record(self, now: float, request: int, op: Op, tier: TierNumber, entry: int) -> float:
        """Record one operation; return the time at which it is done."""
        size = int(self._sizes[entry])
        values = (now, request, op, tier, entry, size)
        for name, value in zip(_RECORDED, values, strict=True):
            self._columns[name].append(value)
        is_io = tier is TierNumber.STORAGE and op is not Op.DELETE
        return now + size / self._rate if is_io else now

    def _read(self, request: int, entry: int, now: float) -> float:
        is_stored = entry in self._storage.entries
        (self._storage if is_stored else self._cpu).entries.move_to_end(entry)
        tier = TierNumber.STORAGE if is_stored else TierNumber.CPU
        done = self._record(now, request, Op.READ, tier, entry)
        self._busy_until_s[entry] = max(done, self._busy_until_s.get(entry, 0.0))
        return done

    def _write(self, request: int, taken: float, now: float) -> float:
        """Write the request's entry into host memory if it fits, otherwise into storage.

        Room is made when the request is taken. Because requests are taken in the order of time, what is
        stored never exceeds the limit, even though writes overtake each other.
        """
        size = int(self._sizes[request])
        if size <= _CPU_ENTRY * (self._cpu.limit or 0) and self._demote(request, size, taken):
            self._cpu.add(request, size)
            done = self._record(now, request, Op.WRITE, TierNumber.CPU, request)
        elif self._make_room(request, size, taken):
            self._storage.add(request, size)
            done = self._record(now, request, Op.WRITE, TierNumber.STORAGE, request)
        else:
            return now
        self._visible_s[request] = self._busy_until_s[request] = done
        return done

    def _demote(self, request: int, size: int, now: float) -> bool:
        """Move the least recently used entries from host memory to storage until an entry of `size` fits."""
        limit = max(int(_CPU_FILL * (self._cpu.limit or 0)), size)
        while self._cpu.used + size > limit:
            entry = self._idle(self._cpu, now)
            if entry is None or not self._make_room(request, self._cpu.entries[entry], now):
                return False
            moved = self._cpu.drop(entry)
            self._storage.add(entry, moved)
            done = self._record(now, request, Op.WRITE, TierNumber.STORAGE, entry)
            self._visible_s[entry] = self._busy_until_s[entry] = done
        return True

    def _make_room(self, request: int, size: int, now: float) -> bool:
        """Delete the least recently used entries from storage until an entry of `size` fits."""
        storage = self._storage
        if storage.limit is None:
            return True
        while storage.used + size > storage.limit:
            entry = self._idle(storage, now)
            if entry is None:
                return False
            self._record(now, request, Op.DELETE, TierNumber.STORAGE, entry)
            storage.drop(entry)
            del self._visible_s[entry]
        return True

    def _idle(self, tier: _Tier, now: float) -> int | None:
        """Return the least recently used entry that no worker is using, or None."""
        return next((entry for entry in tier.entries if self._busy_until_s[entry] <= now), None)


_RECORDED: Final = ("time_s", "request", "op", "tier", "entry", "bytes")


def _turns_before(requests: Requests) -> list[list[int]]:
    """Return, for each request, the earlier requests of its conversation."""
    turns: dict[int, list[int]] = {}
    before = []
    for request, first in enumerate(requests["first_turn"].tolist()):
        earlier = turns.setdefault(first, [])
        before.append(list(earlier))
        earlier.append(request)
    return before
