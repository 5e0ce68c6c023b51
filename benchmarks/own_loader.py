"""A loader of the user's own, measured: planted bottlenecks, and what measuring costs.

    python benchmarks/own_loader.py              both tables
    python benchmarks/own_loader.py planted      20 loaders with one known bottleneck each: is it named?
    python benchmarks/own_loader.py overhead     what measuring adds to batches of 7 us, 0.4 and 4 ms

Storage is slow by a server behind a socket that answers late, so that reading sleeps as it does on a slow
file system. Sizes are chosen so that sleeping dominates, for machines with two cores. Each run is a process
of its own: `python benchmarks/own_loader.py run '{...}'` prints what it found as JSON.
"""

import json
import os
import resource
import socket
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from penstock.bench.own_loader.loader_watch import ProcessWatch, TorchWatch, WorkerDeaths
from penstock.bench.own_loader.own_loader_run import EpochLoop, OwnLoaderRequest, run_own_loader
from penstock.bench.own_loader.user_code import DescribedLoader, SampleCounter
from penstock.bench.recorded_run import EventsInMemory
from penstock.cluster.comm import SoloComm
from penstock.errors import PenstockError
from penstock.progress import Progress
from penstock.results.run_status import Meter
from penstock.workload.quantities import Duration
from penstock.workload.spec import Train, Workload


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A loader with known costs: seconds a sample, a batch or a start, and bytes a sample."""

    expected: str = ""
    read_s: float = 0.0
    decode_mib: float = 0.0
    work_kib: float = 0.0
    collate_s: float = 0.0
    start_s: float = 0.0
    copy_mib: float = 0.0
    tensor_mib: float = 0.0
    step_s: float = 0.005
    workers: int = 2
    batch: int = 4
    batches: int = 60
    epochs: int = 1
    persistent: bool = False
    shm_mib: int = 0


class Planted(Dataset[Any]):
    """Samples that cost what the plant says."""

    def __init__(self, plant: Plant, server: str) -> None:
        self.plant = plant
        self.server = server
        self.work = bytes(int(plant.work_kib * 1024))
        self.packed = zlib.compress(np.arange(int(plant.decode_mib * 2**17), dtype=np.int64).tobytes(), 6)

    def __len__(self) -> int:
        return (self.plant.batch or 1) * self.plant.batches

    def __getitem__(self, index: int) -> Any:
        plant = self.plant
        if plant.read_s:
            read_from(self.server, plant.read_s)
        if plant.decode_mib:
            zlib.decompress(self.packed)
        if plant.work_kib:
            zlib.crc32(self.work)
        if plant.copy_mib:
            return np.zeros(int(plant.copy_mib * 2**20), np.uint8)
        return torch.zeros(int(plant.tensor_mib * 2**18) or 16)


@dataclass
class Collate:
    """A collation that computes, or keeps samples apart so that each is pickled."""

    plant: Plant

    def __call__(self, samples: list[Any]) -> Any:
        """One batch."""
        end_s = time.thread_time() + self.plant.collate_s
        while time.thread_time() < end_s:
            np.sort(np.arange(4096)[::-1])
        return samples if self.plant.copy_mib else torch.stack(samples)


@dataclass
class SlowStart:
    """A worker that begins late, as with heavy imports or a big index."""

    seconds: float

    def __call__(self, _worker: int) -> None:
        """Called in each worker."""
        time.sleep(self.seconds)


class _LateAnswers(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while asked := self.request.recv(16, socket.MSG_WAITALL):
            time.sleep(float(asked))
            self.request.sendall(bytes(65536))


_connections: dict[int, socket.socket] = {}


def read_from(server: str, delay_s: float) -> int:
    """Read 64 KiB from the slow server, as from a file of a slow storage."""
    if os.getpid() not in _connections:
        _connections[os.getpid()] = socket.socket(socket.AF_UNIX)
        _connections[os.getpid()].connect(server)
    connection = _connections[os.getpid()]
    connection.sendall(f"{delay_s:<16.9f}".encode()[:16])
    return len(connection.recv(65536, socket.MSG_WAITALL))


def make_loader(plant: Plant, server: str) -> DataLoader[Any]:
    """The loader, as its user would have written it."""
    return DataLoader(
        Planted(plant, server),
        batch_size=plant.batch or None,
        num_workers=plant.workers,
        collate_fn=Collate(plant) if plant.collate_s or plant.copy_mib else None,
        worker_init_fn=SlowStart(plant.start_s) if plant.start_s else None,
        persistent_workers=plant.persistent,
    )


PLANTED = (
    Plant(expected="storage", read_s=0.005, batches=200),
    Plant(expected="storage", read_s=0.02, batches=30),
    Plant(expected="storage", read_s=0.06, batches=15, workers=4),
    Plant(expected="storage", read_s=0.01, workers=0, batches=30),
    Plant(expected="compute", decode_mib=2, workers=1, batches=60),
    Plant(expected="compute", decode_mib=8, workers=1, batch=2, batches=20),
    Plant(expected="compute", decode_mib=4, workers=0, batches=15),
    Plant(expected="compute", decode_mib=4, read_s=0.001, workers=1, batches=15),
    Plant(expected="copy", copy_mib=4, batches=30, step_s=0.001),
    Plant(expected="copy", copy_mib=16, batches=12, step_s=0.001),
    Plant(expected="copy", copy_mib=48, batch=2, batches=10, step_s=0.001, workers=1),
    Plant(expected="collate", collate_s=0.02, workers=1, batches=40),
    Plant(expected="collate", collate_s=0.06, workers=1, batches=20),
    Plant(expected="collate", collate_s=0.03, workers=0, batches=30),
    Plant(expected="startup", start_s=1.5, batches=40, step_s=0.01),
    Plant(expected="startup", start_s=0.5, batches=10, epochs=3, step_s=0.01),
    Plant(expected="consumer", step_s=0.05, batches=120),
    Plant(expected="consumer", step_s=0.15, read_s=0.01, batches=40, workers=4),
    Plant(expected="shared memory", tensor_mib=4, shm_mib=8),
    Plant(expected="shared memory", tensor_mib=0.25, shm_mib=2, batch=8),
)


def run_here(words: dict[str, Any]) -> dict[str, Any]:
    """Run one plant in this process."""
    plant = Plant(**words)
    with tempfile.TemporaryDirectory() as folder:
        server = socketserver.ThreadingUnixStreamServer(f"{folder}/slow", _LateAnswers)
        server.daemon_threads = True
        _apart(server)
        request = OwnLoaderRequest(
            results=Path(folder, "runs"),
            workload=Workload(
                name="planted",
                train=Train(epochs=plant.epochs, computation_time=Duration(mean_s=plant.step_s)),
            ),
            loader=DescribedLoader(name="benchmark"),
            factory=lambda: make_loader(plant, f"{folder}/slow"),
            seed=0,
        )
        try:
            result = run_own_loader(request, comm=SoloComm(), progress=Progress())
        except PenstockError as error:
            named = "shared memory" if str(error).startswith("Shared memory is full") else "another failure"
            return {"bottleneck": named, "answer": str(error), "samples_per_s": 0.0}
        assert result.stages.waits is not None
        return {**result.stages.waits.document(), "samples_per_s": result.train.samples_per_s_strict}


def _apart(server: socketserver.ThreadingUnixStreamServer) -> None:
    """Answer in another process, whose threads are not the loader's."""
    if os.fork() == 0:
        parent = os.getppid()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)


