"""`penstock storage probe` beside fio on the same disk, and against storages whose limits are known.

Streams: fio runs psync threads, one block in flight each, O_DIRECT: exactly what the probe's streams do.
Jobs: fio keeps blocks of one file in flight by psync threads; the probe does the same on the same file. The
goal of both is a ratio of 1: neither slower than the disk allows nor faster than the truth. Cost: the CPU
time of an operation, in user code and in the kernel, which other programs on the machine do not change much.

Both sides have the same kind of pages. The probe's own are huge: a device is told of fewer pieces. fio's are
huge only if asked to and if some are reserved (sysctl vm.nr_hugepages=16), so large blocks are compared with
ordinary pages, then with huge ones if there are any.

    python benchmarks/storage_probe.py            everything, up to 15 rounds of each comparison
    python benchmarks/storage_probe.py jobs       one part: streams, jobs, cost, metadata, knee, stall
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from harness import Ratio, interleave
from penstock.bench.probe.load_plan import NS, LoadRequest
from penstock.bench.probe.load_run import LoadLoop, LoadResult, measure_load
from penstock.bench.probe.metadata_rates import MOST_FILES, measure_metadata
from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.timed_streams import FileTarget
from penstock.cluster.comm import SoloComm
from penstock.progress import Progress
from penstock.storage import Storage, open_storage
from penstock.storage.aligned import PAGE_BYTES
from penstock.storage.capabilities import find_local_paths
from penstock.storage.uri import parse_uri

SIZE_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
RANDOM_BLOCK_BYTES = 128 << 10
NUM_RANDOM_READS = 4096
STREAMS = (1, 8)
SECONDS = 1.0
"""Of one side of a job: short, so that many rounds see the same disk."""
LOAD_SECONDS = 2.0
NUM_HUGE_PAGES = 16


@dataclass(frozen=True)
class Job:
    """fio's name of the pattern, the block, how many in flight."""

    pattern: str
    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.pattern} {self.block_bytes >> 10} KiB, {self.depth} in flight"

    @property
    def load(self) -> LoadRequest:
        """The same as a load of the probe."""
        return LoadRequest(
            block_bytes=self.block_bytes,
            read_percent=0 if "write" in self.pattern else 100,
            depth=self.depth,
        )


JOBS = (
    Job("randread", 1 << 20, 1),
    Job("randread", 128 << 10, 8),
    Job("randwrite", 1 << 20, 4),
    Job("randread", 4 << 10, 1),
    Job("randread", 4 << 10, 32),
    Job("randwrite", 4 << 10, 16),
)


def measure(repetitions: int) -> list[Ratio]:
    """Both sides of all comparisons with fio, in a folder on the disk that holds the current folder."""
    return [*compare_streams(repetitions), *compare_jobs(repetitions)]


def compare_streams(repetitions: int) -> list[Ratio]:
    """Streams of the probe beside as many threads of fio."""
    return [
        ratio
        for pages in _kinds_of_pages()
        for streams in STREAMS
        for ratio in _compare(
            repetitions,
            partial(_our_streams, streams=streams, pages=pages),
            partial(_fio_streams, streams=streams, pages=pages),
            "GiB/s",
        )
    ]


def compare_jobs(repetitions: int) -> list[Ratio]:
    """Six jobs with blocks of one file in flight, each beside fio's; of small blocks pages do not matter."""
    return [
        ratio
        for pages in _kinds_of_pages()
        for job in JOBS
        if job.block_bytes > PAGE_BYTES or not pages.is_huge
        for ratio in _compare(
            repetitions,
            partial(_our_job, job=job, pages=pages),
            partial(_fio_job, job=job, pages=pages),
            "ops/s",
        )
    ]


@dataclass(frozen=True)
class Pages:
    """What the memory of both sides consists of."""

    is_huge: bool

    def __str__(self) -> str:
        return "huge pages" if self.is_huge else "ordinary pages"

    @property
    def fio_option(self) -> str:
        """What has fio use these pages."""
        return f"--mem={'mmaphuge' if self.is_huge else 'malloc'}"

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Have this process, and those that it starts, use these pages."""
        set_thp_disable = partial(ctypes.CDLL(None).prctl, 41)
        set_thp_disable(int(not self.is_huge), 0, 0, 0)
        yield
        set_thp_disable(0, 0, 0, 0)


ORDINARY = Pages(is_huge=False)


def _kinds_of_pages() -> list[Pages]:
    """Huge ones only if enough are reserved, which only the administrator can do."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free")), 0)
    if free < NUM_HUGE_PAGES:
        print(f"    for huge pages: sysctl vm.nr_hugepages={NUM_HUGE_PAGES}", file=sys.stderr, flush=True)
        return [ORDINARY]
    return [ORDINARY, Pages(is_huge=True)]


