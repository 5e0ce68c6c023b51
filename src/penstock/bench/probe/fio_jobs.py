"""A probe's measurements as a job file of fio, which repeats them one after the other with its own loops.

Only files can be repeated so. A section's comment has what the probe found, for comparison.
"""

from collections.abc import Iterator
from typing import Final

from penstock.bench.probe.load_run import LoadResult
from penstock.bench.probe.probe_plan import SMALL_OBJECT_BYTES, ProbeRequest
from penstock.bench.probe.probe_run import ProbeMeasurement, ProbeResult
from penstock.errors import UsageError
from penstock.storage.uri import find_local_paths_at, parse_uri
from penstock.units import format_rate

_MODES: Final = {"buffered": ["direct=0", "invalidate=1"], "direct": ["direct=1"]}
_PATTERNS: Final = {
    "write": ["rw=write", "end_fsync=1"],
    "read": ["rw=read"],
    "random_read": ["rw=randread"],
    "small_write": ["rw=write", "create_on_open=1", "fsync_on_close=1"],
    "small_read": ["rw=read"],
    "fsync": ["rw=write", "fsync=1"],
}


def check_fio_repeats(request: ProbeRequest) -> None:
    """Raise `UsageError` before anything is measured that fio cannot repeat."""
    if find_local_paths_at(request.uri) is None or set(request.parts) == {"metadata"}:
        raise UsageError(
            "fio can only repeat reads and writes of files",
            where=request.uri,
            fix="Leave --fio out, or probe /path, file:///path or direct:///path for best rates or a knee.",
        )


def fio_job_file(result: ProbeResult) -> str:
    """The text of the job file."""
    ranks = "one rank" if result.ranks == 1 else f"{result.ranks} ranks, as the share of one of them"
    head = [
        f"; What `penstock storage probe {result.uri}` measured on {ranks}, for fio 3.0 or later.",
        "; fio leaves its files behind: remove penstock-fio.* afterwards.",
        "[global]",
        f"directory={parse_uri(result.uri).root}",
        "filename_format=penstock-fio.$jobname.$jobnum",
        "thread",
        "group_reporting",
        "randrepeat=0",
    ]
    sections = [*map(_step, result.measurements), *(lines for load in result.loads for lines in _rates(load))]
    return "\n".join("\n".join(lines) + "\n" for lines in [head, *sections])


def _step(seen: ProbeMeasurement) -> list[str]:
    each_bytes = seen.moved_bytes // (seen.ranks * seen.streams)
    rate = f"{format_rate(seen.gib_per_s * 2**30)}, {seen.operations_per_s:,.0f} operations a second"
    lines = [
        f"; {rate}, p99 {seen.p99_ms:.3f} ms",
        f"[{seen.op}-{seen.mode}-{seen.streams}x{seen.block_bytes}]",
        "stonewall",
        "ioengine=psync",
        *_PATTERNS[seen.op],
        f"bs={seen.block_bytes}",
        f"numjobs={seen.streams}",
        f"size={each_bytes}",
        *_MODES[seen.mode],
    ]
    if seen.op.startswith("small"):
        lines += [f"nrfiles={each_bytes // SMALL_OBJECT_BYTES}", f"filesize={SMALL_OBJECT_BYTES}"]
        lines += ["openfiles=1", "file_service_type=sequential"]
        lines += ["filename_format=penstock-fio.$jobname.$jobnum.$filenum"]
    return lines


def _rates(load: LoadResult) -> Iterator[list[str]]:
    """Each rate on an even schedule, on one file that all of them share."""
    pattern = {100: "randread", 0: "randwrite"}.get(load.read_percent, "randrw")
    # A rate that was offered twice is one section, with the figures of the last time.
    for _, point in sorted({point.offered_per_s: point for point in load.points}.items()):
        rate = max(1, round(point.offered_per_s / load.ranks))
        reads = rate * load.read_percent // 100
        yield [
            f"; p50 {point.p50_ms:.3f} ms, p99 {point.p99_ms:.3f} ms, p99.9 {point.p999_ms:.3f} ms",
            f"[load-{load.mode}-{rate}]",
            "stonewall",
            "ioengine=io_uring",
            f"iodepth={load.depth}",
            f"rw={pattern}",
            *([f"rwmixread={load.read_percent}"] if pattern == "randrw" else []),
            f"bs={load.block_bytes}",
            f"size={load.size_bytes // load.ranks}",
            "filename=penstock-fio.load",
            *_MODES[load.mode],
            *(["sync=dsync"] if load.mode == "buffered" and load.read_percent < 100 else []),
            "time_based",
            f"runtime={round(1000 * point.seconds)}ms",  # of a fraction of a second fio takes the whole part
            f"rate_iops={reads or ''},{rate - reads or ''}".rstrip(","),
            "rate_process=linear",
        ]