def run_apart(plant: Plant) -> dict[str, Any]:
    """Run one plant in a process of its own; with little shared memory if it asks for that."""
    command = [sys.executable, __file__, "run", json.dumps(asdict(plant))]
    if plant.shm_mib:
        mount = f'mount -t tmpfs -o size={plant.shm_mib}m tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    if done.returncode or not done.stdout:
        return {"bottleneck": "failed", "answer": done.stderr[-300:], "samples_per_s": 0.0}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def planted() -> int:
    """The table of planted bottlenecks; how many were named wrongly."""
    wrong = 0
    for number, plant in enumerate(PLANTED, 1):
        found = run_apart(plant)
        right = found["bottleneck"] == plant.expected
        wrong += not right
        stages = {
            name[:-2]: round(spent, 2) for name, spent in found.get("stages", {}).items() if spent >= 0.01
        }
        verdict = "right" if right else f"WRONG: {found['bottleneck']}"
        print(f"{number:3} {plant.expected:<14}{verdict:<22}{stages or found['answer'][:110]}", flush=True)
    print(f"{len(PLANTED) - wrong} of {len(PLANTED)} named right")
    return wrong


LOADERS = (
    ("free, no workers", Plant(batch=0, batches=4000, workers=0)),
    ("0.4 ms, no workers", Plant(batch=8, batches=2000, workers=0, work_kib=140)),
    ("0.4 ms, 2 workers", Plant(batch=8, batches=2000, workers=2)),
    ("4 ms, no workers", Plant(batch=8, batches=400, workers=0, work_kib=2000)),
    ("4 ms, 2 workers", Plant(batch=8, batches=400, workers=2, work_kib=2000)),
)


