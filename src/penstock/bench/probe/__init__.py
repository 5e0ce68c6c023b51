"""What can this storage do at best, from here? Plan the steps, time each, sum up over ranks, clean up."""

from penstock.bench.probe.measure import Measurement
from penstock.bench.probe.plan import ProbeRequest
from penstock.bench.probe.run import ProbeResult, probe

__all__ = ["Measurement", "ProbeRequest", "ProbeResult", "probe"]
