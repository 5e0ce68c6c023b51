"""The shipped test kit: a contract suite for storages and faults to put around them.

Outside every flow: nothing but tests and benchmarks import it. `contract` needs pytest; the rest does not.
"""
