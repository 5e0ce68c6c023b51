"""`penstock storage probe` beside fio on the same disk, and against storages whose limits are known.

Streams: fio runs psync threads, one block in flight each, O_DIRECT: exactly what the probe's streams do.
Jobs: fio keeps blocks of one file in flight by io_uring with registered buffers, or one by psync; the probe
whichever of its two ways is faster, from ordinary pages as fio's. (From huge pages, which the probe uses
otherwise, large blocks are faster: the device is told of fewer pieces.) The goal of both is a ratio of 1:
neither slower than the disk allows nor faster than the truth. Cost: the CPU time of an operation, in user
code and in the kernel, which other programs on the machine do not change much.

    python benchmarks/storage_probe.py            everything, five rounds of each comparison
    python benchmarks/storage_probe.py jobs       one part: streams, jobs, cost, metadata, knee, stall, loops,
                                                  export
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from harness import Ratio, interleave
from penstock.bench.probe.block_targets import FileTarget, find_local_files
from penstock.bench.probe.load_loops import LoadRun, Operations, RingLoop, ThreadLoop, blocks_ahead
from penstock.bench.probe.load_plan import LoadShape
from penstock.bench.probe.load_run import LoadRequest, LoadResult, measure_load
from penstock.bench.probe.metadata_rates import MOST_FILES, measure_metadata
from penstock.bench.probe.probe_folder import ProbeFolder
from penstock.bench.probe.timed_streams import Blocks
from penstock.cluster.comm import SoloComm
from penstock.progress import Silent
from penstock.storage import Storage, open_storage
from penstock.storage.uri import parse_uri

SIZE_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
RANDOM_BLOCK_BYTES = 128 << 10
NUM_RANDOM_READS = 4096
STREAMS = (1, 8)
SECONDS = 2.0
JOBS = (
    ("read", 1 << 20, 1),
    ("read", 128 << 10, 8),
    ("write", 1 << 20, 4),
    ("randread", 4 << 10, 1),
    ("randread", 4 << 10, 32),
    ("randwrite", 4 << 10, 16),
)
Job = tuple[str, int, int]
"""fio's name of the pattern, the block, how many in flight."""


def measure(repetitions: int) -> list[Ratio]:
    """Both sides of all comparisons with fio, in a folder on the disk that holds the current folder."""
    return [*compare_streams(repetitions), *compare_jobs(repetitions)]


def compare_streams(repetitions: int) -> list[Ratio]:
    """Streams of the probe beside as many threads of fio."""
    return [
        ratio
        for streams in STREAMS
        for ratio in _compare(
            repetitions,
            partial(_our_streams, streams=streams),
            partial(_fio_streams, streams=streams),
            "GiB/s",
        )
    ]


def compare_jobs(repetitions: int) -> list[Ratio]:
    """Six jobs with blocks of one file in flight, each beside fio's."""
    return [
        ratio
        for job in JOBS
        for ratio in _compare(repetitions, partial(_our_job, job=job), partial(_fio_job, job=job), "ops/s")
    ]


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


def _name(operation: str, streams: int) -> str:
    return f"{operation} direct, {streams} streams"


def _our_streams(folder: str, streams: int) -> Mapping[str, float]:
    command = [
        *(sys.executable, "-m", "penstock", "storage", "probe", f"direct://{folder}", "--json", "--exact"),
        *("--size", str(SIZE_BYTES), "--streams", str(streams), "--blocks", str(BLOCK_BYTES)),
    ]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    wanted = ("write", "read", "random_read")
    return {
        _name(seen["op"], streams): seen["gib_per_s"]
        for seen in result["measurements"]
        if seen["op"] in wanted
    }


def _fio_streams(folder: str, streams: int) -> Mapping[str, float]:
    threads = ("--filename_format=peer.$jobnum", "--thread", "--ioengine=psync", f"--numjobs={streams}")
    options = (*threads, f"--size={SIZE_BYTES // streams}")
    write = _fio(folder, "write", BLOCK_BYTES, *options, "--end_fsync=1")
    read = _fio(folder, "read", BLOCK_BYTES, *options)
    reads_each = f"--number_ios={NUM_RANDOM_READS // streams}"
    random = _fio(folder, "randread", RANDOM_BLOCK_BYTES, *options, reads_each)
    for path in Path(folder).glob("peer.*"):
        path.unlink()
    sides = {"write": write, "read": read, "random_read": random}
    return {_name(name, streams): side["bw_bytes"] / 2**30 for name, side in sides.items()}


