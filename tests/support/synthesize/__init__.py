"""Traces made from a description, for studies, tests and teaching.

description -> planned calls of a rank -> lines of a generation -> damage -> trace files
"""

from tests.support.synthesize.trace_description import SynthesisSpec, read_description, shipped_names
from tests.support.synthesize.write_traces import SynthesizedTraces, synthesize

__all__ = ["SynthesisSpec", "SynthesizedTraces", "read_description", "shipped_names", "synthesize"]