def _compare(
    repetitions: int,
    ours: Callable[[str], Mapping[str, float]],
    theirs: Callable[[str], Mapping[str, float]],
    unit: str,
) -> list[Ratio]:
    if shutil.which("fio") is None:
        sys.exit(
            "fio is not installed: apt-get install fio (or your distribution's package), then try again."
        )
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        return interleave(partial(ours, folder), partial(theirs, folder), repetitions=repetitions, unit=unit)


def _name(operation: str, streams: int, pages: Pages) -> str:
    return f"{operation} direct, {streams} streams, {pages}"


def _our_streams(folder: str, streams: int, pages: Pages) -> Mapping[str, float]:
    command = [
        *(sys.executable, "-m", "penstock", "storage", "probe", f"direct://{folder}", "--json"),
        *("--size", f"{SIZE_BYTES}B", "--streams", str(streams), "--blocks", f"{BLOCK_BYTES}B"),
    ]
    with pages.ours():
        result = json.loads(_output(*command))
    wanted = ("write", "read", "random_read")
    return {
        _name(seen["op"], streams, pages): seen["gib_per_s"]
        for seen in result["measurements"]
        if seen["op"] in wanted
    }


def _fio_streams(folder: str, streams: int, pages: Pages) -> Mapping[str, float]:
    threads = ("--filename_format=peer.$jobnum", "--thread", "--ioengine=psync", f"--numjobs={streams}")
    options = (*threads, f"--size={SIZE_BYTES // streams}", pages.fio_option)
    write = _fio(folder, "write", BLOCK_BYTES, *options, "--end_fsync=1")
    read = _fio(folder, "read", BLOCK_BYTES, *options)
    reads_each = f"--number_ios={NUM_RANDOM_READS // streams}"
    random = _fio(folder, "randread", RANDOM_BLOCK_BYTES, *options, reads_each)
    for path in Path(folder).glob("peer.*"):
        path.unlink()
    sides = {"write": write, "read": read, "random_read": random}
    return {_name(name, streams, pages): side["bw_bytes"] / 2**30 for name, side in sides.items()}


def _fio(folder: str, pattern: str, block_bytes: int, *more: str) -> Mapping[str, float]:
    command = [
        *("fio", "--name=peer", f"--directory={folder}", "--output-format=json", "--direct=1"),
        *("--group_reporting", f"--rw={pattern}", f"--bs={block_bytes}", *more),
    ]
    (job,) = json.loads(_output(*command))["jobs"]
    side = job["write" if "write" in pattern else "read"]
    # fio gives percentages of the time that the job ran, so its start does not count.
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * side["runtime"] / 1000
    return {name: side[name] for name in ("iops", "bw_bytes", "total_ios")} | {"cpu_s": cpu_s}


def _our_job(folder: str, job: Job, pages: Pages, figure: str = "rate") -> Mapping[str, float]:
    """A closed loop of the probe on the file that fio uses, by the way that suits the depth."""
    files = find_local_paths(open_storage(f"direct://{folder}", {}))
    assert files is not None
    with closing(FileTarget(files, _shared_file(folder), folder, is_sequential=False)) as target:
        with pages.ours():
            loop = LoadLoop(
                job.load, target, uri=folder, size_bytes=SIZE_BYTES, comm=SoloComm(), progress=Progress()
            )
        before_s = time.process_time()
        times = loop.run(None, SECONDS)
        cpu_s = time.process_time() - before_s
    in_time = float(np.count_nonzero(times["ended"] < SECONDS * NS))
    return {f"{job}, {pages}": in_time / SECONDS if figure == "rate" else times.size / cpu_s}


def _fio_job(folder: str, job: Job, pages: Pages, figure: str = "rate") -> Mapping[str, float]:
    engine = ("--ioengine=psync", "--thread", f"--numjobs={job.depth}")
    options = (f"--size={SIZE_BYTES}", f"--filename={_shared_file(folder)}", *engine, pages.fio_option)
    runtime = f"--runtime={round(1000 * SECONDS)}ms"
    side = _fio(folder, job.pattern, job.block_bytes, *options, "--randrepeat=0", "--time_based", runtime)
    return {f"{job}, {pages}": side["iops"] if figure == "rate" else side["total_ios"] / side["cpu_s"]}


def _shared_file(folder: str) -> str:
    """The file of a job, written by fio: two files lie elsewhere on a disk, and may differ by a third."""
    path = Path(folder) / "peer.job"
    if not path.exists():
        _fio(folder, "write", 8 << 20, f"--size={SIZE_BYTES}", f"--filename={path.name}", "--end_fsync=1")
    return path.name


def compare_cost(repetitions: int) -> list[Ratio]:
    """Operations of jobs of small blocks for each second of CPU time, beside fio's."""
    return [
        ratio
        for job in JOBS
        if job.block_bytes == PAGE_BYTES
        for ratio in _compare(
            repetitions,
            partial(_our_job, job=job, pages=ORDINARY, figure="cost"),
            partial(_fio_job, job=job, pages=ORDINARY, figure="cost"),
            "ops/CPU s",
        )
    ]