def _fio(folder: str, pattern: str, block_bytes: int, *more: str) -> Mapping[str, float]:
    command = [
        *("fio", "--name=peer", f"--directory={folder}", "--output-format=json", "--direct=1"),
        *("--group_reporting", f"--rw={pattern}", f"--bs={block_bytes}", *more),
    ]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result["jobs"][0]["write" if "write" in pattern else "read"]  # type: ignore[no-any-return]


def _job_name(job: Job) -> str:
    pattern, block_bytes, depth = job
    return f"{pattern} {block_bytes >> 10} KiB, {depth} in flight"


def _shape(job: Job) -> LoadShape:
    pattern, block_bytes, depth = job
    return LoadShape(
        block_bytes=block_bytes,
        read_percent=0 if "write" in pattern else 100,
        is_sequential=not pattern.startswith("rand"),
        depth=depth,
    )


def _our_job(folder: str, job: Job) -> Mapping[str, float]:
    with _ordinary_pages():
        seen = _load(f"direct://{folder}", _shape(job))
    # The mean over the whole time, as fio's.
    return {_job_name(job): float(np.mean([one.operations_per_s for one in seen.saturation.intervals]))}


@contextmanager
def _ordinary_pages() -> Iterator[None]:
    """Have no huge pages in this process."""
    set_thp_disable = partial(ctypes.CDLL(None).prctl, 41)
    set_thp_disable(1, 0, 0, 0)
    yield
    set_thp_disable(0, 0, 0, 0)


def _fio_job(folder: str, job: Job, figure: str = "iops") -> Mapping[str, float]:
    pattern, block_bytes, depth = job
    path = Path(folder) / "peer.job"
    if not path.exists():
        _fio(folder, "write", 8 << 20, f"--size={SIZE_BYTES}", f"--filename={path.name}", "--end_fsync=1")
    ring = ("--ioengine=io_uring", f"--iodepth={depth}", "--fixedbufs")
    engine = ring if depth > 1 else ("--ioengine=psync",)
    options = (f"--size={SIZE_BYTES}", f"--filename={path.name}", *engine)
    runtime = f"--runtime={round(1000 * SECONDS)}ms"
    before = _cpu_s(resource.RUSAGE_CHILDREN)
    side = _fio(folder, pattern, block_bytes, *options, "--randrepeat=0", "--time_based", runtime)
    cpu_s = _cpu_s(resource.RUSAGE_CHILDREN) - before
    return {_job_name(job): side["iops"] if figure == "iops" else side["total_ios"] / cpu_s}


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def compare_cost(repetitions: int) -> list[Ratio]:
    """Operations of jobs of small blocks for each second of CPU time, beside fio's."""
    return [
        ratio
        for job in JOBS
        if job[1] == 4 << 10
        for ratio in _compare(
            repetitions,
            partial(_our_cost, job=job),
            partial(_fio_job, job=job, figure="cost"),
            "ops/CPU s",
        )
    ]


def _our_cost(folder: str, job: Job) -> Mapping[str, float]:
    """A closed loop on the file that fio uses, by the way that suits the depth."""
    _, block_bytes, depth = job
    if not (Path(folder) / "peer.job").exists():
        _fio_job(folder, job)
    blocks = Blocks(depth + blocks_ahead(block_bytes), block_bytes, stream_id=0)
    files = find_local_files(open_storage(f"direct://{folder}", {}))
    assert files is not None
    with closing(FileTarget(files, "peer.job", folder, is_sequential=False)) as target:
        ring, threads = RingLoop(target, blocks, depth, folder), ThreadLoop(target, blocks, depth, folder)
        operations = Operations.of(_shape(job), SIZE_BYTES, rank=0)
        run = LoadRun(operations=operations, due_ns=None, seconds=SECONDS)
        before = _cpu_s(resource.RUSAGE_SELF)
        times = (ring if depth > 1 else threads).run(run)
    return {_job_name(job): times.due.size / (_cpu_s(resource.RUSAGE_SELF) - before)}


