"""Workflows over several parts of the package: the demo, sweeps, submission runs."""
