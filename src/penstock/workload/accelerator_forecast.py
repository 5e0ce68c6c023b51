"""How many accelerators a bandwidth can feed. Pure and exact within its model, which it states.

The model: prefetching hides reading behind computation, so a step lasts as long as the slower of the two, and
accelerators share the bandwidth evenly. Utilization is computation divided by step time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from penstock.errors import UsageError
from penstock.units import format_rate
from penstock.workload.dataset_size import bytes_text, quotient_text, read_bytes_per_sample, record_bytes
from penstock.workload.spec import Workload

MODEL: Final = (
    "prefetching hides reading: step = max(computation, reading), utilization = computation / step, "
    "bandwidth shared evenly, no other cost"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorForecast:
    """The largest number of accelerators at the threshold, and the utilization there and one further.

    `num_accelerators` of 0 means that not even one is kept busy enough; then `au` is 1 of it.
    """

    num_accelerators: int
    au: Fraction
    au_with_one_more: Fraction
    threshold: Fraction
    step_read_bytes: Fraction
    computation_s: Fraction
    bytes_per_accelerator_per_s: Fraction
    bandwidth_bytes_per_s: Fraction
    proof: tuple[str, ...]


def forecast_accelerators(workload: Workload, bandwidth_bytes_per_s: Fraction) -> AcceleratorForecast:
    """The largest number of accelerators whose utilization stays at or above the workload's threshold."""
    computation_s = Fraction(str(workload.train.computation_time.expected_s))
    threshold = Fraction(str(workload.metric.au))
    _check(computation_s, threshold, bandwidth_bytes_per_s)
    step_bytes = workload.reader.batch_size * read_bytes_per_sample(workload.dataset)
    exactly = bandwidth_bytes_per_s * computation_s / (threshold * step_bytes)
    num_accelerators = math.floor(exactly)

    def au(num: int) -> Fraction:
        return computation_s / max(computation_s, num * step_bytes / bandwidth_bytes_per_s)

    forecast = AcceleratorForecast(
        num_accelerators=num_accelerators,
        au=au(max(num_accelerators, 1)),
        au_with_one_more=au(num_accelerators + 1),
        threshold=threshold,
        step_read_bytes=step_bytes,
        computation_s=computation_s,
        bytes_per_accelerator_per_s=step_bytes / computation_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        proof=(),
    )
    return replace(forecast, proof=tuple(_proof(workload, forecast, exactly)))


def _check(computation_s: Fraction, threshold: Fraction, bandwidth_bytes_per_s: Fraction) -> None:
    if bandwidth_bytes_per_s <= 0:
        raise UsageError("The bandwidth is nothing", fix="Give a rate, for example 40GiB/s.")
    if computation_s == 0:
        raise UsageError("Without computation no bandwidth is ever enough", fix="Set train.computation_time.")
    if threshold == 0:
        raise UsageError("With a threshold of 0 any number passes", fix="Set metric.au.")


def _proof(workload: Workload, forecast: AcceleratorForecast, exactly: Fraction) -> Iterator[str]:
    step, computation = f"{bytes_text(forecast.step_read_bytes)} B", f"{float(forecast.computation_s):g} s"
    bandwidth = format_rate(float(forecast.bandwidth_bytes_per_s))
    rate = format_rate(float(forecast.bytes_per_accelerator_per_s))
    yield f"model: {MODEL}"
    yield f"a step reads {_step_text(workload)} = {step}"
    yield f"an accelerator that never waits: {step} / {computation} = {rate}"
    yield (
        f"{bandwidth} x {computation} / ({float(forecast.threshold):g} x {step}) = "
        f"{quotient_text(exactly)} -> {_accelerators(forecast.num_accelerators)}"
    )
    if forecast.num_accelerators:
        met = f"{_percent(forecast.au)} % >= {_percent(forecast.threshold)} %"
        yield f"{_accelerators(forecast.num_accelerators)}: utilization {met}"
    missed = f"{_percent(forecast.au_with_one_more)} % < {_percent(forecast.threshold)} %"
    yield f"{_accelerators(forecast.num_accelerators + 1)}: utilization {missed}"


def _accelerators(num: int) -> str:
    return f"{num:,} accelerator{'s' * (num != 1)}"


def _step_text(workload: Workload) -> str:
    whole, read = record_bytes(workload.dataset), read_bytes_per_sample(workload.dataset)
    text = f"{workload.reader.batch_size:,} samples x {bytes_text(read)} B"
    if read == whole:
        return text
    columns = workload.dataset.parquet.columns
    wanted = sum(column.read for column in columns)
    return f"{text} ({wanted} of {len(columns)} columns, rows of {bytes_text(whole)} B)"


def _percent(share: Fraction) -> str:
    """Cut, not rounded, so that what misses a threshold never looks as if it met it."""
    return f"{math.floor(share * 10_000) / 100:.2f}"
