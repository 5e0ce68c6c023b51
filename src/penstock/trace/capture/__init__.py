"""Capture: record what a run does, while it happens, in the newest format that DFTracer's tools read."""
