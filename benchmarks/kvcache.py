"""Key-value caches: one figure for each thing that `penstock kvcache` promises.

    PYTHONPATH=. python benchmarks/kvcache.py FOLDER [--trace conversation_trace.jsonl] [--only NAME ...]

FOLDER is on the disk to measure; 4 GiB of it are used for a while.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from tests.support.rank_threads import on_ranks
from tests.support.rate_limit import RateLimitedStorage
from tests.support.s3.moto_server import running_moto
from tests.support.s3.radosgw_server import running_radosgw
from tests.support.s3.server import BUCKET

from penstock.bench.probe import ProbeRequest, probe
from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.probe_run import measure as measure_step
from penstock.bench.probe.timed_streams import ProbeStep
from penstock.cluster.comm import SoloComm
from penstock.errors import Unavailable
from penstock.kvcache.block_trace import find_reuse, generate_trace
from penstock.kvcache.cache_figures import compare_cache_runs
from penstock.kvcache.cache_run import CacheRequest, measure_plan
from penstock.kvcache.entries import FOOTER_BYTES, EntryLayout, EntryOutcome
from penstock.kvcache.io_engine import EngineSettings, IoEngine
from penstock.kvcache.io_plan import OPERATION, IoPlan, ObjectLayout, Op, TierSizes, plan_blocks
from penstock.kvcache.mlperf_run import MlperfRequest, load_limits, run_mlperf
from penstock.kvcache.models import MODELS
from penstock.kvcache.read_traces import read_trace
from penstock.progress import Progress
from penstock.storage import Storage, open_storage
from penstock.storage.capabilities import defer_sync
from penstock.storage.files.file_storage import reclaim_unfinished
from penstock.storage.uri import parse_uri

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
    trace = generate_trace(requests=150, most_input_tokens=20_000)
    return plan_blocks(
        trace,
        MODELS["llama3.1-8b"],
        tiers=TierSizes(storage=800),
        layout=ObjectLayout(scale=Fraction(1, 1000)),
    )


def hits(arguments: argparse.Namespace) -> None:
    """Prefix hits of the conversation trace for all capacities, and the time that takes."""
    if arguments.trace is None:
        print("hits: skipped; --trace names the trace")
        return
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


def measure(
    plan: IoPlan, folder: Path, *, ranks: int = 1, storage: Storage | None = None, **settings: Any
) -> dict[str, Any]:
    """The document of a run on ranks that are threads of this process."""
    request = CacheRequest(
        results=folder,
        plan=plan,
        layout=EntryLayout(namespace="bench", parts=plan.parts),
        engine=EngineSettings(**settings),
    )
    storage = storage or open_storage(f"direct://{folder}/entries", {})
    (folder / "records").mkdir(exist_ok=True)
    return on_ranks(
        ranks,
        lambda comm: measure_plan(request, storage, folder / "records", comm=comm, progress=Progress()),
        hosts=["host"] * ranks,
        timeout_s=600,
    )[0].document


REPEATED = {
    **{f"{name} GiB/s": (name, "gib_per_s") for name in ("read", "write")},
    **{f"{name} GiB/busy s": (name, "gib_per_busy_s") for name in ("read", "write")},
    **{
        f"{name} {figure}": (name, "latency_ms", figure)
        for name in ("read", "write")
        for figure in ("mean", "p50", "p95", "p99")
    },
    **{f"load {figure}": ("requests", "load_ms", figure) for figure in ("mean", "p50", "p95", "p99")},
    "hits worth it": ("time_to_first_token", "hits_worth_it"),
    "saved": ("time_to_first_token", "saved_s"),
}


def repeat(arguments: argparse.Namespace) -> None:
    """How far two runs of one seed are apart in each figure, on a storage that is as fast each time."""
    trace = generate_trace(requests=1000, most_input_tokens=20_000)
    plan = plan_blocks(
        trace,
        MODELS["llama3.1-8b"],
        tiers=TierSizes(storage=3000),
        layout=ObjectLayout(scale=Fraction(1, 400)),
    )
    storage = RateLimitedStorage(open_storage("mem://repeat", {}), 100 * MIB)
    with scratch(arguments.folder) as folder:
        runs = [measure(plan, folder, storage=storage, streams=4) for _ in range(3)][1:]
    for name, path in REPEATED.items():
        first, second = (_figure(run, path) for run in runs)
        apart = abs(second / first - 1) if first else abs(second)
        print(f"repeat: {name} {first:.4g}, {second:.4g}: {apart:.1%} apart{', ABOVE 5 %' * (apart > 0.05)}")


def _figure(document: Any, path: tuple[str, ...]) -> float:
    for name in path:
        document = document[name]
    return float(document or 0.0)


def chunks(arguments: argparse.Namespace) -> None:
    """Chunks of 32 MiB against the same bytes of the probe by O_DIRECT; each goes first every other time.

    All write new files. The probe's streams are files of 12 chunks, durable as a whole; its files are of one
    chunk, each durable on its own, as ours are.
    """
    rates: dict[str, list[float]] = {}
    for repetition in range(arguments.repetitions):
        with scratch(arguments.folder) as folder:
            sides = [lambda at=folder: _probe_chunks(at), lambda at=folder: _our_chunks(at)]
            for side in sides if repetition % 2 else reversed(sides):
                for name, rate in side().items():
                    rates.setdefault(name, []).append(rate)
        print("chunks: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in rates.items()) + " GiB/s")
    for ours, theirs in (
        ("write", "probe's streams, write"),
        ("write", "probe's files, write"),
        ("write without fsync", "probe's streams, write"),
        ("read", "probe's streams, read"),
    ):
        shares = np.array(rates[ours]) / np.array(rates[theirs])
        print(
            f"chunks: {ours} of {theirs}: median {np.median(shares):.3f} "
            f"[{shares.min():.2f}..{shares.max():.2f}], best {max(rates[ours]) / max(rates[theirs]):.3f}"
        )


_CHUNKS, _CHUNK_STREAMS = 96, 8


def _probe_chunks(folder: Path) -> dict[str, float]:
    request = ProbeRequest(
        uri=f"direct://{folder}",
        size_bytes=_CHUNKS * 32 * MIB,
        streams=(_CHUNK_STREAMS,),
        block_bytes=(32 * MIB,),
    )
    report = probe(request, comm=SoloComm(), environment={}, options={}, progress=Progress())
    rates = {
        f"probe's streams, {measured.op}": measured.gib_per_s
        for measured in report.measurements
        if measured.op in ("read", "write")
    }
    files = ProbeStep(
        op="small_write",
        mode="direct",
        streams=_CHUNK_STREAMS,
        block_bytes=32 * MIB,
        blocks_per_stream=_CHUNKS // _CHUNK_STREAMS,
    )
    place = ProbeFolder(parse_uri(request.uri), "files", comm=SoloComm(), environment={}, options={})
    with place:
        place.storage = defer_sync(place.storage, "names")
        measured = measure_step(files, place, comm=SoloComm(), progress=Progress())
    return rates | {"probe's files, write": measured.gib_per_s}


def _our_chunks(folder: Path) -> dict[str, float]:
    rates = {}
    # As the probe does: the first run is not counted, because memory not used lately is slow.
    _chunk_rate(open_storage(f"direct://{folder}/first", {}), Op.WRITE)
    shutil.rmtree(folder / "first")
    for name, fsync in (("write", "true"), ("write without fsync", "false")):
        storage = open_storage(f"direct://{folder}/{fsync}", {}, options={"fsync": fsync})
        rates[name] = _chunk_rate(storage, Op.WRITE)
    rates["read"] = _chunk_rate(storage, Op.READ)
    return rates


def _chunk_rate(storage: Storage, op: Op) -> float:
    engine = execute(
        storage, rows(*((op, entry) for entry in range(_CHUNKS)), size=32 * MIB), streams=_CHUNK_STREAMS
    )
    return float(_CHUNKS * 32 / 1024 / (engine.timed["end_ns"].max() / 1e9))


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
            1, lambda comm: run_mlperf(request, storage, comm=comm, progress=Progress()), timeout_s=600
        )[0]
        return document | {"target": "no limit" if limit is None else f"{limit / MIB:g} MiB/s"}


def memory(arguments: argparse.Namespace) -> None:
    """The memory of option 1 at 1/1000."""
    mlperf_document(arguments, None)
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most (want 512)")


def ordering(arguments: argparse.Namespace) -> None:
    """Four storages of known speed: the order that our figures give, and that of the published ones.

    First each with the streams that it takes to saturate it: tokens over the waiting of all streams added up
    say that a storage is slower the more streams it serves at a time. Then all with as many, where latencies
    order them, too.
    """
    for streams in ((1, 64, 4, 16), (16, 16, 16, 16)):
        comparison = compare_cache_runs(
            [
                mlperf_document(arguments, rate * MIB, streams=number)
                for rate, number in zip((5, 40, 10, 20), streams, strict=True)
            ]
        )
        print(f"ordering: {comparison['targets']} with {streams} streams, the right order is [1, 3, 2, 0]")
        for name, figure in comparison["figures"].items():
            values = ", ".join(f"{value:,.3f}" for value in figure["values"])
            verdict = "right" if figure["best_first"] == [1, 3, 2, 0] else "WRONG"
            verdict = verdict if figure["best_first"] else "no order"
            print(f"ordering: {verdict} {name}: {values} -> {figure['best_first']}")


def devices(arguments: argparse.Namespace) -> None:
    """Bytes of the ledger against those of the device."""
    with scratch(arguments.folder) as folder:
        document = measure(_device_plan(), folder, streams=4)
    for delivery in document["deliveries"]:
        moved, asked = delivery["delivered_bytes"], delivery["application_bytes"]
        share = f"{moved / asked - 1:+.2%}" if moved else delivery["why"]
        print(f"devices: {delivery['direction']} {asked:,} B by the ledger, {moved} by devices ({share})")
    print(f"devices: reads went {document['cold']['path']}")


def _device_plan() -> IoPlan:
    """Entries of 1 MiB, beside which headers and footers are small."""
    return plan_blocks(
        generate_trace(requests=40, most_input_tokens=16_000),
        MODELS["llama3.1-8b"],
        tiers=TierSizes(storage=400),
        layout=ObjectLayout(scale=Fraction(1, 32)),
    )


def objects(arguments: argparse.Namespace) -> None:
    """Bytes of the ledger against those on the wire to an S3 server: Moto, and Ceph's if it is installed."""
    for running in (running_moto, running_radosgw):
        try:
            with running() as server, _Wire(urlsplit(server.endpoint).port or 80) as wire:
                environment = {**server.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}"}
                with scratch(arguments.folder) as folder:
                    document = measure(
                        _device_plan(),
                        folder,
                        storage=open_storage(f"s3://{BUCKET}/kv", environment),
                        streams=4,
                    )
        except Unavailable as error:
            print(f"objects: {running.__name__}: {error}")
            continue
        counted = document["storage_counters"]
        for direction, name, moved in (
            ("read", "read_bytes", wire.to_client),
            ("write", "written_bytes", wire.to_server),
        ):
            print(
                f"objects: {server.kind}: {direction} {counted[name]:,} B by the ledger, {moved:,} on the "
                f"wire ({moved / counted[name] - 1:+.2%}); {sum(document['misses'].values())} misses, reads: "
                f"{document['cold']['path']}"
            )


