"""Key-value caches: one figure for each thing that `penstock kvcache` promises.

    python benchmarks/kvcache.py FOLDER [--trace conversation_trace.jsonl] [--only NAME ...]

FOLDER is on the disk to measure; 4 GiB of it are used for a while.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.probe import ProbeRequest, probe
from penstock.cluster.comm import SoloComm
from penstock.kvcache.cache_run import CacheRequest, measure_plan, reclaim_unfinished
from penstock.kvcache.compare_runs import compare_cache_runs
from penstock.kvcache.entries import EntryLayout, EntryOutcome
from penstock.kvcache.io_engine import EngineSettings, IoEngine
from penstock.kvcache.io_plan import OPERATION, IoPlan, ObjectLayout, Op, TierSizes, plan_blocks
from penstock.kvcache.lru_simulation import find_reuse
from penstock.kvcache.mlperf_run import MlperfRequest, load_limits, run_mlperf
from penstock.kvcache.models import MODELS
from penstock.kvcache.read_traces import read_trace
from penstock.kvcache.trace_generator import GeneratorSettings, generate_trace
from penstock.progress import Silent
from penstock.storage import Storage, open_storage
from penstock.storage.rate_limit import RateLimitedStorage
from penstock.testing.rank_threads import on_ranks

MIB = 1 << 20
CAPACITIES = (1000, 10_000, 30_000, 50_000, 100_000, None)


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder that goes away."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def rows(*steps: tuple[Op, int], size: int) -> Any:
    """Operations on entries of one size."""
    operations = np.zeros(len(steps), OPERATION)
    operations["op"], operations["entry"] = zip(*steps, strict=True)
    operations["bytes"], operations["tier"] = size, 2
    return operations


def execute(storage: Storage, operations: Any, **settings: Any) -> IoEngine:
    """Run operations on this rank alone."""
    engine = IoEngine(storage, operations, EntryLayout(namespace="bench"), EngineSettings(**settings))
    engine.run()
    return engine


def small_plan() -> IoPlan:
    """A few hundred requests with small entries."""
    trace = generate_trace(GeneratorSettings(requests=150, most_input_tokens=20_000))
    return plan_blocks(
        trace,
        MODELS["llama3.1-8b"],
        tiers=TierSizes(storage=800),
        layout=ObjectLayout(scale=Fraction(1, 1000)),
    )


def hits(arguments: argparse.Namespace) -> None:
    """Prefix hits of the conversation trace for all capacities, and the time that takes."""
    began = time.process_time()
    trace = read_trace(arguments.trace)
    read_s = time.process_time() - began
    reuse = find_reuse(trace)
    ratios = [round(reuse.prefix_hit_ratio(capacity), 3) for capacity in CAPACITIES]
    total_s = time.process_time() - began
    print(f"hits: {ratios}; {trace.num_blocks:,} blocks, {total_s:.2f} CPU s, reading {read_s:.2f} of them")


def digests(arguments: argparse.Namespace) -> None:
    """One digest and the same bytes for all numbers of streams and ranks."""
    plan, seen = small_plan(), set()
    for ranks, streams in ((1, 1), (1, 8), (1, 64), (2, 8), (4, 8)):
        with scratch(arguments.folder) as folder:
            document = measure(plan, folder, ranks=ranks, streams=streams)
        seen.add((document["plan"]["digest"], document["read"]["bytes"], document["write"]["bytes"]))
    print(f"digests: {len(seen)} different of 5 runs")


def measure(plan: IoPlan, folder: Path, *, ranks: int = 1, **settings: Any) -> dict[str, Any]:
    """The document of a run on ranks that are threads of this process."""
    request = CacheRequest(
        results=folder,
        plan=plan,
        layout=EntryLayout(namespace="bench", parts=plan.parts),
        engine=EngineSettings(**settings),
    )
    storage = open_storage(f"direct://{folder}/entries", {})
    (folder / "records").mkdir(exist_ok=True)
    return on_ranks(
        ranks,
        lambda comm: measure_plan(request, storage, folder / "records", comm=comm, progress=Silent()),
        hosts=["host"] * ranks,
        timeout_s=600,
    )[0].document


def repeat(arguments: argparse.Namespace) -> None:
    """How far two runs of one seed are apart."""
    plan = small_plan()
    with scratch(arguments.folder) as folder:
        runs = [measure(plan, folder, streams=4) for _ in range(3)][1:]
    for name in ("read", "write"):
        first, second = (run[name]["gib_per_s"] for run in runs)
        middle, other = (run[name]["latency_ms"]["p50"] for run in runs)
        print(
            f"repeat: {name} {first:.3f} and {second:.3f} GiB/s ({abs(second / first - 1):.1%} apart), "
            f"p50 {middle:.2f} and {other:.2f} ms"
        )


def chunks(arguments: argparse.Namespace) -> None:
    """Chunks of 32 MiB against the same bytes of the probe by O_DIRECT, alternating."""
    shares: dict[str, list[float]] = {"read": [], "write": [], "durable write": []}
    streams, count = 8, 96
    for _ in range(3):
        with scratch(arguments.folder) as folder:
            request = ProbeRequest(
                uri=f"direct://{folder}",
                size_bytes=count * 32 * MIB,
                streams=(streams,),
                block_bytes=(32 * MIB,),
            )
            report = probe(request, comm=SoloComm(), environment={}, options={}, progress=Silent())
            best = {}
            for measured in report.measurements:
                if measured.op in ("read", "write"):
                    best[measured.op] = measured.gib_per_s
            durable = open_storage(f"direct://{folder}", {})
            quick = open_storage(f"direct://{folder}", {}, options={"fsync": "false"})
            for name, op, storage in (
                ("durable write", Op.WRITE, durable),
                ("write", Op.WRITE, quick),
                ("read", Op.READ, durable),
            ):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                engine = execute(
                    storage, rows(*((op, entry) for entry in range(count)), size=32 * MIB), streams=streams
                )
                elapsed_s = engine.timed["end_ns"].max() / 1e9
                ours = count * 32 / 1024 / elapsed_s
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
                probed = best[name.rpartition(" ")[2]]
                shares[name].append(ours / probed)
                print(f"chunks: {name} {ours:.3f} GiB/s, probe {probed:.3f}; memory grew by {grown:.0f} MiB")
    for name, values in shares.items():
        print(f"chunks: {name} median share of the probe {np.median(values):.3f}")


def mlperf_document(
    arguments: argparse.Namespace, limit: float | None, *, streams: int = 8
) -> dict[str, Any]:
    """Option 1 at 1/1000 on a storage of this rate."""
    with scratch(arguments.folder) as folder:
        request = MlperfRequest(
            results=folder / "results",
            limits=load_limits(),
            engine=EngineSettings(streams=streams),
            cache=str(folder),
            options=(1,),
            trials=1,
            scale=Fraction(1, 1000),
            duration_s=10,
            pause_s=0,
        )
        storage: Storage = open_storage(f"{folder}/entries", {})
        if limit is not None:
            storage = RateLimitedStorage(storage, limit)
        document: dict[str, Any] = on_ranks(
            1, lambda comm: run_mlperf(request, storage, comm=comm, progress=Silent()), timeout_s=600
        )[0]
        return document | {"target": "no limit" if limit is None else f"{limit / MIB:g} MiB/s"}


def memory(arguments: argparse.Namespace) -> None:
    """The memory of option 1 at 1/1000."""
    mlperf_document(arguments, None)
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most (want 512)")


def ordering(arguments: argparse.Namespace) -> None:
    """Four storages of known speed, each with the streams that it takes to saturate it.

    The order that our figures give, and that of the published ones: tokens over the waiting of all streams
    added up say that a storage is slower the more streams it serves at a time.
    """
    storages = ((20, 1), (160, 64), (40, 4), (80, 16))
    comparison = compare_cache_runs(
        [mlperf_document(arguments, rate * MIB, streams=streams) for rate, streams in storages]
    )
    print(f"ordering: storages {comparison['targets']}, the right order is [1, 3, 2, 0]")
    for name, figure in comparison["figures"].items():
        values = ", ".join(f"{value:,.3f}" for value in figure["values"])
        verdict = "right" if figure["best_first"] == [1, 3, 2, 0] else "WRONG"
        print(f"ordering: {verdict} {name}: {values} -> {figure['best_first']}")


def devices(arguments: argparse.Namespace) -> None:
    """Bytes of the ledger against those of the device."""
    trace = generate_trace(GeneratorSettings(requests=40, most_input_tokens=16_000))
    plan = plan_blocks(
        trace,
        MODELS["llama3.1-8b"],
        tiers=TierSizes(storage=400),
        layout=ObjectLayout(scale=Fraction(1, 32)),
    )
    with scratch(arguments.folder) as folder:
        document = measure(plan, folder, streams=4)
    for delivery in document["deliveries"]:
        moved, asked = delivery["delivered_bytes"], delivery["application_bytes"]
        share = f"{moved / asked - 1:+.2%}" if moved else delivery["why"]
        print(f"devices: {delivery['direction']} {asked:,} B by the ledger, {moved} by devices ({share})")
    print(f"devices: reads went {document['cold']['path']}")


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from kvcache import execute, rows, Op
from penstock.storage import open_storage
storage = open_storage(sys.argv[1], {})
print("ready", flush=True)
execute(storage, rows(*((Op.WRITE, entry) for entry in range(10**6)), size=1 << 20), streams=4)
"""


