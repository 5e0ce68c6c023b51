"""Planning saves and loads among very many ranks: what it costs each of them, all simulated in one process.

    python benchmarks/checkpoint_plan.py [ranks [tensors [replicas]]]      (16384 1000 1)

Each rank runs its real code, and every message is counted. Those that receive most are run once more, each in
a process of its own with the messages that it received, for the growth of its memory and its CPU seconds.
Takes about ten minutes and 4 GiB for 16,384 ranks x 1,000 tensors. Messages wait in a temporary file.

    python benchmarks/checkpoint_plan.py cache [ranks]

What ranks tell each other when a manager with caches starts, saves a step (8 ranks a node, in groups of 8)
and looks which steps there are: bytes and messages of the rank that receives most, and CPU seconds of one.

    python benchmarks/checkpoint_plan.py describe [ranks [tensors [folder]]]

What rank 0 needs to write `.metadata` and the manifest of so many parts from the spans of all ranks, and what
one of them needs to make its spans, which stand for those of all.
"""

import gc
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# For the simulated ranks, which the tests have, too.
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from tests.support.simulated_ranks import SimulatedRanks

from penstock.checkpoint.commit.protocol import Draft
from penstock.checkpoint.engine import RankSaveStats, WrittenFile, WrittenShare
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata
from penstock.checkpoint.formats.manifest import Manifest, ManifestFile, file_text
from penstock.checkpoint.formats.metadata_writing import MetadataWriting, SpanNumbers
from penstock.checkpoint.levels import agreement
from penstock.checkpoint.levels.agreement import Nodes
from penstock.checkpoint.levels.options import Xor
from penstock.checkpoint.levels.redundancy.parity_layout import FittedScheme, choose_groups
from penstock.checkpoint.levels.redundancy.protector import ReportedShare, build_records
from penstock.checkpoint.levels.redundancy.redundancy_record import (
    GroupRecord,
    NodeShares,
    RecordedFile,
    list_members,
)
from penstock.checkpoint.plan.save_plan import Holdings, SaveOptions
from penstock.checkpoint.plan.shared_plan import Place, plan_share
from penstock.checkpoint.saving.shared_description import RankDescription, SpanReader
from penstock.checkpoint.state.regions import (
    CheckpointIndex,
    Regions,
    StoredRegions,
    TensorFacts,
)
from penstock.cluster import rounds
from penstock.cluster.rounds import Rounds
from penstock.storage.protocol import write_object
from penstock.storage.uri import open_here