class _Wire:
    """A relay on loopback in front of a server, which counts the bytes in both directions."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.to_server = self.to_client = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            for source, target, name in (
                (client, server, "to_server"),
                (server, client, "to_client"),
            ):
                threading.Thread(target=self._relay, args=(source, target, name), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, name: str) -> None:
        buffer = memoryview(bytearray(256 << 10))
        with suppress(OSError):
            while moved := source.recv_into(buffer):
                with self._lock:
                    setattr(self, name, getattr(self, name) + moved)
                target.sendall(buffer[:moved])
            target.shutdown(socket.SHUT_WR)


KILL_STREAMS = 4
_DAMAGED = 3


def kills(arguments: argparse.Namespace) -> None:
    """Processes killed in the middle of writing: what they leave, and whether any byte is wrong.

    Two of three kills hit a whole run, which the next one of the same plan follows; the third hits one of
    three writers of the same entries, the others of which read on.
    """
    execute(open_storage("mem://warm", {}), rows((Op.WRITE, 0), (Op.READ, 0), size=MIB))
    random = np.random.Generator(np.random.PCG64(1))
    plan = plan_blocks(
        generate_trace(requests=400, most_input_tokens=20_000),
        MODELS["llama3.1-8b"],
        tiers=TierSizes(storage=60),
        layout=ObjectLayout(scale=Fraction(1, 32)),
    )
    object_bytes = int(plan.operations["bytes"].max()) + FOOTER_BYTES
    footers = FOOTER_BYTES * plan.most_stored_bytes(1) // int(plan.operations["bytes"].min())
    bound = plan.most_stored_bytes(1) + footers + KILL_STREAMS * object_bytes
    most = most_hidden = hidden = wrong = 0
    with scratch(arguments.folder) as folder:
        for number in range(arguments.kills):
            if number % 3 < 2:
                with scratch(folder) as records:
                    _kill(random, _run_plan_forever, str(folder / "run"), plan, records)
                left = list(_files(folder / "run"))
                most = max(most, sum(size for _, size in left))
                wrong += _count_damaged(folder / "run", plan)
            else:
                others = [_writer(_write_shared, str(folder / "shared"), seed) for seed in (1, 2)]
                _kill(random, _write_shared, str(folder / "shared"), 3)
                for other in others:
                    other.join()
                    wrong += other.exitcode != 0
                left = list(_files(folder / "shared"))
            unfinished = sum(path.name.startswith(".penstock-") for path, _ in left)
            hidden += unfinished
            most_hidden = max(most_hidden, unfinished)
            reclaim_unfinished(
                open_storage(str(folder / ("run" if number % 3 < 2 else "shared")), {}), older_than_s=0
            )
    print(
        f"kills: {arguments.kills}, {hidden} objects caught in the middle, at most {most_hidden} by one kill "
        f"({KILL_STREAMS} streams); at most {most:,} B left (stated bound {bound:,}); {wrong} wrong"
    )


def _writer(target: Callable[..., None], *values: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=values)
    process.start()
    return process


def _kill(random: np.random.Generator, target: Callable[..., None], folder: str, *values: Any) -> None:
    """Start a process, wait until it writes, and kill it a random time later."""
    process = _writer(target, folder, *values)
    while process.is_alive() and not any(
        path.name.startswith(".penstock-") for path, _ in _files(Path(folder))
    ):
        time.sleep(0.001)
    time.sleep(float(random.uniform(0.0, 0.2)))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.stat().st_size


def _run_plan_forever(folder: str, plan: IoPlan, records: Path) -> None:
    request = CacheRequest(
        results=records,
        plan=plan,
        layout=EntryLayout(namespace="bench"),
        engine=EngineSettings(streams=KILL_STREAMS),
        measures_ceiling=False,
        stale_s=0,
    )
    storage = open_storage(folder, {})
    while True:
        on_ranks(1, lambda comm: measure_plan(request, storage, records, comm=comm, progress=Progress()))


def _count_damaged(folder: Path, plan: IoPlan) -> int:
    """Entries that are there, but are not what was written."""
    layout = EntryLayout(namespace="bench")
    written = plan.operations[plan.operations["op"] == Op.WRITE]
    stored = [(folder / layout.key(int(entry), 0)).is_file() for entry in written["entry"]]
    written = written[stored]
    written["op"] = Op.READ
    engine = IoEngine(open_storage(str(folder), {}), written, layout, EngineSettings(streams=2))
    engine.run()
    return _num_wrong(engine)


def _num_wrong(engine: IoEngine) -> int:
    outcomes = engine.timed["outcome"]
    return int(((outcomes != EntryOutcome.DONE) & (outcomes != EntryOutcome.MISSING)).sum())


def _write_shared(folder: str, seed: int) -> None:
    """Write, read and delete entries that others write, too."""
    random = np.random.Generator(np.random.PCG64(seed))
    steps = [(Op(int(random.integers(3))), int(random.integers(30))) for _ in range(200)]
    engine = execute(open_storage(folder, {}), rows(*steps, size=MIB), streams=KILL_STREAMS)
    if _num_wrong(engine):
        sys.exit(_DAMAGED)


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
    step.__name__: step
    for step in (hits, digests, repeat, chunks, memory, ordering, devices, objects, kills, damages)
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", type=Path, help="conversation_trace.jsonl, for `hits`")
    parser.add_argument("--only", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=6)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.absolute()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        STEPS[name](arguments)


if __name__ == "__main__":
    main()
