"""Workloads as data: loaded once at the edge, and the pure arithmetic on them."""
