"""Measure the limits of a storage location: plan the steps, time each, sum up over ranks, clean up."""

from penstock.bench.probe.probe_run import (
    ProbeMeasurement,
    ProbeRequest,
    ProbeResult,
    probe,
    probe_in_folder,
    read_probe,
)

__all__ = ["ProbeMeasurement", "ProbeRequest", "ProbeResult", "probe", "probe_in_folder", "read_probe"]
