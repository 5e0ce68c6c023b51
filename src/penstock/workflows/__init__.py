"""Workflows over several parts of the package: the demo, the levels study, sweeps, submission runs."""
