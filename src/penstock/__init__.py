"""Penstock measures, explains and speeds up the path between storage and accelerators.

Nothing is imported here: each room (`penstock.storage`, `penstock.cluster`, ...) is imported by name,
so that a program pays only for what it uses.
"""

__version__ = "0.1.0"
