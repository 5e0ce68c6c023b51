"""What every benchmark here has in common: interleaved repetitions, ratios with their spread, and records.

A benchmark compares us with a peer or a raw limit in the same run: a noisy machine is noisy for both. A ratio
is ours over theirs: above 1 we are faster. Records hold the last accepted ratios.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.storage import Storage, residency
from penstock.storage.capabilities import find_local_paths

# Benchmarks share servers, ranks and made-up data with the tests, whose root is not on the path of
# `python benchmarks/run.py`.
sys.path.insert(0, str(Path(__file__).parents[1]))

RECORDS = Path(__file__).parent / "records"
WORST_ACCEPTED = 0.8
"""A ratio below this share of its record is a regression."""

ROUNDS_LIMIT_S = 25.0
"""No further round begins that would end after so long; the least number of rounds is run in any case."""
LEAST_ROUNDS = 3

Side = Callable[[], Mapping[str, float]]
"""Runs one side once; gives a figure (higher is better) for each thing measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ours over theirs for one thing: the median over repetitions, and how far they spread."""

    name: str
    median: float
    low: float
    high: float
    ours: float
    theirs: float
    unit: str

    def line(self, record: float | None) -> str:
        """The ratio as a line of a report, beside its record."""
        before = f"{record:5.2f}" if record is not None else "  new"
        return (
            f"{self.name:<56} {self.median:5.2f}  [{self.low:.2f} .. {self.high:.2f}]  record {before}   "
            f"ours {self.ours:,.3f}, theirs {self.theirs:,.3f} {self.unit}"
        )


def rounds(repetitions: int) -> Iterator[int]:
    """Numbers of rounds: `repetitions`, or fewer (but three) once they have taken `ROUNDS_LIMIT_S`."""
    begin_s = time.monotonic()
    for number in range(repetitions):
        taken_s = time.monotonic() - begin_s
        if number >= LEAST_ROUNDS and taken_s * (number + 1) / number > ROUNDS_LIMIT_S:
            return
        print(f"    round {number + 1} of {repetitions}, {taken_s:.0f} s", file=sys.stderr, flush=True)
        yield number


def interleave(ours: Side, theirs: Side, *, repetitions: int, unit: str) -> list[Ratio]:
    """Run both sides in turn, swapping who goes first, and compare what they have in common."""
    pairs: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for number in rounds(repetitions):
        if number % 2 == 0:
            mine, peers = ours(), theirs()
        else:
            peers, mine = theirs(), ours()
        pairs.append((mine, peers))
    return [
        ratio_of(name, [(mine[name], peers[name]) for mine, peers in pairs], unit) for name in pairs[0][0]
    ]


def take_turns(sides: Sequence[Side], *, repetitions: int) -> list[dict[str, float]]:
    """Run all sides once a round, another one first each time; the figures of each round."""
    figures: list[dict[str, float]] = []
    for number in rounds(repetitions):
        first = number % len(sides)
        figures.append({})
        for side in (*sides[first:], *sides[:first]):
            figures[-1].update(side())
    return figures


def best_speed(size_bytes: int, once: Callable[[], object], *, passes: int = 5) -> float:
    """GB/s of the best of several passes over as many bytes, after one that does not count."""
    once()
    best_s = float("inf")
    for _ in range(passes):
        start = time.perf_counter()
        once()
        best_s = min(best_s, time.perf_counter() - start)
    return size_bytes / best_s / 1e9


def compare(figures: Sequence[Mapping[str, float]], name: str, pair: tuple[str, str], unit: str) -> Ratio:
    """Ours over theirs in each of the rounds, by the names of both figures."""
    ours, theirs = pair
    return ratio_of(name, [(one[ours], one[theirs]) for one in figures], unit)


def ratio_of(name: str, pairs: Sequence[tuple[float, float]], unit: str) -> Ratio:
    """Ours over theirs from pairs that were measured in turn."""
    ratios = [mine / peers for mine, peers in pairs]
    return Ratio(
        name=name,
        median=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        ours=statistics.median(mine for mine, _ in pairs),
        theirs=statistics.median(peers for _, peers in pairs),
        unit=unit,
    )


@dataclass(frozen=True, slots=True)
class Record:
    """What was last accepted of a benchmark: medians and our own figures by name, and the machine."""

    machine: Mapping[str, str]
    ratios: Mapping[str, float]
    ours: Mapping[str, float]


def read_record(benchmark: str) -> Record:
    """The record of a benchmark; empty if there is none."""
    path = RECORDS / f"{benchmark}.json"
    if not path.exists():
        return Record({}, {}, {})
    content = json.loads(path.read_text(encoding="utf-8"))
    entries = content["ratios"]
    return Record(
        machine=content["machine"],
        ratios={entry["name"]: entry["median"] for entry in entries},
        ours={entry["name"]: entry["ours"] for entry in entries},
    )


def write_record(benchmark: str, ratios: Sequence[Ratio], machine: Mapping[str, str]) -> Path:
    """Make these ratios the ones to compare with from now on."""
    path = RECORDS / f"{benchmark}.json"
    path.parent.mkdir(exist_ok=True)
    content = {"machine": machine, "ratios": [asdict(ratio) for ratio in ratios]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def fallen(ratios: Sequence[Ratio], record: Record) -> list[Ratio]:
    """The ratios that fell by more than a fifth below their record."""
    return [one for one in ratios if one.median < WORST_ACCEPTED * record.ratios.get(one.name, 0.0)]


def is_ours(ratio: Ratio, record: Record, machine: Mapping[str, str]) -> bool:
    """Whether a ratio fell because we got slower; on the recorded machine a peer's good day lowers it too."""
    if record.machine.get("cores") != machine["cores"] or record.machine.get("kernel") != machine["kernel"]:
        return True
    return ratio.ours < WORST_ACCEPTED * record.ours[ratio.name]


def evict_all(storage: Storage) -> None:
    """Drop the pages of all files of a storage from memory."""
    files = find_local_paths(storage)
    assert files is not None, "only local files have pages"
    residency.evict_files(files.local_path(found.key) for found in storage.list())
