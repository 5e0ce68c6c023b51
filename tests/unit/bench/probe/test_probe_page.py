"""What a probe's page says of its measurements."""

from fractions import Fraction

import pytest

from penstock.bench.probe import ProbeResult
from penstock.bench.probe.probe_page import feed_rows, make_probe_page, say_feeds
from penstock.bench.probe.probe_run import ProbeMeasurement
from penstock.units import parse_rate
from penstock.workload.load_workload import load
from penstock.workload.sizing import forecast_accelerators

MIB = 2**20


def measurement(op: str, streams: int, block_bytes: int, gib_per_s: float) -> ProbeMeasurement:
    return ProbeMeasurement(
        op=op,
        mode="buffered",
        ranks=1,
        streams=streams,
        block_bytes=block_bytes,
        moved_bytes=8 * MIB,
        elapsed_s=1.0,
        create_s=0.0,
        drain_s=0.0,
        gib_per_s=gib_per_s,
        operations_per_s=1.0,
        p50_ms=1.0,
        p99_ms=1.0,
        max_ms=1.0,
        copied_bytes=0,
        resident_before=None,
        intervals=(),
    )


def probed(rates: dict[tuple[int, int], float]) -> ProbeResult:
    """A probe whose reads reached a rate with each number of streams and MiB of a block."""
    reads = [measurement("read", streams, mib * MIB, rate) for (streams, mib), rate in rates.items()]
    others = [measurement(op, 1, MIB, 1.0) for op in ("write", "random_read")]
    return ProbeResult(
        uri="mem://x",
        ranks=1,
        hosts=("one",),
        size_bytes=8 * MIB,
        storage={},
        counters={},
        measurements=(*reads, *others),
        notes=(),
    )


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({(1, 1): 1.0, (8, 1): 2.0}, "the streams tried: 8 streams of 1 MiB"),
        ({(1, 1): 1.0, (1, 8): 2.0, (8, 8): 1.5}, "more streams were not faster"),
        ({(1, 1): 1.0, (1, 8): 0.5, (8, 1): 0.5}, "neither more streams nor larger blocks helped"),
        ({(1, 1): 1.0}, "what was tried: only 1 stream of 1 MiB"),
    ],
)
def test_the_limit_is_where_more_streams_or_larger_blocks_no_longer_helped(
    rates: dict[tuple[int, int], float], expected: str
) -> None:
    banner = make_probe_page(probed(rates)).banner
    assert banner is not None
    assert expected in banner.limited_by


def test_samples_that_are_small_files_count_on_random_reads_and_others_on_sequential_ones() -> None:
    result = probed({(1, 1): 3.0, (8, 1): 4.0})
    rates = {row["workload"]: row["from"] for row in feed_rows(result)}
    assert rates["unet3d_h100"].startswith("4 GiB/s: sequential reads, 8 streams")
    assert rates["resnet50_h100"].startswith("4 GiB/s: sequential")  # many samples a file
    assert rates["retinanet_b200"].startswith("1 GiB/s: random reads")
    assert say_feeds(result) == "feeds 1 H100 of unet3d"
    assert say_feeds(probed({(1, 1): 1.0})) == "is too slow for 1 H100 of unet3d, which needs 2.67 GiB/s"
    unet3d = load("unet3d_h100").workload
    enough, less = (Fraction(parse_rate(rate)) for rate in ("2.67GiB/s", "2.66GiB/s"))
    assert forecast_accelerators(unet3d, enough).num_accelerators == 1
    assert forecast_accelerators(unet3d, less).num_accelerators == 0
