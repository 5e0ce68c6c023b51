"""Traces made from a description: what one studies, tests and teaches with.

description -> planned calls of a rank -> lines of a generation -> damage -> trace files
"""

from penstock.trace.synthesize.description import Description, read_description, shipped_names
from penstock.trace.synthesize.write import Synthesized, synthesize

__all__ = ["Description", "Synthesized", "read_description", "shipped_names", "synthesize"]