def _load(
    uri: str,
    shape: LoadShape,
    *,
    size_bytes: int = SIZE_BYTES,
    rates: tuple[float, ...] | None = (),
    seconds: float = SECONDS,
    wrap: Callable[[Storage], Storage] = lambda storage: storage,
) -> LoadResult:
    request = LoadRequest(
        shape=shape, size_bytes=size_bytes, seconds=seconds, max_seconds=seconds, rates=rates
    )
    folder = ProbeFolder(parse_uri(uri), "penstock-probe-bench", comm=SoloComm(), environment={}, options={})
    with folder as place:
        place.storage = wrap(place.storage)
        return measure_load(request, place, comm=SoloComm(), progress=Silent())


def print_knees() -> None:
    """The knee of storages of known rate and latency."""
    from tests.support.slow_storages import Throttled  # noqa: PLC0415 - found through `harness`

    for rate_per_s, latency_s in ((100, 0.02), (400, 0.005), (400, 0.05), (1000, 0.01), (2000, 0.005)):
        seen = _load(
            "mem://x",
            LoadShape(depth=64),
            size_bytes=16 << 20,
            rates=None,
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
    more = {"size_bytes": 16 << 20, "seconds": 6.0, "wrap": wrap}
    seen = _load("mem://x", LoadShape(depth=64), rates=(200.0,), **more)  # type: ignore[arg-type]
    alone = _load("mem://x", LoadShape(depth=1), **more)  # type: ignore[arg-type]
    (point,) = seen.points
    print(
        f"stall of 200 ms every 2 s: on schedule p50 {point.p50_ms:.1f}, p99 {point.p99_ms:.1f}, "
        f"p99.9 {point.p999_ms:.1f} ms; one reader in a closed loop: p99 {alone.saturation.p99_ms:.1f} ms"
    )


def print_loops() -> None:
    """What threads and io_uring reach with 4 KiB reads."""
    for depth in (1, 8, 32, 128):
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
            seen = _load(f"direct://{folder}", LoadShape(block_bytes=4096, depth=depth))
        rates = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in seen.rates_of_loops.items())
        print(f"random reads of 4 KiB, {depth} in flight: {rates}")


def print_export() -> None:
    """Every job that a probe writes for fio, run by fio: our figure over its."""
    options = ("--size", "256MiB", "--streams", "1,4", "--blocks", "1MiB", "--exact", "--seconds", "2")
    load = ("--measure", "best,knee", "--request", "16KiB", "--mix", "70", "--rates", "500,2000")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        jobs = Path(folder) / "probe.fio"
        probe = (sys.executable, "-m", "penstock", "storage", "probe", folder, *options, *load)
        ours = json.loads(_output(*probe, "--fio", str(jobs), "--json"))
        theirs = json.loads(_output("fio", "--output-format=json", str(jobs)))
    rates = {
        f"{seen['op']}-{seen['mode']}-{seen['streams']}x{seen['block_bytes']}": seen["operations_per_s"]
        for seen in ours["measurements"]
    }
    for seen in ours["loads"]:
        rates[f"load-{seen['mode']}-closed"] = seen["saturation"]["operations_per_s"]
        rates |= {
            f"load-{seen['mode']}-{at['offered_per_s']:.0f}": at["achieved_per_s"] for at in seen["points"]
        }
    for job in theirs["jobs"]:
        name, peer = job["jobname"], job["read"]["iops"] + job["write"]["iops"]
        print(f"{name:<40} {rates[name] / peer:5.2f}   ours {rates[name]:,.0f}, fio {peer:,.0f} operations/s")


def _output(*command: str) -> bytes:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def compare_metadata(repetitions: int) -> list[Ratio]:
    """Calls on files by one thread of the probe beside a bare loop of the same calls."""
    return _compare(repetitions, _our_calls, _bare_calls, "files/s")


def _our_calls(folder: str) -> Mapping[str, float]:
    uri = parse_uri(f"file://{folder}")
    place = ProbeFolder(uri, "penstock-probe-bench", comm=SoloComm(), environment={}, options={})
    with place:
        rates = measure_metadata(place, (1,), comm=SoloComm(), progress=Silent())
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
    for ratio in compare(5):
        print(ratio.line(None), flush=True)


PARTS: Mapping[str, Callable[[], None]] = {
    "streams": partial(_print_ratios, compare_streams),
    "jobs": partial(_print_ratios, compare_jobs),
    "cost": partial(_print_ratios, compare_cost),
    "knee": print_knees,
    "stall": print_stall,
    "loops": print_loops,
    "export": print_export,
    "metadata": partial(_print_ratios, compare_metadata),
}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
