"""A probe's measurements as a job file of fio, which repeats them one after the other with its own loops.

Only files can be repeated so. Sizes, blocks, threads and rates are those measured; a section's comment says
what the probe found, so that the two can be compared.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from penstock.bench.probe.block_targets import find_local_files
from penstock.bench.probe.load_run import LoadResult
from penstock.bench.probe.probe_plan import SMALL_OBJECT_BYTES, ProbeRequest
from penstock.bench.probe.probe_run import ProbeMeasurement, ProbeResult
from penstock.environment import Environment
from penstock.errors import UsageError
from penstock.storage import open_storage
from penstock.storage.uri import parse_uri
from penstock.units import format_rate

_MODES: Final = {"buffered": ["direct=0", "invalidate=1"], "direct": ["direct=1"]}
_PATTERNS: Final = {
    "write": "write",
    "read": "read",
    "random_read": "randread",
    "small_write": "write",
    "small_read": "read",
    "fsync": "write",
}


def check_fio_repeats(request: ProbeRequest, *, environment: Environment, options: Mapping[str, str]) -> None:
    """Raise `UsageError` before anything is measured that fio cannot repeat."""
    storage = open_storage(request.uri, environment, options=options)
    if find_local_files(storage) is None or set(request.parts) == {"metadata"}:
        raise UsageError(
            "fio can only repeat reads and writes of files",
            where=request.uri,
            fix="Leave --fio out, or probe /path, file:///path or direct:///path for best rates or a knee.",
        )


def fio_job_file(result: ProbeResult) -> str:
    """The text of the job file."""
    sections = [
        *(lines for seen in result.measurements if seen.mode in _MODES for lines in [_step(seen)]),
        *(lines for load in result.loads if load.mode in _MODES for lines in _load(load)),
    ]
    head = [
        f"; What `penstock storage probe {result.uri}` measured on {_ranks(result)}, for fio 3.0 or later.",
        "; fio leaves its files behind: remove penstock-fio.* afterwards.",
        "[global]",
        f"directory={parse_uri(result.uri).root}",
        "filename_format=penstock-fio.$jobname.$jobnum",
        "thread",
        "group_reporting",
        "randrepeat=0",
    ]
    return "\n".join("\n".join(lines) + "\n" for lines in [head, *sections])


def _ranks(result: ProbeResult) -> str:
    return "one rank" if result.ranks == 1 else f"{result.ranks} ranks, as the share of one of them"


def _step(seen: ProbeMeasurement) -> list[str]:
    each_bytes = seen.moved_bytes // (seen.ranks * seen.streams)
    rate = f"{format_rate(seen.gib_per_s * 2**30)}, {seen.operations_per_s:,.0f} operations a second"
    lines = [
        f"; {rate}, p99 {seen.p99_ms:.3f} ms",
        f"[{seen.op}-{seen.mode}-{seen.streams}x{seen.block_bytes}]",
        "stonewall",
        "ioengine=psync",
        f"rw={_PATTERNS[seen.op]}",
        f"bs={seen.block_bytes}",
        f"numjobs={seen.streams}",
        f"size={each_bytes}",
        *_MODES[seen.mode],
    ]
    if seen.op == "write":
        lines.append("end_fsync=1")
    if seen.op == "fsync":
        lines.append("fsync=1")
    if seen.op.startswith("small"):
        files = each_bytes // SMALL_OBJECT_BYTES
        lines += [f"nrfiles={files}", f"filesize={SMALL_OBJECT_BYTES}", "openfiles=1"]
        lines += ["file_service_type=sequential", "filename_format=penstock-fio.$jobname.$jobnum.$filenum"]
        lines += ["create_on_open=1", "fsync_on_close=1"] if seen.op == "small_write" else []
    return lines


def _load(load: LoadResult) -> Iterator[list[str]]:
    """The closed loop, then each rate on an even schedule, on one file that all of them share."""
    most = load.saturation
    yield _load_section(load, "closed", f"{most.operations_per_s:,.0f} operations a second", most.seconds)
    # A rate that was offered twice is one section, with the figures of the last time.
    points = {point.offered_per_s: point for point in load.points}
    for _, point in sorted(points.items()):
        text = f"p50 {point.p50_ms:.3f} ms, p99 {point.p99_ms:.3f} ms, p99.9 {point.p999_ms:.3f} ms"
        rate = max(1, round(point.offered_per_s / load.ranks))
        yield [
            *_load_section(load, f"{rate}", text, point.seconds),
            *_rates(load.read_percent, rate),
        ]


def _rates(read_percent: int, rate: int) -> list[str]:
    """Operations a second of reads, then of writes, on an even schedule."""
    reads, writes = rate * read_percent // 100, rate - rate * read_percent // 100
    given = f"{reads or ''},{writes or ''}".rstrip(",")
    return [f"rate_iops={given}", "rate_process=linear"]


def _load_section(load: LoadResult, name: str, text: str, seconds: float) -> list[str]:
    pattern = {100: "read", 0: "write"}.get(load.read_percent, "rw")
    is_ring = load.loop == "io_uring"
    return [
        f"; {text}",
        f"[load-{load.mode}-{name}]",
        "stonewall",
        f"ioengine={'io_uring' if is_ring or name != 'closed' else 'psync'}",
        *([f"iodepth={load.depth}"] if is_ring or name != "closed" else [f"numjobs={load.depth}"]),
        f"rw={'' if load.is_sequential else 'rand'}{pattern}",
        *([f"rwmixread={load.read_percent}"] if pattern == "rw" else []),
        f"bs={load.block_bytes}",
        f"size={load.size_bytes // load.ranks}",
        "filename=penstock-fio.load",
        *_MODES[load.mode],
        *(["sync=dsync"] if load.mode == "buffered" and load.read_percent < 100 else []),
        "time_based",
        f"runtime={round(1000 * seconds)}ms",  # of a fraction of a second fio takes the whole part
    ]
