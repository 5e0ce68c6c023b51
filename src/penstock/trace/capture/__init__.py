"""Capture: what a run really did, written as it happens, in the newest format that DFTracer's tools read."""