def kills(arguments: argparse.Namespace) -> None:
    """Writers killed in the middle: unfinished objects that stay, and entries with wrong bytes."""
    random = np.random.Generator(np.random.PCG64(1))
    left = wrong = most = 0
    with scratch(arguments.folder) as folder:
        storage = open_storage(str(folder), {})
        for _ in range(arguments.kills):
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)],
                stdout=subprocess.PIPE,
            )
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(float(random.uniform(0.0, 0.15)))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
            hidden = [path for path in folder.rglob(".penstock-*") if path.is_file()]
            most = max(most, len(hidden))
            reclaim_unfinished(storage, older_than_s=0)
            left += sum(1 for path in folder.rglob(".penstock-*") if path.is_file())
            stored = sum(1 for _ in storage.list())
            engine = execute(
                storage, rows(*((Op.READ, entry) for entry in range(max(stored, 1) + 8)), size=MIB), streams=2
            )
            counts = Counter(engine.timed["outcome"].tolist())
            wrong += sum(
                count
                for outcome, count in counts.items()
                if outcome not in (EntryOutcome.DONE, EntryOutcome.MISSING)
            )
            for info in list(storage.list()):
                storage.delete(info.key)
    print(
        f"kills: {arguments.kills}; at most {most} unfinished objects after a kill (4 streams), {left} after "
        f"reclaiming, {wrong} entries neither whole nor missing"
    )