ROWS, COLUMNS = 16_384, 1024
NODE_RANKS = 8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Job:
    """Tensors that are sharded by rows over size / replicas ranks."""

    size: int
    num_tensors: int
    replicas: int

    @cached_property
    def tensors(self) -> tuple[TensorFacts, ...]:
        """The properties of all."""
        return tuple(
            TensorFacts(f"layers.{number}.weight", "float32", (ROWS, COLUMNS), 4)
            for number in range(self.num_tensors)
        )

    def held(self, rank: int) -> Regions:
        """One rank's regions, without memory of their own, of which the simulation has little."""
        rows = ROWS * self.replicas // self.size
        offsets = np.broadcast_to(np.array([rank // self.replicas * rows, 0]), (self.num_tensors, 2))
        sizes = np.broadcast_to(np.array([rows, COLUMNS]), (self.num_tensors, 2))
        return Regions(np.arange(self.num_tensors), offsets, sizes)

    def save(self, rank: int) -> Rounds[int]:
        """One rank's part in the planning of a save; the number of its regions."""
        held = Holdings(tensors=self.tensors, regions=self.held(rank))
        share = yield from plan_share(Place(rank, self.size), held, {}, SaveOptions())
        return len(share.regions)


def replay(job: Job, rank: int, inbox: Sequence[list[bytes]]) -> tuple[float, float]:
    """CPU seconds and MiB that one rank needs beyond those of its process, given what it received."""
    start_s, start_bytes = time.process_time(), _resident_bytes()
    most = start_bytes
    operation = job.save(rank)
    try:
        next(operation)
        received = iter(inbox)
        while True:
            operation.send(next(received))
            most = max(most, _resident_bytes())
    except StopIteration:
        most = max(most, _resident_bytes())
    return time.process_time() - start_s, (most - start_bytes) / 2**20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * _PAGE_BYTES


def measure(job: Job) -> None:
    """Plan once with all ranks, and print what it cost them."""
    size, num_tensors = job.size, job.num_tensors
    watched = {number * size // num_tensors for number in (0, num_tensors // 2, num_tensors - 1)}
    num_parts = 0
    with tempfile.TemporaryFile() as spool:
        ranks = SimulatedRanks[int](size, {rank: [] for rank in sorted(watched)}, spool.fileno())
        gc.disable()
        for _, count in ranks.run(job.save):
            num_parts += count
        gc.enable()
    print(f"{size:,} ranks x {num_tensors:,} tensors, {job.replicas} replica(s): {num_parts:,} parts written")
    received = [cost.received_bytes for cost in ranks.costs]
    cpu_s = [cost.cpu_s for cost in ranks.costs]
    print(f"  received by a rank: median {statistics.median(received):,.0f}, most {max(received):,} bytes")
    print(f"  messages at a time: {max(cost.fan_in for cost in ranks.costs)}")
    print(f"  CPU of a rank, simulated: median {statistics.median(cpu_s):.4f}, most {max(cpu_s):.3f} s")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for rank, inbox in ranks.inbox.items():
            took_s, grown_mib = processes.apply(replay, (job, rank, inbox))
            print(f"  rank {rank} alone in a process: {took_s:.3f} CPU s, {grown_mib:.1f} MiB more")
    again = SimulatedRanks[bool](size)
    assert all(same for _, same in again.run(lambda rank: rounds.all_equal(rank, size, bytes(24))))
    print(f"  unchanged plan: {max(cost.received_bytes for cost in again.costs)} bytes received by a rank")


def _written(rank: int) -> WrittenShare:
    """Two files, without what only rank 0 learns."""
    nothing = np.zeros(0, dtype=np.int64)
    files = [
        WrittenFile(
            name=f"__{rank}_{number}.distcp",
            size_bytes=1 << 30,
            item_offset=nothing,
            item_bytes=nothing,
            payload_offset=nothing,
            sums=b"",
        )
        for number in (0, 1)
    ]
    stats = RankSaveStats(rank=rank, payload_bytes=1 << 31, file_bytes=1 << 31)
    return WrittenShare(rank=rank, files=tuple(files), stats=stats)


def cache(size: int) -> None:
    """Start, save and assess with caches of all ranks."""
    domains = [f"node-{rank // NODE_RANKS:05}" for rank in range(size)]
    start_s = time.process_time()
    groups = choose_groups(domains, NODE_RANKS)
    print(f"{size:,} ranks: choosing the groups takes {time.process_time() - start_s:.3f} CPU s on each")
    group_of = {rank: group for group in groups for rank in group}
    order = tuple((each % 2, 1 << 23) for each in range(128))

    def report(rank: int) -> ReportedShare:
        files = tuple(
            RecordedFile(name=f"__{rank}_{each}.distcp", size_bytes=1 << 30, sum="") for each in (0, 1)
        )
        kept = RecordedFile(name=f"parity-{rank}.bin", size_bytes=1 << 28, sum="0" * 32)
        return ReportedShare(files=files, kept=kept, order=order, chunk_bytes=1 << 28, block_bytes=1 << 20)

    nodes = Nodes([rank // NODE_RANKS * NODE_RANKS for rank in range(size)], domains)
    draft = Draft(name="step-1", folder="", save_id="0" * 16)
    fitted = FittedScheme(scheme=Xor(group=NODE_RANKS), groups=groups)

    def start(rank: int) -> Rounds[object]:
        return (yield from agreement.locate_caches(rank, size, rank // NODE_RANKS, domains[rank]))

    def save(rank: int) -> Rounds[object]:
        reported = yield from agreement.tell_groups(rank, size, nodes, group_of[rank], report(rank))
        built[rank] = build_records(draft, fitted, reported, nodes.domains) if rank == 0 else {}
        return (yield from agreement.tell_files(rank, size, _written(rank)))

    def assess(rank: int) -> Rounds[object]:
        name = f"step-{rank // size}"
        return (yield from agreement.agree_on_names(rank, size, [name], is_certain=True))

    built: dict[int, Mapping[int, GroupRecord]] = {}
    for operation in (start, save, assess):
        ranks = SimulatedRanks[object](size)
        for _ in ranks.run(operation):
            pass
        received = [cost.received_bytes for cost in ranks.costs]
        cpu_s = [cost.cpu_s for cost in ranks.costs]
        print(
            f"  {operation.__name__}: received median {statistics.median(received):,.0f}, "
            f"most {max(received):,} bytes; {max(cost.fan_in for cost in ranks.costs)} messages at a time; "
            f"CPU median {statistics.median(cpu_s):.4f}, most {max(cpu_s):.3f} s"
        )
    sizes = {
        file.name: file.size_bytes
        for record, place in list_members(built[0], nodes.ranks_of[0])
        for file in record.stored_files(place)
    }
    node = NodeShares(ranks=nodes.ranks_of[0], sizes=sizes, records=built[0])
    start_s = time.process_time()
    message = next(agreement.agree_on_whole(size - 1, size, nodes, node)).sends[0][1]
    took_s = time.process_time() - start_s
    assert message[:1] == b"\1", "the step is whole"
    print(f"  whole step: {len(message)} bytes from each rank below, {took_s:.3f} CPU s before they leave")


def describe(size: int, num_tensors: int, folder: str) -> None:
    """Write the description of tensors that are sharded over all ranks, from spans of their real sizes."""
    writing = MetadataWriting(dtypes=("float32",), num_tensors=num_tensors, num_objects=0)
    facts = TensorFacts("layers.0.weight", "float32", (ROWS, COLUMNS), 4)
    rows = np.arange(size)
    offsets = np.stack([rows * (ROWS // size), np.zeros(size, dtype=np.int64)], axis=1)
    sizes = np.full((size, 2), (ROWS // size, COLUMNS))
    regions = Regions(np.zeros(size, dtype=np.int64), offsets, sizes)
    places = np.full(size, 123_456)
    stored = StoredRegions(regions, rows, places, places, places, np.zeros(size, dtype=np.bool_))
    start_s = time.process_time()
    index = CheckpointIndex((facts,), stored, (), ())
    paths: dict[str, tuple[str | int, ...]] = {facts.name: ("layers", 0, "weight")}
    of_tensor = writing.spans(DcpMetadata(index=index, paths=paths), SpanNumbers())
    made_s = time.process_time() - start_s
    at = np.arange(num_tensors)
    file = ManifestFile(
        name="__12345_0.distcp",
        size_bytes=1 << 30,
        item_name=at,
        item_offset=at * 65536,
        item_bytes=at + 65536,
        payload_offset=at * 65536,
        sums=bytes(16 * num_tensors),
    )
    spans = (*of_tensor, b',"layers.0.weight"', b"", b"," + file_text(file))
    is_planner = np.zeros(size, dtype=np.bool_)
    is_planner[np.arange(num_tensors) * size // num_tensors] = True
    lengths = np.where(is_planner[:, None], [list(map(len, spans))], 0)
    lengths[:, -1] = len(spans[-1])
    # Each receipt is a copy, as from a network.
    reader = SpanReader(
        RankDescription(
            Place(0, size), spans, is_small=False, stats=(), lengths=lengths, sizes={}, writing=writing
        ),
        Manifest(metadata_bytes=0, metadata_sum=b"", names=(), files=()),
        DcpMetadata(index=CheckpointIndex((), stored.take(slice(0)), (), ())),
        lambda round_: [bytes(bytearray(next(span for span in spans if len(span) == round_.size_bytes)))],
    )
    print(f"{size:,} ranks x {num_tensors:,} tensors: one tensor's spans take {made_s:.3f} CPU s")
    start_s, start_bytes, begin_s = time.process_time(), _peak_bytes(), time.monotonic()
    reader.survey()
    with tempfile.TemporaryDirectory(dir=folder) as target:
        storage = open_here(target)
        for name, parts in (
            ("penstock.json", reader.manifest_parts()),
            (".metadata", reader.metadata_parts()),
        ):
            size_bytes = write_object(storage, name, parts).size_bytes
            print(f"  {name}: {size_bytes / 2**20:,.0f} MiB")
    took_s = time.process_time() - start_s
    grown_mib = (_peak_bytes() - start_bytes) / 2**20
    print(f"  rank 0: {took_s:.1f} CPU s, {time.monotonic() - begin_s:.1f} s, {grown_mib:.0f} MiB more")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["cache"]:
        cache(int((sys.argv[2:] or ["16384"])[0]))
    elif sys.argv[1:2] == ["describe"]:
        words = sys.argv[2:] + ["16384", "1000", tempfile.gettempdir()][len(sys.argv) - 2 :]
        describe(int(words[0]), int(words[1]), words[2])
    else:
        chosen = [int(argument) for argument in sys.argv[1:]]
        measure(Job(*(chosen + [16_384, 1000, 1][len(chosen) :])))