@dataclass(frozen=True)
class Spent:
    """Microseconds a batch between the first and the last one, and of all processes over the whole run."""

    elapsed_us: float
    consumer_us: float
    whole_cpu_us: float


def overhead(rounds: int = 11) -> None:
    """Loaders iterated by the barest loop and measured, in turn: medians, and quartiles of differences."""
    print("us a batch: the barest loop, and what measuring adds (lower and upper quartile of the rounds)")
    for name, plant in LOADERS:
        pairs: list[tuple[Spent, Spent]] = []
        for number in range(rounds):
            ways = (_iterate_bare, _iterate_measured)
            first, second = (_spend(way, plant) for way in (ways if number % 2 else ways[::-1]))
            pairs.append((first, second) if number % 2 else (second, first))
        for figure, title in (
            ("elapsed_us", "elapsed"),
            ("consumer_us", "consumer's thread, CPU"),
            ("whole_cpu_us", "all processes with start, CPU"),
        ):
            bare = statistics.median(getattr(one, figure) for one, _ in pairs)
            added = [getattr(measured, figure) - getattr(one, figure) for one, measured in pairs]
            low, middle, high = statistics.quantiles(added, n=4)
            print(
                f"{name:<20}{title:<31}{bare:9.1f}  {middle:+7.1f} ({low:+.1f} to {high:+.1f}),"
                f" {middle / bare:+.1%}",
                flush=True,
            )


def _iterate_bare(plant: Plant) -> tuple[int, int]:
    moments, first_cpu_ns = array("q"), 0
    keep = moments.append
    for _ in make_loader(plant, ""):
        keep(time.perf_counter_ns())
        first_cpu_ns = first_cpu_ns or time.thread_time_ns()
    return moments[-1] - moments[0], time.thread_time_ns() - first_cpu_ns


def _iterate_measured(plant: Plant) -> tuple[int, int]:
    cpu_ns: list[int] = []

    def consume(_batch: Any, loaded_ns: int, _epoch: int, step: int) -> int:
        if step in (1, plant.batches):
            cpu_ns.append(time.thread_time_ns())
        return loaded_ns

    with Meter() as progress, WorkerDeaths() as deaths, TorchWatch(deaths):
        loop = EpochLoop(SoloComm(), EventsInMemory(), progress, consume, "fast")
        loop.count = SampleCounter(plant.batch or None)
        watch = ProcessWatch(loop.waited_ns)
        watch.start()
        steps = loop.run_epoch(make_loader(plant, ""), 1)
        watch.stop()
    return steps[-1].loaded_ns - steps[0].loaded_ns, cpu_ns[-1] - cpu_ns[0]


def _spend(iterate: Callable[[Plant], tuple[int, int]], plant: Plant) -> Spent:
    before_s = sum(_cpu_s())
    elapsed_ns, consumer_ns = iterate(plant)
    whole_s, batches = sum(_cpu_s()) - before_s, plant.batches
    return Spent(elapsed_ns / batches / 1e3, consumer_ns / batches / 1e3, whole_s / batches * 1e6)


def _cpu_s() -> Iterator[float]:
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        yield used.ru_utime + used.ru_stime


def main() -> int:
    """Print the tables that are asked for; 1 if something was named wrongly."""
    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    if what == "run":
        print(json.dumps(run_here(json.loads(sys.argv[2]))))
        return 0
    wrong = 0
    if what in ("all", "planted"):
        wrong = planted()
    if what in ("all", "overhead"):
        overhead()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