def damages(arguments: argparse.Namespace) -> None:
    """Entries damaged in all ways: each must be a miss with a name."""
    random = np.random.Generator(np.random.PCG64(2))
    found: Counter[str] = Counter()
    served = 0
    with scratch(arguments.folder) as folder:
        storage, layout = open_storage(str(folder), {}), EntryLayout(namespace="bench")
        size, num = 40_000, 1000
        execute(storage, rows(*((Op.WRITE, entry) for entry in range(num)), size=size), streams=8)
        for entry in range(num):
            path = folder / layout.key(entry, 0)
            content = bytearray(path.read_bytes())
            kind = entry % 5
            if kind == 0:
                path.unlink()
                continue
            if kind == 1:
                del content[int(random.integers(1, len(content))) :]
            elif kind == 2:
                content[int(random.integers(len(content)))] ^= 1 << int(random.integers(8))
            elif kind == 3:
                page = int(random.integers(size // 4096)) * 4096
                content[page : page + 4096] = bytes(4096)
            else:
                content = bytearray((folder / layout.key((entry + 5) % num, 0)).read_bytes())
            path.write_bytes(content)
        engine = execute(storage, rows(*((Op.READ, entry) for entry in range(num)), size=size), streams=8)
        for outcome in engine.timed["outcome"].tolist():
            found[EntryOutcome(outcome).name.lower()] += 1
        served = found.pop("done", 0)
    print(f"damages: {dict(found)}, {served} served")


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    step.__name__: step for step in (hits, digests, repeat, chunks, memory, ordering, devices, kills, damages)
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    default = Path(os.environ.get("PENSTOCK_MOONCAKE_FIXTURES", "/nowhere")) / "conversation_trace.jsonl"
    parser.add_argument("--trace", type=Path, default=default)
    parser.add_argument("--only", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--kills", type=int, default=300)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.absolute()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        STEPS[name](arguments)


if __name__ == "__main__":
    main()