def _load(
    uri: str,
    load: LoadRequest,
    *,
    size_bytes: int = SIZE_BYTES,
    wrap: Callable[[Storage], Storage] = lambda storage: storage,
) -> LoadResult:
    folder = ProbeFolder(parse_uri(uri), "penstock-probe-bench", comm=SoloComm(), environment={}, options={})
    with folder as place:
        place.storage = wrap(place.storage)
        return measure_load(
            load,
            place,
            size_bytes=size_bytes,
            max_seconds=load.seconds,
            comm=SoloComm(),
            progress=Progress(),
        )


def print_knees() -> None:
    """The knee of storages of known rate and latency."""
    from tests.support.slow_storages import Throttled  # noqa: PLC0415 - found through `harness`

    for rate_per_s, latency_s in ((100, 0.02), (400, 0.005), (400, 0.05), (1000, 0.01), (2000, 0.005)):
        seen = _load(
            "mem://x",
            LoadRequest(depth=64, seconds=LOAD_SECONDS),
            size_bytes=16 << 20,
            wrap=partial(Throttled, rate_per_s=rate_per_s, latency_s=latency_s),
        )
        found, by = (seen.knee.operations_per_s, seen.knee.limited_by) if seen.knee else (0.0, "no knee")
        print(
            f"throttled to {rate_per_s}/s and {1e3 * latency_s:g} ms: knee at {found:,.1f}/s, "
            f"{found / rate_per_s - 1:+.1%}, limited by {by}, after {len(seen.points)} loads",
            flush=True,
        )


def print_stall() -> None:
    """What a stall of 200 ms every 2 s looks like on a schedule, and to one reader in a closed loop."""
    from tests.support.slow_storages import Stalling  # noqa: PLC0415 - found through `harness`

    wrap = partial(Stalling, latency_s=0.002, stall_s=0.2, every_s=2.0)
    scheduled, closed = LoadRequest(seconds=6.0, rates=(200.0,)), LoadRequest(depth=1, seconds=6.0, rates=())
    seen = _load("mem://x", scheduled, size_bytes=16 << 20, wrap=wrap)
    alone = _load("mem://x", closed, size_bytes=16 << 20, wrap=wrap)
    (point,) = seen.points
    print(
        f"stall of 200 ms every 2 s: on schedule p50 {point.p50_ms:.1f}, p99 {point.p99_ms:.1f}, "
        f"p99.9 {point.p999_ms:.1f} ms; one reader in a closed loop: p99 {alone.saturation.p99_ms:.1f} ms"
    )


def _output(*command: str) -> bytes:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def compare_metadata(repetitions: int) -> list[Ratio]:
    """Calls on files by one thread of the probe beside a bare loop of the same calls."""
    return _compare(repetitions, _our_calls, _bare_calls, "files/s")


def _our_calls(folder: str) -> Mapping[str, float]:
    uri = parse_uri(f"file://{folder}")
    place = ProbeFolder(uri, "penstock-probe-bench", comm=SoloComm(), environment={}, options={})
    with place:
        rates = measure_metadata(place, (1,), comm=SoloComm(), progress=Progress())
        return {f"{rate.op} files": rate.files_per_s for rate in rates}


def _bare_calls(folder: str) -> Mapping[str, float]:
    inside = f"{folder}/bare"
    os.mkdir(inside)  # noqa: PTH102 - the calls themselves are compared
    names = [f"{inside}/{number}" for number in range(MOST_FILES)]
    rates = {}

    def create() -> None:
        for name in names:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    def delete() -> None:
        for name in names:
            os.unlink(name)  # noqa: PTH108 - as above

    calls: Mapping[str, Callable[[], object]] = {
        "create": create,
        "stat": lambda: [os.stat(name) for name in names],  # noqa: PTH116
        "list": lambda: os.listdir(inside),  # noqa: PTH208
        "delete": delete,
    }
    for name, call in calls.items():
        begin_s = time.monotonic()
        call()
        rates[f"{name} files"] = MOST_FILES / (time.monotonic() - begin_s)
    os.rmdir(inside)  # noqa: PTH106
    return rates


def _print_ratios(compare: Callable[[int], list[Ratio]]) -> None:
    for ratio in compare(15):
        print(ratio.line(None), flush=True)


PARTS: Mapping[str, Callable[[], None]] = {
    "streams": partial(_print_ratios, compare_streams),
    "jobs": partial(_print_ratios, compare_jobs),
    "cost": partial(_print_ratios, compare_cost),
    "knee": print_knees,
    "stall": print_stall,
    "metadata": partial(_print_ratios, compare_metadata),
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
