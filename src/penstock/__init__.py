"""Penstock measures, explains and speeds up the path between storage and accelerators.

Nothing is imported here: a program imports the packages that it uses by name (`penstock.storage`,
`penstock.cluster`, ...), and no others are loaded.
"""

__version__ = "0.2.0"
